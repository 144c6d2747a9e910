"""Real NeMo-RL jobs on a CPU with two vLLM engines: GRPO, PPO, asynchronous GRPO.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_specrl.engine.vllm.environment import has_custom_proposers
from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from tests.conftest import REPOSITORY
from tests.monitoring.test_live_server import following, get
from tests.support.nemo_rl.jobs import (
    ACCEPTED,
    ASYNCHRONOUS,
    BATCH,
    FAITHFUL,
    GROUP,
    HOME,
    PROMPTS,
    SITE,
    STEPS_PER_EPOCH,
    TOTAL,
    Job,
    marks,
)

pytestmark = marks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nemo")


@pytest.fixture(scope="module")
def plain(folder):
    return Job(folder / "plain", steps=6, spec_rl={"enabled": "false"}).wait()


@pytest.fixture(scope="module")
def reused(folder):
    return Job(folder / "reused", steps=6, spec_rl=FAITHFUL).wait()


@pytest.fixture(scope="module")
def anchored(folder):
    spec_rl = FAITHFUL | {"clip_anchor": "birth"}
    return Job(folder / "anchored", steps=4, spec_rl=spec_rl).wait()


def test_switched_off_the_plugin_leaves_no_trace(plain):
    steps = plain.train()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert not [name for record in steps.values() for name in record if "spec_rl" in name]
    assert not list(plain.out.glob("checkpoints/*/rollout_cache"))
    assert not (plain.out / "logs" / METRICS).exists()


def test_while_the_cache_is_cold_everything_is_as_without_it(plain, reused):
    for step in range(1, STEPS_PER_EPOCH + 1):
        ours, theirs = reused.train()[step], plain.train()[step]
        assert ours["reward"] == theirs["reward"]
        assert ours["spec_rl/draft_coverage"] == 0
    for ours, theirs in zip(
        reused.calls()[:STEPS_PER_EPOCH], plain.calls()[:STEPS_PER_EPOCH], strict=True
    ):
        assert ours["prompts"] == theirs["prompts"]
        assert ours["outputs"] == theirs["outputs"]


def test_the_log_says_what_the_plugin_does(plain, reused):
    line = "nemo_specrl: preset faithful: prefix reuse, rollouts in "
    assert reused.log.read_text().count(line) == 1
    assert "nemo_specrl: preset" not in plain.log.read_text()


def test_pages_are_made_from_what_is_in_its_log_folder(reused):
    """The report, and the live page, which has every tile that the embedded trainer's has."""
    logs = reused.out / "logs"
    rows = read_metrics(logs / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        logged = reused.train()[row["step"]]
        assert row.items() >= {k: v for k, v in logged.items() if "spec_rl/" in k}.items()
        assert row["reward"] == logged["reward"]
        assert row["step_s"] > row["rollout_s"] > row["verify_s"] >= 0
        assert ("heldout_accuracy" in row) == (row["step"] % 2 == 0)
    assert "heldout_accuracy_at_start" in rows[0]
    report = [sys.executable, "-m", "nemo_specrl", "report", str(logs)]
    subprocess.run(report, cwd=REPOSITORY, check=True, capture_output=True)
    assert (logs / "report.html").stat().st_size > 50_000  # with the picture
    with following(logs) as (port, _):
        page = get(port, "/content")[1].decode()
        assert get(port, "/picture.png")[1].startswith(b"\x89PNG")
    assert 'class="state done"' in page and "<b>6</b><small>of 6</small>" in page
    for label in ("Steps per hour", "Tokens per second", "Accepted", "Reward"):
        assert f"<span>{label}</span>" in page
    assert "times plain in evaluations" in page


def test_seconds_are_logged_beside_those_of_the_trainer(plain, reused):
    names = {f"spec_rl_{part}" for part in ("lookup", "verification", "decoding", "assembly")}
    for record in reused.metrics("timing/train"):
        assert names <= set(record)
        assert record["spec_rl_lookup"] > 0 and record["spec_rl_decoding"] > 0
        assert record["spec_rl_rollout"] > record["spec_rl_decoding"]
        assert (record["spec_rl_verification"] > 0) is (record["step"] > STEPS_PER_EPOCH)
    assert len(reused.metrics("timing/train")) == len(plain.metrics("timing/train")) == 6
    assert not names & {name for record in plain.metrics("timing/train") for name in record}


def test_the_store_and_plain_decoding_in_validation_are_logged(reused):
    for record in reused.train().values():
        assert 0 < record["spec_rl/cache_bytes"] <= record["spec_rl/cache_max_bytes"]
        assert (
            record["spec_rl/corrupt_records"] == 0 and 0 < record["spec_rl/disk_used_fraction"] < 1
        )
    validated = {step for step, r in reused.train().items() if "spec_rl/heldout_tokens" in r}
    timed = {r["step"] for r in reused.metrics("timing/train") if "spec_rl_heldout_decoding" in r}
    assert validated == timed and len(validated) > 0


def test_from_the_second_epoch_on_drafts_are_accepted(reused):
    for step, record in reused.train().items():
        assert record["spec_rl/cache_errors"] == record["spec_rl/cache_missing_copies"] == 0
        assert record["spec_rl/cache_nodes"] == 1
        if step > STEPS_PER_EPOCH:
            assert record["spec_rl/draft_coverage"] > 0.5
            assert record["spec_rl/accepted_fraction"] > ACCEPTED
            assert record["spec_rl/decoded_tokens"] < 0.9 * record["spec_rl/response_tokens"]
        assert record["gen_kl_error"] < 1e-4  # what engines report is the policy's own


def test_fresh_rows_are_compared_with_reused_ones(reused):
    cold, *_, last = (record for _, record in sorted(reused.train().items()))
    assert cold["spec_rl/logprob_gap"] == 0
    assert "spec_rl/staleness" not in cold  # how long an epoch is shows in its last step
    assert last["spec_rl/logprob_gap"] != 0
    assert last["spec_rl/staleness"] != 0  # two epochs with reused rows are over
    assert last["spec_rl/fresh_fraction"] == 0.2
    saved = reused.out / "checkpoints" / "step_6" / "rollout_cache" / "monitor.json"
    assert json.loads(saved.read_text())["steps"] == 5  # trainers save a step, then log its rows


def test_a_prompt_is_hashed_once_a_step_and_each_process_asks_the_cache_once(reused, anchored):
    """With the monitor, and with the birth anchor as well, over generation, training and logging.

    The driver hashes the prompt of each row and asks how long the drafts are; two workers ask for
    the drafts of their rows.
    """
    for job in (reused, anchored):
        counts = job.counts()
        assert len(counts) == len(job.calls())
        for counted in counts:
            hashed = [n for (kind, _), n in counted.items() if kind == "hash"]
            assert hashed == [BATCH]
            asked = {kind: n for (kind, _), n in counted.items() if kind != "hash"}
            assert asked == {"outlines": 1, "get": 1}
            assert sum(kind == "get" for kind, _ in counted) == 2  # processes


def test_rows_come_back_in_their_order_although_engines_get_them_balanced(reused):
    assert len(reused.calls()) == 6
    for call in reused.calls():
        for prompt, output in zip(call["prompts"], call["outputs"], strict=True):
            assert output[: len(prompt)] == prompt and len(output) > len(prompt)
        keys = [tuple(prompt) for prompt in call["prompts"]]
        assert [keys[i] for i in range(0, len(keys), GROUP)] == list(dict.fromkeys(keys))


def test_the_limit_of_a_sequence_holds_for_what_is_reused(reused):
    later = reused.calls()[STEPS_PER_EPOCH:]
    assert max(len(output) for call in later for output in call["outputs"]) == TOTAL


def test_validation_does_not_touch_the_cache(reused):
    calls = reused._lines("rows.jsonl")
    assert [c["validating"] for c in calls] == [True, *[False, False, True] * 3]
    assert [len(c["prompts"]) == BATCH for c in calls] == [not c["validating"] for c in calls]
    before = 0
    for call in calls:
        if call["validating"]:
            assert call["cached"] == before
        before = call["cached"]
    assert before == PROMPTS * GROUP


def test_a_checkpoint_has_the_cache_beside_the_weights(reused):
    for step in (2, 4, 6):
        folder = reused.out / "checkpoints" / f"step_{step}"
        manifest = json.loads((folder / "rollout_cache" / "manifest.json").read_text())
        assert manifest["policy_version"] == step + 1  # one refit more, for the validation
        assert sum(file["rollouts"] for file in manifest["files"]) == PROMPTS * GROUP
        assert (folder / "policy" / "weights").is_dir()


def test_killed_and_resumed_it_drafts_at_once(folder):
    out = folder / "killed"
    # NeMo-RL's scripts give each process a log folder of its own.
    logs = [out / "logs" / name for name in ("exp_001", "exp_002")]
    killed = Job(
        out,
        steps=6,
        spec_rl=FAITHFUL,
        **{"++env.killed_in_step": 4, "logger.log_dir": logs[0]},
    )
    killed.wait_for_kill()
    assert [p.name for p in sorted(out.glob("checkpoints/step_*"))] == ["step_2"]
    # The node's disk is lost, too: what is left is the checkpoint.
    for path in (folder / "stores").glob("*/rollouts.sqlite*"):
        path.unlink()
    resumed = Job(out, steps=6, spec_rl=FAITHFUL, **{"logger.log_dir": logs[1]}).wait()
    steps = resumed.train()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    first, second = (read_metrics(log / METRICS) for log in logs)
    assert [row["step"] for row in first] == [1, 2, 3]
    assert [row["step"] for row in second] == [1, 2, 3, 4, 5, 6]
    assert second[:2] == first[:2]
    assert steps[3]["spec_rl/accepted_fraction"] > ACCEPTED
    manifest = out / "checkpoints" / "step_6" / "rollout_cache" / "manifest.json"
    assert json.loads(manifest.read_text())["policy_version"] > 6  # it goes on counting


def test_a_damaged_cache_costs_the_resumed_run_its_drafts_and_no_more(folder):
    out = folder / "damaged"
    Job(out, steps=2, spec_rl=FAITHFUL).wait()
    manifest = out / "checkpoints" / "step_2" / "rollout_cache" / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])
    for path in (folder / "stores").glob("*/rollouts.sqlite*"):
        path.unlink()
    resumed = Job(out, steps=4, spec_rl=FAITHFUL).wait()
    assert "manifest.json: damaged" in resumed.log.read_text()
    assert resumed.train()[3]["spec_rl/draft_coverage"] == 0


def test_anchored_at_birth_the_ratio_of_reused_tokens_does_not_start_at_one(reused, anchored):
    for job, moved in ((reused, False), (anchored, True)):
        steps = job.train()
        for step in (1, 2):
            assert abs(steps[step]["probs_ratio_max"] - 1) < 1e-3
        for step in (3, 4):
            assert (abs(steps[step]["probs_ratio_max"] - 1) > 0.01) is moved


def assert_drafts_from_the_second_epoch_on(steps):
    for step in (1, 2):
        assert steps[step]["spec_rl/draft_coverage"] == 0
    for step in (3, 4):
        assert steps[step]["spec_rl/draft_coverage"] > 0.5
        assert steps[step]["spec_rl/accepted_fraction"] > ACCEPTED


def test_with_the_asynchronous_engine_drafts_are_accepted_and_validation_stays_out(folder):
    job = Job(
        folder / "engine",
        steps=4,
        spec_rl=FAITHFUL,
        **{"policy.generation.vllm_cfg.async_engine": "true"},
    ).wait()
    steps = job.train()
    assert_drafts_from_the_second_epoch_on(steps)
    for step in (3, 4):
        assert steps[step]["gen_kl_error"] < 1e-4
    calls = job._lines("rows.jsonl")  # rows come alone
    assert [len(c["prompts"]) for c in calls] == [1] * len(calls)
    assert sum(c["validating"] for c in calls) == 3 * 2
    rows = job.rollouts()
    for step in range(4):
        engines = {}
        for c in rows[step * BATCH : (step + 1) * BATCH]:
            engines.setdefault(tuple(c["prompts"][0]), []).extend(c["engines"])
        if step < STEPS_PER_EPOCH:  # the rows of a prompt share an engine
            assert sorted(engines.values()) == [[0] * GROUP, [1] * GROUP]
        else:  # they go where there is less to do
            assert {0, 1} == {engine for of in engines.values() for engine in of}
    manifest = job.out / "checkpoints" / "step_4" / "rollout_cache" / "manifest.json"
    kept = sum(file["rollouts"] for file in json.loads(manifest.read_text())["files"])
    assert kept == PROMPTS * GROUP  # a group keeps to its sample indices, and validation has none


def test_asynchronous_grpo_drafts_in_its_collector(folder):
    job = Job(folder / "async", steps=5, spec_rl=FAITHFUL, **ASYNCHRONOUS).wait()
    steps = job.train()
    assert sorted(steps) == [1, 2, 3, 4, 5]
    # The collector runs ahead: some steps find all their rows rolled out already, and the first may
    # see rows of the second epoch.
    drafted = [r for r in steps.values() if r["spec_rl/draft_coverage"] > 0]
    assert drafted and steps[1]["spec_rl/draft_coverage"] < 0.5
    assert all(record["spec_rl/accepted_fraction"] > ACCEPTED for record in drafted)
    assert sum(c["validating"] for c in job._lines("rows.jsonl")) == 2 * 2


def test_ppo_drafts_from_the_second_epoch_on_and_is_anchored_and_watched(folder):
    job = Job(
        folder / "ppo",
        steps=4,
        spec_rl=FAITHFUL | {"clip_anchor": "birth"},
        algorithm="ppo",
        # A step's four passes move the policy as far as the other jobs' one pass.
        **{"policy.optimizer.kwargs.lr": "7.5e-6"},
    ).wait()
    steps = job.train()
    assert_drafts_from_the_second_epoch_on(steps)
    for step, record in steps.items():
        # Of several passes over a batch, the last is logged: its ratios have moved in any case, but
        # what they start from are the engines' log-probs only where no token was reused.
        assert (record["gen_kl_error"] > 1e-7) is (step > 2)
        assert step > 2 or record["spec_rl/logprob_gap"] == 0
    assert steps[4]["spec_rl/staleness"] != 0
    saved = job.out / "checkpoints" / "step_4" / "rollout_cache" / "monitor.json"
    state = json.loads(saved.read_text())
    assert state["steps"] == 4  # however many passes
    # The gap itself may be 0: often the fresh and the reused rows of a prompt have the same text.
    assert state["gaps"]["logprob"]["information"] > 0
    for call in job._lines("rows.jsonl"):
        assert call["validating"] is (len(call["prompts"]) != BATCH)
    assert (job.out / "checkpoints" / "step_4" / "rollout_cache" / "manifest.json").is_file()


def test_what_cannot_be_is_refused_before_anything_is_started(folder):
    job = Job(
        folder / "refused",
        steps=2,
        spec_rl=FAITHFUL,
        **{"policy.generation.temperature": 0.7},
    )
    assert job.exit_code() != 0
    assert "policy.generation.temperature = 0.7: prefix reuse verifies" in job.log.read_text()
    assert not job.metrics("train")


def launched(folder, text, *arguments):
    """``nemo-specrl run`` of a script with this text."""
    script = folder / "script.py"
    script.write_text(text)
    paths = [HOME, str(REPOSITORY), str(SITE)]
    return subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "run", str(script), *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"},
        capture_output=True,
        text=True,
    )


def test_the_launcher_runs_a_script_with_the_plugin_in_place(tmp_path):
    done = launched(
        tmp_path,
        "import sys\n"
        "from nemo_rl.algorithms import grpo, ppo\n"
        "print(grpo.VllmGeneration.__name__, ppo.VllmGeneration.__name__, sys.argv[1:])\n",
        *("--config", "x", "a=b"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "SpecVllmGeneration SpecVllmGeneration ['--config', 'x', 'a=b']" in done.stdout


def test_evaluation_is_refused_before_anything_is_built(tmp_path):
    """For every backend: the constructor of another one would not know of the block."""
    done = launched(
        tmp_path,
        "from types import SimpleNamespace\n"
        "from nemo_rl.evals.eval import setup\n"
        "own = {'backend': 'megatron', 'spec_rl': {'enabled': True, 'preset': 'fast'}}\n"
        "setup(SimpleNamespace(generation=own), SimpleNamespace(get_vocab=dict))\n",
    )
    assert done.returncode != 0
    why = "preset = fast: a reused prefix is no sample"
    if not has_custom_proposers():
        why = "enabled = true: vLLM 0.20.0 takes no drafter of ours"
    assert f"generation.spec_rl.{why}" in done.stderr


@pytest.mark.parametrize("module", ["evals.eval", "algorithms.single_controller_utils.setup"])
def test_where_there_is_no_reuse_yet_it_is_refused(tmp_path, module):
    if module != "evals.eval":
        pytest.importorskip("transfer_queue", reason="NeMo-RL's data plane is not installed")
        if not (Path(HOME) / "nemo_rl" / "algorithms" / "single_controller_utils").is_dir():
            pytest.skip("this NeMo-RL has no single controller")
    done = launched(
        tmp_path,
        f"from nemo_rl.{module} import VllmGeneration\n"
        "VllmGeneration(cluster=None, config={'spec_rl': {'enabled': True}})\n",
    )
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if "spec_rl.enabled = true" in line]
    assert "and not here; set false" in line
    assert "shutdown" not in done.stdout  # there is nothing yet to shut down


def test_another_nemo_rl_is_refused_with_the_versions_that_are_known(tmp_path):
    package = tmp_path / "nemo_rl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "run", str(script)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)]),
            "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has no nemo_rl.models.generation.vllm" in done.stderr
    assert "v0.7.0, and main" in done.stderr

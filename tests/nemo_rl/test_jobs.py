"""Real NeMo-RL jobs on a CPU with two vLLM engines, started by ``nemo-specrl run``.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import os
import shutil
import subprocess
import sys
import time

import pytest

from nemo_specrl.cache.inspection import open_source
from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from nemo_specrl.nemo_rl.save_deadline import MUST_SAVE_AT
from tests.conftest import REPOSITORY
from tests.support.nemo_rl.jobs import (
    ASYNCHRONOUS,
    BATCH,
    CONTROLLED,
    GROUP,
    HOME,
    PROMPTS,
    SITE,
    STEPS_PER_EPOCH,
    Job,
    marks,
    tokens_per_step,
)

pytestmark = marks
DRAFTED = 1.3
"""Tokens of a row per step of its engine, in a step whose prompts have been there before; cold, a
step has 1.0 to 1.2."""
REUSE = {"preset": "reuse", "reuse": "{fresh_fraction:0}"}


def kept_in(job, step):
    """The responses in the cache of a checkpoint, by prompt key."""
    found = {}
    with open_source(job.out / "checkpoints" / f"step_{step}" / "rollout_cache") as source:
        for rollout in source.rollouts:
            found.setdefault(rollout.key, []).append(rollout)
    return found


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """A job that is killed in its fourth step and loses its disks, and the one that goes on."""
    out = tmp_path_factory.mktemp("nemo") / "job"
    # NeMo-RL's scripts give each process a log folder of its own.
    logs = [out / "logs" / name for name in ("exp_001", "exp_002")]
    killed = Job(out, 6, {}, **{"++env.killed_in_step": 4, "logger.log_dir": logs[0]})
    killed.wait_for_kill()
    assert [p.name for p in sorted(out.glob("checkpoints/step_*"))] == ["step_2"]
    shutil.rmtree(out.parent / "stores")
    resumed = Job(out, 6, {}, **{"logger.log_dir": logs[1]}).wait()
    return resumed, logs


def test_killed_and_resumed_engines_draft_at_once_from_the_checkpoint(killed_and_resumed):
    job, _ = killed_and_resumed
    steps = job.train()
    tokens = tokens_per_step(steps)
    print(f"tokens a step: {tokens}")
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert max(tokens[step] for step in (3, 4)) > DRAFTED > tokens[1]
    for step in (2, 4, 6):
        kept = kept_in(job, step)
        assert len(kept) >= PROMPTS  # and those of validation
        folder = job.out / "checkpoints" / f"step_{step}"
        assert (folder / "policy" / "weights").is_dir()
        assert (folder / "rollout_cache" / "lengths.npy").is_file()
    log = job.log.read_text()
    assert log.count("nemo_specrl: preset lossless, earlier responses in ") == 2  # one a process
    assert " responses from " in log


def test_metrics_of_engines_and_cache_are_logged_and_written(killed_and_resumed):
    job, logs = killed_and_resumed
    first, second = (read_metrics(log / METRICS) for log in logs)
    assert [row["step"] for row in first] == [1, 2, 3]
    assert [row["step"] for row in second] == [1, 2, 3, 4, 5, 6]
    assert second[:2] == first[:2]
    for row in second:
        logged = job.train()[row["step"]]
        assert row.items() >= {k: v for k, v in logged.items() if "spec_rl/" in k}.items()
        assert row["reward"] == logged["reward"]
        assert row["step_s"] > row["rollout_s"] > 0
        assert row["spec_rl/cache_nodes"] == row["spec_rl/drafting"] == 1
        assert 0 < row["spec_rl/cache_bytes"] <= row["spec_rl/cache_max_bytes"]
        assert logged["gen_kl_error"] < 1e-4
        assert ("heldout_accuracy" in row) == (row["step"] % 2 == 0)
    assert sum(row.get("spec_rl/responses_kept", 0) for row in second) > 0


def test_rows_come_back_in_their_order_although_engines_get_them_balanced(killed_and_resumed):
    job, _ = killed_and_resumed
    calls = [row for row in job.rows() if len(row["prompts"]) == BATCH]
    assert len(calls) >= 6
    for call in calls:
        for prompt, output in zip(call["prompts"], call["outputs"], strict=True):
            assert output[: len(prompt)] == prompt and len(output) > len(prompt)
        keys = [tuple(prompt) for prompt in call["prompts"]]
        assert [keys[i] for i in range(0, len(keys), GROUP)] == list(dict.fromkeys(keys))


def test_asynchronous_engines_get_the_rows_of_a_prompt_together(tmp_path):
    job = Job(tmp_path / "job", 5, {}, **ASYNCHRONOUS).wait()
    steps = job.train()
    tokens = tokens_per_step(steps)
    print(f"tokens a step: {tokens}")
    assert sorted(steps) == [1, 2, 3, 4, 5] and max(tokens.values()) > DRAFTED
    engines = {}
    for row in job.rows()[: PROMPTS * GROUP]:
        engines.setdefault(tuple(row["prompts"][0]), []).extend(row["engines"])
    whole = [of for of in engines.values() if len(of) == GROUP]
    assert whole and all(len(set(of)) == 1 for of in whole)
    assert {0, 1} == {engine for of in engines.values() for engine in of}


def test_the_single_controller_logs_saves_resumes_and_keeps_the_jobs_time_limit(tmp_path):
    pytest.importorskip("transfer_queue", reason="NeMo-RL's data plane is not installed")
    steps = 2 * STEPS_PER_EPOCH
    job = Job(tmp_path / "job", steps, {}, "controller", **CONTROLLED).wait()
    logged = job.train()
    print(f"tokens a step: {tokens_per_step(logged)}")
    assert sorted(logged) == list(range(1, steps + 1))
    assert max(tokens_per_step(logged).values()) > DRAFTED
    assert all(record["spec_rl/cache_nodes"] == 1 for record in logged.values())
    [logs] = (job.out / "logs").glob("exp_*")
    assert [row["step"] for row in read_metrics(logs / METRICS)] == list(range(1, steps + 1))
    assert len(kept_in(job, steps)) == PROMPTS

    shutil.rmtree(tmp_path / "stores")
    deadline = {MUST_SAVE_AT: str(int(time.time()) + 150)}
    resumed = Job(tmp_path / "job", 1000, {}, "controller", variables=deadline, **CONTROLLED).wait()
    last = max(resumed.train())
    assert "Timeout has been reached" in resumed.log.read_text()
    assert steps < last < 1000 and len(kept_in(resumed, last)) == PROMPTS
    again = [n for step, n in tokens_per_step(resumed.train()).items() if step > steps]
    print(f"after a resume: {again}")
    assert max(again) > DRAFTED


def check_reuse(steps):
    """Prefixes were reused from the second epoch on, and log-probs are the policy's."""
    for step, record in steps.items():
        assert record["spec_rl/refused_drafts"] == 0
        assert record["gen_kl_error"] < 1e-4
        if step <= STEPS_PER_EPOCH:
            assert record["spec_rl/reuse_coverage"] == 0
    later = [record for step, record in steps.items() if step > STEPS_PER_EPOCH]
    reused = [round(record["spec_rl/reuse_accepted_fraction"], 2) for record in later]
    print(f"accepted: {reused}")
    assert max(record["spec_rl/reuse_coverage"] for record in later) > 0.5
    assert max(reused) > 0.2


def test_prefix_reuse_with_synchronous_engines(tmp_path):
    job = Job(tmp_path / "job", 4, REUSE).wait()
    steps = job.train()
    assert sorted(steps) == [1, 2, 3, 4]
    check_reuse(steps)
    for record in steps.values():  # validation is not among them
        assert record["spec_rl/response_tokens"] >= record["spec_rl/decoded_tokens"]
        # Nothing is decoded where every draft is accepted to its end.
        whole = record.get("spec_rl/reused_whole_fraction", 0) == 1
        assert record["spec_rl/decoded_tokens"] > 0 or whole


def test_prefix_reuse_with_asynchronous_engines(tmp_path):
    job = Job(
        tmp_path / "job", 4, REUSE, **{"policy.generation.vllm_cfg.async_engine": "true"}
    ).wait()
    check_reuse(job.train())


def test_what_cannot_be_is_refused_before_anything_is_started(tmp_path):
    job = Job(tmp_path / "job", 2, REUSE, **{"policy.generation.temperature": 0.7})
    assert job.exit_code() != 0
    assert "preset = 'reuse': does not work with policy.generation.temp" in job.log.read_text()
    assert not job.metrics("train")


def test_ppo_is_measured_too_and_off_leaves_no_trace(tmp_path):
    """NeMo-RL's own PPO logs nothing of vLLM's drafts."""
    job = Job(tmp_path / "on" / "job", 4, {}, "ppo").wait()
    tokens = tokens_per_step(job.train())
    print(f"tokens a step: {tokens}")
    assert max(tokens[step] for step in (3, 4)) > DRAFTED
    off = Job(tmp_path / "off" / "job", 2).wait()
    assert off.log.read_text().count("nemo_specrl: off, since the recipe has no ") == 1
    assert not [name for record in off.train().values() for name in record if "spec_rl" in name]
    assert not list(off.out.glob("checkpoints/*/rollout_cache"))
    assert not (off.out / "logs" / METRICS).exists()


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
    assert "v0.8.0, and main of August 2026" in done.stderr


def test_an_evaluation_takes_the_block_and_refuses_prefix_reuse(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from nemo_rl.evals.eval import VllmGeneration\n"
        "config = {'spec_rl': {'enabled': True, 'preset': 'reuse'}}\n"
        "VllmGeneration(cluster=None, config=config)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "run", str(script)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([HOME, str(REPOSITORY), str(SITE)]),
            "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "generation.spec_rl.preset = 'reuse': a reused prefix is no sample" in done.stderr

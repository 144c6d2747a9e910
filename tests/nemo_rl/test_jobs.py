"""Real NeMo-RL jobs on a CPU with two vLLM engines: GRPO, PPO, asynchronous GRPO.

They need a checkout of NeMo-RL, unmodified, in NEMO_RL_HOME, and its environment: `make test-nemo`.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY

HOME = os.environ.get("NEMO_RL_HOME")
pytestmark = [
    pytest.mark.skipif(
        not HOME,
        reason="set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL and run `make test-nemo`",
    ),
    pytest.mark.timeout(900),
]
PROMPTS, GROUP, STEPS_PER_EPOCH = 4, 4, 2
BATCH = PROMPTS // STEPS_PER_EPOCH * GROUP


class Job:
    """A run of tests/nemo_rl/job.py in a process group of its own."""

    def __init__(self, out, steps, spec_rl=None, algorithm="grpo", **overrides):
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        arguments = [algorithm, f"{algorithm}.max_num_steps={steps}"]
        arguments += [f"{k}={v}" for k, v in overrides.items()]
        if spec_rl is not None:
            cache = f"cache:{{dir:{out.parent}/stores,deadline_ms:60000}}"
            block = ",".join([*(f"{k}:{v}" for k, v in spec_rl.items()), cache])
            arguments.append(f"++policy.generation.spec_rl={{{block}}}")
        paths = [HOME, str(REPOSITORY), str(REPOSITORY / "tests" / "nemo_rl" / "path")]
        self.log = out / "log.txt"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.nemo_rl.job", str(out), *arguments],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self):
        assert self.process.wait() == 0, self.log.read_text()[-6000:]
        return self

    def kill_after_step(self, step):
        """SIGKILL the driver and what it started, in the step behind ``step``."""
        while not any(r["step"] >= step for r in self.metrics("timing/train")):
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            time.sleep(0.1)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _lines(self, name):
        path = self.out / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metrics(self, prefix):
        return [r for r in self._lines("metrics.jsonl") if r["prefix"] == prefix]

    def train(self):
        """By step, everything that NeMo-RL logged as train/..."""
        steps = {}
        for record in self.metrics("train"):
            steps.setdefault(record["step"], {}).update(record)
        return steps

    def calls(self):
        """The training batches."""
        return [r for r in self._lines("rows.jsonl") if len(r["prompts"]) == BATCH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nemo")


@pytest.fixture(scope="module")
def plain(folder):
    return Job(folder / "plain", steps=6, spec_rl={"enabled": "false"}).wait()


@pytest.fixture(scope="module")
def reused(folder):
    return Job(folder / "reused", steps=6, spec_rl={"enabled": "true"}).wait()


def test_switched_off_the_plugin_leaves_no_trace(plain):
    steps = plain.train()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert not [name for record in steps.values() for name in record if "spec_rl" in name]
    assert not list(plain.out.glob("checkpoints/*/rollout_cache"))


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


def test_from_the_second_epoch_on_drafts_are_accepted(reused):
    for step, record in reused.train().items():
        assert record["spec_rl/cache_errors"] == 0
        if step > STEPS_PER_EPOCH:
            assert record["spec_rl/draft_coverage"] > 0.5
            assert record["spec_rl/accepted_fraction"] > 0.5
            assert record["spec_rl/decoded_tokens"] < 0.7 * record["spec_rl/response_tokens"]
        assert record["gen_kl_error"] < 1e-4  # what engines report is the policy's own


def test_rows_come_back_in_their_order_although_engines_get_them_balanced(reused):
    assert len(reused.calls()) == 6
    for call in reused.calls():
        for prompt, output in zip(call["prompts"], call["outputs"], strict=True):
            assert output[: len(prompt)] == prompt and len(output) > len(prompt)
        keys = [tuple(prompt) for prompt in call["prompts"]]
        assert [keys[i] for i in range(0, len(keys), GROUP)] == list(dict.fromkeys(keys))


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
    Job(out, steps=6, spec_rl={"enabled": "true"}).kill_after_step(3)
    assert [p.name for p in sorted(out.glob("checkpoints/step_*"))] == ["step_2"]
    # The node's disk is lost, too: what is left is the checkpoint.
    for path in (folder / "stores").glob("*/*.mdb"):
        path.unlink()
    resumed = Job(out, steps=6, spec_rl={"enabled": "true"}).wait()
    steps = resumed.train()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert steps[3]["spec_rl/accepted_fraction"] > 0.5
    manifest = out / "checkpoints" / "step_6" / "rollout_cache" / "manifest.json"
    assert json.loads(manifest.read_text())["policy_version"] > 6  # it goes on counting


def test_a_damaged_cache_costs_the_resumed_run_its_drafts_and_no_more(folder):
    out = folder / "damaged"
    Job(out, steps=2, spec_rl={"enabled": "true"}).wait()
    manifest = out / "checkpoints" / "step_2" / "rollout_cache" / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])
    for path in (folder / "stores").glob("*/*.mdb"):
        path.unlink()
    resumed = Job(out, steps=4, spec_rl={"enabled": "true"}).wait()
    assert "manifest.json: damaged" in resumed.log.read_text()
    assert resumed.train()[3]["spec_rl/draft_coverage"] == 0


def test_anchored_at_birth_the_ratio_of_reused_tokens_does_not_start_at_one(folder, reused):
    anchored = Job(
        folder / "anchored", steps=4, spec_rl={"enabled": "true", "clip_anchor": "birth"}
    ).wait()
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
        assert steps[step]["spec_rl/accepted_fraction"] > 0.5


def test_with_the_asynchronous_engine_drafts_are_accepted_and_validation_stays_out(folder):
    job = Job(
        folder / "engine",
        steps=4,
        spec_rl={"enabled": "true"},
        **{"policy.generation.vllm_cfg.async_engine": "true"},
    ).wait()
    steps = job.train()
    assert_drafts_from_the_second_epoch_on(steps)
    for step in (3, 4):
        assert steps[step]["gen_kl_error"] < 1e-4
    calls = job._lines("rows.jsonl")  # rows come alone
    assert [len(c["prompts"]) for c in calls] == [1] * len(calls)
    assert sum(c["validating"] for c in calls) == 3 * 2
    manifest = job.out / "checkpoints" / "step_4" / "rollout_cache" / "manifest.json"
    kept = sum(file["rollouts"] for file in json.loads(manifest.read_text())["files"])
    assert kept == PROMPTS * GROUP  # a group keeps to its slots, and validation has none


def test_asynchronous_grpo_drafts_in_its_collector(folder):
    job = Job(
        folder / "async",
        steps=5,
        spec_rl={"enabled": "true"},
        **{
            "policy.generation.vllm_cfg.async_engine": "true",
            "grpo.async_grpo.enabled": "true",
            "loss_fn.use_importance_sampling_correction": "true",
            "policy.generation.colocated.enabled": "false",
            "policy.generation.colocated.resources.gpus_per_node": "2",
            "cluster.gpus_per_node": "3",
            "grpo.val_at_start": "false",
        },
    ).wait()
    steps = job.train()
    assert sorted(steps) == [1, 2, 3, 4, 5]
    # The collector runs ahead: some steps find all their rows rolled out already.
    drafted = [r for r in steps.values() if r["spec_rl/draft_coverage"] > 0]
    assert steps[1]["spec_rl/draft_coverage"] == 0 and drafted
    assert all(record["spec_rl/accepted_fraction"] > 0.5 for record in drafted)
    assert sum(c["validating"] for c in job._lines("rows.jsonl")) == 2 * 2


def test_ppo_drafts_from_the_second_epoch_on(folder):
    job = Job(folder / "ppo", steps=4, spec_rl={"enabled": "true"}, algorithm="ppo").wait()
    steps = job.train()
    assert_drafts_from_the_second_epoch_on(steps)
    for call in job._lines("rows.jsonl"):
        assert call["validating"] is (len(call["prompts"]) != BATCH)
    assert (job.out / "checkpoints" / "step_4" / "rollout_cache" / "manifest.json").is_file()


def test_what_cannot_be_is_refused_before_anything_is_started(folder):
    job = Job(
        folder / "refused",
        steps=2,
        spec_rl={"enabled": "true"},
        **{"policy.generation.temperature": 0.7},
    )
    assert job.process.wait() != 0
    assert "policy.generation.temperature = 0.7: drafts are verified by" in job.log.read_text()
    assert not job.metrics("train")


def test_the_launcher_runs_a_script_with_the_plugin_in_place(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from nemo_rl.algorithms import grpo, ppo\n"
        "print(grpo.VllmGeneration.__name__, ppo.VllmGeneration.__name__, sys.argv)\n"
    )
    paths = [HOME, str(REPOSITORY), str(REPOSITORY / "tests" / "nemo_rl" / "path")]
    done = subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "run", str(script), "--config", "x", "a=b"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = f"SpecVllmGeneration SpecVllmGeneration {[str(script), '--config', 'x', 'a=b']}"
    assert expected in done.stdout


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
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "has no nemo_rl.models.generation.vllm" in done.stderr
    assert "v0.7.0, and main" in done.stderr

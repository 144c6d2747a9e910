"""The single controller of NeMo-RL main in real jobs: its script, its actor, TransferQueue.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import ray

from nemo_specrl.cache.inspection import open_source
from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from nemo_specrl.nemo_rl.save_deadline import MUST_SAVE_AT
from tests.nemo_rl.test_recipes import nemo  # noqa: F401
from tests.support.nemo_rl.jobs import (
    ACCEPTED,
    FAITHFUL,
    GROUP,
    HOME,
    PROMPTS,
    STEPS_PER_EPOCH,
    Job,
    marks,
)

SCRIPT = Path(HOME or "/") / "examples" / "run_grpo_single_controller.py"
pytestmark = [
    *marks,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="this NeMo-RL has no single controller"),
]
LOSSLESS = {"enabled": "true", "preset": "lossless", "tree": "{adaptive:false,method:proposer}"}
CONTROLLED = {
    "grpo.val_period": 0,
    "grpo.val_at_start": "false",
    "policy.generation.colocated.resources.gpus_per_node": 2,
    "cluster.gpus_per_node": 3,
    "checkpointing.enabled": "true",
    "data_plane.num_storage_units": 1,
}
STEPS = 2 * STEPS_PER_EPOCH


def controlled(out, steps, spec_rl=LOSSLESS, environment=(), **overrides):
    pytest.importorskip("transfer_queue", reason="NeMo-RL's data plane is not installed")
    overrides = {**CONTROLLED, **overrides}
    return Job(out, steps, spec_rl, algorithm="controller", environment=environment, **overrides)


def drafts_of(record):
    """Tokens that a row gains from a step of the engine; None where none was decoded.

    Rows are made ahead of the step that trains on them, and at a resume come with the checkpoint.
    """
    return record["spec_rl/tree_tokens_per_step"] if record["spec_rl/decoded_tokens"] else None


def kept_of(job, step):
    """The rollouts in the cache of a checkpoint."""
    with open_source(job.out / "checkpoints" / f"step_{step}" / "rollout_cache") as source:
        return list(source.rollouts)


def test_drafts_metrics_a_resumed_checkpoint_and_the_jobs_time_limit(tmp_path):
    job = controlled(tmp_path / "job", STEPS).wait()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for record in steps.values():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
    drafted = [drafts_of(record) for _, record in sorted(steps.items())]
    print(f"tokens a step: {drafted}")
    assert max(tokens or 0 for tokens in drafted[STEPS_PER_EPOCH:]) > 1.5

    [logs] = (job.out / "logs").glob("exp_*")
    rows = read_metrics(logs / METRICS)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        logged = steps[row["step"]]
        assert row.items() >= {k: v for k, v in logged.items() if "spec_rl/" in k}.items()
        assert row["reward"] == logged["reward"] and row["loss"] == logged["loss"]
        assert row["step_s"] > row["train_s"] > 0 and row["total_steps"] == STEPS

    kept = kept_of(job, STEPS)
    assert len({rollout.key for rollout in kept}) == PROMPTS and len(kept) >= PROMPTS * GROUP
    assert all(rollout.policy_version > 0 for rollout in kept)

    # In a new process, with stores that are empty: drafts come from the checkpoint.
    shutil.rmtree(tmp_path / "stores")
    deadline = {MUST_SAVE_AT: str(int(time.time()) + 100)}
    resumed = controlled(tmp_path / "job", 1000, environment=deadline).wait()
    steps = resumed.train()
    again = [drafts_of(steps[step]) for step in sorted(steps) if step > STEPS]
    print(f"after a resume: {again}")
    # What ended until the first step's end may be all in the checkpoint's replay buffer.
    assert next((tokens for tokens in again if tokens is not None), 0) > 1.5 or len(again) < 2
    assert "Timeout has been reached" in resumed.log.read_text()
    last = max(steps)
    assert STEPS < last < 1000 and kept_of(resumed, last)


def test_streamed_parts_of_a_batch_are_compared_and_anchored_at_birth(tmp_path):
    """Prefix reuse with a policy that waits for its rows: all of a step are of its own weights."""
    job = controlled(
        tmp_path / "job",
        STEPS,
        FAITHFUL | {"clip_anchor": "birth"},
        **{
            "async_rl.min_groups_for_streaming_train": 1,
            "async_rl.sampler.max_lookahead_versions": 0,
        },
    ).wait()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, record in steps.items():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        if step <= STEPS_PER_EPOCH:
            assert abs(record["probs_ratio_max"] - 1) < 1e-3
            assert record["gen_kl_error"] < 1e-4  # what engines report is the policy's own
        else:
            assert record["spec_rl/draft_coverage"] > 0.3  # of the next step's first rows, too
            assert record["spec_rl/accepted_fraction"] > ACCEPTED
    assert steps[1]["spec_rl/draft_coverage"] == 0
    assert max(abs(record["probs_ratio_max"] - 1) for record in steps.values()) > 5e-3
    assert steps[STEPS]["spec_rl/staleness"] != 0  # an epoch with reused rows is over
    saved = job.out / "checkpoints" / f"step_{STEPS}" / "rollout_cache" / "monitor.json"
    state = json.loads(saved.read_text())
    assert state["steps"] == STEPS  # however many parts, with the rows of all
    assert state["staleness"][0]["information"] > 0


def test_conversations_by_http_return_from_the_data_plane(tmp_path):
    job = controlled(
        tmp_path / "job",
        STEPS,
        **{
            "++env.should_use_nemo_gym": "true",
            "policy.max_total_sequence_length": 400,
            "policy.generation.vllm_cfg.max_model_len": 400,
            "policy.optimizer.kwargs.lr": 0,
        },
    ).wait()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert sum(record["spec_rl/cache_errors"] for record in steps.values()) == 0
    drafted = [drafts_of(record) for _, record in sorted(steps.items())]
    print(f"tokens a step: {drafted}")
    assert max(tokens or 0 for tokens in drafted) > 1.5
    kept = kept_of(job, STEPS)
    assert len({rollout.key for rollout in kept}) == PROMPTS and len(kept) == PROMPTS * GROUP
    assert not any(rollout.raw for rollout in kept)
    assert all(0 < r.birth_versions[0] <= r.policy_version <= STEPS for r in kept)


@pytest.mark.parametrize(
    ("spec_rl", "line"),
    [
        (FAITHFUL | {"tree": "{enabled:true,method:rounds}"}, "tree.method=auto"),
        (LOSSLESS | {"run_ahead": "{enabled:true}"}, "run_ahead.enabled = True: an asynchronous"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(tmp_path, spec_rl, line):
    job = controlled(tmp_path / "job", STEPS, spec_rl)
    assert job.exit_code() != 0
    assert line in job.log.read_text() and "Launching SingleController" not in job.log.read_text()


@ray.remote(num_cpus=0)
class Controller:
    """An actor that ends a step when it is told to."""

    steps, lost = 0, False

    async def end_step(self):
        """End a step, and have the connection be lost once."""
        self.steps, self.lost = self.steps + 1, True

    async def ping(self):
        if self.lost:
            self.lost = False
            raise ray.exceptions.ActorUnavailableError("lost", None)
        return {"train_steps": self.steps}


def test_the_driver_tells_of_each_step_that_the_actor_has_ended(nemo, monkeypatch):  # noqa: F811
    from nemo_specrl.nemo_rl import job_state, single_controller

    beats = []
    monkeypatch.setattr(single_controller, "PING_SECONDS", 0.05)
    monkeypatch.setattr(job_state, "heartbeat", lambda: beats.append(1))
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        ray.init(
            "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        try:
            actor = Controller.remote()
            thread = threading.Thread(target=single_controller._send_heartbeats, args=(actor,))
            thread.start()
            for step in range(3):
                while len(beats) <= step and thread.is_alive():  # the first is for setup
                    time.sleep(0.01)
                ray.get(actor.end_step.remote())
            while len(beats) < 4 and thread.is_alive():
                time.sleep(0.01)
            ray.kill(actor)
            thread.join()
            assert len(beats) == 4
        finally:
            ray.shutdown()

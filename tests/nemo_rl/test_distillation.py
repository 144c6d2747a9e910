"""On-policy distillation in real NeMo-RL jobs: the student's rollouts are drafted and reused.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import json

import pytest

from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from tests.nemo_rl.test_lossless import LOSSLESS
from tests.support.nemo_rl.jobs import (
    ACCEPTED,
    BATCH,
    FAITHFUL,
    GROUP,
    PROMPTS,
    STEPS_PER_EPOCH,
    Job,
    marks,
)

pytestmark = marks
STEPS = 6


@pytest.fixture(scope="module", params=["lossless", "faithful"])
def job(request, tmp_path_factory):
    spec_rl = LOSSLESS if request.param == "lossless" else FAITHFUL
    folder = tmp_path_factory.mktemp(request.param)
    return Job(folder / "job", steps=STEPS, spec_rl=spec_rl, algorithm="distillation").wait()


def test_the_students_rollouts_draft(job):
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    lossless = not any(record["spec_rl/draft_coverage"] for record in steps.values())
    assert lossless is ("lossless" in str(job.out))
    for step, record in steps.items():
        assert record["spec_rl/cache_errors"] == record["spec_rl/refused_drafts"] == 0
        assert record["loss"] > 0 and record["grad_norm"] > 0  # it is trained
        if lossless:
            assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"]
        elif step > STEPS_PER_EPOCH:
            assert record["spec_rl/draft_coverage"] > 0.5
            assert record["spec_rl/accepted_fraction"] > ACCEPTED
    if lossless:
        later = [r["spec_rl/tree_tokens_per_step"] for s, r in steps.items() if s > STEPS_PER_EPOCH]
        assert max(later) > 1.5


def test_there_is_no_monitor_where_there_are_no_rewards(job):
    assert not any("spec_rl/logprob_gap" in record for record in job.train().values())
    saved = job.out / "checkpoints" / f"step_{STEPS}" / "rollout_cache"
    assert not (saved / "monitor.json").exists()
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["policy_version"] == STEPS + 1  # one refit more, for the validation
    assert sum(file["rollouts"] for file in manifest["files"]) == PROMPTS * GROUP
    rows = read_metrics(job.out / "logs" / METRICS)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["total_steps"] == STEPS


def test_validation_does_not_touch_the_cache(job):
    before = 0
    calls = job._lines("rows.jsonl")
    assert any(call["validating"] for call in calls)
    for call in calls:
        assert (len(call["prompts"]) == BATCH) is not call["validating"]
        if call["validating"]:
            assert call["cached"] == before
        before = call["cached"]

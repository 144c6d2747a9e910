"""Prefix reuse beside a drafter of vLLM's own in a real NeMo-RL job: n-grams, as in test_jobs."""

import pytest

from tests.support.engines import needs_drafters
from tests.support.nemo_rl.jobs import (
    ACCEPTED,
    FAITHFUL,
    TOTAL,
    Job,
    assert_drafts_follow_the_history,
    marks,
)

pytestmark = [*marks, needs_drafters]
LOOKAHEAD = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": LOOKAHEAD,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    drafter = ",".join(f"{name}:{value}" for name, value in NGRAM.items())
    return Job(
        tmp_path_factory.mktemp("drafters") / "job",
        steps=4,
        spec_rl=FAITHFUL | {"fresh_fraction": 0},
        **{"++policy.generation.vllm_kwargs.speculative_config": f"{{{drafter}}}"},
    ).wait()


def test_every_row_with_a_history_is_reused(job):
    assert_drafts_follow_the_history(job, job.calls())
    steps = job.train()
    assert sorted(steps) == [1, 2, 3, 4]
    for step in (3, 4):
        assert steps[step]["spec_rl/accepted_fraction"] > ACCEPTED


def test_what_is_not_reused_is_drafted_by_ngrams(job):
    for record in job.train().values():
        assert record["vllm/spec_num_drafts"] > 0
        assert record["vllm/spec_num_accepted_tokens"] > 0


def test_the_reported_log_probs_are_the_policys(job):
    for record in job.train().values():
        assert record["gen_kl_error"] < 1e-4


def test_responses_stay_within_the_models_limit(job):
    """NeMo-RL main also leaves room for what a drafter reads ahead; a response has a token."""
    for call in job.rollouts():
        for prompt, output in zip(call["prompts"], call["outputs"], strict=True):
            assert len(prompt) < len(output) <= TOTAL

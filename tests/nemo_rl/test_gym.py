"""Conversations over NeMo-RL's HTTP servers, as NeMo-Gym leads them, in real jobs.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
The package nemo_gym is not there: an agent of two questions asks the servers in its place, and
NeMo-RL's own class makes rows of the answers (``tests.support.nemo_rl.agent``).
"""

import shutil
from collections import Counter

import numpy as np
import pytest

from nemo_specrl import prompt_key
from nemo_specrl.cache.inspection import open_source
from nemo_specrl.engine.vllm.environment import has_custom_proposers
from nemo_specrl.nemo_rl.rollout_metadata import response_spans
from tests.support.nemo_rl.jobs import (
    ASYNCHRONOUS,
    GROUP,
    PROMPTS,
    STEPS_PER_EPOCH,
    Job,
    check_talks,
    marks,
)

pytestmark = [
    *marks,
    pytest.mark.skipif(
        not has_custom_proposers(), reason="vLLM 0.20 takes no drafter, so that NeMo-Gym is refused"
    ),
]
LOSSLESS = {"enabled": "true", "preset": "lossless", "tree": "{adaptive:false,method:proposer}"}
TALKING = {
    "++env.questions": "2",
    "policy.max_total_sequence_length": "400",
    "policy.generation.vllm_cfg.max_model_len": "400",
    "policy.optimizer.kwargs.lr": "0",  # so that the history alone decides how much is accepted
}
STEPS = 2 * STEPS_PER_EPOCH


def rows_of(job, step):
    """Root, all that was said behind it, and how many tokens of that are the policy's, by row of a
    step that the job was trained on."""
    rows = []
    for row in job.batch(step):
        ids, mask = row["token_ids"].tolist(), row["token_loss_mask"] > 0
        turns = response_spans(mask)
        assert len(turns) == 2  # with the second question between them
        root, said = ids[: turns[0][0]], ids[turns[0][0] : turns[-1][1]]
        rows.append((tuple(root), tuple(said), int(mask.sum())))
    return rows


def test_the_second_epoch_drafts_from_the_first(tmp_path):
    job = Job(tmp_path / "job", steps=STEPS, spec_rl=LOSSLESS, **TALKING).wait()
    steps = job.train()
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, record in steps.items():
        assert record["spec_rl/cache_errors"] == record["spec_rl/draft_coverage"] == 0
        assert record["gen_kl_error"] < 1e-4  # what the server reports is the policy's own
        made = sum(tokens for *_, tokens in rows_of(job, step))  # and nothing of validation's
        assert record["spec_rl/decoded_tokens"] == record["spec_rl/response_tokens"] == made
    first, second = (
        [steps[step]["spec_rl/tree_tokens_per_step"] for step in epoch]
        for epoch in (range(1, STEPS_PER_EPOCH + 1), range(STEPS_PER_EPOCH + 1, STEPS + 1))
    )
    print(f"tokens a step: {first}, then {second}")
    assert min(second) > max(1.5, *first)

    # What was trained on last is in the checkpoint, under its root and the version that made it.
    made = {step: rows_of(job, step) for step in range(STEPS_PER_EPOCH + 1, STEPS + 1)}
    [folder] = job.out.glob(f"checkpoints/step_{STEPS}/rollout_cache")
    with open_source(folder) as source:
        kept = list(source.rollouts)
    assert Counter((r.key, tuple(r.tokens.tolist())) for r in kept) == Counter(
        (prompt_key(root), said) for rows in made.values() for root, said, _ in rows
    )
    assert len(kept) == PROMPTS * GROUP and not any(r.raw for r in kept)
    versions = {
        step: {r.policy_version for r in kept if r.key in {prompt_key(root) for root, *_ in rows}}
        for step, rows in made.items()
    }
    assert versions == {step: {step} for step in made}  # each step begins with a refit
    assert {int(v) for r in kept for v in r.birth_versions - r.policy_version} == {0}

    # New engines know only what came back.
    shutil.rmtree(tmp_path / "stores")
    resumed = Job(tmp_path / "job", steps=STEPS + 1, spec_rl=LOSSLESS, **TALKING).wait()
    record = resumed.train()[STEPS + 1]
    print(f"after a resume: {record['spec_rl/tree_tokens_per_step']}")
    assert record["spec_rl/tree_tokens_per_step"] > max(1.5, *first)
    assert record["spec_rl/cache_errors"] == 0


def test_in_flight_each_turn_knows_its_weights(tmp_path):
    """Asynchronous GRPO: conversations go on through refits, and are trained on later."""
    in_flight = {
        "grpo.async_grpo.in_flight_weight_updates": "true",
        "grpo.async_grpo.max_trajectory_age_steps": "2",
    }
    job = Job(
        tmp_path / "job", steps=STEPS, spec_rl=LOSSLESS, **{**TALKING, **ASYNCHRONOUS, **in_flight}
    ).wait()
    check_talks(job, STEPS)
    [folder] = job.out.glob(f"checkpoints/step_{STEPS}/rollout_cache")
    with open_source(folder) as source:
        kept = list(source.rollouts)
    trained = {row for step in range(1, STEPS + 1) for row in rows_of(job, step)}
    assert kept and {(r.key, tuple(r.tokens.tolist())) for r in kept} <= {
        (prompt_key(root), said) for root, said, _ in trained
    }
    assert all((np.diff(r.birth_versions) >= 0).all() for r in kept)
    assert all(0 <= r.birth_versions[0] <= r.policy_version <= STEPS for r in kept)
    print(f"{sum(len(set(r.birth_versions)) > 1 for r in kept)} of {len(kept)} span a refit")

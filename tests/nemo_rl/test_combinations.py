"""Reuse with other options of NeMo-RL's recipes: real jobs on a CPU, as in test_jobs."""

import re
from pathlib import Path

import pytest

from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.support.nemo_rl.jobs import (
    ACCEPTED,
    BATCH,
    FAITHFUL,
    HOME,
    Job,
    assert_drafts_follow_the_history,
    marks,
    with_history,
)

pytestmark = marks
[STEP_END] = encode(";")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """Conversations of three turns that end at a stop string, with importance sampling."""
    return Job(
        tmp_path_factory.mktemp("nemo") / "conversations",
        steps=6,
        spec_rl=FAITHFUL | {"fresh_fraction": 0, "reported_logprobs": "behaviour"},
        **{
            "++env.turns": 3,
            "grpo.max_rollout_turns": 3,
            "policy.optimizer.kwargs.lr": "2e-4",
            "policy.generation.stop_strings": "[';']",
            "loss_fn.use_importance_sampling_correction": "true",
        },
    ).wait()


def test_each_turn_is_keyed_by_its_whole_conversation(conversations):
    calls = conversations.rollouts()
    assert_drafts_follow_the_history(conversations, calls)
    opening = {tuple(p) for call in calls for p in call["prompts"] if STEP_END not in p}
    later = [
        (prompt, drafted)
        for call, marked in zip(calls, with_history(calls), strict=True)
        for prompt, drafted in zip(call["prompts"], marked, strict=True)
        if tuple(prompt) not in opening
    ]
    assert {drafted for _, drafted in later} == {True, False}
    for prompt, _ in later:
        assert any(tuple(prompt[: len(first)]) == first for first in opening)


def test_a_stop_string_ends_what_is_reused_as_what_is_decoded(conversations):
    responses = [
        output[len(prompt) :]
        for call in conversations.rollouts()
        for prompt, output in zip(call["prompts"], call["outputs"], strict=True)
    ]
    assert all(STEP_END not in response[:-1] for response in responses)
    assert {STEP_END} <= {response[-1] for response in responses} <= {STEP_END, EOS}


def test_the_correction_sees_with_what_probability_a_token_was_produced(conversations):
    for step, record in conversations.train().items():
        if step <= 2:
            assert record["sampling_importance_ratio"] == pytest.approx(1, abs=1e-4)
        else:  # never less likely under the policy than it was to be kept
            assert record["sampling_importance_ratio"] > 1


def test_with_the_asynchronous_engine_later_turns_are_drafted_too(tmp_path):
    job = Job(
        tmp_path / "turns",
        steps=4,
        spec_rl=FAITHFUL | {"fresh_fraction": 0},
        **{
            "++env.turns": 3,
            "grpo.max_rollout_turns": 3,
            "policy.generation.stop_strings": "[';']",
            "policy.generation.vllm_cfg.async_engine": "true",
        },
    ).wait()
    steps = job.train()
    for step in (1, 2):
        assert steps[step]["spec_rl/draft_coverage"] == 0
    for step in (3, 4):  # of three turns, more than the first ones
        assert steps[step]["spec_rl/draft_coverage"] > 0.5


def test_dynamic_sampling_draws_on_until_a_batch_is_full(tmp_path):
    """With DAPO's rewards, clipping and filter of overlong responses."""
    job = Job(
        tmp_path / "dapo",
        steps=5,
        spec_rl=FAITHFUL | {"fresh_fraction": 0},
        **{
            "++env.prompts": 6,
            "grpo.use_dynamic_sampling": "true",
            "grpo.dynamic_sampling_max_gen_batches": 20,
            "grpo.use_leave_one_out_baseline": "false",
            "grpo.overlong_filtering": "true",
            "grpo.reward_scaling.enabled": "true",
            "grpo.reward_scaling.target_min": "-1.0",
            "grpo.reward_shaping.enabled": "true",
            "grpo.reward_shaping.overlong_buffer_length": 40,
            "grpo.reward_shaping.max_response_length": 160,
            "loss_fn.ratio_clip_max": 0.28,
            "loss_fn.ratio_clip_c": 10,
        },
    ).wait()
    calls = job.calls()
    versions = [call["policy_version"] for call in calls]
    assert len(set(versions)) == 5 < len(versions)  # some steps took several batches
    assert_drafts_follow_the_history(job, calls)
    assert max(record["spec_rl/draft_coverage"] for record in job.train().values()) > 0.5


def test_on_the_data_plane_rollouts_are_made_and_kept_by_another_process(tmp_path):
    pytest.importorskip("transfer_queue", reason="NeMo-RL's data plane is not installed")
    job = Job(
        tmp_path / "plane",
        steps=4,
        spec_rl=FAITHFUL | {"fresh_fraction": 0},
        **{"data_plane.enabled": "true", "data_plane.num_storage_units": 1},
    ).wait()
    assert_drafts_follow_the_history(job, job.calls())
    kept = [call["cached"] for call in job._lines("rows.jsonl") if len(call["prompts"]) != BATCH]
    assert kept == [0, 16, 16]  # validation adds nothing
    steps = job.train()
    for step in (3, 4):
        assert steps[step]["spec_rl/accepted_fraction"] > ACCEPTED
        assert steps[step]["gen_kl_error"] < 1e-4
    assert (job.out / "checkpoints" / "step_4" / "rollout_cache" / "manifest.json").is_file()


def test_lora_is_merged_before_it_reaches_the_engines():
    """Training LoRA needs a GPU, so only check that NeMo-RL passes no adapters to vLLM."""
    workers = sorted((Path(HOME) / "nemo_rl/models/generation/vllm").glob("vllm_worker*.py"))
    assert len(workers) >= 2
    for worker in workers:
        assert not re.search(r"enable_lora|lora_request", worker.read_text())

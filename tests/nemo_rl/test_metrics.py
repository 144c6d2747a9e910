"""A step's metrics from vLLM's counters, and the warnings where drafting does not work."""

from __future__ import annotations

import logging

import pytest

from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from nemo_specrl.nemo_rl.metrics import (
    Alarm,
    StepLog,
    Stragglers,
    engine_metrics,
    reuse_metrics,
    summed,
)
from nemo_specrl.nemo_rl.recipe import run_of
from tests.nemo_rl.test_recipe import TOKENIZER, recipe

TOKENS, DRAFTED, ACCEPTED = (
    "vllm:generation_tokens",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)


def test_tokens_a_step_count_the_steps_without_drafts_too():
    engines = [
        {TOKENS: 60.0, DRAFTED: 40.0, ACCEPTED: 20.0, "by position": [1, 2]},
        {TOKENS: 40.0, DRAFTED: 40.0, ACCEPTED: 30.0},
    ]
    metrics = engine_metrics(summed(engines))
    assert metrics[metric.TOKENS_PER_STEP] == 2  # 100 tokens in 50 steps of rows
    assert metrics[metric.DRAFT_LENGTH] == 80 / 50
    assert metrics[metric.DRAFT_ACCEPTED_FRACTION] == 50 / 80
    assert metrics[metric.DRAFTING] == 1


def test_without_a_drafter_without_drafts_and_without_an_answer():
    plain = engine_metrics({TOKENS: 10.0})
    assert plain[metric.DRAFTING] == 0 and metric.TOKENS_PER_STEP not in plain
    cold = engine_metrics({TOKENS: 10.0, DRAFTED: 0.0, ACCEPTED: 0.0})
    assert cold[metric.TOKENS_PER_STEP] == 1 and metric.DRAFT_ACCEPTED_FRACTION not in cold
    idle = engine_metrics({TOKENS: 0.0, DRAFTED: 0.0, ACCEPTED: 0.0})
    assert metric.TOKENS_PER_STEP not in idle
    assert engine_metrics({}) == {}


def test_counts_of_reuse_workers_are_added_but_for_the_noise():
    calls = [
        {
            "rows": 4,
            "drafts": 2,
            "draft_tokens": 100,
            "accepted_tokens": 50,
            "response_tokens": 200,
        },
        {"rows": 4, "drafts": 4, "draft_tokens": 100, "accepted_tokens": 0, "response_tokens": 200},
    ]
    noises = [
        {**calls[0], "noise_prefix_tokens": 300.0},
        {**calls[1], "noise_prefix_tokens": 250.0},
    ]
    metrics = reuse_metrics(noises)
    assert metrics[metric.REUSE_COVERAGE] == 6 / 8
    assert metrics[metric.REUSE_ACCEPTED_FRACTION] == 50 / 200
    assert metrics[metric.NOISE_PREFIX_TOKENS] == 250
    assert metric.NOISE_PREFIX_TOKENS not in reuse_metrics(calls)
    assert reuse_metrics([])[metric.REUSE_COVERAGE] == 0


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ([(1, 500, 0), (1, 500, 0)], "no draft token was accepted in 2 steps"),
        ([(0, None, None)] * 3, "the engines do not draft"),
        ([(1, 500, 0), (1, 500, 1), (1, 500, 0)], None),
        ([(1, 50, 0)] * 3, None),  # too few to mean anything
        ([(1, 0, 0)] * 3, None),  # cold
    ],
)
def test_what_does_not_work_is_told_once(caplog, steps, warned):
    alarm = Alarm()
    with caplog.at_level(logging.WARNING):
        for drafting, drafted, accepted in steps:
            metrics = {metric.DRAFTING: float(drafting)}
            if drafted is not None:
                metrics |= {metric.DRAFTED_TOKENS: drafted, metric.ACCEPTED_TOKENS: accepted}
            alarm.look_at(metrics)
    assert len(caplog.messages) == (warned is not None)
    assert warned is None or warned in caplog.messages[0]


def test_a_steps_record_has_the_names_of_the_embedded_trainers(tmp_path):
    run = run_of(recipe({}, logger__log_dir=str(tmp_path)), TOKENIZER)
    log = StepLog(run)
    log.note_trainer({"reward": 0.5, "loss": 0.1, "of nobody": 3.0, "grad_norm": [1.0]})
    log.note_validation({"accuracy": 0.25}, 1)
    own = engine_metrics({TOKENS: 100.0, DRAFTED: 80.0, ACCEPTED: 50.0})
    log.end_step(1, own, {"total_step_time": 9.0, "generation": 4.0})
    [row] = read_metrics(tmp_path / METRICS)
    assert (
        row.items()
        >= {
            "step": 1,
            "total_steps": 100,
            "reward": 0.5,
            "loss": 0.1,
            "heldout_accuracy": 0.25,
            "step_s": 9.0,
            "rollout_s": 4.0,
            "response_tokens": 100.0,
            metric.TOKENS_PER_STEP: 2.0,
        }.items()
    )
    assert "of nobody" not in row and "grad_norm" not in row


def test_an_engine_that_is_slow_in_three_steps_on_end_is_found_once():
    stragglers = Stragglers()
    even, slow, other = [10.0, 11.0, 10.0, 9.0], [10.0, 11.0, 14.5, 9.0], [14.5, 11.0, 10.0, 9.0]
    found = [stragglers.look_at(step) for step in (slow, slow, even, slow, slow, slow, slow, other)]
    assert found == [[], [], [], [], [], [2], [], []]
    assert Stragglers().look_at([10.0]) == []  # a single engine

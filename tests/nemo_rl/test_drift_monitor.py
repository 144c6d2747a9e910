"""The drift monitor over the rows of NeMo-RL's trainers; needs no NeMo-RL."""

import json
import logging

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.nemo_rl.context import RunContext
from nemo_specrl.nemo_rl.rollout_metadata import MetadataLog, MetadataTable
from nemo_specrl.speculation.draft_selection import Row, is_fresh
from tests.conftest import DictCache
from tests.nemo_rl.test_context import recipe
from tests.support.nemo_rl.steps import GROUP, Workers, monitor_of, step, table_of


def kinds(rollouts):
    return np.array([rollout.fresh for rollout in rollouts])


def test_it_compares_fresh_with_reused_rows_of_a_prompt():
    rows, rollouts = step([7], np.random.default_rng(0))
    fresh = kinds(rollouts)
    assert 0 < fresh.sum() < GROUP
    got = monitor_of(table_of(rows, rollouts)).compare(rows)
    for name, values in (
        ("reward", np.array(rows["rewards"])),
        ("logprob", -1.0 - np.arange(GROUP)),
    ):
        expected = values[fresh].mean() - values[~fresh].mean()
        assert got[f"spec_rl/{name}_gap"] == pytest.approx(expected)
    assert got["spec_rl/staleness"] == pytest.approx(-18)  # two reused tokens, nine nats each


def test_a_cold_epoch_and_rows_without_a_record_compare_nothing():
    rng = np.random.default_rng(0)
    cold, rollouts = step([7, 8], rng, fresh_fraction=1)
    assert monitor_of(table_of(cold, rollouts)).compare(cold)["spec_rl/reward_gap"] == 0
    warm, rollouts = step([7, 8], rng)
    lost = monitor_of(table_of(warm, [None] * len(rollouts)))
    assert lost.compare(warm)["spec_rl/reward_gap"] == 0 and lost.monitor.steps == 0


def test_under_dynamic_sampling_the_rewards_are_those_of_the_rows_kept():
    rows, rollouts = step([7, 8], np.random.default_rng(1))
    expected = monitor_of(table_of(rows, rollouts)).compare(rows)
    filtered = rows | {"filtered_rewards": rows["rewards"], "rewards": [1.0] * 99}
    assert monitor_of(table_of(rows, rollouts)).compare(filtered) == expected


@pytest.mark.parametrize(
    ("reported", "column"), [("policy", "generation_logprobs"), ("behaviour", None)]
)
def test_where_the_policys_logprobs_are_not_computed_the_engines_are_compared(
    tmp_path, reported, column
):
    """NeMo-RL logs zeros for them with ``force_on_policy_ratio``."""
    skipping = recipe(tmp_path, spec_rl__preset="faithful", spec_rl__reported_logprobs=reported)
    skipping.loss_fn["force_on_policy_ratio"] = True
    assert RunContext.of(skipping, "ppo").policy_logprobs == "prev_logprobs"  # PPO computes them
    run = RunContext.of(skipping, "grpo")
    assert run.policy_logprobs == column
    rows, rollouts = step([7], np.random.default_rng(0))
    expected = monitor_of(table_of(rows, rollouts)).compare(rows)
    assert expected["spec_rl/logprob_gap"] != 0
    rows["generation_logprobs"] = rows["prev_logprobs"]
    rows["prev_logprobs"] = np.zeros_like(rows["prev_logprobs"]).tolist()
    got = monitor_of(table_of(rows, rollouts), logprobs=run.policy_logprobs).compare(rows)
    without = {name for name in expected if "logprob" in name} if column is None else set()
    assert got == {name: value for name, value in expected.items() if name not in without}
    if reported == "policy":
        skipping.grpo.seq_logprob_error_threshold = 2.0
        assert RunContext.of(skipping, "grpo").policy_logprobs == "prev_logprobs"


def test_remembered_rows_raise_a_warning_and_with_auto_the_fresh_fraction(caplog):
    changed, workers = [], Workers()
    records = MetadataTable(workers.take)
    monitor = monitor_of(records, changed, monitor={"auto": True})
    rng = np.random.default_rng(2)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 9):
            rows, rollouts = step(range(10, 60), rng, version=version, remembered=0.4)
            workers.make(rows, rollouts)
            monitor.compare(rows)
            records.end_step()
            if changed:
                break
    assert changed == [0.4]
    assert "reused rollouts no longer match the current policy (reward -0." in caplog.text


def test_max_age_counts_where_fresh_fraction_does():
    """With a third of the rows fresh, no token survives more than two epochs."""
    rows, rollouts = step([7], np.random.default_rng(0))
    bounded = monitor_of(table_of(rows, rollouts), fresh_fraction=0.1, max_age=2)
    assert bounded.compare(rows)["spec_rl/fresh_fraction"] == pytest.approx(1 / 3)


def test_a_run_that_is_resumed_continues_from_what_was_seen(tmp_path):
    rows, rollouts = step(range(10, 20), np.random.default_rng(3))
    first = monitor_of(table_of(rows, rollouts))
    first.compare(rows)
    first.save(tmp_path)
    changed = []
    again = monitor_of(table_of(rows, rollouts), changed, state=tmp_path)
    assert again.monitor.state() == first.monitor.state()
    assert changed == [0.2]
    assert monitor_of(table_of(rows, rollouts), state=tmp_path / "none").monitor.steps == 0


def compared(monitor, workers, prompts, rng):
    """What a monitor says of a step with these prompts."""
    rows, rollouts = step(prompts, rng)
    workers.make(rows, rollouts)
    got = monitor.compare(rows)
    monitor._records.end_step()
    return got


@pytest.mark.parametrize("resumed_before", [None, 1, 2])
def test_an_epoch_is_over_when_half_of_a_steps_prompts_come_back(tmp_path, resumed_before):
    """The loader is much longer where the data set has each problem many times."""
    workers, rng = Workers(), np.random.default_rng(4)

    def started(state=None):
        return monitor_of(MetadataTable(workers.take), loader_length=1000, state=state)

    monitor = started()
    for number, prompts in enumerate([(10, 11, 12, 13), (14, 15, 16, 10), (11, 17, 18, 15)]):
        if number == resumed_before:
            monitor.save(tmp_path)
            monitor = started(tmp_path)
        got = compared(monitor, workers, prompts, rng)
        assert ("spec_rl/staleness" in got) is (number == 2)
    assert got["spec_rl/staleness"] == pytest.approx(-18)  # of the first two steps' rows
    assert monitor.monitor.steps_per_epoch == 2 and monitor.monitor.window == 20
    monitor.save(tmp_path)
    assert started(tmp_path).monitor.steps_per_epoch == 2


def test_an_epoch_is_no_longer_than_the_loader():
    workers, rng = Workers(), np.random.default_rng(4)
    monitor = monitor_of(MetadataTable(workers.take), loader_length=3)
    seen = [compared(monitor, workers, [prompt], rng) for prompt in range(10, 14)]
    assert ["spec_rl/staleness" in got for got in seen] == [False, False, True, True]
    assert seen[2]["spec_rl/staleness"] == pytest.approx(-18)


def test_a_state_from_before_epochs_were_learned_is_continued(tmp_path):
    workers, rng = Workers(), np.random.default_rng(4)
    monitor = monitor_of(MetadataTable(workers.take), loader_length=9)
    compared(monitor, workers, [10], rng)
    monitor.save(tmp_path)
    state = json.loads((tmp_path / "monitor.json").read_text())
    del state["steps_per_epoch"], state["recurrence"]
    (tmp_path / "monitor.json").write_text(json.dumps(state))
    monitor = monitor_of(MetadataTable(workers.take), loader_length=9, state=tmp_path)
    assert monitor.monitor.steps == 1
    learned = ["spec_rl/staleness" in compared(monitor, workers, [p], rng) for p in (11, 12, 11)]
    assert learned == [False, False, True] and monitor.monitor.steps_per_epoch == 2


@pytest.mark.parametrize("text", ["", "[]", '{"fresh_fraction": 0.9}'])
def test_a_state_that_is_damaged_ends_no_run(tmp_path, caplog, text):
    (tmp_path / "monitor.json").write_text(text)
    changed = []
    again = monitor_of(MetadataTable(list), changed, state=tmp_path).monitor
    assert "monitor.json: damaged" in caplog.text
    assert (again.steps, again.fresh_fraction, changed) == (0, 0.2, [])


def test_rows_that_it_does_not_understand_cost_no_step(caplog):
    rows, rollouts = step([7], np.random.default_rng(0))
    del rows["rewards"]
    with caplog.at_level(logging.WARNING):
        assert monitor_of(table_of(rows, rollouts)).compare(rows) == {}
    assert "the drift monitor failed: KeyError: 'rewards'" in caplog.text


def test_monitor_and_engine_agree_on_fresh_rows_when_drafts_are_refused(engine):
    """A row whose draft the engine refuses is a fresh one, whatever was scheduled for it."""
    prompt, cache, fraction, rows = [1, 12, 5, 14], DictCache(), 0.25, 16
    key = prompt_key(prompt)
    speculative = SpeculativeLLM(
        engine,
        cache,
        SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=fraction),
        seed=3,
    )

    def generate(version):
        speculative.policy_version = version
        params = [SamplingParams(max_tokens=12, seed=100 * version + i) for i in range(rows)]
        prompts = [{"prompt_token_ids": prompt}] * rows
        return speculative.generate(prompts, params, prompt_keys=[key] * rows, use_tqdm=False)

    generate(0)
    unknown = np.full(6, 1000)  # beyond the vocabulary, as of another model
    cache.put(Rollout(key, i, unknown, np.zeros(6), Finish.STOP, 0) for i in range(0, rows, 2))
    outputs = generate(1)
    scheduled = [is_fresh(Row(key, i), 1, seed=3, fresh_fraction=fraction) for i in range(rows)]
    refused = speculative.metrics.refused_drafts
    assert refused == sum(not fresh for fresh in scheduled[::2]) > 0

    log = MetadataLog(births=False)
    log.note(outputs)
    ids = [[*prompt, *output.outputs[0].token_ids] for output in outputs]
    width = max(map(len, ids))
    columns = {
        "token_ids": [row + [0] * (width - len(row)) for row in ids],
        "token_loss_mask": [
            [0] * len(prompt) + [1] * (len(row) - len(prompt)) + [0] * (width - len(row))
            for row in ids
        ],
        "input_lengths": [len(row) for row in ids],
        "rewards": [0.0] * rows,
        "prev_logprobs": [[-1.0] * width] * rows,
    }
    monitor = monitor_of(MetadataTable(log.take), fresh_fraction=fraction)
    monitor.compare(columns)
    kept = sum(rollout.fresh for rollout in cache.all())
    assert kept == sum(scheduled) + refused
    gap = monitor.monitor.gaps["length"]
    assert gap.information == pytest.approx(kept * (rows - kept) / rows)

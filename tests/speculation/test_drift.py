"""The test of fresh against reused rows: its error rate, its power, and the dial."""

import json
import re

import numpy as np
import pytest

from nemo_specrl.config import MonitorConfig
from nemo_specrl.speculation.drift import DriftMonitor, Gap

PROMPTS, GROUP, FRESH = 48, 8, 0.2
NONE = np.zeros(0)


def run(rng, epochs, *, gap=0.0, stale=0.0, config=None, fresh_fraction=FRESH):
    """A run in which reused rows come again unchanged, and are better by ``gap`` than fresh ones.

    They have lost ``stale`` nats since birth.

    Returns:
        the monitor, and for each epoch the quantities that drift in it.
    """
    monitor = DriftMonitor(
        config or MonitorConfig(), fresh_fraction=fresh_fraction, steps_per_epoch=1
    )
    difficulty = rng.beta(1, 1.5, (PROMPTS, 1))
    rewards = (rng.random((PROMPTS, GROUP)) < difficulty).astype(float)
    lengths = rng.normal(100, 20, (PROMPTS, GROUP))
    logprobs = rng.normal(-0.1, 0.05, (PROMPTS, GROUP))
    groups = np.repeat(np.arange(PROMPTS), GROUP).tolist()
    drifting = [
        monitor.update(
            groups, np.ones(rewards.size, bool), values(rewards, lengths, logprobs), NONE
        )
    ]
    for _ in range(epochs - 1):
        fresh = rng.random((PROMPTS, GROUP)) < monitor.fresh_fraction
        rewards[fresh] = (rng.random((PROMPTS, GROUP)) < difficulty)[fresh]
        lengths[fresh] = rng.normal(100, 20, fresh.sum())
        logprobs[fresh] = rng.normal(-0.1, 0.05, fresh.sum())
        seen = np.where(fresh, rewards - gap, rewards)
        lost = rng.normal(stale, 0.6, int((~fresh).sum()))
        rows = values(seen, lengths, logprobs)
        drifting.append(monitor.update(groups, fresh.ravel(), rows, lost))
    return monitor, drifting


def values(rewards, lengths, logprobs):
    return {"reward": rewards.ravel(), "length": lengths.ravel(), "logprob": logprobs.ravel()}


def test_the_gap_by_hand():
    gap = Gap()
    gap.add(np.array([1.0, 0.0, 0.0, 1.0]), np.array([True, False, False, False]))
    gap.add(np.array([0.0, 1.0]), np.array([True, False]))
    gap.add(np.array([0.0, 1.0]), np.array([True, True]))  # nothing to compare with
    assert gap.information == pytest.approx(3 / 4 + 1 / 2)
    assert gap.mean == pytest.approx((3 / 4 * (1 - 1 / 3) + 1 / 2 * -1) / (3 / 4 + 1 / 2))
    assert gap.degrees_of_freedom == 2
    assert gap.squares == pytest.approx(2 / 3)


def test_nothing_compared_is_no_drift():
    monitor = DriftMonitor(MonitorConfig(), fresh_fraction=0.0, steps_per_epoch=1)
    for fresh in (True, False):
        assert monitor.update([0, 0], np.array([fresh] * 2), values(*np.ones((3, 2))), NONE) == []
    assert monitor.as_dict()["spec_rl/reward_gap"] == 0.0
    assert monitor.as_dict()["spec_rl/reward_gap_z"] == 0.0
    json.dumps(monitor.as_dict())


def test_a_few_rows_that_are_all_alike_are_no_drift():
    """One fresh row is right and its siblings are wrong: their spread is 0, and says nothing."""
    monitor = DriftMonitor(MonitorConfig(), fresh_fraction=FRESH, steps_per_epoch=1)
    fresh = np.array([True, False, False, False])
    for _ in range(5):
        rows = values(np.array([1.0, 0, 0, 0]), *np.ones((2, 4)))
        assert monitor.update([0] * 4, fresh, rows, np.ones(3)) == []
    assert monitor.as_dict()["spec_rl/reward_gap"] == 1.0


def test_silent_where_reuse_is_fair():
    """100 runs of 20 epochs, two windows each, looked at after every epoch, with no tolerance.

    At an error rate of 0.1 a window, 20 alarms are the most that may be expected; with that
    many, more than 33 come with probability 1e-3. Reused rows come again unchanged here, which
    independent rows would not: the bound has room for that.
    """
    config = MonitorConfig(
        reward_tolerance=0,
        length_tolerance=0,
        logprob_tolerance=0,
        staleness_tolerance=0,
        error_rate=0.1,
    )
    rng = np.random.default_rng(0)
    alarms = sum(any(run(rng, 20, config=config)[1]) for _ in range(100))
    assert alarms <= 33


def test_finds_rows_that_are_remembered():
    rng = np.random.default_rng(1)
    found = [run(rng, 6, gap=0.35)[1] for _ in range(20)]
    assert all(any("reward" in names for names in drifting) for drifting in found)
    assert all("length" not in names for drifting in found for names in drifting)


def test_finds_tokens_that_the_policy_has_turned_away_from():
    rng = np.random.default_rng(5)
    found = [run(rng, 3, stale=0.4)[1] for _ in range(20)]
    assert all(drifting == [[], ["staleness"], ["staleness"]] for drifting in found)
    within = [run(rng, 20, stale=0.08)[1] for _ in range(20)]
    assert not any(names for drifting in within for names in drifting)


def test_staleness_is_that_of_the_last_whole_epoch():
    monitor = DriftMonitor(MonitorConfig(), fresh_fraction=FRESH, steps_per_epoch=2)
    seen = []
    for lost in ([1.0, 3.0], [2.0], [0.0], [0.5], []):
        monitor.update([0], np.array([True]), values(*np.ones((3, 1))), np.array(lost))
        seen.append(monitor.as_dict()["spec_rl/staleness"])
    assert seen == pytest.approx([0, 2, 2, 0.25, 0.25])


def test_epochs_whose_length_is_known_late_are_those_that_were_known_from_the_start():
    known = DriftMonitor(MonitorConfig(), fresh_fraction=FRESH, steps_per_epoch=3)
    late = DriftMonitor(MonitorConfig(), fresh_fraction=FRESH, steps_per_epoch=None)
    rng = np.random.default_rng(7)
    for step in range(35):  # one window, and the beginning of the next
        if step == 3:  # prompts come back
            late.begin_epochs(3)
        rows = ([0] * 4, rng.random(4) < 0.5, values(*rng.random((3, 4))), rng.normal(size=2))
        assert known.update(*rows) == late.update(*rows)
        assert ("spec_rl/staleness" in late.as_dict()) is (step >= 3)
        if step >= 3:
            assert late.as_dict() == known.as_dict() and late.state() == known.state()
    assert late.steps == 5


def test_a_window_that_was_taken_for_longer_ends_once_the_epoch_is_known():
    """As of a state of a run that took the loader's length for an epoch."""
    config = MonitorConfig(auto=True, window_epochs=5)
    monitor = DriftMonitor(config, fresh_fraction=0.1, steps_per_epoch=None)
    monitor.fresh_fraction = 0.4
    rows = ([0] * 8, np.zeros(8, bool), values(*np.ones((3, 8))), np.ones(80))
    for _ in range(40):
        assert monitor.update(*rows) == []  # its rows have counted several times
    monitor.begin_epochs(3)
    assert monitor.fresh_fraction == 0.4 and monitor.as_dict()["spec_rl/staleness"] == 0
    monitor.update(*rows)
    assert monitor.fresh_fraction == 0.2 and monitor.steps == 1


def test_the_warning_names_what_drifts_also_when_the_dial_turns():
    rng = np.random.default_rng(6)
    for auto in (False, True):
        config = MonitorConfig(auto=auto)
        monitor, drifting = run(rng, 2, stale=0.5, config=config)
        assert drifting[-1] == ["staleness"]
        assert re.search(r"\(staleness \+0\.[45]\d+\); raise", monitor.warning)
    calm, _ = run(rng, 2)
    assert calm.warning == ""


def test_a_gap_within_tolerance_is_let_be():
    rng = np.random.default_rng(2)
    monitor, drifting = run(rng, 60, gap=0.05, config=MonitorConfig(reward_tolerance=0.15))
    assert not any(drifting)
    assert monitor.as_dict()["spec_rl/reward_gap"] < 0  # reused minus fresh is what was put in


def test_the_dial_goes_up_and_comes_back():
    config = MonitorConfig(auto=True, window_epochs=5)
    rng = np.random.default_rng(3)
    monitor, drifting = run(rng, 12, gap=0.4, config=config, fresh_fraction=0.1)
    assert any(drifting) and monitor.fresh_fraction > 0.1
    turned = monitor.fresh_fraction
    rows = np.zeros(8, bool)
    for _ in range(5):
        monitor.update([0] * 8, rows, values(*np.ones((3, 8))), NONE)
    seen = [monitor.fresh_fraction]
    for _ in range(50):
        monitor.update([0] * 8, rows, values(*np.ones((3, 8))), NONE)
        seen.append(monitor.fresh_fraction)
    assert seen[-1] == 0.1 and seen == sorted(seen, reverse=True) and max(seen) <= turned


def test_without_auto_the_dial_stays():
    monitor, drifting = run(np.random.default_rng(3), 12, gap=0.4)
    assert any(drifting) and monitor.fresh_fraction == FRESH


def test_goes_on_from_its_state():
    rng = np.random.default_rng(4)
    monitor, _ = run(rng, 7, gap=0.2)
    copy = DriftMonitor(MonitorConfig(), fresh_fraction=FRESH, steps_per_epoch=1)
    copy.restore(json.loads(json.dumps(monitor.state())))
    assert copy.as_dict() == monitor.as_dict()
    rows = (
        list(np.repeat(range(4), 4)),
        rng.random(16) < 0.3,
        values(*rng.random((3, 16))),
        rng.normal(size=9),
    )
    assert copy.update(*rows) == monitor.update(*rows)
    assert copy.state() == monitor.state()

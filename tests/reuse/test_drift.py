"""The test of fresh against reused rows: its error rate and its power."""

import numpy as np
import pytest

from nemo_specrl.reuse.drift import DriftMonitor

PROMPTS, GROUP, FRESH = 48, 8, 0.2
GROUPS = np.repeat(np.arange(PROMPTS), GROUP).tolist()


def run(rng, epochs, *, gap=0.0, **options):
    """A run in which reused rows come again unchanged, and are better by ``gap`` than fresh ones.

    Returns:
        the monitor, and the warnings of its epochs.
    """
    monitor = DriftMonitor(**options)
    difficulty = rng.beta(1, 1.5, (PROMPTS, 1))
    rewards = (rng.random((PROMPTS, GROUP)) < difficulty).astype(float)
    warnings = [monitor.update(GROUPS, np.ones(rewards.size, bool), rewards.ravel())]
    for _ in range(epochs - 1):
        fresh = rng.random((PROMPTS, GROUP)) < FRESH
        rewards[fresh] = (rng.random((PROMPTS, GROUP)) < difficulty)[fresh]
        seen = np.where(fresh, rewards - gap, rewards)
        warnings.append(monitor.update(GROUPS, fresh.ravel(), seen.ravel()))
    return monitor, warnings


def test_the_gap_by_hand():
    monitor = DriftMonitor()
    fresh = np.array([True, False, False, False, True, False, True, True])
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    assert monitor.update([0, 0, 0, 0, 1, 1, 2, 2], fresh, rewards) == ""  # 2: nothing to compare
    assert monitor.gap == pytest.approx((3 / 4 * (1 - 1 / 3) + 1 / 2 * -1) / (3 / 4 + 1 / 2))
    assert monitor.as_dict() == {
        "spec_rl/reward_gap": monitor.gap,
        "spec_rl/reward_gap_z": 0.0,
        "spec_rl/drifts": 0.0,
    }


def test_a_few_rows_that_are_all_alike_are_no_drift():
    """One fresh row is right and its siblings are wrong: their spread is 0, and says nothing."""
    monitor = DriftMonitor()
    fresh = np.array([True, False, False, False])
    for _ in range(5):
        assert monitor.update([0] * 4, fresh, np.array([1.0, 0, 0, 0])) == ""
    assert monitor.gap == 1.0


def test_silent_where_reuse_is_fair():
    """100 runs of 20 epochs, looked at after every epoch, with no tolerance.

    At an error rate of 0.1, 10 alarms are the most that may be expected; with that many, more than
    20 come with probability 1e-3. Reused rows come again unchanged here, which independent rows
    would not: the bound has room for that.
    """
    rng = np.random.default_rng(0)
    options = {"tolerance": 0.0, "error_rate": 0.1}
    assert sum(any(run(rng, 20, **options)[1]) for _ in range(100)) <= 20


def test_sees_what_the_laboratory_saw():
    """A gap of -0.17 after six of ten epochs on 48 prompts: one warning each, within 25 epochs."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        monitor, warnings = run(rng, 25, gap=0.17)
        [warning] = [w for w in warnings if w]
        assert "fresh minus reused: -0." in warning and "fresh_fraction" in warning
        assert monitor.drifts and monitor.as_dict()["spec_rl/reward_gap_z"] < -5


def test_a_window_ends():
    """What a run has mended is forgotten after 4,096 rows, and what comes back is told again."""
    monitor, rng = DriftMonitor(), np.random.default_rng(3)
    groups, fresh = np.repeat(np.arange(1024), 4).tolist(), np.tile([True, False] * 2, 1024)
    told = []
    for gap in [0.5] * 4 + [0.0] * 4 + [0.5] * 4:
        rewards = (rng.random(4096) < 0.5) + np.where(fresh, -gap, 0.0)
        told.append(bool(monitor.update(groups, fresh, rewards)))
    assert told == [True] + [False] * 7 + [True] + [False] * 3

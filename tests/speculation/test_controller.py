"""The controller of draft lengths on simulated machines, whose costs and chances are known.

A machine is a function from rows and draft tokens to seconds, a policy one from what speaks for a
token to its chance of being accepted. The controller is told what an engine would tell it and
nothing else. Its expected tokens per second are compared with the best fixed choice's: a least
chance and a greatest length for all drafts, none at all included, known chances throughout.
"""

import numpy as np
import pytest

from nemo_specrl.speculation.controller import Chances, Controller, StepCosts

CELLS = 24
PRIOR = np.linspace(0.3, 0.98, CELLS)
LONGEST, NO_TOKEN = 24, CELLS  # behind the cells: no token


def cpu(rows, drafted):
    """A processor: what a token costs is about the same from the first one on."""
    return 1.4e-3 + 6e-5 * rows + (drafted > 0) * (3e-4 + 2e-5 * rows) + 1.2e-5 * drafted


def gpu(rows, drafted):
    """A GPU: up to 256 tokens the weights' way through memory, from there on computation."""
    return 6e-3 + max(0.0, rows + drafted - 256) * 2e-5 + 2e-6 * rows


def dear(rows, drafted):
    return 1e-3 + 1e-4 * rows + (drafted > 0) * 1e-3 + 3e-4 * drafted


def free(rows, drafted):
    return 5e-3 + 1e-7 * (rows + drafted)


def warm(rng, rows):
    """As behind a long match: the longer, the surer."""
    start, length = rng.integers(6, 20, (rows, 1)), rng.integers(8, 30, (rows, 1))
    at = np.arange(LONGEST)
    return np.where(at < length, np.minimum(start + at, CELLS - 1), NO_TOKEN)


def cold(rng, rows):
    """As from siblings: often nothing, and mostly short."""
    cells = rng.integers(0, 12, (rows, LONGEST))
    return np.where(np.arange(LONGEST) < rng.integers(0, 4, (rows, 1)), cells, NO_TOKEN)


def mixed(rng, rows):
    return np.where(rng.random((rows, 1)) < 0.4, warm(rng, rows), cold(rng, rows))


WELL = PRIOR
BETTER = PRIOR**0.2
WORSE = PRIOR**2
NEVER = PRIOR * 0.05

REGIMES = {
    "warm, few rows, processor": (cpu, 8, BETTER, warm),
    "warm, one row, processor": (cpu, 1, BETTER, warm),
    "cold, few rows, processor": (cpu, 8, WORSE, cold),
    "cold, many rows, processor": (cpu, 64, WELL, cold),
    "high entropy, processor": (cpu, 8, NEVER, warm),
    "mixed, processor": (cpu, 8, WELL, mixed),
    "warm, few rows, GPU": (gpu, 8, WELL, warm),
    "warm, many rows, GPU": (gpu, 64, BETTER, warm),
    "mixed, full batch, GPU": (gpu, 128, WELL, mixed),
    "high entropy, full batch, GPU": (gpu, 128, NEVER, mixed),
    "dear tokens": (dear, 16, WELL, warm),
    "free tokens": (free, 16, WORSE, mixed),
}


def chances_of(table, cells):
    """Chance that all tokens up to each one are accepted; 0 where there is none."""
    return np.cumprod(np.append(table, 0.0)[cells], axis=1)


class Run:
    """A controller on a machine."""

    def __init__(self, outliers=0.0):
        self.controller = Controller(PRIOR)
        self.rng = np.random.default_rng(0)
        self.outliers = outliers

    def steps(self, machine, truth, drafts):
        """Run a step for each batch of drafts; tokens and seconds to be expected of them."""
        tokens = seconds = 0.0
        controller, rng = self.controller, self.rng
        for cells in drafts:
            rows = len(cells)
            lengths = self.lengths(cells)
            drafted = int(lengths.sum())
            took = machine(rows, drafted)
            kept = np.arange(LONGEST) < lengths[:, None]
            tokens += rows + float((chances_of(truth, cells) * kept).sum())
            seconds += took
            noise = rng.lognormal(0, 0.05) * (30 if rng.random() < self.outliers else 1)
            controller.observe(rows, drafted, took * noise)
            accepted = np.cumprod(rng.random(cells.shape) < np.append(truth, 0.0)[cells], axis=1)
            accepted = np.minimum(accepted.sum(axis=1), lengths)
            for row in np.flatnonzero(lengths).tolist():
                draft = cells[row, : lengths[row]].astype(np.uint8).tobytes()
                controller.outcome(draft, int(accepted[row]))
        return tokens, seconds

    def lengths(self, cells):
        """Lengths of the drafts of a step, int ``[rows]``."""
        controller, rows = self.controller, len(cells)
        nothing = np.zeros(rows, int)
        if not controller.prepare(rows):
            return nothing
        believed = chances_of(controller.chances.table, cells)
        made = (believed >= controller.least) & (cells != NO_TOKEN)
        believed = believed.astype(np.float32)
        drafts = [believed[row, kept].tobytes() for row, kept in enumerate(made)]
        lengths = controller.lengths(rows, drafts)
        return nothing if lengths is None else np.array(lengths)


def best_fixed(machine, truth, drafts):
    """Tokens per second of the best fixed choice for these drafts, and of none at all."""
    rows, cells = len(drafts[0]), np.concatenate(drafts)
    chances = chances_of(truth, cells)
    rates = [rows / machine(rows, 0)]
    for least in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 1e-9):
        for longest in (1, 2, 4, 8, 12, 24):
            kept = (chances >= least) & (np.arange(LONGEST) < longest)
            drafted = kept.sum(axis=1).reshape(-1, rows).sum(axis=1)
            seconds = sum(machine(rows, int(d)) for d in drafted)
            rates.append((len(cells) + (chances * kept).sum()) / seconds)
    return max(rates), rates[0]


def drafts_of(kind, rows, count, seed=1):
    rng = np.random.default_rng(seed)
    return [kind(rng, rows) for _ in range(count)]


@pytest.mark.parametrize("name", REGIMES)
def test_within_two_percent_of_the_best_fixed_choice(name):
    machine, rows, truth, kind = REGIMES[name]
    drafts = drafts_of(kind, rows, 1600)
    run = Run()
    run.steps(machine, truth, drafts[:400])
    tokens, seconds = run.steps(machine, truth, drafts[400:])
    best, plain = best_fixed(machine, truth, drafts[400:])
    assert tokens / seconds > best / 1.02
    assert tokens / seconds > plain / 1.02


@pytest.mark.parametrize("name", ["warm, few rows, processor", "high entropy, processor"])
def test_outliers_of_thirty_times_a_step_spoil_nothing(name):
    machine, rows, truth, kind = REGIMES[name]
    drafts = drafts_of(kind, rows, 1600)
    run = Run(outliers=0.03)
    run.steps(machine, truth, drafts[:400])
    tokens, seconds = run.steps(machine, truth, drafts[400:])
    assert tokens / seconds > best_fixed(machine, truth, drafts[400:])[0] / 1.03


def test_a_change_of_regime_is_followed():
    """From drafts that are never accepted to good ones, to other rows, and back."""
    run = Run()
    for truth, rows, kind in (
        (NEVER, 8, warm),
        (BETTER, 8, warm),
        (WELL, 2, mixed),
        (NEVER, 8, warm),
    ):
        drafts = drafts_of(kind, rows, 1200)
        run.steps(cpu, truth, drafts[:400])
        tokens, seconds = run.steps(cpu, truth, drafts[400:])
        assert tokens / seconds > best_fixed(cpu, truth, drafts[400:])[0] / 1.03


def test_where_drafts_do_not_pay_probes_are_rare_and_look_ups_too():
    run = Run()
    drafts = drafts_of(warm, 8, 3000)
    run.steps(cpu, NEVER, drafts[:1000])
    looked_up = proposed = 0
    prepare, lengths = run.controller.prepare, run.lengths

    def counting_prepare(rows):
        nonlocal looked_up
        looked_up += (answer := prepare(rows))
        return answer

    def counting_lengths(cells):
        nonlocal proposed
        proposed += bool((answer := lengths(cells)).any())
        return answer

    run.controller.prepare, run.lengths = counting_prepare, counting_lengths
    run.steps(cpu, NEVER, drafts[1000:])
    assert 0 < looked_up < 600
    assert 0 < proposed < 100
    run.controller.wake()
    assert prepare(8)


def test_the_price_of_a_token_is_what_it_prolongs_a_step_by_in_tokens():
    """On a machine of linear cost the price is the rate times the seconds of a token."""
    machine, rows, truth, kind = REGIMES["warm, few rows, processor"]
    drafts = drafts_of(kind, rows, 1600)
    run = Run()
    run.steps(machine, truth, drafts[:400])
    tokens, seconds = run.steps(machine, truth, drafts[400:])
    assert run.controller.price == pytest.approx(tokens / seconds * 1.2e-5, rel=0.3)


def test_chances_come_to_be_those_observed_and_fall_with_what_is_rejected():
    rng = np.random.default_rng(3)
    truth = rng.uniform(0.1, 0.9, CELLS)
    truth[-1] = 0.5
    chances = Chances(PRIOR)
    for _ in range(300):
        cells = rng.integers(0, CELLS - 1, 200).astype(np.uint8)
        hit = rng.random(200) < truth[cells]
        chances.learn(cells[hit].tobytes(), cells[~hit].tobytes())
    assert np.allclose(chances.table[:-1], truth[:-1], atol=0.13)  # 4 standard errors
    # The last cell was never seen: the prior said .98 of it, and too much of all the others.
    assert 0.5 < chances.table[-1] < PRIOR[-1]


@pytest.mark.parametrize("machine", [cpu, gpu, dear])
def test_costs_between_and_beyond_what_was_seen(machine):
    rng = np.random.default_rng(4)
    costs = StepCosts()
    for _ in range(3000):
        rows = int(rng.choice([4, 8, 16]))
        drafted = int(rng.choice([0, *range(1, 300)]))
        costs.observe(rows, drafted, machine(rows, drafted) * rng.lognormal(0, 0.05))
    costs.observe(8, 0, 5.0)  # a pause
    for rows in (4, 8, 12, 16):
        assert costs.plain(rows) == pytest.approx(machine(rows, 0), rel=0.1)
        at = np.array([4.0, 30, 100, 290])
        expected = [machine(rows, d) for d in at]
        assert np.allclose(costs.drafting(rows, at), expected, rtol=0.12)
    assert costs.unseen(8) == 0
    assert StepCosts().plain(8) is None
    assert StepCosts().drafting(8, np.ones(1)) is None
    assert StepCosts().unseen(8) == float("inf")

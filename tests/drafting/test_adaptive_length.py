"""Draft lengths on simulated machines, whose costs and chances of acceptance are known.

A machine is a function from rows, draft tokens and the longest draft to seconds, a policy one from
what speaks for a token to its chance of being accepted. The lengths are decided from what an engine
would tell and nothing else. The expected tokens per second are compared with those of the best
fixed chance at which drafts end, with known chances, those of the best fixed lengths, and those of
no drafts at all.
"""

import math

import numpy as np
import pytest

from nemo_specrl.drafting.adaptive_length import (
    AcceptanceChances,
    DraftLengths,
    Step,
    StepCosts,
    likeliest,
)

CELLS = 24
PRIOR = np.linspace(0.3, 0.98, CELLS)
FIRST = 0.2
MAX_TOKENS = 8192
LONGEST, NO_TOKEN = 24, CELLS  # behind the cells: no token
LEARNING, MEASURED = 600, 600  # steps


def cpu(rows, drafted, longest):
    return 1.4e-3 + 6e-5 * rows + (drafted > 0) * (3e-4 + 2e-5 * rows) + 1.2e-5 * drafted


def gpu(rows, drafted, longest):
    """Up to 150 tokens the weights' way through memory, from there on computation."""
    return 2.5e-3 + max(4e-3, 2.7e-5 * (rows + drafted)) + 2e-6 * rows


def padding(rows, drafted, longest):
    """A GPU whose sampler pads each row to the longest draft."""
    return gpu(rows, drafted, longest) + 4e-6 * rows * longest


def padding_cpu(rows, drafted, longest):
    return cpu(rows, drafted, longest) + 2e-5 * rows * longest


def dear(rows, drafted, longest):
    return 1e-3 + 1e-4 * rows + (drafted > 0) * 1e-3 + 2e-4 * drafted


def free(rows, drafted, longest):
    return 5e-3 + 1e-7 * (rows + drafted)


def warm(rng, rows):
    """Cells behind a long match: the longer, the surer."""
    start, length = rng.integers(6, 20, (rows, 1)), rng.integers(8, 30, (rows, 1))
    at = np.arange(LONGEST)
    return np.where(at < length, np.minimum(start + at, CELLS - 1), NO_TOKEN)


def cold(rng, rows):
    """As from siblings: often nothing, and mostly short."""
    cells = rng.integers(0, 12, (rows, LONGEST))
    return np.where(np.arange(LONGEST) < rng.integers(0, 4, (rows, 1)), cells, NO_TOKEN)


def mixed(rng, rows):
    return np.where(rng.random((rows, 1)) < 0.4, warm(rng, rows), cold(rng, rows))


BETTER, WORSE, HARDLY = PRIOR**0.2, PRIOR**2, PRIOR * 0.05
REGIMES = {
    "processor, few rows, warm": (cpu, 8, BETTER, warm),
    "processor, one row, warm": (cpu, 1, BETTER, warm),
    "processor, few rows, cold": (cpu, 8, WORSE, cold),
    "processor, many rows, cold": (cpu, 64, PRIOR, cold),
    "processor, few rows, hardly accepted": (cpu, 8, HARDLY, warm),
    "processor, few rows, mixed": (cpu, 8, PRIOR, mixed),
    "GPU, few rows, warm": (gpu, 8, PRIOR, warm),
    "GPU, many rows, warm": (gpu, 64, BETTER, warm),
    "GPU, full batch, mixed": (gpu, 256, PRIOR, mixed),
    "GPU, full batch, hardly accepted": (gpu, 256, HARDLY, mixed),
    "GPU that pads, few rows, warm": (padding, 8, PRIOR, warm),
    "GPU that pads, many rows, mixed": (padding, 64, PRIOR, mixed),
    "GPU that pads, full batch, mixed": (padding, 256, BETTER, mixed),
    "dear tokens": (dear, 16, PRIOR, warm),
    "free tokens": (free, 16, WORSE, mixed),
}


def chances_of(table, cells):
    """Chance that all tokens up to each one are accepted; 0 where there is none."""
    return np.cumprod(np.append(table, 0.0)[cells], axis=1)


def expected(machine, truth, cells, lengths):
    """Tokens and seconds of a step."""
    kept = np.arange(LONGEST) < np.asarray(lengths)[:, None]
    tokens = len(cells) + float((chances_of(truth, cells) * kept).sum())
    return np.array([tokens, machine(len(cells), int(kept.sum()), int(max(lengths)))])


class Engine:
    """Steps of a machine, whose measured times scatter, with the lengths that are decided."""

    def __init__(self, outliers=0.0):
        self.lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS)
        self.rng = np.random.default_rng(0)
        self.outliers = outliers
        self.drafted = []  # tokens of each step

    def run(self, machine, truth, drafts):
        """Tokens and seconds to be expected of steps that are offered these drafts."""
        return sum(self.step(machine, truth, cells) for cells in drafts)

    def step(self, machine, truth, cells):
        rng, rows = self.rng, len(cells)
        taken = np.array(self.taken(cells))
        self.drafted.append(int(taken.sum()))
        noise = rng.lognormal(0, 0.1) * (10 if rng.random() < self.outliers else 1)
        computed = rows, self.drafted[-1], int(taken.max())
        self.lengths.observe(Step(*computed, 0), machine(*computed) * noise)
        accepted = np.cumprod(rng.random(cells.shape) < np.append(truth, 0.0)[cells], axis=1)
        for row in np.flatnonzero(taken).tolist():
            draft = cells[row, : taken[row]].astype(np.uint8).tobytes()
            self.lengths.learn(draft, min(int(accepted[row].sum()), int(taken[row])))
        return expected(machine, truth, cells, taken)

    def taken(self, cells):
        lengths = self.lengths
        lengths.prepare(len(cells), self.drafted[-1] if self.drafted else 0)
        believed = chances_of(lengths.table, cells).astype(np.float32)
        found = ((believed >= lengths.min_probability) & (cells != NO_TOKEN)).sum(axis=1)
        found = np.minimum(found, lengths.looked_up)
        if not lengths.searching:
            return found.tolist()
        drafts = [row[:n].tobytes() for row, n in zip(believed, found, strict=True)]
        return lengths.choose(drafts)


def fixed(machine, truth, drafts, least, longest):
    """Tokens and seconds where drafts end at a chance, which is known; ``least`` > 1: none."""
    made = [(chances_of(truth, cells) >= least)[:, :longest].sum(axis=1) for cells in drafts]
    steps = zip(drafts, made, strict=True)
    return sum(expected(machine, truth, cells, lengths) for cells, lengths in steps)


def rate(of_steps):
    tokens, seconds = of_steps
    return tokens / seconds


@pytest.mark.parametrize("outliers", [0.0, 0.02], ids=["even", "outliers"])
@pytest.mark.parametrize("regime", REGIMES)
def test_no_fixed_chance_and_no_plain_decoding_yields_notably_more(regime, outliers):
    machine, rows, truth, kind = REGIMES[regime]
    rng = np.random.default_rng(1)
    drafts = [kind(rng, rows) for _ in range(LEARNING + MEASURED)]
    engine = Engine(outliers)
    engine.run(machine, truth, drafts[:LEARNING])
    mine = rate(engine.run(machine, truth, drafts[LEARNING:]))
    measured = drafts[LEARNING:]
    whole = [(chance, LONGEST) for chance in (2, 0.8, 0.6, 0.4, 0.2, 0.1)]
    others = [rate(fixed(machine, truth, measured, *how)) for how in (*whole, (0.2, 3), (0.2, 8))]
    assert mine > 0.95 * max(others)
    assert mine > 0.98 * others[0]


def test_the_choice_follows_the_policy_and_the_rows():
    """What pays under one policy and with few rows does not under another and with many."""
    rng = np.random.default_rng(2)
    few, many = ([warm(rng, rows) for _ in range(2 * LEARNING)] for rows in (8, 256))
    engine = Engine()
    drafted = []
    for truth, drafts in ((PRIOR, few), (HARDLY, many), (BETTER, many)):
        engine.run(gpu, truth, drafts)
        late = engine.drafted[-LEARNING // 4 :]
        drafted.append(sum(late) / len(late) / len(drafts[0]))  # of a row
    assert drafted[0] > 5
    assert drafted[1] < 0.1
    assert drafted[2] > 1


def test_until_costs_are_known_drafts_end_at_the_first_chance():
    lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS)
    for _ in range(StepCosts.FITTED - 1):
        lengths.observe(Step(4, 0, 0, 0), 0.01)
        lengths.prepare(4, 0)
        assert (lengths.min_probability, lengths.searching) == (FIRST, False)
    lengths.observe(Step(4, 0, 0, 0), 0.01)
    lengths.prepare(4, 0)
    assert lengths.searching


def test_what_was_not_tried_for_long_is_tried_again():
    """Costs of the other way of stepping are known only while it is taken now and then."""
    rng = np.random.default_rng(3)
    engine = Engine()
    for truth, tried in ((HARDLY, lambda n: n > 0), (BETTER, lambda n: n == 0)):
        engine.run(dear if truth is HARDLY else free, truth, [warm(rng, 8) for _ in range(1200)])
        tries = [i for i, n in enumerate(engine.drafted[-900:]) if tried(n)]
        assert 3 <= len(tries) <= 9
        assert max(np.diff(tries)) <= 2 * DraftLengths.PROBE


def test_a_step_that_tries_drafts_looks_for_the_longest():
    """Whatever the limit was when drafts were last worth it."""
    lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS)
    lengths.costs.costs = np.array([1e-3, 0, 1e-4, 0, 0, 0, 0])
    lengths._limit = 4
    for _ in range(DraftLengths.PROBE):
        lengths.prepare(3, 0)
    lengths._searched, lengths._rows = 0, 3
    lengths.prepare(3, 0)
    assert (lengths.looked_up, lengths.min_probability) == (128, DraftLengths.PROBED)
    assert lengths.table is lengths._prior and not lengths.searching


def test_a_search_is_made_again_when_the_rows_have_changed_by_more_than_a_quarter():
    """It looks for drafts down to half of the chance at which they ended."""
    lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS)
    lengths.costs.costs = np.array([1e-3, 0, 1e-4, 0, 0, 0, 0])
    searching = []
    for rows in (8, 6, 10, 5, 5):
        lengths.prepare(rows, 1)
        searching.append(lengths.searching)
    assert searching == [True, False, False, True, False]
    for cutoff, least in ((0.3, 0.15), (0.6, FIRST), (0.001, DraftLengths.LEAST)):
        lengths.cutoff = cutoff
        lengths.prepare(50 if least == FIRST else 5, 1)
        lengths.prepare(9, 1)
        assert lengths.searching and lengths.min_probability == pytest.approx(least)


def test_costs_are_fitted_once_for_each_few_steps_and_no_time_counts_for_nothing():
    costs = StepCosts()
    for _ in range(StepCosts.FITTED):
        costs.observe(Step(4, 0, 0, 0), 0.01)
    known, none = costs.costs, np.zeros(1, int)
    for _ in range(StepCosts.FITTED - 1):
        costs.observe(Step(4, 0, 0, 0), 1e-9)  # a clock that stood still
    assert costs.costs is known
    costs.observe(Step(4, 0, 0, 0), 1e-9)
    assert costs.costs is not known
    assert 0.006 < float(costs.seconds(4, none, none)[0]) < 0.009


def test_chances_are_those_of_the_outcomes_and_go_back_to_the_prior():
    chances = AcceptanceChances(PRIOR)
    assert chances.table == pytest.approx(PRIOR)
    for _ in range(100):
        chances.learn(bytes([20] * 6), bytes([20] * 14))
    assert chances.table[20] == pytest.approx(0.3, abs=0.03)
    assert (chances.table[:20] < PRIOR[:20]).all()  # what was not seen is expected to be worse, too
    odds = np.log(chances.table / (1 - chances.table)) - np.log(PRIOR / (1 - PRIOR))
    assert odds.min() > -AcceptanceChances.LARGEST_SHIFT - 2
    for _ in range(1000):
        chances.learn(b"", b"")
    assert chances.table == pytest.approx(PRIOR, abs=0.01)


def test_one_step_of_bad_luck_does_not_move_every_chance():
    """Siblings at the same token are all wrong at once."""
    chances = AcceptanceChances(PRIOR)
    chances.learn(b"", bytes([10] * 33))
    assert chances.table[10] < 0.2
    assert chances.table[20] > 0.5 * PRIOR[20]


@pytest.mark.parametrize("machine", [cpu, padding_cpu])
def test_costs_are_those_of_the_machine(machine):
    rng = np.random.default_rng(4)
    costs = StepCosts()
    for _ in range(50 * StepCosts.FITTED):
        rows, begun = int(rng.integers(1, 64)), int(rng.integers(0, 3))
        drafted = int(rng.integers(0, 2) * rng.integers(1, 500))
        longest = int(min(LONGEST, rng.integers(-(-drafted // rows), drafted + 1)))
        seconds = machine(rows, drafted, longest) + 2e-4 * begun
        costs.observe(Step(rows, drafted, longest, begun), seconds * rng.lognormal(0, 0.05))
    for rows, drafted, longest in ((8, 0, 0), (8, 100, 20), (60, 0, 0), (60, 400, 8), (60, 90, 24)):
        predicted = float(costs.seconds(rows, np.array([drafted]), np.array([longest]))[0])
        assert predicted == pytest.approx(machine(rows, drafted, longest), rel=0.1)


def test_of_each_draft_the_likeliest_tokens_are_taken():
    """A step of 1 ms, with 0.1 ms for each draft token, is worth one that brings 0.3 of a row's."""
    lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS)
    lengths.costs.costs = np.array([1e-3, 0, 1e-4, 0, 0, 0, 0])
    lengths.prepare(3, 1)
    assert lengths.searching
    chances = [np.array(c, np.float32).tobytes() for c in ([0.9, 0.8, 0.1], [], [0.5, 0.05])]
    assert lengths.choose(chances) == [2, 0, 1]
    assert lengths.cutoff == pytest.approx(0.4)  # 1e-4 s, of 5.2 tokens in 1.3 ms
    assert lengths.choose([b"", b"", b""]) == [0, 0, 0]
    assert lengths.cutoff == math.inf


def test_drafts_leave_room_for_all_rows_in_a_step():
    """A step's tokens go to rows in their order, so that without room the last ones get none."""
    lengths = DraftLengths(PRIOR, FIRST, 7)
    lengths.costs.costs = np.array([1.0, 0, 0, 0, 0, 0, 0])
    lengths.prepare(4, 1)
    chances = [np.array(c, np.float32).tobytes() for c in ([0.9, 0.8, 0.7], [0.6], [], [0.95])]
    assert lengths.choose(chances) == [2, 0, 0, 1]
    lengths.prepare(7, 1)
    assert lengths.choose([chances[0]] * 7) == [0] * 7


def test_a_limit_is_set_where_all_rows_are_padded_to_the_longest_draft():
    """One row in eight has a long draft: worth it while it alone is paid for."""
    chances = [np.float32([0.95] * 24).cumprod().astype(np.float32).tobytes()]
    chances += [np.array([0.9], np.float32).tobytes()] * 7
    taken = []
    for padded in (0, 2e-5):
        lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS, longest=24)
        lengths.costs.costs = np.array([5e-3, 0, 1e-5, 0, 0, 0, padded])
        lengths.prepare(8, 1)
        assert lengths.looked_up == 24
        taken.append(lengths.choose(chances))
        lengths.prepare(8, 1)
        assert not lengths.searching
        limit = lengths.looked_up
    assert taken[0] == [24] + [1] * 7
    assert 1 < taken[1][0] == limit < 24 and taken[1][1:] == [1] * 7


def test_drafts_of_a_step_keep_their_bound_with_equal_chances_too():
    """The bound is one of memory: ties are not a reason to exceed it."""
    equal = [np.array([0.9] * 4, np.float32).tobytes()] * 5
    lengths = DraftLengths(PRIOR, FIRST, MAX_TOKENS, max_drafted=7)
    lengths.costs.costs = np.array([1.0, 0, 0, 0, 0, 0, 0])
    lengths.prepare(5, 1)
    assert sum(lengths.choose(equal)) == 7
    assert likeliest(equal, 7) == lengths.choose(equal)
    assert likeliest(equal, 20) == [4] * 5
    assert likeliest(equal, 0) == likeliest(equal, -3) == [0] * 5
    falling = [np.array(c, np.float32).tobytes() for c in ([0.9, 0.2], [0.8, 0.7, 0.1], [])]
    assert likeliest(falling, 3) == [1, 2, 0]

"""How long drafts are: as long as a further token is worth its price, and none where none pays.

A draft token is worth its chance of being accepted, and it costs what a step of the engine takes
longer for it. Both are learnt while the engine runs: chances from what was accepted, costs from the
time between proposals. Drafts are cut so that the batch yields the most tokens in a second, by
Dinkelbach's rule for ratios: with the best rate r, a token that prolongs the step by s seconds is
worth taking while its chance is above r * s, its price in tokens. (Survival probability times
profiled step cost is the rule of vLLM's adaptive verification, PR 52362.)

Lengths depend on what was sampled before and on measured time, never on the tokens that are about
to be verified, so that they cannot bias what is accepted.

This module knows neither engines nor trees: it is told steps, times and outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Chances", "Controller", "StepCosts"]

Floats = npt.NDArray[np.floating]

FIRST_PRICE = 0.2
"""Chance at which a draft ends until the first costs are known."""
PROBE_SHARE = 0.005
"""Share of the time that may be lost to trying what seems to be slower."""
STALE = 16
"""Steps after which the cost of a step without drafts is measured again, if that is affordable."""
PROBED = 2
"""Tokens of each draft that are tried where drafts have been refused for some steps."""
REFUSED = 8
"""That many steps."""
NAP = 32
"""Steps for which no drafts are looked up, at most, where none has paid for long."""


class Chances:
    """Chance of acceptance of a draft token given those before it, by what speaks for the token.

    Tokens fall into cells: by the share of the tree's weights that they have, by how many tokens
    before them match, and by the number of earlier responses that go on with them. The chance of a
    cell is the share of its tokens that were accepted, old ones forgotten, drawn towards a prior.
    The prior moves with all cells together: where tokens are accepted less often than it says, a
    cell that was not seen is not expected to be better.

    Args:
        prior: float ``[cells]``.

    Attributes:
        table: chances now, float32 ``[cells]``.
    """

    WEIGHT = 4.0
    """Observations that the prior counts for."""
    KEPT = 0.99
    """Of the weight of earlier observations, at each update."""
    MOST = 200.0
    """Observations of a cell that count, about; the older ones go first."""
    SURPRISE = 8.0
    """Standard errors of the hits of an update, beyond which what was learnt before is forgotten:
    the policy or the rows are others. Outcomes of a response are alike, hence not 3."""

    def __init__(self, prior: Floats) -> None:
        self._prior = np.log(prior / (1 - prior))
        self._expected = prior
        self._offered = np.zeros(len(prior))
        self._accepted = np.zeros(len(prior))
        self.table = prior.astype(np.float32)

    def learn(self, accepted: bytes, rejected: bytes) -> None:
        """Take in outcomes: cells, uint8, of accepted tokens and of those rejected behind them."""
        cells = len(self._prior)
        good = np.bincount(np.frombuffer(accepted, np.uint8), minlength=cells)
        bad = np.bincount(np.frombuffer(rejected, np.uint8), minlength=cells)
        new = good + bad
        variance = float(new @ (self.table * (1 - self.table)))
        surprise = (float(good.sum()) - float(new @ self.table)) ** 2 > self.SURPRISE**2 * variance
        kept = np.minimum(self.KEPT, self.MOST / (self._offered + new + 1))
        if surprise:
            kept = np.minimum(kept, 2.0 / (self._offered + 1))
        self._accepted = kept * self._accepted + good
        self._offered = kept * self._offered + new
        seen, hits = self._offered.sum() + 2, self._accepted.sum() + 1
        expected = (self._offered @ self._expected + 1) / seen
        shift = np.log(hits / (seen - hits)) - np.log(expected / (1 - expected))
        weighed = self._accepted + self.WEIGHT / (1 + np.exp(-self._prior - shift))
        self.table = (weighed / (self._offered + self.WEIGHT)).astype(np.float32)


class StepCosts:
    """Seconds of an engine step by its rows and draft tokens, on this machine.

    Steps are averaged in cells, an octave of rows by half an octave of draft tokens, where an
    outlier moves the average a little at most. Between cells the cost is linear: fitted around the
    rows and draft tokens that are asked for, since a GPU's cost is flat up to some number of
    tokens and rises behind it. Steps without drafts are apart, for they take another path through
    the sampler.
    """

    RATE = 0.05
    """Weight of a new observation, at least."""
    CLIP = 0.5
    """An observation differs from its cell's average by this share of it, at most."""
    HALF_LIFE = 2000.0
    """Steps after which what a cell knows counts half."""

    def __init__(self) -> None:
        # By octave of rows and half octave of draft tokens: the count, means of rows, draft tokens
        # and seconds, and the last step.
        self._cells: dict[tuple[int, int], list[float]] = {}
        self.steps = 0

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take in a step of ``rows`` rows with ``drafted`` draft tokens and no prefill."""
        self.steps += 1
        key = (rows.bit_length(), _half_octave(drafted))
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = [1.0, rows, drafted, seconds, self.steps]
            return
        cell[0] = min(cell[0] + 1, 1 / self.RATE)
        rate = 1 / cell[0]
        if cell[0] > 2:
            seconds = min(max(seconds, cell[3] * (1 - self.CLIP)), cell[3] * (1 + self.CLIP))
        elif seconds < cell[3]:  # the first two: the smaller one, as the larger may be an outlier
            rate = 1.0
        else:
            seconds = min(seconds, cell[3] * (1 + self.CLIP))
        cell[1] += rate * (rows - cell[1])
        cell[2] += rate * (drafted - cell[2])
        cell[3] += rate * (seconds - cell[3])
        cell[4] = self.steps

    def unseen(self, rows: int) -> float:
        """Steps since one of about so many rows had no drafts; infinite where none had."""
        cell = self._cells.get((rows.bit_length(), 0))
        return float("inf") if cell is None else self.steps - cell[4]

    def plain(self, rows: int) -> float | None:
        """Seconds of a step without drafts; None: not known."""
        seconds = self._fitted(rows, np.zeros(1), drafting=False)
        return None if seconds is None else float(seconds[0])

    def drafting(self, rows: int, drafted: Floats) -> Floats | None:
        """Seconds of steps with so many draft tokens, rising, float ``[n]``; None: not known."""
        seconds = self._fitted(rows, drafted, drafting=True)
        return None if seconds is None else np.maximum.accumulate(seconds)

    def _fitted(self, rows: int, drafted: Floats, *, drafting: bool) -> Floats | None:
        """Seconds at each of some points, by linear regression on the cells around it."""
        known = [(*key, *cell) for key, cell in self._cells.items() if (key[1] > 0) == drafting]
        if not known:
            return None
        of_rows, of_drafted, count, x, y, seconds, last = np.array(known).T
        near = 2.0 * abs(of_rows - rows.bit_length()) + (self.steps - last) / self.HALF_LIFE
        at = np.array([_half_octave(d) for d in drafted.tolist()])
        far = abs(of_drafted - at[:, None])
        weight = count * 0.5 ** (near + far)
        weight /= weight.sum(axis=1, keepdims=True)
        level, at_x, at_y = weight @ seconds, weight @ x, weight @ y
        dx = x / at_x[:, None] - 1
        dy = (y - at_y[:, None]) / (at_y[:, None] + 1)
        # Towards slopes of a part of the level, where the cells do not tell (ridge).
        by_x, by_y = 0.3 * level, 0.15 * level * drafting
        rest = seconds - level[:, None] - by_x[:, None] * dx - by_y[:, None] * dy
        xx, yy = (weight * dx * dx).sum(axis=1) + 1e-3, (weight * dy * dy).sum(axis=1) + 1e-3
        xy = (weight * dx * dy).sum(axis=1)
        xr, yr = (weight * dx * rest).sum(axis=1), (weight * dy * rest).sum(axis=1)
        by_x = np.maximum(by_x + (yy * xr - xy * yr) / (xx * yy - xy * xy), 0)
        by_y = np.maximum(by_y + (xx * yr - xy * xr) / (xx * yy - xy * xy), 0)
        fitted = level + by_x * (rows / at_x - 1) + by_y * (drafted - at_y) / (at_y + 1)
        floor: Floats = np.maximum(fitted, 0.2 * level)
        return floor


def _half_octave(drafted: float) -> int:
    """0 without draft tokens, then 1, 3, 4, 5, 6, ...: two for each doubling."""
    return int(2 * math.log2(drafted)) + 1 if drafted >= 1 else 0


class Controller:
    """Decides the draft lengths of each step.

    The order of calls: :meth:`observe` with the step that has ended, and :meth:`outcome` with each
    draft in it; then :meth:`prepare`, drafts are made with ``least`` and ``chances.table``, and
    :meth:`lengths` says how much of each the batch is to have.

    Args:
        prior: chances of acceptance before any is known, float ``[cells]``.

    Attributes:
        price: of a draft token, in tokens: the least chance at which it is worth taking.
        least: chance at which drafts of this step should end; lower than the price where it is
            about to be found anew.
    """

    EVERY = 16
    """Steps between two searches for the price."""
    POOLED = 64
    """Rows whose drafts the search goes by, those of several steps where there are fewer."""

    def __init__(self, prior: Floats) -> None:
        self.chances = Chances(prior)
        self.costs = StepCosts()
        self.price = self.least = FIRST_PRICE
        self._accepted: list[bytes] = []
        self._rejected: list[bytes] = []
        self._credit = 0.0  # seconds that may be lost to probes
        self._refused = 0  # steps in a row whose drafts were not worth it
        self._asleep = 0
        self._steps = 0
        self._searching = self._probing = False
        self._rows = 0
        self._plain: float | None = None
        self._grid = np.zeros(1)
        self._with: Floats | None = None
        self._pool: list[tuple[int, Floats]] = []  # rows and chances

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take in a step that had no prefill: its rows, their draft tokens, and its time."""
        self.costs.observe(rows, drafted, seconds)
        usual = self._plain or seconds
        most = (64 if self._refused >= REFUSED else 8) * usual
        self._credit = min(self._credit + PROBE_SHARE * min(seconds, 4 * usual), most)

    def outcome(self, cells: bytes, accepted: int) -> None:
        """Take in a verified draft: the cells of its tokens, and how many were accepted."""
        self._accepted.append(cells[:accepted])
        self._rejected.append(cells[accepted : accepted + 1])

    def wake(self) -> None:
        """Look drafts up in the next step, as a row has begun that may have better ones."""
        self._asleep = 0

    def prepare(self, rows: int) -> bool:
        """Set ``least`` for a step of so many rows.

        Returns:
            Whether drafts should be looked up for this step.
        """
        self._asleep -= 1
        if self._asleep >= 0:
            return False
        self._steps += 1
        # Outcomes of a probe are of use at once.
        due = self._steps % self.EVERY == 0 or self._steps in (2, 4, 8)
        due |= bool(self._refused and self._accepted)
        self._searching = due or rows.bit_length() != self._rows.bit_length()
        self.least = self.price / 8 if self._searching else self.price
        self._probing = self._refused >= REFUSED and self._loss(rows, PROBED * rows) < self._credit
        if self._probing:  # whatever is believed of it
            self.least = 0.0
        if self._searching:
            self._rows = rows
            if self._accepted:
                self.chances.learn(b"".join(self._accepted), b"".join(self._rejected))
                self._accepted, self._rejected = [], []
            most = rows * 128.0
            self._grid = np.unique(np.floor(2.0 ** np.arange(0, math.log2(most) + 0.5, 0.5)))
            self._plain = self.costs.plain(rows)
            self._with = self.costs.drafting(rows, self._grid)
        return True

    def lengths(self, rows: int, chances: Sequence[bytes]) -> list[int] | None:
        """Decide how much of the drafts of a step is proposed.

        Args:
            rows: of the step.
            chances: by draft, float32: that all tokens up to each one are accepted.

        Returns:
            The length of each draft; None: nothing is proposed.
        """
        lengths = [len(of_draft) // 4 for of_draft in chances]
        if self._probing and any(lengths):
            lengths = [min(length, PROBED) for length in lengths]
            self._credit -= self._loss(rows, sum(lengths))
            self._refused += 1
            return lengths
        every = np.frombuffer(b"".join(chances), np.float32)
        if self._searching:
            self._search(rows, every)
            kept = every >= self.price
            ends = np.cumsum([0, *lengths])
            inside = np.concatenate([[0], np.cumsum(kept)])[ends]
            lengths = np.diff(inside).tolist()
            every = every[kept]
        if self._takes(rows, len(every), float(every.sum())):
            return lengths
        return None

    def _search(self, rows: int, chances: Floats) -> None:
        """Find the price at which the drafts of late would yield the most tokens in a second."""
        self._pool.append((rows, np.sort(chances)[::-1]))
        while len(self._pool) > 1 and sum(r for r, _ in self._pool[1:]) >= self.POOLED:
            del self._pool[0]
        best = np.sort(np.concatenate([c for _, c in self._pool]))[::-1].astype(np.float64)
        if self._with is None or not len(best):
            return
        share = rows / sum(r for r, _ in self._pool)
        tokens = rows + share * np.cumsum(best)
        seconds = np.interp(share * np.arange(1, len(best) + 1), self._grid, self._with)
        at = int(np.argmax(tokens / seconds))
        self.price = float(min(max(best[at], 1e-3), 0.95))

    def _takes(self, rows: int, drafted: int, gain: float) -> bool:
        """Whether a step is to have drafts of so many tokens, of which ``gain`` are accepted."""
        if not drafted:
            return self._refuse()
        if self._with is None:  # the first steps: find out
            return True
        with_drafts = float(np.interp(drafted, self._grid, self._with))
        plain = self._plain if self._plain is not None else with_drafts
        pays = (rows + gain) * plain >= rows * with_drafts
        if pays:
            loss = plain - with_drafts * rows / (rows + gain)
            due = self.costs.unseen(rows) > STALE
        else:
            loss = with_drafts - plain * (rows + gain) / rows
            due = True
        if due and loss <= self._credit:
            self._credit -= loss
            return not pays
        if not pays:
            return self._refuse()
        self._refused = 0
        return True

    def _loss(self, rows: int, drafted: int) -> float:
        """Seconds that drafts of so many tokens lose if none of them is accepted."""
        if self._with is None or self._plain is None:
            return math.inf
        return max(0.0, float(np.interp(drafted, self._grid, self._with)) - self._plain)

    def _refuse(self) -> bool:
        """Have a step without drafts; the more of them in a row, the longer the nap behind it."""
        self._refused += 1
        self._asleep = min(self._refused // REFUSED, NAP)
        return False

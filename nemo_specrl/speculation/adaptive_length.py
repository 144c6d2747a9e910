"""How long the drafts of a step are: as long as one token more is worth its share of the step.

A draft token is worth its chance of being accepted, and the step that verifies it takes longer for
it. Both are measured while the engine runs: the chances from what was accepted of earlier drafts,
the costs from the time between proposals. Each step then takes the draft tokens, likeliest first,
with which it yields the most tokens in a second, and none at all where plain decoding yields more.
Where an engine pads all drafts to the longest one, a limit for all of them is chosen as well.
(Expected acceptance over the cost of a step is also the rule of vLLM's adaptive verification,
vllm-project/vllm pull request 52362.)

Lengths depend on what was sampled before and on measured times, never on the tokens that are about
to be verified, so that they cannot bias what is accepted.

This module knows neither engines nor trees: it is told steps, times and outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["AcceptanceChances", "DraftLengths", "Step", "StepCosts", "likeliest"]

FloatArray = npt.NDArray[np.floating]
LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Lengths that are tried as the longest draft of a step."""


class AcceptanceChances:
    """The chance that a draft token is accepted if those before it are, by what speaks for it.

    Tokens fall into bins (``cell_of`` in ``_suffix.c``). The chance of a bin is the share of its
    tokens that were accepted lately, drawn towards a prior, which moves with all bins together:
    where tokens are accepted less often than it says, a bin that was not seen is not expected to
    be better. What was learned is forgotten bit by bit.

    Args:
        prior: chances before any outcome is known, float ``[bins]``.

    Attributes:
        table: chances now, float32 ``[bins]``.
    """

    PRIOR_WEIGHT = 8.0
    """Outcomes that the prior of a bin counts for."""
    DECAY = 0.99
    """Of the weight of earlier outcomes, each time that new ones are taken in."""
    MAX_OUTCOMES = 200.0
    """Outcomes of a bin that count, about; older ones go first."""
    SHIFT_WEIGHT = 32.0
    """Outcomes that speak against moving the prior of all bins."""
    LARGEST_SHIFT = 2.0
    """Of the prior, in log-odds."""

    def __init__(self, prior: FloatArray) -> None:
        self.table = prior.astype(np.float32)
        self._prior = prior.astype(np.float64)
        self._log_odds = np.log(self._prior / (1 - self._prior))
        self._offered = np.zeros(len(prior))
        self._accepted = np.zeros(len(prior))

    def learn(self, accepted: bytes, rejected: bytes) -> None:
        """Take in outcomes: bins, uint8, of tokens that were accepted and of those rejected."""
        bins = len(self._prior)
        good = np.bincount(np.frombuffer(accepted, np.uint8), minlength=bins)
        new = good + np.bincount(np.frombuffer(rejected, np.uint8), minlength=bins)
        kept = np.minimum(self.DECAY, self.MAX_OUTCOMES / (self._offered + new + 1))
        self._accepted = kept * self._accepted + good
        self._offered = kept * self._offered + new
        seen = self._offered.sum() + self.SHIFT_WEIGHT
        share = (self._accepted.sum() + self.SHIFT_WEIGHT / 2) / seen
        expected = (self._offered @ self._prior + self.SHIFT_WEIGHT / 2) / seen
        shift = math.log(share / (1 - share)) - math.log(expected / (1 - expected))
        shift = min(max(shift, -self.LARGEST_SHIFT), self.LARGEST_SHIFT)
        weighed = self._accepted + self.PRIOR_WEIGHT / (1 + np.exp(-self._log_odds - shift))
        self.table = (weighed / (self._offered + self.PRIOR_WEIGHT)).astype(np.float32)


class Step(NamedTuple):
    """What a step of the engine computed.

    Args:
        rows: that it decoded.
        drafted: tokens that it verified.
        longest: tokens of its longest draft.
        begun: rows that yielded their first token.
    """

    rows: int
    drafted: int
    longest: int
    begun: int


class StepCosts:
    """Seconds of an engine step by what it computes, on this machine.

    What a step costs in itself, and for each row, draft token and request that has just begun, is
    fitted by least squares of relative errors. Verifying any draft at all costs something more,
    for the step and for each row, as another sampler runs then, and for each row as much more as
    the longest draft has tokens, where rows are padded to it. Earlier steps are forgotten, so
    that the fit is of steps like the present ones: a GPU takes no longer for more tokens up to some
    number, and longer for each behind it.

    Attributes:
        costs: seconds of a step, a row, a draft token, a request that has begun, a step with
            drafts, a row in such a step, a row for each token of the longest draft, float ``[7]``;
            None: not known yet.
    """

    DECAY = 0.995
    """Of the weight of a step, with each that follows."""
    CLIPPED = (0.5, 2.0)
    """What a step counts for at least and at most, times the seconds expected of it."""
    RIDGE = np.array([2e-3, 2e-3, 2e-4, 2e-3, 2e-2, 2e-2, 2e-2])
    """Pull of each cost towards 0, which decides where steps do not tell them apart: for the tokens
    rather than for what drafts cost beside them, as many tokens must not seem cheap."""
    FITTED = 16
    """Steps that are taken into the fit at once."""

    def __init__(self) -> None:
        self.costs: FloatArray | None = None
        self._products = np.zeros((7, 7))
        self._targets = np.zeros(7)
        self._new: list[tuple[Step, float]] = []

    def observe(self, step: Step, seconds: float) -> None:
        """Take in a step and the time that it took, with what the engine does between two steps."""
        self._new.append((step, seconds))
        if len(self._new) >= self.FITTED:
            self._fit()

    def seconds(
        self, rows: int, drafted: npt.NDArray[np.integer], longest: npt.NDArray[np.integer]
    ) -> FloatArray:
        """Expected of steps in which no request begins.

        Args:
            rows: of each.
            drafted: tokens that they verify, ``[n]``.
            longest: tokens of their longest drafts, ``[n]``.

        Returns:
            Float ``[n]``.
        """
        assert self.costs is not None
        step, row, token, _, drafts, drafts_row, padded = self.costs
        verifying = (drafts + drafts_row * rows) * (drafted > 0) + padded * rows * longest
        return np.asarray(step + row * rows + token * drafted + verifying)

    def _fit(self) -> None:
        rows, drafted, longest, begun = np.array([step for step, _ in self._new], np.float64).T
        seconds = np.array([seconds for _, seconds in self._new])
        self._new.clear()
        drafts = drafted > 0
        of_drafts = (drafts, drafts * rows, rows * longest)
        features = np.stack((np.ones_like(rows), rows, drafted, begun, *of_drafts), 1)
        expected = seconds
        if self.costs is not None:
            expected = np.maximum(features @ self.costs, 1e-9)
            least, most = self.CLIPPED
            seconds = np.clip(seconds, least * expected, most * expected)
        age = np.arange(len(seconds))[::-1]
        weighted = features * (self.DECAY**age / expected**2)[:, None]
        kept = self.DECAY ** len(seconds)
        self._products = kept * self._products + weighted.T @ features
        self._targets = kept * self._targets + weighted.T @ seconds
        ridge = np.diag(self.RIDGE * np.diag(self._products) + 1e-12)
        costs = np.maximum(np.linalg.solve(self._products + ridge, self._targets), 0)
        if costs[:2].sum() > 0:
            self.costs = costs


class DraftLengths:
    """Decides how long the drafts of each step are.

    After a step, :meth:`observe` takes in how long it took and :meth:`learn` what came of its
    drafts. :meth:`prepare` then says down to which chance the next drafts are looked up. Every few
    steps :attr:`searching` is set; then :meth:`choose` finds anew where drafts end, and how much of
    each is to be taken.

    Args:
        prior: see :class:`AcceptanceChances`.
        first: chance at which drafts end until the first costs are known.
        max_tokens: of rows and drafts together that the engine computes in a step.
        longest: tokens of a draft at most.
        max_drafted: tokens of the drafts of a step together at most; None: ``max_tokens`` decides.

    Attributes:
        table: chances of acceptance by bin, float32 ``[bins]``.
        costs: of steps.
        cutoff: chance at which drafts end; infinite: there are none.
        min_probability: chance at which the look-up of the next drafts may end.
        looked_up: tokens of each that are looked up at most.
        searching: whether they should go to :meth:`choose`.
    """

    EVERY = 4
    """Steps between two searches, unless the number of rows changes by a quarter."""
    PROBE = 200
    """Steps after which one without drafts, or one with some, shows again what it costs."""
    PROBED = 0.7
    """Chance at which drafts end then, by the chances before any outcome was known."""
    LEAST = 0.02
    """Of the chances that are looked up."""

    def __init__(
        self,
        prior: FloatArray,
        first: float,
        max_tokens: int,
        *,
        longest: int = LIMITS[-1],
        max_drafted: int | None = None,
    ) -> None:
        self.costs = StepCosts()
        self.cutoff = self.min_probability = first
        self.searching = False
        self.looked_up = self._limit = self._longest = longest
        self._max_drafted = max_tokens if max_drafted is None else max_drafted
        self._chances = AcceptanceChances(prior)
        self.table = self._prior = self._chances.table
        self._first = first
        self._max_tokens = max_tokens
        self._accepted: list[bytes] = []  # bins of tokens, since the last search
        self._rejected: list[bytes] = []
        self._drafting = False  # in the last step
        self._alike = 0  # steps in a row that drafted, or did not, as the last one
        self._searched = 0  # steps since the last search
        self._rows = 0  # at the last search

    def observe(self, step: Step, seconds: float) -> None:
        """See :meth:`StepCosts.observe`."""
        self.costs.observe(step, seconds)

    def learn(self, bins: bytes, accepted: int) -> None:
        """Take in a verified draft: the bins of its tokens, and how many were accepted."""
        self._accepted.append(bins[:accepted])
        self._rejected.append(bins[accepted : accepted + 1])

    def prepare(self, rows: int, drafted: int) -> None:
        """Set ``least``, ``looked_up`` and ``searching`` for the next step.

        Args:
            rows: of it.
            drafted: tokens that the last step verified.
        """
        self._alike = self._alike + 1 if (drafted > 0) == self._drafting else 1
        self._drafting = drafted > 0
        self._searched += 1
        self.searching, self.min_probability, self.table = False, self.cutoff, self._chances.table
        self.looked_up = self._limit
        if self.costs.costs is None:
            return
        if self._alike > self.PROBE and self._drafting:
            self.min_probability = math.inf
        elif self._alike > self.PROBE:
            self.min_probability, self.table = self.PROBED, self._prior
            self.looked_up = self._longest
        elif self._searched >= self.EVERY or 4 * abs(rows - self._rows) > self._rows:
            self.searching, self.looked_up = True, self._longest
            self._searched, self._rows = 0, rows
            self._chances.learn(b"".join(self._accepted), b"".join(self._rejected))
            self._accepted, self._rejected = [], []
            self.table = self._chances.table
            self.min_probability = max(self.LEAST, 0.5 * min(self.cutoff, 2 * self._first))

    def choose(self, chances: Sequence[bytes]) -> list[int]:
        """Find where drafts end, and how many tokens of each are to be taken.

        Args:
            chances: of every row, for each token of its draft the chance that all up to it are
                accepted, float32.
        """
        assert self.costs.costs is not None
        tokens = _OfRows(chances)
        room = max(0, min(self._max_tokens - self._rows, self._max_drafted))
        longest = int(tokens.place.max(initial=-1)) + 1
        limits = [n for n in LIMITS if n < longest] if self.costs.costs[6] > 0 else []
        best, plain, self._limit, least = -1.0, 0.0, self._longest, 0.0
        for limit in (*limits, max(1, longest)):
            within = tokens.falling[tokens.place[tokens.falling] < limit]
            taken = within[:room]
            yielded = self._rows + np.cumsum(tokens.chance[taken], dtype=np.float64)
            drafted, padded = np.arange(1, len(taken) + 1), 1 + tokens.place[taken]
            seconds = self.costs.seconds(self._rows, drafted, np.maximum.accumulate(padded))
            zero = np.zeros(1, dtype=np.intp)
            plain = self._rows / float(self.costs.seconds(self._rows, zero, zero)[0])
            rate = float((yielded / seconds).max(initial=plain))
            if rate > best:
                best, self._limit = rate, limit if limit < longest else self._longest
                cut_off = len(taken) < len(within)
                least = float(tokens.chance[taken[-1]]) if cut_off and room else self.LEAST
        # A token more is worth it while its chance is above its seconds times the best rate.
        price = float(best * self.costs.costs[2])
        self.cutoff = max(price, least) if best > plain else math.inf
        return tokens.lengths(room, self.cutoff, self._limit)


def likeliest(chances: Sequence[bytes], most: int) -> list[int]:
    """How much of each row's draft is taken where all drafts may have ``most`` tokens together.

    Args:
        chances: see :meth:`DraftLengths.choose`.
        most: tokens.
    """
    lengths = [len(of_row) // 4 for of_row in chances]
    return lengths if sum(lengths) <= most else _OfRows(chances).lengths(max(0, most))


class _OfRows:
    """The draft tokens of all rows, in one array.

    Attributes:
        chance: that a token and all before it in its row are accepted, float32 ``[n]``.
        place: of a token in its row, from 0, int ``[n]``.
        falling: numbers of the tokens, the likeliest first; among equals, in their order. So the
            first ones, however many, are beginnings of rows.
    """

    def __init__(self, chances: Sequence[bytes]) -> None:
        self.chance = np.frombuffer(b"".join(chances), np.float32)
        sizes = np.array([len(of_row) // self.chance.itemsize for of_row in chances], np.intp)
        self._row = np.repeat(np.arange(len(sizes)), sizes)
        self._rows = len(sizes)
        self.place = np.arange(len(self.chance)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.falling = np.argsort(-self.chance, kind="stable")

    def lengths(self, most: int, least: float = 0.0, limit: int = LIMITS[-1]) -> list[int]:
        """Tokens of each row among the likeliest.

        Args:
            most: tokens of all rows.
            least: chance of each.
            limit: tokens of a row.
        """
        fit = (self.chance[self.falling] >= least) & (self.place[self.falling] < limit)
        taken = self.falling[fit][:most]
        lengths: list[int] = np.bincount(self._row[taken], minlength=self._rows).tolist()
        return lengths

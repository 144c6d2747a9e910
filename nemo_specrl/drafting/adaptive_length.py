"""How long the drafts of a step are: a draft is extended while that raises tokens per second.

A draft token is worth its chance of being accepted, and it makes the step that verifies it take
longer. Both are measured while the engine runs: the chances from how many tokens of earlier drafts
were accepted, the costs from the time between proposals. Each step then takes the draft tokens,
likeliest first, with which it yields the most tokens per second, and none at all if plain decoding
yields more. If an engine pads all drafts to the longest one, a limit for all of them is chosen as
well. (Expected acceptance over the cost of a step is also the rule of vLLM's adaptive verification,
vllm-project/vllm pull request 52362.)

Lengths depend on what was sampled before and on measured times, never on the tokens that are about
to be verified, so they cannot bias what is accepted.

This module knows neither engines nor trees: it is given steps, times and outcomes.
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
    """The chance that a draft token is accepted if those before it are, by the evidence for it.

    Tokens fall into bins by that evidence (``cell_of`` in ``_suffix.c``). The chance of a bin is
    the share of its recent tokens that were accepted, shrunk towards a prior. The prior of all bins
    shifts together: if tokens are accepted less often than it says, a bin without outcomes is not
    expected to do better. Older outcomes lose weight step by step.

    Args:
        prior: chances before any outcome is known, float ``[bins]``.

    Attributes:
        table: chances now, float32 ``[bins]``.
    """

    PRIOR_WEIGHT = 8.0
    """Number of outcomes for which the prior of a bin counts."""
    DECAY = 0.99
    """Factor on the weight of earlier outcomes each time new ones are learned."""
    MAX_OUTCOMES = 200.0
    """Approximate number of outcomes of a bin that count; older ones are dropped first."""
    SHIFT_WEIGHT = 32.0
    """Number of outcomes for which the unshifted prior counts when the shift is estimated."""
    LARGEST_SHIFT = 2.0
    """Largest shift of the prior, in log-odds."""

    def __init__(self, prior: FloatArray) -> None:
        self.table = prior.astype(np.float32)
        self._prior = prior.astype(np.float64)
        self._log_odds = np.log(self._prior / (1 - self._prior))
        self._offered = np.zeros(len(prior))
        self._accepted = np.zeros(len(prior))

    def learn(self, accepted: bytes, rejected: bytes) -> None:
        """Learn from outcomes.

        Args:
            accepted: bins of accepted tokens, uint8.
            rejected: bins of rejected tokens, uint8.
        """
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
    """The work of one step of the engine.

    Args:
        rows: number of rows that it decoded.
        drafted: number of draft tokens that it verified.
        longest: number of tokens of its longest draft.
        begun: number of rows that yielded their first token.
    """

    rows: int
    drafted: int
    longest: int
    begun: int


class StepCosts:
    """Seconds of an engine step by what it computes, on this machine.

    The costs of a step, and of each row, draft token and newly begun request in it, are fitted by
    least squares of relative errors. A step with drafts has further costs, for the step and for
    each row, because another sampler runs then; if rows are padded to the longest draft, there is
    also one for each row and each token of that draft. Earlier steps lose weight, so that the fit
    follows the present batch: up to some number of tokens a GPU takes no longer for one more,
    beyond it each takes longer.

    Attributes:
        costs: seconds of a step, a row, a draft token, a request that has begun, a step with
            drafts, a row in such a step, a row for each token of the longest draft, float ``[7]``;
            None while they are not known yet.
    """

    DECAY = 0.995
    """Factor on the weight of a step for each step that follows."""
    CLIPPED = (0.5, 2.0)
    """A measured time is clipped to this range, as multiples of the expected time."""
    RIDGE = np.array([2e-3, 2e-3, 2e-4, 2e-3, 2e-2, 2e-2, 2e-2])
    """Ridge penalty of each cost. It decides if the steps so far cannot tell costs apart: the cost
    of a draft token is penalized least, so that long drafts do not seem cheap."""
    FITTED = 16
    """Number of steps that are added to the fit at once."""

    def __init__(self) -> None:
        self.costs: FloatArray | None = None
        self._products = np.zeros((7, 7))
        self._targets = np.zeros(7)
        self._new: list[tuple[Step, float]] = []

    def observe(self, step: Step, seconds: float) -> None:
        """Add a step and its time, seconds, including what the engine does between two steps."""
        self._new.append((step, seconds))
        if len(self._new) >= self.FITTED:
            self._fit()

    def seconds(
        self, rows: int, drafted: npt.NDArray[np.integer], longest: npt.NDArray[np.integer]
    ) -> FloatArray:
        """Expected time of steps in which no request begins.

        Args:
            rows: number of rows of each step.
            drafted: number of draft tokens that each step verifies, ``[n]``.
            longest: number of tokens of each step's longest draft, ``[n]``.

        Returns:
            Seconds, float ``[n]``.
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

    After a step, :meth:`observe` takes in how long it took and :meth:`learn` the outcome of its
    drafts. :meth:`prepare` then says down to which chance the next drafts are looked up. Every few
    steps :attr:`searching` is set; :meth:`choose` then determines again where drafts end, and how
    much of each to take.

    Args:
        prior: see :class:`AcceptanceChances`.
        first: chance at which drafts end until the first costs are known.
        max_tokens: largest number of tokens, of rows and drafts together, that the engine computes
            in a step.
        longest: largest number of tokens of a draft.
        max_drafted: largest number of draft tokens in a step; None: ``max_tokens`` decides.

    Attributes:
        table: chances of acceptance by bin, float32 ``[bins]``.
        costs: the fitted costs of steps.
        cutoff: a draft ends where the chance that all tokens up to there are accepted falls below
            this; infinite if drafting does not pay.
        min_probability: the chance down to which the next drafts are looked up.
        looked_up: the number of tokens to which each of them is looked up.
        searching: whether the drafts that were looked up should go to :meth:`choose`.
    """

    EVERY = 4
    """Steps between two searches, unless the number of rows changes by a quarter."""
    PROBE = 200
    """After this many steps that all drafted, or all did not, one step does the opposite, so that
    its cost stays known."""
    PROBED = 0.7
    """Chance at which drafts end in a step that drafts only to probe, by the prior chances."""
    LEAST = 0.02
    """Smallest chance down to which drafts are looked up."""

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
        self._drafting = False  # whether the last step drafted
        self._alike = 0  # consecutive steps that drafted, or did not, like the last one
        self._searched = 0  # steps since the last search
        self._rows = 0  # number of rows at the last search

    def observe(self, step: Step, seconds: float) -> None:
        """See :meth:`StepCosts.observe`."""
        self.costs.observe(step, seconds)

    def learn(self, bins: bytes, accepted: int) -> None:
        """Learn from a verified draft: the bins of its tokens, and how many were accepted."""
        self._accepted.append(bins[:accepted])
        self._rejected.append(bins[accepted : accepted + 1])

    def prepare(self, rows: int, drafted: int) -> None:
        """Set ``min_probability``, ``looked_up``, ``table`` and ``searching`` for the next step.

        Args:
            rows: number of rows in the next step.
            drafted: number of draft tokens that the last step verified.
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
        """Find where drafts end, and how many tokens of each to take.

        Args:
            chances: for each row, the chance for each token of its draft that all up to it are
                accepted, float32.

        Returns:
            the number of draft tokens of each row.
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
        # Another token pays while its chance is above its seconds times the best rate.
        price = float(best * self.costs.costs[2])
        self.cutoff = max(price, least) if best > plain else math.inf
        return tokens.lengths(room, self.cutoff, self._limit)


def likeliest(chances: Sequence[bytes], most: int) -> list[int]:
    """Shorten drafts to ``most`` tokens in total, keeping the likeliest ones.

    Args:
        chances: see :meth:`DraftLengths.choose`.
        most: largest number of draft tokens of all rows together.

    Returns:
        the number of draft tokens of each row.
    """
    lengths = [len(of_row) // 4 for of_row in chances]
    return lengths if sum(lengths) <= most else _OfRows(chances).lengths(max(0, most))


class _OfRows:
    """The draft tokens of all rows, in one array.

    Attributes:
        chance: chance that a token and all before it in its row are accepted, float32 ``[n]``.
        place: position of a token in its row, from 0, int ``[n]``.
        falling: indices of the tokens, likeliest first and equal ones in their order, so that any
            number of the first ones form beginnings of the rows' drafts.
    """

    def __init__(self, chances: Sequence[bytes]) -> None:
        self.chance = np.frombuffer(b"".join(chances), np.float32)
        sizes = np.array([len(of_row) // self.chance.itemsize for of_row in chances], np.intp)
        self._row = np.repeat(np.arange(len(sizes)), sizes)
        self._rows = len(sizes)
        self.place = np.arange(len(self.chance)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.falling = np.argsort(-self.chance, kind="stable")

    def lengths(self, most: int, least: float = 0.0, limit: int = LIMITS[-1]) -> list[int]:
        """Number of tokens of each row among the likeliest ones.

        Args:
            most: largest number of tokens of all rows together.
            least: smallest chance of a token that is taken.
            limit: largest number of tokens of a row.
        """
        fit = (self.chance[self.falling] >= least) & (self.place[self.falling] < limit)
        taken = self.falling[fit][:most]
        lengths: list[int] = np.bincount(self._row[taken], minlength=self._rows).tolist()
        return lengths

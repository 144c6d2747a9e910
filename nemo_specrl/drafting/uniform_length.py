"""How many tokens the rows of a step draft if all of them draft the same number.

vLLM's V2 model runner gives every row of a step the same number of draft tokens, which keeps its
full CUDA graphs. With few rows, a GPU waits for its weights, so that verifying long drafts costs
next to nothing; many rows keep it computing, and only drafts that are likely to be accepted pay
off. The number therefore depends on the rows of the step, on what a step costs (``StepCosts``,
computed from the model and the data sheet of the GPU, or timed when the engine started), and on
which drafts have been accepted (``UniformLengths``). If no length gains anything, it is 0, and vLLM
decodes as it does without drafts.

Nothing here reads a clock: while an engine runs, the choice depends only on what was accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "BANDWIDTH_SHARE",
    "GPUS",
    "LEAST_GAIN",
    "LENGTHS",
    "PRIOR_CHANCE",
    "ROW_SECONDS",
    "SAMPLER_PASSES",
    "Gpu",
    "StepCosts",
    "UniformLengths",
    "expected_tokens",
]

Floats = npt.NDArray[np.float64]

LENGTHS = (0, 1, 2, 3, 5, 7, 11, 16, 24)
"""Lengths to choose from. CUDA graphs are captured for each, so there are only a few."""
LEAST_GAIN = 1.03
"""Factor that a length must gain over none, so that an error in the costs does not slow steps
down."""

BANDWIDTH_SHARE, COMPUTE_SHARE = 0.79, 0.816
"""The shares of the data sheet's values that serving kernels reach: fitted, like the numbers below,
to steps of Qwen3-8B on an H100 (docs/evidence/measured.md)."""
WAVE, WAVE_SHARE = 512, 0.44
"""Beyond half of so many tokens, matrix products take their time in steps of so many: this share of
the time is that of the tokens rounded up. 512 tokens took 13.9 ms, 768 took 21.3, 1,024 took
26.5."""
OVERLAP = 2.7
"""Exponent of the norm by which the times of reading weights and of computing add up; the larger it
is, the more of the shorter one is hidden behind the longer one. Fitted likewise."""
LAUNCH_SECONDS, ROW_SECONDS, DRAFT_SECONDS = 1.0e-3, 2.6e-6, 1.1e-4
"""Seconds of any step, whatever its work, of each row, and of search and vote in addition."""
SAMPLER_PASSES = 9
"""How often sampling and verification read or write the float32 logits of each position."""

PRIOR_CHANCE = 0.8
"""Chance that a draft token is accepted if those before it are, before anything is known. It is
high, since nothing is learned if nothing is drafted: many rows find out within a few steps that
drafts do not pay, but with a low chance they would never find out that they do."""
PRIOR_WEIGHT = 16.0
"""Number of drafts for which it counts. At later positions, the chance of the previous position has
this weight."""
MOST_COUNTED = 8_000
"""Number of drafts after which earlier observations count half: more of them add no information,
and the longer a batch continues, the later a slow change would be noticed."""
SURPRISE = 4.0
"""Standard deviations by which what is accepted has to differ from what was before for that to be
forgotten."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The values in the data sheet of a GPU.

    Args:
        bandwidth: bandwidth of its memory, bytes per second.
        flops: dense operations in bfloat16 per second; a multiply-add counts as two.
    """

    bandwidth: float
    flops: float


GPUS = {
    "H100": Gpu(3.35e12, 989e12),
    "H200": Gpu(4.8e12, 989e12),
    "B200": Gpu(8e12, 2250e12),
    "B300": Gpu(8e12, 2250e12),
    "A100": Gpu(2.0e12, 312e12),
}
"""Keyed by a part of the name that the driver reports; "GB200" has a B200. Others count as an
H100."""


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The time of a decoding step, from the bytes that it moves and the operations that it does.

    Args:
        gpu: the GPU that it runs on.
        weight_bytes: bytes of the weights that each step reads, on one rank.
        expert_bytes: bytes of the experts of a mixture, on one rank: a step reads those that its
            tokens chose. Not included in ``weight_bytes``.
        expert_share: share of the experts that a token chooses.
        token_flops: operations of one token, on one rank.
        kv_bytes: bytes of a token in the KV cache, on one rank.
        vocabulary: entries of the logits. The output layer is shared among ranks, but vLLM gathers
            the logits, and each rank samples from all of them.
        head_bytes: bytes of the output layer, on one rank. Included in ``weight_bytes``, as its
            operations are in ``token_flops``.
        head_flops: operations of a token in the output layer, on one rank.
        state_bytes: bytes of a row's state in layers other than attention, on one rank. A step
            reads one, and writes one after each of its tokens.
        timed: numbers of tokens, increasing, and the seconds that all layers but the output layer
            took for them, with contexts of next to nothing. Empty: these are computed.
    """

    gpu: Gpu
    weight_bytes: float
    expert_bytes: float
    expert_share: float
    token_flops: float
    kv_bytes: float
    vocabulary: int
    head_bytes: float = 0.0
    head_flops: float = 0.0
    state_bytes: float = 0.0
    timed: Sequence[tuple[int, float]] = ()

    def seconds(
        self, rows: npt.ArrayLike, length: npt.ArrayLike, context: float
    ) -> npt.NDArray[np.float64]:
        """Return the seconds that a step takes.

        Args:
            rows: number of rows that it decodes.
            length: number of draft tokens of each row.
            context: average number of tokens of a row's prompt and response.
        """
        rows, length = np.asarray(rows, np.float64), np.asarray(length, np.float64)
        tokens = rows * (1 + length)
        bandwidth = BANDWIDTH_SHARE * self.gpu.bandwidth
        if self.timed:
            model = self._timed(tokens) + self._products(self.head_bytes, self.head_flops, tokens)
        else:
            experts = self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)
            model = self._products(self.weight_bytes + experts, self.token_flops, tokens)
            model += (rows + tokens) * self.state_bytes / bandwidth + LAUNCH_SECONDS
        attention = rows * context * self.kv_bytes / bandwidth
        sampling = tokens * self.vocabulary * 4 * SAMPLER_PASSES / bandwidth
        drafting = np.where(length > 0, DRAFT_SECONDS, 0.0)
        seconds: Floats = model + attention + sampling + drafting + rows * ROW_SECONDS
        return seconds

    def _products(self, nbytes: npt.ArrayLike, flops: float, tokens: Floats) -> Floats:
        """Seconds of matrix products that read so many bytes, and do so much for each token."""
        reading = np.asarray(nbytes) / (BANDWIDTH_SHARE * self.gpu.bandwidth)
        waves = np.where(tokens > WAVE / 2, np.ceil(tokens / WAVE) * WAVE, tokens)
        computed = (1 - WAVE_SHARE) * tokens + WAVE_SHARE * waves
        computing = flops * computed / (COMPUTE_SHARE * self.gpu.flops)
        seconds: Floats = (reading**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP)
        return seconds

    def _timed(self, tokens: Floats) -> Floats:
        """Between the numbers that were timed as on a line; beyond them in proportion."""
        sizes, seconds = np.array(self.timed).T
        between = np.interp(tokens, sizes, np.maximum.accumulate(seconds))
        found: Floats = between * np.maximum(1.0, tokens / sizes[-1])
        return found


def expected_tokens(chances: npt.ArrayLike) -> Floats:
    """Return the expected number of tokens that a row gains from a step, by the length of its
    draft.

    Args:
        chances: chance for each position of a draft that its token is accepted if those before it
            are, ``[n]``.

    Returns:
        One value for each draft length from 0 to ``n``, ``[n + 1]``.
    """
    return 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(np.asarray(chances, np.float64)))])


def _by_position(counts: Floats) -> tuple[Floats, Floats]:
    """How many drafts reached each position, and had the token there accepted.

    Args:
        counts: drafts by their length, and by how many of their tokens were accepted.
    """
    at_least = counts[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
    return np.diagonal(at_least, -1), np.diagonal(at_least)[1:]


def _chances(counts: Floats) -> Floats:
    """Chance for each position that a draft token is accepted if those before it are."""
    chances, before = [], PRIOR_CHANCE
    for reached, accepted in zip(*_by_position(counts), strict=True):
        before = (accepted + PRIOR_WEIGHT * before) / (reached + PRIOR_WEIGHT)
        chances.append(before)
    return np.array(chances)


class UniformLengths:
    """Chooses a length for each number of rows.

    Args:
        costs: costs of steps.
        lengths: lengths to choose from, including 0.
        max_rows: the most rows of a step.
        max_drafted: the most draft tokens of a step.
    """

    def __init__(
        self, costs: StepCosts, lengths: Sequence[int], max_rows: int, max_drafted: int
    ) -> None:
        self._costs, self._lengths = costs, sorted(lengths)
        self._max_rows, self._max_drafted = max_rows, max_drafted
        # Drafts by their length, and by how many of their tokens were accepted: before the last
        # table and since then.
        self._counts, self._recent = np.zeros((2, max(lengths) + 1, max(lengths) + 1))

    def observe(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were accepted."""
        if 0 < drafted < len(self._recent):
            self._recent[drafted, min(accepted, drafted)] += 1

    def begin_batch(self) -> None:
        """Halve the weight of earlier observations: the weights and the prompts may differ now."""
        self._settle()
        self._counts /= 2

    def _settle(self) -> None:
        """Add what was observed recently, which replaces what was before if it is a surprise."""
        if not self._recent.any():
            return
        chances = _chances(self._counts)
        reached, accepted = _by_position(self._recent)
        expected, variance = reached @ chances, reached @ (chances * (1 - chances))
        if (accepted.sum() - expected) ** 2 > SURPRISE**2 * (variance + 1):
            self._counts[:] = 0
        self._counts += self._recent
        self._recent[:] = 0
        if self._counts.sum() > MOST_COUNTED:
            self._counts /= 2

    def chances(self) -> Floats:
        """Chance for each position that a draft token is accepted if those before it are."""
        return _chances(self._counts + self._recent)

    def table(self, context: float) -> list[int]:
        """The length for each number of rows, from 0 (not used) to ``max_rows``.

        Args:
            context: average number of tokens of a row's prompt and response.
        """
        self._settle()
        rows = np.arange(1, self._max_rows + 1)[:, None]
        lengths = np.array(self._lengths)[None, :]
        gains = expected_tokens(self.chances())[lengths] / self._costs.seconds(
            rows, lengths, context
        )
        gains[:, lengths[0] > 0] /= LEAST_GAIN
        gains[rows * lengths > self._max_drafted] = 0
        best = np.array(self._lengths)[gains.argmax(1)]
        return [0, *best.tolist()]

    def probing(self, table: Sequence[int]) -> list[int]:
        """A table with the shortest draft in place of none, where there is memory for it."""
        least = next(length for length in self._lengths if length)
        return [
            length or (least if 0 < rows * least <= self._max_drafted else 0)
            for rows, length in enumerate(table)
        ]

"""Recorded rollouts, replayed with a preset in the simulated engine.

``lossless`` replays the trees that an engine would draft from. ``reuse`` also needs the probability
that the policy of a step gives to the tokens of the epoch before. It is known if a rollout of that
step has the same tokens so far; :func:`acceptance_rates` extrapolates from there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import DraftConfig, ReuseConfig
from nemo_specrl.drafting.suffix_tree import DraftTrees
from nemo_specrl.nemo_rl.balance import balanced_order
from nemo_specrl.simulation.recorded_run import RecordedSample
from nemo_specrl.simulation.simulated_engine import (
    FEATURES,
    SimulatedEngine,
    SimulatedRequest,
    Steps,
    drafting,
    run,
    verifying,
)

__all__ = [
    "LOSSLESS",
    "PLAIN",
    "REUSE",
    "History",
    "SimulatedRow",
    "acceptance_rates",
    "groups_of",
    "histories_of",
    "phase",
    "rejecting",
    "rows_of",
]

PLAIN, LOSSLESS, REUSE = "plain", "lossless", "reuse"
Float64Array = npt.NDArray[np.float64]
History = Mapping[bytes, Sequence[Sequence[RecordedSample]]]
"""Earlier groups of each prompt, the oldest first."""

_BUCKETS = np.log([0.05, 0.2, 0.5, 0.8, 0.95, 0.99])
"""Log-probs between which tokens share a rate of acceptance."""


@dataclass(eq=False)
class SimulatedRow:
    """A row of a step: what it verifies, and how it decodes.

    Args:
        sample: the recorded rollout.
        group: index of its group in the step.
        expected: number of tokens that it is expected to decode, for the balance over engines.
        draft: the earlier rollout that it verifies (``reuse``), or None.
        accepted: number of accepted tokens of ``draft``.
        trace: steps of its decoding; :func:`phase` fills in those of rows that draft.
    """

    sample: RecordedSample
    group: int
    expected: float
    draft: RecordedSample | None = None
    accepted: int = 0
    trace: list[tuple[int, int]] = field(default_factory=list)


def rows_of(
    preset: str,
    step: Sequence[RecordedSample],
    history: History,
    rates: Float64Array | None = None,
    seed: int = 0,
) -> list[SimulatedRow]:
    """The rows of a step with a preset.

    Args:
        preset: ``plain``, ``lossless`` or ``reuse``.
        step: the recorded rollouts, those of a group contiguous.
        history: earlier groups of their prompts.
        rates: rates of acceptance (:func:`acceptance_rates`), for ``reuse``.
        seed: seed that decides which rows are fresh and which tokens are accepted.
    """
    rng = np.random.default_rng(seed)
    mean = float(np.mean([len(sample.tokens) for sample in step]))
    rows = []
    for group, (key, samples) in enumerate(groups_of(step).items()):
        earlier = history.get(key, ())
        expected = mean
        if earlier:
            expected = float(np.mean([len(s.tokens) for of in earlier for s in of]))
        for i, sample in enumerate(samples):
            row = SimulatedRow(sample, group, expected)
            fresh = rng.random() < ReuseConfig().fresh_fraction
            if rates is not None and earlier and i < len(earlier[-1]) and not fresh:
                row.draft = earlier[-1][i]
                chances = rates[np.searchsorted(_BUCKETS, row.draft.known_logprobs)]
                rejected = np.flatnonzero(rng.random(len(chances)) > chances)
                row.accepted = int(rejected[0]) if len(rejected) else len(chances)
                row.expected = max(1.0, len(sample.tokens) - row.accepted) if len(rejected) else 0.0
            if preset == PLAIN:
                row.trace = [(0, 1)] * len(sample.tokens)
            rows.append(row)
    return rows


def phase(
    preset: str,
    rows: Sequence[SimulatedRow],
    engine: SimulatedEngine,
    engines: int = 1,
    history: History | None = None,
) -> Float64Array:
    """Simulate the rollout phase of a step.

    Args:
        preset: preset of the rows.
        rows: rows of the step, those of a group contiguous.
        engine: limits of an engine.
        engines: number of engines, each with its own trees.
        history: earlier groups, from which a replay of trees makes the traces of rows that draft.
            None: the rows have traces already.

    Returns:
        Counts of each engine, float64 ``[engines, len(FEATURES)]``.
    """
    order = list(range(len(rows)))
    if preset != PLAIN:
        lengths = [row.expected for row in rows]
        prompts = [row.sample.prompt for row in rows]
        order = balanced_order([row.group for row in rows], lengths, prompts, engines)
    size = -(-len(rows) // engines)
    shares = [order[i * size : (i + 1) * size] for i in range(engines)]
    engine = replace(engine, drafts=preset != PLAIN)
    counts = np.zeros((engines, len(FEATURES)))
    for i, share in enumerate(shares):
        trees = DraftTrees(DraftConfig().max_bytes)
        requests = []
        judged: dict[tuple[int, bytes], list[SimulatedRequest]] = {}
        prefilled: set[int] = set()
        for identity, row in enumerate(rows[j] for j in share):
            steps: Steps = iter(row.trace)
            if preset != PLAIN and history is not None and row.expected:
                steps = _replayed(row, trees, identity, history, engine.max_draft_tokens)
            request = SimulatedRequest(row.sample.prompt + row.accepted, steps)
            if row.draft is None:
                request.siblings = row.group
                request.shared = _whole_blocks(row.sample.prompt, engine) // engine.block_size
            if row.group in prefilled or row.draft is not None:
                request.cached = _whole_blocks(request.prompt, engine)
            if row.draft is None:
                prefilled.add(row.group)
                requests.append(request)
                continue
            content = row.group, row.draft.tokens.tobytes()
            if content not in judged:
                judged[content] = []
                length = row.sample.prompt + len(row.draft.tokens)
                requests.append(SimulatedRequest(length, verifying(), then=judged[content]))
            if row.expected:
                judged[content].append(request)
        counts[i] = run(engine, requests)
    return counts


def _whole_blocks(tokens: int, engine: SimulatedEngine) -> int:
    """Tokens of a prompt that the prefix cache serves: whole blocks, never the last token."""
    return (tokens - 1) // engine.block_size * engine.block_size


def _replayed(
    row: SimulatedRow, trees: DraftTrees, identity: int, history: History, max_draft_tokens: int
) -> Steps:
    """Yield the steps of a row that drafts from its tree; they are also added to its trace.

    What a row says after an accepted prefix is not recorded; the recorded response's tokens at the
    same places stand for it.
    """
    row.trace.clear()
    earlier = [
        ((version + 1) << 32 | i, sample.tokens.tobytes())
        for version, group in enumerate(history.get(row.sample.key, ()))
        for i, sample in enumerate(group)
    ]
    start = min(row.accepted, len(row.sample.tokens) - 1)
    for step in drafting(
        trees, row.sample.key, identity, earlier, row.sample.tokens, max_draft_tokens, start
    ):
        row.trace.append(step)
        yield step


def acceptance_rates(
    pairs: Sequence[tuple[Sequence[RecordedSample], Sequence[RecordedSample]]], lenience: float
) -> Float64Array | None:
    """Estimate the chance that prefix reuse accepts a token, by the token's earlier log-prob.

    The chance is min(1, lenience * p_new / p_old). p_new is known if a rollout of the newer policy
    has the same token after the same tokens. Likely tokens are seen more often this way, so each is
    weighted by one over its chance of being seen (Horvitz and Thompson,
    doi:10.1080/01621459.1952.10483446). Tokens in contexts that no newer rollout reached are
    assumed to be accepted like those of the same log-prob.

    Args:
        pairs: for each prompt, a group and the next group of an on-policy run.
        lenience: lenience of the acceptance test.

    Returns:
        rates by bucket of the earlier log-prob, float64; None if no token was seen.
    """
    accepted, seen, squared = np.zeros((3, len(_BUCKETS) + 1))
    for old, new in pairs:
        newer = _Trie(new)
        for sample in old:
            buckets = np.searchsorted(_BUCKETS, sample.known_logprobs)
            found = newer.follow(sample.tokens)
            for bucket, p_old, (visits, p_new) in zip(
                buckets, sample.known_logprobs.tolist(), found, strict=False
            ):
                weight = 1 / (1 - (1 - min(1.0, math.exp(p_new))) ** visits)
                accepted[bucket] += min(1.0, lenience * math.exp(p_new - p_old)) * weight
                seen[bucket] += weight
                squared[bucket] += weight**2
    if not seen.any():
        return None
    rates = np.empty(len(seen))
    likelier = accepted.sum() / seen.sum()
    # Unlikely tokens are hardly ever seen, and are rejected more often than likely ones: a bucket
    # of few tokens (by Kish's effective size, since some weigh much) leans on the next likelier.
    for bucket in reversed(range(len(seen))):
        if seen[bucket]:
            tokens = seen[bucket] ** 2 / squared[bucket]
            rate = accepted[bucket] / seen[bucket]
            likelier = (tokens * rate + likelier) / (tokens + 1)
        rates[bucket] = likelier
    return np.clip(rates, 0.0, 1.0)


class _Trie:
    """Rollouts of one prompt by their beginnings, with the log-prob of each token.

    Nodes are numbers, and the root is 0.
    """

    def __init__(self, samples: Iterable[RecordedSample]) -> None:
        self._child: dict[tuple[int, int], int] = {}
        self._visits, self._logprob = [0], [0.0]
        for sample in samples:
            node = 0
            for token, logprob in zip(
                sample.tokens.tolist(), sample.known_logprobs.tolist(), strict=True
            ):
                self._visits[node] += 1
                node = self._child.setdefault((node, token), len(self._visits))
                if node == len(self._visits):
                    self._visits.append(0)
                    self._logprob.append(logprob)

    def follow(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, float]]:
        """Walk along tokens as far as a rollout went the same way.

        Yields:
            for each token, how many rollouts had a token there, and the token's log-prob, nats.
        """
        node = 0
        for token in tokens.tolist():
            visits = self._visits[node]
            if (following := self._child.get((node, token))) is None:
                return
            node = following
            yield visits, self._logprob[node]


def rejecting(rates: Float64Array, times: float) -> Float64Array:
    """Return rates of acceptance with ``times`` as many rejections."""
    return 1 - np.minimum(1.0, times * (1 - rates))


def histories_of(steps: Sequence[Sequence[RecordedSample]]) -> Iterator[History]:
    """Yield, for each step, the earlier groups of all prompts."""
    history: dict[bytes, list[list[RecordedSample]]] = defaultdict(list)
    for step in steps:
        yield {key: list(groups) for key, groups in history.items()}
        for key, group in groups_of(step).items():
            history[key].append(group)


def groups_of(step: Sequence[RecordedSample]) -> dict[bytes, list[RecordedSample]]:
    """Return the rollouts of a step by prompt."""
    groups: dict[bytes, list[RecordedSample]] = defaultdict(list)
    for sample in step:
        groups[sample.key].append(sample)
    return groups

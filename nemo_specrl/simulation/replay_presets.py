"""Recorded rollouts, replayed with each preset in the simulated engine.

``lossless`` replays the trees that an engine would draft from. ``faithful`` and ``fast`` need the
probability that the policy of a step gives to the tokens of the epoch before. It is known if a
rollout of that step has the same tokens so far; :func:`acceptance_rates` extrapolates from there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import PRESETS, TreeConfig
from nemo_specrl.engine.load_balance import balanced_order
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
from nemo_specrl.speculation.draft_selection import Row as Place
from nemo_specrl.speculation.draft_selection import is_fresh
from nemo_specrl.speculation.suffix_tree import DraftTrees

__all__ = [
    "LOSSLESS",
    "PLAIN",
    "History",
    "SimulatedRow",
    "acceptance_rates",
    "groups_of",
    "histories_of",
    "phase",
    "rejecting",
    "rows_of",
]

PLAIN, LOSSLESS = "plain", "lossless"
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
        expected: number of tokens that it is expected to decode, for order and load balance.
        rank: number of rows of its prompt that are begun before it, so that it drafts from them.
        trace: steps of its decoding; a replay of trees fills it in.
        draft: the rollout that it verifies, or None.
        accepted: number of accepted tokens of the draft.
    """

    sample: RecordedSample
    group: int
    expected: float
    rank: int = 0
    trace: list[tuple[int, int]] = field(default_factory=list)
    draft: RecordedSample | None = None
    accepted: int = 0


def rows_of(
    preset: str,
    step: Sequence[RecordedSample],
    history: History,
    rates: Float64Array | None = None,
    seed: int = 0,
) -> list[SimulatedRow]:
    """The rows of a step with a preset.

    Args:
        preset: ``plain``, ``lossless``, ``faithful`` or ``fast``.
        step: the recorded rollouts, those of a group contiguous.
        history: earlier groups of their prompts.
        rates: rates of acceptance (:func:`acceptance_rates`), for prefix reuse.
        seed: seed that decides which rows are fresh and which tokens are accepted.
    """
    rng = np.random.default_rng(seed)
    mean = float(np.mean([len(sample.tokens) for sample in step]))
    rows = []
    index: Counter[bytes] = Counter()
    groups: dict[bytes, int] = {}
    for sample in step:
        key, length = sample.key, len(sample.tokens)
        earlier = history.get(key, ())
        row = SimulatedRow(sample, groups.setdefault(key, len(groups)), mean)
        if earlier:
            row.expected = float(np.mean([len(s.tokens) for group in earlier for s in group]))
        elif preset == LOSSLESS:
            row.rank = index[key]
            index[key] += 1
        if preset != LOSSLESS:
            row.trace = [(0, 1)] * length
        if preset not in (PLAIN, LOSSLESS) and rates is not None and earlier:
            k = index[key]
            index[key] += 1
            fresh = is_fresh(
                Place(key, k),
                len(earlier),
                seed=seed,
                fresh_fraction=PRESETS[preset]["fresh_fraction"],
            )
            if k < len(earlier[-1]) and not fresh:
                row.draft = earlier[-1][k]
                chances = rates[np.searchsorted(_BUCKETS, row.draft.logprobs)]
                rejected = np.flatnonzero(rng.random(len(chances)) > chances)
                row.accepted = int(rejected[0]) if len(rejected) else len(chances)
                left = max(1, length - row.accepted) if len(rejected) else 0
                row.trace = [(0, 1)] * left
                row.expected = float(left)
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
        history: earlier groups, from which a replay of trees makes the traces of lossless rows.
            None: the rows have traces already.

    Returns:
        Counts of each engine, float64 ``[engines, len(FEATURES)]``.
    """
    order = list(range(len(rows)))
    if preset != PLAIN:
        order = balanced_order([row.expected for row in rows], engines)
    engine = replace(engine, drafts=preset == LOSSLESS)
    size = -(-len(rows) // engines)
    counts = np.zeros((engines, len(FEATURES)))
    for i in range(engines):
        share = [rows[j] for j in order[i * size : (i + 1) * size]]
        if preset != PLAIN:  # SpeculativeLLM sends rows in this order
            share.sort(key=_place)
        trees = DraftTrees(TreeConfig().max_bytes)
        requests = []
        judged: dict[tuple[int, bytes], list[SimulatedRequest]] = {}
        prefilled: set[int] = set()
        for identity, row in enumerate(share):
            steps: Steps = iter(row.trace)
            if preset == LOSSLESS and history is not None:
                steps = _replayed(row, trees, identity, history, engine.max_draft_tokens)
            request = SimulatedRequest(row.sample.prompt + row.accepted, steps)
            if row.draft is None:
                if row.group in prefilled:
                    request.cached = _whole_blocks(request.prompt, engine)
                prefilled.add(row.group)
                requests.append(request)
                continue
            request.cached = _whole_blocks(request.prompt, engine)
            content = row.group, row.draft.tokens.tobytes()
            if content not in judged:  # one verification for all rows with the same draft
                judged[content] = []
                length = row.sample.prompt + len(row.draft.tokens)
                requests.append(SimulatedRequest(length, verifying(), then=judged[content]))
            if row.trace:
                judged[content].append(request)
        counts[i] = run(engine, requests)
    return counts


def _place(row: SimulatedRow) -> tuple[bool, int, float]:
    """Sort key: rows without a draft, the longest first, then those with one, likewise."""
    return row.draft is not None, row.rank, -(len(row.draft.tokens) if row.draft else row.expected)


def _whole_blocks(tokens: int, engine: SimulatedEngine) -> int:
    """Tokens of a prompt that the prefix cache serves: whole blocks, never the last token."""
    return (tokens - 1) // engine.block_size * engine.block_size


def _replayed(
    row: SimulatedRow, trees: DraftTrees, identity: int, history: History, max_draft_tokens: int
) -> Steps:
    """Yield the steps of a row that drafts from its tree; they are also added to its trace."""
    earlier = [
        ((version + 1) << 32 | i, sample.tokens.tobytes())
        for version, group in enumerate(history.get(row.sample.key, ()))
        for i, sample in enumerate(group)
    ]
    steps = drafting(trees, row.sample.key, identity, earlier, row.sample.tokens, max_draft_tokens)
    for step in steps:
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
        newer = _Trie(sample for sample in new if sample.fresh)
        for sample in old:
            buckets = np.searchsorted(_BUCKETS, sample.logprobs)
            found = newer.follow(sample.tokens)
            for bucket, p_old, (visits, p_new) in zip(
                buckets, sample.logprobs.tolist(), found, strict=False
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
                sample.tokens.tolist(), sample.logprobs.tolist(), strict=True
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

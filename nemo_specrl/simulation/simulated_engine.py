"""Simulation of the rollout phase of one engine: its steps, and how many tokens each computes.

A request is a sequence of engine steps, each of which verifies some draft tokens and yields some.
The simulated engine schedules requests as vLLM does: slots for rows, a token budget for a step,
blocks of KV cache, preemption. A run returns counts, not seconds; multiplied by the coefficients of
:func:`fit_costs` they are seconds.

How many draft tokens are accepted is replayed, not modelled. At temperature 1 a draft token is kept
with the probability that the policy gives it. A response that the policy sampled therefore decides
what would have been accepted of any draft: the tokens up to the first one that differs.

This module knows neither engines nor caches; the trees are those from which CPU engines draft.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import DraftConfig
from nemo_specrl.drafting.suffix_tree import DraftTrees
from nemo_specrl.errors import ConfigError

__all__ = [
    "FEATURES",
    "SimulatedEngine",
    "SimulatedRequest",
    "Steps",
    "drafting",
    "fit_costs",
    "run",
    "verifying",
]

FEATURES = ("steps", "drafting_steps", "rows", "tokens", "kv_tokens", "verified_tokens")
"""The counts of a rollout phase, each summed over the engine's steps: steps of an engine that does
not draft; steps of one that does; rows; computed tokens; tokens of KV cache that are read; and
computed tokens whose log-probs verification asks for."""

Float64Array = npt.NDArray[np.float64]
Steps = Iterator[tuple[int, int]]
"""The steps of a request: draft tokens to verify, and tokens that the step yields."""


@dataclass(frozen=True)
class SimulatedEngine:
    """Limits of an engine, named as vLLM names them.

    Args:
        max_num_seqs: largest number of rows that run at once.
        max_num_batched_tokens: largest number of tokens computed in a step.
        kv_tokens: number of tokens that fit into its KV cache. None: no limit.
        block_size: number of tokens of a block of KV cache.
        drafts: whether it proposes drafts, so that its steps are counted as ``drafting_steps``.
        max_draft_tokens: largest number of tokens of a draft (``draft.max_tokens``).
    """

    max_num_seqs: int
    max_num_batched_tokens: int = 8192
    kv_tokens: int | None = None
    block_size: int = 16
    drafts: bool = False
    max_draft_tokens: int = DraftConfig().max_tokens


@dataclass(eq=False)
class SimulatedRequest:
    """A request to the engine.

    Args:
        prompt: number of tokens that must be in the KV cache before it yields any.
        steps: what its steps draft and yield, beginning with the one that ends the prefill.
        cached: number of the prompt's tokens that the prefix cache has.
        then: requests that are sent when this one has ended.
        siblings: what requests have in common whose prompts share blocks; None: none does.
        shared: number of these blocks, each of which exists once while any of the requests runs.
    """

    prompt: int
    steps: Steps
    cached: int = 0
    then: Sequence[SimulatedRequest] = ()
    siblings: Hashable = None
    shared: int = 0
    drafted: int = field(init=False, default=0)
    yielded: int = field(init=False, default=0)
    pending: int = field(init=False, default=0)  # tokens to compute until its step ends
    context: int = field(init=False, default=0)  # tokens that are in the KV cache
    blocks: int = field(init=False, default=0)  # of KV cache, without shared ones
    runs: bool = field(init=False, default=False)  # and so holds the shared ones, too

    def advance(self) -> bool:
        """Begin the next step; return False if there is none."""
        step = next(self.steps, None)
        if step is not None:
            self.drafted, self.yielded = step
        return step is not None


def verifying() -> Steps:
    """Steps of a request that only prefills its prompt, for the log-probs."""
    return iter([(0, 0)])


def drafting(
    trees: DraftTrees,
    key: bytes,
    identity: int,
    history: Sequence[tuple[int, bytes]],
    response: npt.NDArray[np.int32],
    max_draft_tokens: int,
    start: int = 0,
) -> Steps:
    """Steps of a request that drafts from the tree of its prompt, as the proposer on a CPU does.

    Args:
        trees: the engine's trees.
        key: key of the prompt.
        identity: identity of the response.
        history: earlier responses as identity and int32 tokens, oldest first.
        response: tokens that the policy samples, int32 ``[n]``.
        max_draft_tokens: largest number of tokens of a draft.
        start: number of its tokens that the request's prompt ends with (prefix reuse).
    """
    yield 0, 1
    row = trees.open(key, identity, history)
    tokens = response.tolist()
    position, produced = 0, start + 1
    while True:
        row.extend(tokens[position:produced])
        position = produced
        if position == len(tokens):
            return
        draft = row.draft(max_draft_tokens)
        accepted = 0
        for proposed, sampled in zip(draft, tokens[position:-1], strict=False):
            if proposed != sampled:
                break
            accepted += 1
        produced = position + accepted + 1
        yield len(draft), accepted + 1


def run(engine: SimulatedEngine, requests: Iterable[SimulatedRequest]) -> Float64Array:
    """Run requests to their ends and count the steps of the engine.

    Args:
        engine: limits of the engine.
        requests: requests in the order in which they are sent, all at once.

    Returns:
        float64 ``[len(FEATURES)]``.

    Raises:
        ConfigError: a single request needs more KV cache than there is.
    """
    running = _Running(engine)
    for request in requests:
        running.send(request)
    while running.requests:
        running.step()
    return np.array(running.counts)


class _Running:
    """An engine with its requests, and the counts of the steps so far."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.counts = [0.0] * len(FEATURES)
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self._holders: Counter[Hashable] = Counter()
        limit = engine.kv_tokens
        self._free = math.inf if limit is None else limit // engine.block_size

    @property
    def requests(self) -> int:
        """Number of requests in the engine."""
        return len(self._waiting) + len(self._running)

    def send(self, request: SimulatedRequest) -> None:
        """Put a request into the waiting queue."""
        request.advance()
        request.context, request.pending = request.cached, request.prompt - request.cached
        self._waiting.append(request)

    def step(self) -> None:
        """Do one engine step: running requests first, then waiting ones, as vLLM schedules."""
        engine, budget = self.engine, self.engine.max_num_batched_tokens
        granted: list[tuple[SimulatedRequest, int]] = []
        evicted = False
        while budget and len(granted) < len(self._running):
            request = self._running[len(granted)]
            tokens = min(request.pending, budget)
            before = len(self._running)
            placed = self._place(request, tokens, evict=True)
            evicted = evicted or len(self._running) < before
            if not placed:
                break
            granted.append((request, tokens))
            budget -= tokens
        while budget and self._waiting and not evicted and len(self._running) < engine.max_num_seqs:
            request = self._waiting[0]
            tokens = min(request.pending, budget)
            if not self._place(request, tokens, evict=False):
                break
            self._running.append(self._waiting.popleft())
            granted.append((request, tokens))
            budget -= tokens
        self._count(granted)
        for request, tokens in granted:
            request.context += tokens
            request.pending -= tokens
            if not request.pending:
                self._sample(request)

    def _place(self, request: SimulatedRequest, tokens: int, *, evict: bool) -> bool:
        """Allocate blocks for more tokens of a request; return whether it has them.

        Args:
            request: the request.
            tokens: number of tokens to compute.
            evict: whether the newest running requests are preempted if there are too few blocks.
        """
        total = -(-(request.context + tokens) // self.engine.block_size)
        wanted = max(0, total - request.shared) - request.blocks
        if not request.runs and not self._holders[request.siblings]:
            wanted += request.shared
        while wanted > self._free:
            if len(self._running) < 1 + evict:
                raise ConfigError(
                    f"kv_tokens = {self.engine.kv_tokens}: must hold a request of "
                    f"{request.context + tokens} tokens"
                )
            if not evict:
                return False
            victim = self._running.pop()
            self._release(victim)
            kept = victim.cached if self._holders[victim.siblings] else 0
            victim.pending += victim.context - kept
            victim.context = kept
            self._waiting.appendleft(victim)
            if victim is request:
                return False
        self._free -= max(0, wanted)
        request.blocks = max(request.blocks, total - request.shared)
        if not request.runs:
            request.runs = True
            self._holders[request.siblings] += 1
        return True

    def _release(self, request: SimulatedRequest) -> None:
        """Free the blocks of a request, and shared ones with the last that holds them."""
        self._free += request.blocks
        self._holders[request.siblings] -= 1
        if not self._holders[request.siblings]:
            self._free += request.shared
        request.blocks, request.runs = 0, False

    def _count(self, granted: list[tuple[SimulatedRequest, int]]) -> None:
        counts = self.counts
        counts[1 if self.engine.drafts else 0] += 1
        counts[2] += len(granted)
        counts[3] += sum(tokens for _, tokens in granted)
        counts[4] += sum(request.context + more for request, more in granted)

    def _sample(self, request: SimulatedRequest) -> None:
        """End a request's step: drop rejected tokens from the cache, and begin the next step."""
        request.context -= request.drafted - max(0, request.yielded - 1)
        if not request.yielded:
            self.counts[5] += request.prompt
        if request.advance():
            request.pending = 1 + request.drafted
            return
        self._running.remove(request)
        self._release(request)
        for following in request.then:
            self.send(following)


def fit_costs(counts: Float64Array, seconds: Float64Array) -> Float64Array:
    """Fit what a step, a row, a token and a token of KV cache cost: non-negative least squares.

    Relative errors are minimized, so that short phases count as much as long ones. The optimum is
    the best of the ordinary solutions with some of the costs at 0 and no other below it.

    Args:
        counts: counts of rollout phases, float64 ``[n, len(FEATURES)]``.
        seconds: durations of the phases, float64 ``[n]``.

    Returns:
        Seconds for each feature, float64 ``[len(FEATURES)]``.
    """
    scaled = counts / seconds[:, None]
    used = np.flatnonzero(scaled.any(axis=0))
    best, least = np.zeros(counts.shape[1]), math.inf
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            columns = list(subset)
            values, *_ = np.linalg.lstsq(scaled[:, columns], np.ones(len(seconds)), rcond=None)
            if values.min() < 0:
                continue
            error = float(((scaled[:, columns] @ values - 1) ** 2).sum())
            if error < least:
                best, least = np.zeros(counts.shape[1]), error
                best[columns] = values
    return best

"""Which engine each of the rows goes to that come one by one, and when.

The first rows of a prompt draft from each other in the engine that they share, so they go to one
engine, as long as no other has much less to do. Later ones draft from what the cache has, and go
where there is least to do, by the lengths of the earlier ones. An engine gets no more rows than it
runs at once: those that are left wait here, and the first engine that has room takes them. Knows no
host framework; rows may come from several threads, each with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RowQueue"]

KNOWN_PROMPTS = 2**16
"""Prompts whose engine and mean length are remembered, the latest ones."""
NEWEST_OF_PROMPT, NEWEST_OF_ALL = 0.25, 0.0025
"""Weights of a row's length in the mean of its prompt's rows, and in that of all."""


@dataclass(eq=False)
class Place:
    """Where a row is, or will be.

    Attributes:
        prompt: of the row; None: no row drafts from it.
        cost: what the row is expected to take, where 1 is a row of mean length.
        engine: index of its engine.
    """

    prompt: Hashable
    cost: float
    engine: int
    left: bool = False
    ready: Future[None] = field(default_factory=Future)


@dataclass
class _Prompt:
    engine: int
    length: float | None = None


class RowQueue:
    """The rows that several engines have been given and have not ended.

    A copy in another process begins without rows.

    Args:
        engines: number of engines.
        together: rows of a prompt, of which none has ended, that go to one engine although another
            one has less to do.
        places: rows that an engine runs at once; None: as many as it is given.
    """

    def __init__(self, engines: int, together: float, places: int | None = None) -> None:
        self._arguments = engines, together, places
        self._together = together
        self._places = places
        self._lock = threading.Lock()
        self._running = [0] * engines
        self._loads = [0.0] * engines  # costs of the rows that run or wait
        self._waiting: list[list[tuple[float, int, Place]]] = [[] for _ in range(engines)]
        self._prompts: OrderedDict[Hashable, _Prompt] = OrderedDict()
        self._mean, self._ended = 0.0, 0  # length of a row, and how many had one
        self._numbers = itertools.count()

    def __reduce__(self) -> Any:
        return type(self), self._arguments

    @asynccontextmanager
    async def place(self, prompt: Hashable = None) -> AsyncIterator[Place]:
        """Wait until an engine has room for a row, which is there until the context ends.

        Args:
            prompt: of the row, to keep its rows together; None: it does not matter.
        """
        with self._lock:
            place = self._chosen(prompt)
            if self._has_room(place.engine):
                self._start(place)
            else:
                entry = -place.cost, next(self._numbers), place
                heapq.heappush(self._waiting[place.engine], entry)
        try:
            if not place.ready.done():
                await asyncio.wrap_future(place.ready)
            yield place
        finally:
            self.leave(place)

    def leave(self, place: Place, tokens: int | None = None) -> None:
        """Note that a row has ended, if that is not known yet, and start one that waits.

        Args:
            place: of the row, also of one that has not begun.
            tokens: of its response; None: it has none, or a part of one.
        """
        with self._lock:
            if tokens is not None:
                self._note(place.prompt, tokens)
            if place.left:
                return
            place.left = True
            self._loads[place.engine] -= place.cost
            if place.ready.cancel():  # it waits, and is skipped when its turn comes
                return
            self._running[place.engine] -= 1
            self._fill(place.engine)

    def _chosen(self, prompt: Hashable) -> Place:
        """The engine for a row: that of the prompt's first rows, or the one with least to do."""
        known = self._prompts.get(prompt) if prompt is not None else None
        cost = 1.0
        engine = min(range(len(self._loads)), key=self._loads.__getitem__)
        if known is not None:
            if known.length is not None:
                cost = known.length / max(1.0, self._mean)
            elif self._loads[known.engine] - self._loads[engine] < self._together:
                engine = known.engine
            known.engine = engine
            self._prompts.move_to_end(prompt)
        elif prompt is not None:
            self._prompts[prompt] = _Prompt(engine)
            if len(self._prompts) > KNOWN_PROMPTS:
                self._prompts.popitem(last=False)
        self._loads[engine] += cost
        return Place(prompt, cost, engine)

    def _has_room(self, engine: int) -> bool:
        return self._places is None or self._running[engine] < self._places

    def _start(self, place: Place) -> None:
        if place.ready.set_running_or_notify_cancel():
            self._running[place.engine] += 1
            place.ready.set_result(None)

    def _fill(self, engine: int) -> None:
        """Start rows that wait, the longest first: an engine's own, then of the longest queue."""
        while self._has_room(engine):
            queue = self._waiting[engine] or max(self._waiting, key=len)
            if not queue:
                return
            place = heapq.heappop(queue)[2]
            if place.left:
                continue
            self._loads[place.engine] -= place.cost
            self._loads[engine] += place.cost
            place.engine = engine
            self._start(place)

    def _note(self, prompt: Hashable, tokens: int) -> None:
        """Learn from the length of a row."""
        known = self._prompts.get(prompt) if prompt is not None else None
        if known is not None:
            last = tokens if known.length is None else known.length
            known.length = last + NEWEST_OF_PROMPT * (tokens - last)
        self._ended += 1
        self._mean += max(1 / self._ended, NEWEST_OF_ALL) * (tokens - self._mean)

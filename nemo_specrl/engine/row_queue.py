"""Decides to which engine rows go that arrive one by one, and when.

The first rows of a prompt draft from each other in the engine that they share, so they go to one
engine as long as no other has much less to do. Later rows draft from what the cache has, and go to
the engine with the least to do, judged by the lengths of the earlier ones. An engine gets no more
rows than it runs at once. While all engines are full, rows wait here, and the first engine that has
room takes them: those of the earliest batch, the longest first. Independent of any host framework;
rows may come from several threads, each with its own event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RowQueue"]

KNOWN_PROMPTS = 2**16
"""Number of latest prompts whose engine and mean length are remembered."""
NEWEST_OF_PROMPT, NEWEST_OF_ALL = 0.25, 0.0025
"""Weights of a row's length in the mean over its prompt's rows, and in that over all rows."""

_Batch = tuple[int, int]
"""Number of the event loop that a batch's rows come from, and of the batch among those of this
loop; earlier batches have lower numbers."""

_batch: ContextVar[_Batch | None] = ContextVar("batch", default=None)
"""Batch of the row whose task this is."""


@dataclass(eq=False)
class Place:
    """Where a row is, or will be.

    Attributes:
        prompt: prompt of the row; None: no row drafts from it.
        cost: expected cost of the row, where 1 is a row of mean length.
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


_Waiting = tuple[_Batch, float, int, Place]
"""A row that waits: its batch, minus its cost, its number and its place; the smallest comes
first."""


class RowQueue:
    """The rows that have been given to several engines and have not ended.

    A copy in another process begins without rows.

    Args:
        engines: number of engines.
        together: how many rows of a prompt, none of which has ended, go to one engine although
            another one has less to do.
        places: number of rows that an engine runs at once; None: as many as it is given.
        batch: number of rows of a batch, if one event loop brings several batches; None: it brings
            one.
    """

    def __init__(
        self, engines: int, together: float, places: int | None = None, batch: int | None = None
    ) -> None:
        self._arguments = engines, together, places, batch
        self._together = together
        self._places, self._batch_rows = places, batch
        self._lock = threading.Lock()
        self._running = [0] * engines
        self._loads = [0.0] * engines  # costs of the rows that run or wait
        self._waiting: list[list[_Waiting]] = [[] for _ in range(engines)]
        # Number of each event loop, and of the rows that it has brought.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[int]]
        self._loops = weakref.WeakKeyDictionary()
        self._prompts: OrderedDict[Hashable, _Prompt] = OrderedDict()
        self._mean, self._ended = 0.0, 0  # length of a row, and how many had one
        self._numbers = itertools.count()

    def __reduce__(self) -> Any:
        return type(self), self._arguments

    @asynccontextmanager
    async def place(self, prompt: Hashable = None) -> AsyncIterator[Place]:
        """Wait until an engine has room for a row, which stays there until the context ends.

        Args:
            prompt: the row's prompt, to keep the prompt's rows together; None: it does not matter.
        """
        with self._lock:
            batch, place = self._batch_of(prompt), self._chosen(prompt)
            if self._has_room(place.engine):
                self._start(place)
            else:
                entry = batch, -place.cost, next(self._numbers), place
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
            place: the row's place, even if the row has not begun.
            tokens: number of tokens of its response; None: it has no response, or only part of one.
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

    def _batch_of(self, prompt: Hashable) -> _Batch:
        """The batch of the row for which this task asks; its further turns stay in its batch.

        A step needs all rows of its batch, so none of them may wait for longer rows of later
        batches. Rows do not say which batch they belong to. Event loops tell batches apart even if
        several begin together and their rows arrive interleaved; within a loop batches come one
        after the other.
        """
        batch = _batch.get()
        if batch is None:
            loop = asyncio.get_running_loop()
            of_loop = self._loops.setdefault(loop, [next(self._numbers), 0])
            number, rows = of_loop
            batch = number, rows // self._batch_rows if self._batch_rows else 0
            of_loop[1] += prompt is not None  # rows of a validation come between batches
            _batch.set(batch)
        return batch

    def _chosen(self, prompt: Hashable) -> Place:
        """Choose the engine for a row, among those with room if there are any: that of the prompt's
        first rows, or the one with the least to do.
        """
        known = self._prompts.get(prompt) if prompt is not None else None
        cost = 1.0
        engines = range(len(self._loads))
        open_ones = list(filter(self._has_room, engines)) or list(engines)
        engine = min(open_ones, key=self._loads.__getitem__)
        if known is not None:
            if known.length is not None:
                cost = known.length / max(1.0, self._mean)
            elif (
                known.engine in open_ones
                and self._loads[known.engine] - self._loads[engine] < self._together
            ):
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
        """Start waiting rows, those of the earliest batch and, among these, the longest first: the
        engine's own, then those of the longest queue.
        """
        own = self._waiting[engine]
        while self._has_room(engine):
            for queue in self._waiting:
                while queue and queue[0][-1].left:
                    heapq.heappop(queue)
            queues = [queue for queue in self._waiting if queue]
            if not queues:
                return
            queue = min(queues, key=lambda queue: (queue[0][0], queue is not own, -len(queue)))
            place = heapq.heappop(queue)[-1]
            self._loads[place.engine] -= place.cost
            self._loads[engine] += place.cost
            place.engine = engine
            self._start(place)

    def _note(self, prompt: Hashable, tokens: int) -> None:
        """Update the means with the length of a row."""
        known = self._prompts.get(prompt) if prompt is not None else None
        if known is not None:
            last = tokens if known.length is None else known.length
            known.length = last + NEWEST_OF_PROMPT * (tokens - last)
        self._ended += 1
        self._mean += max(1 / self._ended, NEWEST_OF_ALL) * (tokens - self._mean)

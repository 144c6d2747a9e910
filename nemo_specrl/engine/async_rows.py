"""Rows of an asynchronous engine: each is a coroutine that may be aborted wherever it waits."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from nemo_specrl.engine.requests import RolloutRequest

__all__ = ["RETRY_SECONDS", "AsyncRow", "AsyncRows", "Watched"]

T = TypeVar("T")

RETRY_SECONDS = 0.002
"""Interval after which a row that has not ended is aborted again."""


class Watched(Generic[T]):
    """A stream of outputs that calls a function before a cancellation reaches the stream.

    By the time a cancellation propagates out of ``AsyncLLM.generate``, it has forgotten its
    request. Apart from this, nothing is between the stream and the event loop: a task for each
    output would cost more.

    Args:
        stream: yields the outputs.
        cancelled: called, without arguments, when a task that waits for the next output is
            cancelled.
    """

    def __init__(self, stream: AsyncIterator[T], cancelled: Callable[[], None]) -> None:
        self._stream, self._cancelled = stream, cancelled

    def __aiter__(self) -> Watched[T]:
        return self

    @types.coroutine
    def __anext__(self) -> Generator[Any, Any, T]:
        steps = self._stream.__anext__().__await__()
        try:
            waits_for = next(steps)
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    if isinstance(error, asyncio.CancelledError):
                        self._cancelled()
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(sent)
        except StopIteration as end:  # it no longer waits: this is the output
            output: T = end.value
            return output


class AsyncRow:
    """A row that has not ended.

    Attributes:
        request_id: the caller's.
        request: what the row becomes; None for a row that does not use the cache.
        admitted: it may have requests in the engine.
        in_engine: a request of the row is in the engine now, or on the way to it.
        answered: this request has brought an output.
        start: number of tokens of the response before this request.
        spans_refit: the weights have changed since this request began.
        aborted: the row is to end as soon as it can.
        waiting: what it waits for outside of the engine.
        ended: set when the row ends.
    """

    def __init__(self, request_id: str, request: RolloutRequest | None = None) -> None:
        self.request_id, self.request = request_id, request
        self.admitted = self.in_engine = self.aborted = False
        self.answered = self.spans_refit = False
        self.start = 0
        self.waiting: asyncio.Future[Any] | None = None
        self.ended = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether an abort has nothing left to do: without the cache, a row has one request."""
        return self.ended.is_set() or (self.request is None and self.answered)

    def enter(self, policy_version: int) -> None:
        """Note that the row's next request goes to the engine.

        Args:
            policy_version: policy version of the weights that the engine has now.
        """
        self.in_engine, self.answered, self.spans_refit = True, False, False
        if self.request is not None:
            self.start = len(self.request.tokens)
            self.request.versions.begin(self.start, policy_version)

    def change_weights(self, made: int, policy_version: int) -> None:
        """Note that the weights have changed while the row's request is in the engine.

        Args:
            made: number of tokens that the old weights have made for this request.
            policy_version: policy version of the new weights.
        """
        self.spans_refit = True
        if self.request is not None:
            self.request.versions.begin(self.start + made, policy_version)

    def abort(self) -> None:
        """Make the row end as soon as it can."""
        self.aborted = True
        if self.waiting is not None:
            self.waiting.cancel()

    async def wait_for(
        self, awaited: Coroutine[Any, Any, Any], undo: Callable[[], None] | None = None
    ) -> bool:
        """Wait for something; return False at once if the row is aborted in the meantime.

        Args:
            awaited: what the row waits for.
            undo: takes back what was awaited, if the row's own task is cancelled at that moment.
        """
        self.waiting = asyncio.ensure_future(awaited)
        if self.aborted:
            self.waiting.cancel()
        try:
            await asyncio.wait([self.waiting])
            return not self.waiting.cancelled()
        except asyncio.CancelledError:
            if not self.waiting.cancel() and not self.waiting.cancelled() and undo is not None:
                undo()
            raise
        finally:
            self.waiting = None


class AsyncRows:
    """All rows of an engine that have not ended.

    Args:
        llm: the ``AsyncLLM``.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._rows: set[AsyncRow] = set()
        self._admitting = asyncio.Event()  # cleared while a pause waits for the rows before it
        self._admitting.set()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[AsyncRow]:
        return iter(list(self._rows))

    @contextlib.contextmanager
    def row(self, request_id: str, request: RolloutRequest | None) -> Iterator[AsyncRow]:
        """Register a row until the end of the context."""
        row = AsyncRow(request_id, request)
        self._rows.add(row)
        try:
            yield row
        finally:
            self._rows.discard(row)
            row.ended.set()

    async def admit(self, row: AsyncRow) -> None:
        """Wait until the row may begin, or is aborted."""
        await row.wait_for(self._admitting.wait())
        row.admitted = True

    @property
    def begun(self) -> bool:
        """Whether a row is in progress. Rows that a pause holds back have not begun."""
        return any(row.admitted for row in self._rows)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort the rows with these ids, wherever they are, and wait for them to end.

        vLLM aborts rows that do not use the cache, but not those that still wait for new weights.
        """
        names = set(request_ids)
        rows = [row for row in self._rows if row.request is not None or not row.in_engine]
        await self._abort([row for row in rows if row.request_id in names])

    async def pausing(self, mode: str, pause: Callable[..., Awaitable[Any]], kwargs: Any) -> None:
        """Pause the engine.

        With mode ``abort``, no row is left between two requests, where it would wait for the engine
        to be resumed. With mode ``wait``, the rows that have begun are completed first, so that a
        verified prefix is not continued by other weights.

        Args:
            mode: vLLM's pause mode.
            pause: vLLM's method.
            kwargs: its arguments.
        """
        rows = [row for row in self._drafted() if row.admitted]
        if mode == "wait":
            self._admitting.clear()
            try:
                await asyncio.gather(*(row.ended.wait() for row in rows))
                await pause(**kwargs)
            finally:
                self._admitting.set()
            return
        if mode == "abort":
            rows = self._drafted()
            for row in rows:
                row.abort()
        await pause(**kwargs)
        if mode == "abort":
            await self._abort(rows)

    def _drafted(self) -> list[AsyncRow]:
        """Rows that take more than one request of vLLM, which aborts the others itself."""
        return [row for row in self._rows if row.request is not None]

    async def _abort(self, rows: list[AsyncRow]) -> None:
        for row in rows:
            row.abort()
        while rows := [row for row in rows if not row.over]:
            # Repeat if a request was on its way to the engine, which did not know it yet.
            await self._llm.abort([row.request_id for row in rows if row.in_engine])
            await asyncio.sleep(RETRY_SECONDS)

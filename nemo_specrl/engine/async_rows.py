"""Rows of an asynchronous engine: each is a coroutine, which may be aborted wherever it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["AsyncRow"]


class AsyncRow:
    """A row that has not ended.

    Attributes:
        request_id: the caller's.
        admitted: it may have requests in the engine.
        in_engine: it has one now, or on the way.
        aborted: it shall end as soon as it can.
        waiting: what it waits for outside of the engine.
        ended: set at its end.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.admitted = self.in_engine = self.aborted = False
        self.waiting: asyncio.Future[Any] | None = None
        self.ended = asyncio.Event()

    def abort(self) -> None:
        """Have it end as soon as it can."""
        self.aborted = True
        if self.waiting is not None:
            self.waiting.cancel()

    async def wait_for(
        self, awaited: Coroutine[Any, Any, Any], undo: Callable[[], None] | None = None
    ) -> bool:
        """Wait for something; False, at once, where the row is aborted meanwhile.

        Args:
            awaited: what the row waits for.
            undo: takes back what it has waited for, if the row's own task is cancelled just then.
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

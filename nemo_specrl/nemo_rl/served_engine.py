"""The engine as NeMo-RL's HTTP server sees it (``expose_http_server``, which NeMo-Gym needs).

The server runs in a thread of the worker with its own event loop. Its requests are handed over to
the worker's loop, in which everything else that the plug-in does with the engine happens, and their
outputs come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

__all__ = ["ServedEngine"]

Serve = Callable[..., AsyncGenerator[Any, None]]


class ServedEngine:
    """Stands in for the server's ``AsyncLLM``; everything except ``generate`` is the engine's own.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._serve: Serve = llm.generate
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, serve: Serve) -> None:
        """Serve requests by another function from now on, in the present event loop.

        Args:
            serve: takes the arguments of ``AsyncLLM.generate`` and yields its outputs.
        """
        self._serve, self._loop = serve, asyncio.get_running_loop()

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request, which ends if this generator is closed before it does."""
        if self._loop is None:  # nothing is attached yet
            async for output in self._serve(*args, **kwargs):
                yield output
            return
        here = asyncio.get_running_loop()
        outputs: asyncio.Queue[Any] = asyncio.Queue()

        async def serve() -> None:
            try:
                async with contextlib.aclosing(self._serve(*args, **kwargs)) as stream:
                    async for output in stream:
                        here.call_soon_threadsafe(outputs.put_nowait, output)
            finally:
                here.call_soon_threadsafe(outputs.put_nowait, None)

        served = asyncio.run_coroutine_threadsafe(serve(), self._loop)
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await asyncio.wrap_future(served)  # raises what the request raised
        finally:
            served.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

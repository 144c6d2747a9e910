"""AsyncPrefixReuse: ``AsyncLLM.generate`` with the accepted prefixes of earlier responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.errors import ConfigError
from nemo_specrl.reuse.base import Place, ReuseBase, request_output
from nemo_specrl.reuse.row import EngineRequest, Row
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from nemo_specrl.cache import HistoryCache

__all__ = ["AsyncPrefixReuse"]

Aborted = asyncio.Future[None]  # done when the caller has aborted a row

RETRY_SECONDS = 0.002
"""Interval after which a request that has not ended is aborted again."""


class AsyncPrefixReuse(ReuseBase):
    """A drop-in for ``AsyncLLM.generate`` that reuses earlier responses (SPEC-RL).

    The weights may not change while rows are running.

    Args:
        llm: a running ``AsyncLLM``.
        config, cache, seed, policy_version: see :class:`~nemo_specrl.reuse.llm.PrefixReuse`.

    Attributes:
        metrics: :class:`~nemo_specrl.reuse.metrics.ReuseMetrics` since the caller last replaced it.

    Raises:
        ConfigError: as for ``PrefixReuse``.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: SpecRLConfig,
        cache: HistoryCache | None,
        seed: int = 0,
        policy_version: int = 0,
    ) -> None:
        self.llm = llm
        super().__init__(llm, config, cache, seed, policy_version)
        self._lookups = ThreadPoolExecutor(1, "nemo-specrl-drafts")
        self._running = 0  # rows that have a place in the engine
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._names: dict[str, list[Aborted]] = {}  # of prompts in progress, by request id
        self._undrafted: deque[tuple[list[Place], asyncio.Future[list[Rollout | None]]]] = deque()

    async def set_policy_version(self, version: int) -> None:
        """Begin a policy version, after every refit.

        Drops the engine's prefix cache, whose blocks are those of the old weights.

        Args:
            version: version of the weights that the engine has now.

        Raises:
            ConfigError: rows or other requests are running, or it is no version; it has not
                changed.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.flush)
        if self._names or not await self.llm.reset_prefix_cache() or self._names:
            raise ConfigError(
                f"policy_version = {version}: requests are still running, whose prefixes are those "
                "of the old weights; let them end before the weights change"
            )
        self._begin(version)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Generate the ``n`` responses to a prompt and yield them once, when they are complete.

        Args:
            prompt: token ids or text. Greedy requests, those for prompt log-probs, those with
                images and those with ``extra_args={"spec_rl": False}`` are vLLM's alone, and yield
                all its outputs.
            sampling_params: as in vLLM.
            request_id: unique among the rows in progress.
            kwargs: passed to ``AsyncLLM.generate``.

        Raises:
            UnsupportedSampling: a draft could not be verified under these parameters.
        """
        places = self._places(prompt, sampling_params, "")
        if places is None:
            async with contextlib.aclosing(
                self.llm.generate(prompt, sampling_params, request_id, **kwargs)
            ) as stream:
                async for output in stream:
                    yield output
            return
        aborted: Aborted = asyncio.get_running_loop().create_future()
        self._names.setdefault(request_id, []).append(aborted)
        try:
            drafts = await self._drafts_of(places)
            rows = [self._row(*pair) for pair in zip(places, drafts, strict=True)]
            tasks = [
                asyncio.ensure_future(self._run(row, name, aborted, kwargs))
                for row, name in zip(rows, _names(request_id, len(rows)), strict=True)
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            yield request_output(places[0], rows, request_id)
        finally:
            self._names[request_id].remove(aborted)
            if not self._names[request_id]:
                del self._names[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort rows, wherever they are: they come back with ``finish_reason`` "abort" and the
        tokens that they have.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        for aborted in (a for name in names for a in self._names.get(name, ())):
            if not aborted.done():
                aborted.set_result(None)
        await self.llm.abort([name for name in names if name not in self._names])

    async def _drafts_of(self, places: list[Place]) -> list[Rollout | None]:
        """Take the drafts of a prompt, in one call with those of all prompts that wait for theirs.

        Blocking calls of the cache are made on a thread of their own.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Rollout | None]] = loop.create_future()
        self._undrafted.append((places, future))

        def take() -> None:
            waiting = [self._undrafted.popleft() for _ in range(len(self._undrafted))]
            drafts = iter(self._take_drafts([place for places, _ in waiting for place in places]))
            for places, future in waiting:
                found = [next(drafts) for _ in places]
                loop.call_soon_threadsafe(_answer, future, found)

        self._lookups.submit(take)
        return await future

    async def _run(self, row: Row, name: str, aborted: Aborted, kwargs: dict[str, Any]) -> None:
        """Take a row through the engine."""
        placed = await self._enter(aborted)
        try:
            steps = row.run()
            request = next(steps)
            with contextlib.suppress(StopIteration):
                while True:
                    output = (
                        None if aborted.done() else await self._ask(request, name, aborted, kwargs)
                    )
                    request = steps.send(output)
            self._end(row)
        finally:
            if placed:
                self._leave()

    async def _ask(
        self, request: EngineRequest, name: str, aborted: Aborted, kwargs: dict[str, Any]
    ) -> RequestOutput | None:
        """Have a request made; return its final output."""

        async def final() -> RequestOutput | None:
            stream = self.llm.generate(request.prompt, request.params, name, **kwargs)
            outputs = [output async for output in stream]  # the final one
            return outputs[-1] if outputs else None

        task = asyncio.ensure_future(final())
        try:
            await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
            while not task.done():  # again, if the engine did not know the request yet
                await self.llm.abort(name)
                await asyncio.wait({task}, timeout=RETRY_SECONDS)
            return task.result()
        finally:
            if not task.done():  # this task was cancelled
                task.cancel()
                await asyncio.wait({task})

    async def _enter(self, aborted: Aborted) -> bool:
        """Wait for a place in the engine (``window``); False if the row is aborted before."""
        if not self._waiting and self._has_room:
            self._running += 1
            return True
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await asyncio.wait({place, aborted}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not place.cancel():
                self._leave()
            raise
        return place.done() or not place.cancel()

    @property
    def _has_room(self) -> bool:
        return self.window is None or self._running < self.window

    def _leave(self) -> None:
        """Give a place in the engine to the rows that have waited longest."""
        self._running -= 1
        while self._waiting and self._has_room:
            place = self._waiting.popleft()
            if not place.done():  # it may have been aborted
                place.set_result(None)
                self._running += 1


def _names(request_id: str, rows: int) -> list[str]:
    """The ids under which the rows of a prompt run."""
    return [request_id] if rows == 1 else [f"{request_id}_{i}" for i in range(rows)]


def _answer(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():  # its row may have been cancelled
        future.set_result(result)

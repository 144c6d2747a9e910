"""The driver's side of asynchronous engines, to which NeMo-RL passes rows one by one.

NeMo-RL passes them to its engines in turn. Here the first rows of a prompt stay together, so that
they draft from each other, and later ones are balanced (``nemo_specrl.engine.row_queue``).
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Hashable
from contextvars import ContextVar
from typing import Any

import torch
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.engine.row_queue import RowQueue
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.nemo_rl import compat
from nemo_specrl.nemo_rl.context import SAMPLE_INDICES, RunContext
from nemo_specrl.rollout import prompt_key

__all__ = ["SingleRows"]

_engine: ContextVar[int | None] = ContextVar("engine", default=None)
"""Engine of the current task's row; None: NeMo-RL chooses it."""


class SingleRows(VllmGeneration):
    """``VllmGeneration`` that chooses the engine of each single row, once it drafts from a cache.

    Attributes:
        fleet_selector: from NeMo-RL's main, which keeps rows away from failed engines; if there is
            one, the choice is left to it.
    """

    cache: ClusterCache | None = None
    fleet_selector: Any = None
    _validating = False
    _queue: RowQueue | None = None
    _turn: int | None = None

    _run: RunContext

    @property
    def current_generate_dp_shard_idx(self) -> int:
        """The engine to which NeMo-RL sends the next row."""
        engine = _engine.get()
        if engine is not None:
            return engine
        assert self._turn is not None
        return self._turn

    @current_generate_dp_shard_idx.setter
    def current_generate_dp_shard_idx(self, engine: int) -> None:
        self._turn = engine

    def _choose_engines(self) -> None:
        """Choose the engine of each row from now on, if there are several asynchronous engines.

        Raises:
            IncompatibleVersion: this NeMo-RL chooses the engine elsewhere.
        """
        if self.dp_size < 2 or not self.cfg["vllm_cfg"]["async_engine"]:
            return
        if self._turn is None:
            raise IncompatibleVersion(
                "VllmGeneration has no current_generate_dp_shard_idx, by which rows are given to "
                f"engines; this release of nemo_specrl works with {compat.KNOWN}"
            )
        together: float = self._run.group
        # The collector has an event loop for each batch, and begins several batches at once; the
        # single controller has one loop. v0.7.0's collector has a loop for each prompt: its prompts
        # are taken in the order in which they came, as batches are.
        batch = None
        if self._run.prompts is not None:  # with fewer prompts than engines, each gets some rows
            batch = self._run.prompts * self._run.group
            together = min(together, batch / self.dp_size)
        places = (self.cfg.get("vllm_kwargs") or {}).get("max_num_seqs")
        self._queue = RowQueue(self.dp_size, together, places, batch)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Generate a response to each row as it comes; the worker claims a sample index for it."""
        prompt = None
        if self.cache is not None and not self._validating and not greedy and data.size:
            data = data.slice(0, data.size)  # the caller's batch is not changed
            data[SAMPLE_INDICES] = torch.full((data.size,), -1)
            prompt = prompt_key(data["input_ids"][0, : data["input_lengths"][0]].numpy())
        rows = functools.partial(super().generate_async, data, greedy=greedy)
        async for result in self._placed(rows, prompt):
            yield result

    async def generate_text_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Generate a text for one prompt; the worker claims a sample index for it."""
        prompt = None
        if self.cache is not None and self._run.evaluates and data.size:
            data = data.slice(0, data.size)
            data[SAMPLE_INDICES] = torch.full((data.size,), -1)
            text = data["prompts"][0]
            prompt = text if isinstance(text, str) else None  # otherwise it has images
        rows = functools.partial(super().generate_text_async, data, greedy=greedy)
        async for result in self._placed(rows, prompt):
            yield result

    async def _placed(
        self, rows: Callable[[], AsyncIterator[Any]], prompt: Hashable
    ) -> AsyncIterator[Any]:
        """Yield what the base class generates for a row, on the engine that the queue chose."""
        queue = self._queue
        if queue is None or self.fleet_selector is not None:
            async for result in rows():
                yield result
            return
        async with queue.place(prompt) as place:
            _engine.set(place.engine)  # read in this task before it first waits
            async for index, output in rows():
                lengths = output.get("generation_lengths")
                queue.leave(place, None if lengths is None else int(lengths[0]))
                yield index, output

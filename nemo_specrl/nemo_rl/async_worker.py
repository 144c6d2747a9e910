"""The asynchronous worker (``vllm_cfg.async_engine: true``), which uses AsyncSpeculativeLLM.

Rows arrive one by one, and training and validation rows may be in the engine together, so whether
to draft for a row is decided for each call. Requests to the worker's HTTP server, through which
NeMo-Gym leads conversations, find their drafts by their tokens.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.served_requests import ServingSpeculativeLLM
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.nemo_rl.compat import CHECKPOINT_ENGINE_UPDATE, KNOWN
from nemo_specrl.nemo_rl.context import SAMPLE_INDICES, RunContext
from nemo_specrl.nemo_rl.rollout_metadata import MetadataLog
from nemo_specrl.nemo_rl.served_engine import ServedEngine
from nemo_specrl.nemo_rl.sparse_refits import held_open
from nemo_specrl.nemo_rl.worker_base import ASYNC_CALLS, DraftingWorker

__all__ = ["ASYNC_OPTIONS", "SpecVllmAsyncGenerationWorker", "SpecVllmAsyncGenerationWorkerImpl"]

ASYNC_OPTIONS: dict[str, Any] = {
    "max_concurrency": ASYNC_CALLS,
    "runtime_env": get_nsight_config_if_pattern_matches("vllm_async_generation_worker"),
}
"""Ray's options for asynchronous workers: those of NeMo-RL's own, with more concurrent calls."""

_drafting: ContextVar[bool] = ContextVar("drafting", default=False)
"""Whether the current task's row is drafted for."""


class SpecVllmAsyncGenerationWorkerImpl(DraftingWorker, VllmAsyncGenerationWorkerImpl):
    """The worker's methods, without Ray's decorator."""

    _speculative: ServingSpeculativeLLM | None = None
    _server: ServedEngine | None = None

    async def spec_rl_attach(
        self, cache: ClusterCache, run: RunContext, policy_version: int
    ) -> str:
        """Start drafting from ``cache``; called once, after the engine has started.

        Returns:
            The id of this worker's node in Ray.
        """
        loop = asyncio.get_running_loop()
        node = self._attach(
            ServingSpeculativeLLM,
            cache,
            run,
            policy_version,
            # The receiver's threads have another event loop, or none.
            lambda: held_open(self._refit, loop),
        )
        assert self._speculative is not None
        self.llm = _DraftingEngine(self._speculative, self._metadata)
        if run.served:
            if self._server is None:
                raise IncompatibleVersion(
                    "this NeMo-RL does not set its HTTP server up where it is expected; this "
                    f"release of nemo_specrl works with {KNOWN}"
                )
            self._server.attach(self._serve)
        return node

    def _setup_vllm_openai_api_server(self, app: Any) -> Any:
        """Set the HTTP server up as the base class does, for an engine that drafts."""
        engine = self.llm
        self.llm = self._server = ServedEngine(engine)
        try:
            return super()._setup_vllm_openai_api_server(app)
        finally:
            self.llm = engine

    def _serve(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Generate for a request of the HTTP server."""
        assert self._speculative is not None and self._metadata is not None
        # Turns are noted during validation, too: asynchronous GRPO begins no conversations then,
        # but those that have begun continue.
        drafting, note = not self._paused, self._metadata.note_turn
        return self._speculative.serve(*args, drafting=drafting, note=note, **kwargs)

    async def spec_rl_take_metrics(self) -> EngineMetrics | None:
        """Return the metrics of the rows since they were last taken."""
        if self._speculative is None:
            return None
        await self._speculative.count_tree_drafts()
        metrics, self._speculative.metrics = self._speculative.metrics, EngineMetrics()
        metrics.cache_errors += self._cache.take_failures()
        return metrics

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Generate as the base class does, with a draft for a row of training."""
        self._choose_drafting(data, greedy)
        async for result in super().generate_async(data, greedy=greedy):
            yield result

    async def generate_text_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Do the same for a row of an evaluation, whose prompt is a text."""
        self._choose_drafting(data, greedy)
        async for result in super().generate_text_async(data, greedy=greedy):
            yield result

    def _choose_drafting(self, data: Any, greedy: bool) -> None:
        """Decide whether this call's task drafts: the base class calls self.llm.generate in it."""
        _drafting.set(SAMPLE_INDICES in data and not self._paused and not greedy)

    # These methods change the engine's weights; sparse refits do it apart from them, in the
    # receiver's threads.

    async def update_weights_via_ipc_zmq_async(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and increment the policy version."""
        return await self._refit(super().update_weights_via_ipc_zmq_async, *args, **kwargs)

    async def update_weights_from_collective_async(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and increment the policy version."""
        return await self._refit(super().update_weights_from_collective_async, *args, **kwargs)

    async def nccl_reshard_refit_async(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and increment the policy version."""
        return await self._refit(super().nccl_reshard_refit_async, *args, **kwargs)

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Pass on a call to a checkpoint engine; begin a version if it updates the weights."""
        call = super().checkpoint_engine_rpc_async
        if checkpoint_method == CHECKPOINT_ENGINE_UPDATE:
            return await self._refit(call, checkpoint_method, *args, **kwargs)
        return await call(checkpoint_method, *args, **kwargs)

    async def _refit(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Update the weights and begin a policy version.

        Running rows continue (``async_grpo.in_flight_weight_updates``). NeMo-RL's own
        ``recompute_kv_cache_after_weight_updates`` has no effect on them: its
        ``reset_prefix_cache`` does nothing while requests run. Here it takes effect.
        """
        speculative = self._speculative
        if speculative is None:
            return await update(*args, **kwargs)
        return await speculative.refit(
            functools.partial(update, *args, **kwargs),
            speculative.policy_version + 1,
            recompute_kv=self._recompute_kv,
        )


class _DraftingEngine:
    """Stands in for ``self.llm``: drafts for rows that ask for it, and passes on all else."""

    def __init__(self, speculative: ServingSpeculativeLLM, metadata: MetadataLog | None) -> None:
        self._speculative, self._metadata = speculative, metadata

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if _drafting.get():
            return self._drafted(*args, **kwargs)
        return self._speculative.generate_plain(*args, **kwargs)

    async def abort(self, *args: Any, **kwargs: Any) -> None:
        await self._speculative.abort(*args, **kwargs)

    async def pause_generation(self, **kwargs: Any) -> None:
        await self._speculative.pause_generation(**kwargs)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        await self._speculative.sleep(*args, **kwargs)

    async def _drafted(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async for output in self._speculative.generate(*args, **kwargs):
            if self._metadata is not None:
                self._metadata.note([output])
            yield output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculative.llm, name)


@ray.remote(**ASYNC_OPTIONS)
class SpecVllmAsyncGenerationWorker(SpecVllmAsyncGenerationWorkerImpl):
    """The Ray actor."""

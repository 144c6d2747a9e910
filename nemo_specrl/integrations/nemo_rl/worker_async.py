"""The asynchronous engine's side: AsyncSpeculativeLLM in the place of vLLM's AsyncLLM.

As ``worker``, for ``vllm_cfg.async_engine: true``. Rows come one by one, and those of training and
of validation may be in the engine together: what a row is, its call says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrl.cache.cluster.driver import ClusterCache
from nemo_specrl.engine.asynchronous import AsyncSpeculativeLLM
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.integrations.nemo_rl.run import SAMPLE_INDICES, Run

__all__ = ["SpecVllmAsyncGenerationWorker", "SpecVllmAsyncGenerationWorkerImpl"]

_drafting: ContextVar[bool] = ContextVar("drafting", default=False)


class SpecVllmAsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """A worker that drafts, where its driver has attached a cache to it."""

    llm: Any
    _speculative: AsyncSpeculativeLLM | None = None
    _paused = False

    async def spec_rl_attach(self, cache: ClusterCache, run: Run, policy_version: int) -> str:
        """Get to know the cache; called once, when the engine runs. Returns the node's id."""
        self._speculative = AsyncSpeculativeLLM(self.llm, cache, run.spec_rl, seed=run.seed)
        self._speculative.policy_version = policy_version
        self._cache = cache
        self.llm = _Seam(self._speculative)
        return str(ray.get_runtime_context().get_node_id())

    async def spec_rl_pause(self, paused: bool) -> None:
        """Decode plainly, and keep nothing, while ``paused``."""
        self._paused = paused

    async def spec_rl_set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Decode another share of the rows plainly, from the next one on."""
        if self._speculative is not None:
            self._speculative.fresh_fraction = fresh_fraction

    async def spec_rl_policy_version(self) -> int:
        """Of the weights in the engine."""
        return 0 if self._speculative is None else self._speculative.policy_version

    async def spec_rl_take_metrics(self) -> EngineMetrics | None:
        """Of the rows since this was last asked."""
        if self._speculative is None:
            return None
        metrics, self._speculative.metrics = self._speculative.metrics, EngineMetrics()
        metrics.cache_errors += self._cache.take_failures()
        return metrics

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """As the base class, whose call of ``self.llm.generate`` goes to AsyncSpeculativeLLM."""
        _drafting.set(
            SAMPLE_INDICES in data and not self._paused and not greedy
        )  # of this call's task
        async for result in super().generate_async(data, greedy=greedy):
            yield result

    # The weights move in these calls and in no other (design: policy version).

    async def update_weights_via_ipc_zmq_async(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; then the policy version moves."""
        return await self._moved(await super().update_weights_via_ipc_zmq_async(*args, **kwargs))

    async def update_weights_from_collective_async(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; then the policy version moves."""
        result = await super().update_weights_from_collective_async(*args, **kwargs)
        return await self._moved(result)

    async def nccl_reshard_refit_async(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; then the policy version moves."""
        return await self._moved(await super().nccl_reshard_refit_async(*args, **kwargs))

    async def _moved(self, result: Any) -> Any:
        if self._speculative is not None:
            self._speculative.policy_version += 1
            # A continuation must not read what the old weights prefilled. Without effect on what
            # runs at this moment, which NeMo-RL drains or recomputes as its recipe says.
            await self.llm.reset_prefix_cache()
        return result


class _Seam:
    """What stands in ``self.llm``: the engine, whose training rows draft."""

    def __init__(self, speculative: AsyncSpeculativeLLM) -> None:
        self._speculative = speculative

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        engine = self._speculative if _drafting.get() else self._speculative.llm
        return engine.generate(prompt, sampling_params, request_id, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculative.llm, name)


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class SpecVllmAsyncGenerationWorker(SpecVllmAsyncGenerationWorkerImpl):
    """The actor."""

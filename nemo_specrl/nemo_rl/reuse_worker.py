"""NeMo-RL's workers for ``preset: reuse``: rows of a training reuse prefixes of earlier responses.

Run in the workers' own environment, which has vLLM. A policy version begins with each refit. The
decorated classes at the end are empty, because Ray pickles a decorated class by value, but the
classes that it inherits from by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrl.cache import open_cache
from nemo_specrl.config import SpecRLConfig
from nemo_specrl.nemo_rl.recipe import OWN, REUSED
from nemo_specrl.reuse.async_llm import AsyncPrefixReuse
from nemo_specrl.reuse.llm import PrefixReuse
from nemo_specrl.reuse.metrics import ReuseMetrics

__all__ = ["AsyncReuseWorker", "AsyncReuseWorkerImpl", "ReuseWorker", "ReuseWorkerImpl"]

_reusing: ContextVar[bool] = ContextVar("reusing", default=False)
"""Whether the rows of the current call or task may reuse prefixes."""


def _reuse_of(kind: Any, worker: Any, vllm_config: Any) -> Any:
    """Make the engine's wrapper from what the driver wrote into the generation block."""
    spec_rl = SpecRLConfig.model_validate(worker.cfg["vllm_kwargs"]["additional_config"]["spec_rl"])
    vocabulary = spec_rl.cache.vocabulary
    assert vocabulary is not None  # the driver has it from the tokenizer
    cache = open_cache(spec_rl.cache, vocabulary)
    version = worker.cfg[OWN]["first_version"]
    return kind(worker.llm, spec_rl, cache, vllm_config.model_config.seed, version)


def _counted(metrics: ReuseMetrics) -> dict[str, float]:
    return {name: n for name, n in dataclasses.asdict(metrics).items() if n is not None}


def _refitting(name: str) -> Callable[..., Any]:
    """Make a method that changes the weights as NeMo-RL's does, and begins a policy version."""

    def refit(self: ReuseWorkerImpl, *args: Any, **kwargs: Any) -> Any:
        result = getattr(super(ReuseWorkerImpl, self), name)(*args, **kwargs)
        self._reuse.policy_version += 1
        return result

    return refit


def _refitting_async(name: str) -> Callable[..., Any]:
    """The same for asynchronous engines."""

    async def refit(self: AsyncReuseWorkerImpl, *args: Any, **kwargs: Any) -> Any:
        result = await getattr(super(AsyncReuseWorkerImpl, self), name)(*args, **kwargs)
        await self._reuse.set_policy_version(self._reuse.policy_version + 1)
        return result

    return refit


class ReuseWorkerImpl(VllmGenerationWorkerImpl):
    """The synchronous worker's methods, without Ray's decorator."""

    llm: Any
    _reuse: PrefixReuse

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(llm_kwargs)
        self._reuse = _reuse_of(PrefixReuse, self, self.llm.llm_engine.vllm_config)
        self.llm = _Reusing(self.llm, self._reuse)
        self._counts: list[dict[str, float]] = []

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate as NeMo-RL does; rows of a training reuse prefixes."""
        reuses = REUSED in data and not greedy and len(data["input_ids"]) > 0
        before = _reusing.set(reuses)
        try:
            return super().generate(data, greedy=greedy)
        finally:
            _reusing.reset(before)
            if reuses:
                self._counts.append(_counted(self._reuse.metrics))

    def spec_rl_take_counts(self) -> list[dict[str, float]]:
        """Return the counts of the calls since they were last taken."""
        counts, self._counts = self._counts, []
        return counts

    update_weights_via_ipc_zmq = _refitting("update_weights_via_ipc_zmq")
    update_weights_from_collective = _refitting("update_weights_from_collective")
    nccl_reshard_refit = _refitting("nccl_reshard_refit")


class AsyncReuseWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """The asynchronous worker's methods, without Ray's decorator."""

    llm: Any
    _reuse: AsyncPrefixReuse

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(llm_kwargs)
        self._reuse = _reuse_of(AsyncPrefixReuse, self, self.llm.vllm_config)
        self.llm = _Reusing(self.llm, self._reuse)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """Generate as NeMo-RL does; a row of a training reuses a prefix."""
        _reusing.set(REUSED in data and not greedy)  # the row's task copies the context
        async for result in super().generate_async(data, greedy=greedy):
            yield result

    async def spec_rl_take_counts(self) -> list[dict[str, float]]:
        """Return the counts of the rows since they were last taken."""
        counts, self._reuse.metrics = _counted(self._reuse.metrics), ReuseMetrics()
        return [counts]

    update_weights_via_ipc_zmq_async = _refitting_async("update_weights_via_ipc_zmq_async")
    update_weights_from_collective_async = _refitting_async("update_weights_from_collective_async")
    nccl_reshard_refit_async = _refitting_async("nccl_reshard_refit_async")


class _Reusing:
    """Stands in for the worker's ``LLM`` or ``AsyncLLM``: rows that may reuse go to the wrapper."""

    def __init__(self, llm: Any, reuse: PrefixReuse | AsyncPrefixReuse) -> None:
        self._llm, self._reuse = llm, reuse

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        target: Any = self._reuse if _reusing.get() else self._llm
        return target.generate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class ReuseWorker(ReuseWorkerImpl):
    """The Ray actor."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class AsyncReuseWorker(AsyncReuseWorkerImpl):
    """The Ray actor of an asynchronous engine."""

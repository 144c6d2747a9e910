"""The engine's side of NeMo-RL's generation: SpeculativeLLM in the place of ``vllm.LLM``.

Runs in the worker's own environment, which has vLLM. The class that Ray decorates is empty: Ray
sends such a class by value, and what it inherits by name.
"""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

from nemo_specrl.cache.cluster.driver import ClusterCache
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.speculative import SpeculativeLLM
from nemo_specrl.integrations.nemo_rl.run import SAMPLE_INDICES, Run

__all__ = ["SpecVllmGenerationWorker", "SpecVllmGenerationWorkerImpl"]


class SpecVllmGenerationWorkerImpl(VllmGenerationWorkerImpl):
    """A worker that drafts, where its driver has attached a cache to it."""

    llm: Any
    _speculative: SpeculativeLLM | None = None
    _paused = False

    def spec_rl_attach(self, cache: ClusterCache, run: Run, policy_version: int) -> str:
        """Get to know the cache; called once, when the engine runs. Returns the node's id."""
        self._speculative = SpeculativeLLM(self.llm, cache, run.spec_rl, seed=run.seed)
        self._speculative.policy_version = policy_version
        self._cache = cache
        self._metrics = EngineMetrics()
        return str(ray.get_runtime_context().get_node_id())

    def spec_rl_pause(self, paused: bool) -> None:
        """Decode plainly, and keep nothing, while ``paused``."""
        self._paused = paused

    def spec_rl_set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Decode another share of the rows plainly, from the next call on."""
        if self._speculative is not None:
            self._speculative.fresh_fraction = fresh_fraction

    def spec_rl_policy_version(self) -> int:
        """Of the weights in the engine."""
        return 0 if self._speculative is None else self._speculative.policy_version

    def spec_rl_take_metrics(self) -> EngineMetrics | None:
        """Of the calls since this was last asked."""
        if self._speculative is None:
            return None
        metrics, self._metrics = self._metrics, EngineMetrics()
        metrics.cache_errors += self._cache.take_failures()
        return metrics

    def spec_rl_last_metrics(self) -> EngineMetrics:
        """Of the last call."""
        return EngineMetrics() if self._speculative is None else self._speculative.metrics

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """As the base class, whose call of ``self.llm.generate`` goes to SpeculativeLLM."""
        sample_indices = data.get(SAMPLE_INDICES)
        speculative = self._speculative
        if sample_indices is None or speculative is None or self._paused or greedy:
            return super().generate(data, greedy=greedy)
        llm = self.llm
        self.llm = _Seam(speculative, sample_indices.tolist())
        try:
            output = super().generate(data, greedy=greedy)
        finally:
            self.llm = llm
        self._cache.deliver()  # the next step's look-ups may come from anywhere
        self._metrics = self._metrics + speculative.metrics
        return output

    # The weights move in these calls and in no other (design: policy version).

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; then the policy version moves."""
        return self._moved(super().update_weights_via_ipc_zmq(*args, **kwargs))

    def update_weights_from_collective(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; then the policy version moves."""
        return self._moved(super().update_weights_from_collective(*args, **kwargs))

    def nccl_reshard_refit(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; then the policy version moves."""
        return self._moved(super().nccl_reshard_refit(*args, **kwargs))

    def _moved(self, result: Any) -> Any:
        if self._speculative is not None:
            self._speculative.policy_version += 1
        return result


class _Seam:
    """What stands in ``self.llm`` during one ``generate`` call of the base class."""

    def __init__(self, speculative: SpeculativeLLM, sample_indices: list[int]) -> None:
        self._speculative, self._sample_indices = speculative, sample_indices

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: Any = True) -> Any:
        return self._speculative.generate(
            prompts, sampling_params, sample_indices=self._sample_indices, use_tqdm=use_tqdm
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculative.llm, name)


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecVllmGenerationWorker(SpecVllmGenerationWorkerImpl):
    """The actor."""

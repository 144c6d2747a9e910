"""The synchronous worker, which generates through SpeculativeLLM instead of ``vllm.LLM``.

Runs in the worker's own environment, which has vLLM. The decorated class at the end is empty,
because Ray pickles a decorated class by value, and the classes that it inherits from by name.
"""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.sync_engine import SpeculativeLLM
from nemo_specrl.nemo_rl.compat import CHECKPOINT_ENGINE_UPDATE
from nemo_specrl.nemo_rl.context import PROMPT_KEYS, SAMPLE_INDICES, Run, engine_arguments
from nemo_specrl.nemo_rl.rollout_metadata import Record, RecordLog, SequenceKey

__all__ = ["SpecVllmGenerationWorker", "SpecVllmGenerationWorkerImpl"]


class SpecVllmGenerationWorkerImpl(VllmGenerationWorkerImpl):
    """A worker that drafts rows once the driver has attached a cache."""

    llm: Any
    _speculative: SpeculativeLLM | None = None
    _records: RecordLog | None = None
    _paused = False

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Create the engine, with what lossless drafting needs, if anything."""
        super()._create_engine(engine_arguments(llm_kwargs, self.cfg["spec_rl"]))

    def spec_rl_attach(self, cache: ClusterCache, run: Run, policy_version: int) -> str:
        """Start drafting from ``cache``; called once, after the engine has started.

        Returns:
            The id of this worker's node in Ray.
        """
        self._speculative = SpeculativeLLM(
            self.llm, cache, run.spec_rl, seed=run.seed, policy_version=policy_version
        )
        self._cache = cache
        self._metrics = EngineMetrics()
        if run.needs_records:
            self._records = RecordLog(births=run.spec_rl.clip_anchor == "birth")
        return str(ray.get_runtime_context().get_node_id())

    def spec_rl_pause(self, paused: bool) -> None:
        """Decode without drafts and keep nothing in the cache while ``paused``."""
        self._paused = paused

    def spec_rl_set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Decode another share of the rows without a draft, from the next call on."""
        if self._speculative is not None:
            self._speculative.fresh_fraction = fresh_fraction

    def spec_rl_policy_version(self) -> int:
        """Return the policy version of the engine's weights."""
        return 0 if self._speculative is None else self._speculative.policy_version

    def spec_rl_take_metrics(self) -> EngineMetrics | None:
        """Return the metrics of the calls since they were last taken."""
        if self._speculative is None:
            return None
        metrics, self._metrics = self._metrics, EngineMetrics()
        metrics.cache_errors += self._cache.take_failures()
        return metrics

    def spec_rl_last_metrics(self) -> EngineMetrics:
        """Return the metrics of the last call."""
        return EngineMetrics() if self._speculative is None else self._speculative.metrics

    def spec_rl_take_records(self) -> list[tuple[SequenceKey, Record]]:
        """Return the records of the rollouts since they were last taken."""
        return [] if self._records is None else self._records.take()

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate as the base class does, with a draft for each row that has an identity."""
        speculative = self._speculative
        if SAMPLE_INDICES not in data or speculative is None or self._paused or greedy:
            return super().generate(data, greedy=greedy)
        llm = self.llm
        # The base class calls self.llm.generate(prompts, sampling_params, use_tqdm=...).
        self.llm = _DraftingEngine(
            speculative, data[SAMPLE_INDICES].tolist(), data[PROMPT_KEYS], self._records
        )
        try:
            output = super().generate(data, greedy=greedy)
        finally:
            self.llm = llm
        self._cache.deliver()  # the next step's look-ups may come from any node
        self._metrics = self._metrics + speculative.metrics
        return output

    # These four methods change the engine's weights; sparse refits, which do it by others, are
    # refused (run.py).

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and count the policy version up."""
        return self._refitted(super().update_weights_via_ipc_zmq(*args, **kwargs))

    def update_weights_from_collective(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and count the policy version up."""
        return self._refitted(super().update_weights_from_collective(*args, **kwargs))

    def nccl_reshard_refit(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and count the policy version up."""
        return self._refitted(super().nccl_reshard_refit(*args, **kwargs))

    def checkpoint_engine_rpc(self, checkpoint_method: str, *args: Any, **kwargs: Any) -> Any:
        """Pass on a call to a checkpoint engine; count up where it updates the weights."""
        result = super().checkpoint_engine_rpc(checkpoint_method, *args, **kwargs)
        if checkpoint_method == CHECKPOINT_ENGINE_UPDATE:
            result = self._refitted(result)
        return result

    def _refitted(self, result: Any) -> Any:
        """Begin a policy version, with an empty prefix cache."""
        if self._speculative is not None:
            self._speculative.policy_version += 1
        return result


class _DraftingEngine:
    """Stands in for ``self.llm`` during one call of the base class's ``generate``."""

    def __init__(
        self,
        speculative: SpeculativeLLM,
        sample_indices: list[int],
        prompt_keys: list[bytes],
        records: RecordLog | None,
    ) -> None:
        self._speculative, self._records = speculative, records
        self._sample_indices, self._prompt_keys = sample_indices, prompt_keys

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: Any = True) -> Any:
        outputs = self._speculative.generate(
            prompts,
            sampling_params,
            sample_indices=self._sample_indices,
            prompt_keys=self._prompt_keys,
            use_tqdm=use_tqdm,
        )
        if self._records is not None:
            self._records.note(outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculative.llm, name)


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecVllmGenerationWorker(SpecVllmGenerationWorkerImpl):
    """The Ray actor."""

"""The synchronous worker, which generates through SpeculativeLLM instead of ``vllm.LLM``.

Runs in the worker's own environment, which has vLLM. The decorated class at the end is empty,
because Ray pickles a decorated class by value, but the classes that it inherits from by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.engine.data_parallel import step_along
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.sync_engine import SpeculativeLLM
from nemo_specrl.nemo_rl.compat import CHECKPOINT_ENGINE_UPDATE
from nemo_specrl.nemo_rl.context import (
    ENDED,
    GROUPS,
    PHASE,
    PROMPT_KEYS,
    SAMPLE_INDICES,
    UPCOMING,
    RunContext,
)
from nemo_specrl.nemo_rl.phase_end import PhaseEnd
from nemo_specrl.nemo_rl.rollout_metadata import MetadataLog
from nemo_specrl.nemo_rl.worker_base import DraftingWorker

__all__ = ["SpecVllmGenerationWorker", "SpecVllmGenerationWorkerImpl"]


class SpecVllmGenerationWorkerImpl(DraftingWorker, VllmGenerationWorkerImpl):
    """The worker's methods, without Ray's decorator."""

    _speculative: SpeculativeLLM | None = None
    _ahead: tuple[list[dict[str, Any]], Any] = ([], None)
    """The next prompts, and the sampling parameters of their rows."""

    def spec_rl_attach(self, cache: ClusterCache, run: RunContext, policy_version: int) -> str:
        """Start drafting from ``cache``; called once, after the engine has started.

        Returns:
            The id of this worker's node in Ray.
        """
        self._metrics = EngineMetrics()
        return self._attach(SpeculativeLLM, cache, run, policy_version, self._sparsely_refitting)

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

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate as the base class does, with a draft for each row that has an identity."""
        return self._drafted(super().generate, data, greedy)

    def generate_text(self, data: Any, greedy: bool = False) -> Any:
        """Do the same for an evaluation, whose prompts are texts."""
        return self._drafted(super().generate_text, data, greedy)

    def _drafted(self, generate: Callable[..., Any], data: Any, greedy: bool) -> Any:
        """Call a generating method of the base class, with a drafting engine in its place."""
        speculative = self._speculative
        if SAMPLE_INDICES not in data or speculative is None or self._paused or greedy:
            output = generate(data, greedy=greedy)
            if not data.size:  # the base class has not asked its engine
                step_along(self.llm.llm_engine)
            if PHASE in data:
                output[ENDED] = torch.ones(len(data[PHASE]), dtype=torch.bool)
            return output
        llm = self.llm
        upcoming = [
            {"prompt_token_ids": prompt} for prompts in data.get(UPCOMING, ()) for prompt in prompts
        ]
        # The base class calls self.llm.generate(prompts, sampling_params, use_tqdm=...).
        self.llm = engine = _DraftingEngine(
            speculative,
            data[SAMPLE_INDICES].tolist(),
            data.get(PROMPT_KEYS),
            upcoming,
            self._metadata,
            PhaseEnd(data[PHASE][0], data[GROUPS].tolist()) if data.get(PHASE) else None,
        )
        try:
            output = generate(data, greedy=greedy)
            if not data.size:  # likewise
                engine.generate([], None, use_tqdm=False)
        finally:
            self.llm = llm
        self._cache.deliver()  # the next step's look-ups may come from any node
        self._metrics = self._metrics + engine.metrics
        if PHASE in data:
            output[ENDED] = torch.tensor(engine.ended, dtype=torch.bool)
        self._ahead = upcoming, engine.sampling_params
        return output

    def spec_rl_run_ahead(self, batch: list[Any]) -> None:
        """Decode for the next prompts until all engines have finished their rows.

        Called after ``generate``, so that it begins when this engine has finished its own.

        Args:
            batch: Ray's references to each engine's result of ``generate``.
        """
        (upcoming, sampling_params), self._ahead = self._ahead, ([], None)
        if self._speculative is None or not upcoming or sampling_params is None:
            return

        def until() -> bool:
            done, _ = ray.wait(batch, num_returns=len(batch), timeout=0, fetch_local=False)
            return len(done) == len(batch)

        done = self._speculative.run_ahead(upcoming, sampling_params, until)
        self._metrics = self._metrics + done

    # These methods change the engine's weights; sparse refits do it apart from them, in the
    # receiver's threads.

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and increment the policy version."""
        return self._refitted(super().update_weights_via_ipc_zmq(*args, **kwargs))

    def update_weights_from_collective(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and increment the policy version."""
        return self._refitted(super().update_weights_from_collective(*args, **kwargs))

    def nccl_reshard_refit(self, *args: Any, **kwargs: Any) -> Any:
        """Update the weights, and increment the policy version."""
        return self._refitted(super().nccl_reshard_refit(*args, **kwargs))

    def checkpoint_engine_rpc(self, checkpoint_method: str, *args: Any, **kwargs: Any) -> Any:
        """Pass on a call to a checkpoint engine; begin a version if it updates the weights."""
        result = super().checkpoint_engine_rpc(checkpoint_method, *args, **kwargs)
        if checkpoint_method == CHECKPOINT_ENGINE_UPDATE:
            result = self._refitted(result)
        return result

    def _refitted(self, result: Any) -> Any:
        """Begin a policy version, with an empty prefix cache."""
        if self._speculative is not None:
            self._speculative.policy_version += 1
        return result

    @contextlib.contextmanager
    def _sparsely_refitting(self) -> Iterator[None]:
        """Increment the policy version after a sparse refit, during which nothing is generated."""
        try:
            yield
        finally:
            self._refitted(None)


class _DraftingEngine:
    """Stands in for ``self.llm`` during one call of the base class's ``generate``."""

    def __init__(
        self,
        speculative: SpeculativeLLM,
        sample_indices: list[int],
        prompt_keys: list[bytes] | None,
        upcoming: list[dict[str, Any]],
        metadata: MetadataLog | None,
        early_end: PhaseEnd | None,
    ) -> None:
        self._speculative, self._metadata = speculative, metadata
        self._early_end = early_end
        self._sample_indices, self._prompt_keys = sample_indices, prompt_keys
        self._upcoming = upcoming
        self.sampling_params: Any = None  # of the first row
        self.metrics = EngineMetrics()  # empty if the base class has no rows to generate
        self.ended: list[bool] = []

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: Any = True) -> Any:
        several = isinstance(sampling_params, (list, tuple))
        self.sampling_params = sampling_params[0] if several else sampling_params
        outputs = self._speculative.generate(
            prompts,
            sampling_params,
            sample_indices=self._sample_indices,
            prompt_keys=self._prompt_keys,
            upcoming=self._upcoming,
            early_end=self._early_end,
            use_tqdm=use_tqdm,
        )
        self.metrics = self._speculative.metrics
        if self._metadata is not None:
            self._metadata.note(outputs)
        self.ended = [output.outputs[0].finish_reason != "abort" for output in outputs]
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculative.llm, name)


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecVllmGenerationWorker(SpecVllmGenerationWorkerImpl):
    """The Ray actor."""

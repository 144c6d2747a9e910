"""What the synchronous and the asynchronous worker have in common.

A mixin, placed before NeMo-RL's worker class in the bases. Ray runs its methods in both kinds of
actors: those of an asynchronous actor run in its event loop.
"""

from __future__ import annotations

from typing import Any

import ray

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.nemo_rl.context import RunContext, engine_arguments
from nemo_specrl.nemo_rl.rollout_metadata import MetadataLog, RolloutMetadata, SequenceKey
from nemo_specrl.nemo_rl.sparse_refits import SPARSE_TRANSPORTS, Refitting, SparseRefits

__all__ = ["ASYNC_CALLS", "DraftingWorker"]

ASYNC_CALLS = 2**16
"""Number of calls that an asynchronous worker runs at once. Each of its rows is one until it ends,
and with Ray's own limit of 1000, refits and the driver's questions would wait for rows to end."""


class DraftingWorker:
    """A worker that drafts rows once the driver has attached a cache."""

    cfg: Any
    llm: Any
    expert_parallel_size: int
    tensor_parallel_size: int
    _speculative: Any = None
    """A SpeculativeLLM or an AsyncSpeculativeLLM; None until a cache is attached."""
    _metadata: MetadataLog | None = None
    _paused = False
    _recompute_kv = False

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Create the engine, with whatever lossless drafting needs.

        Engines of data-parallel groups schedule synchronously, so that each of their steps is a
        step of the model. Asynchronous scheduling, which vLLM would choose, has steps that are not,
        for which the others of the group would wait (``engine.data_parallel``).
        """
        if self.expert_parallel_size > self.tensor_parallel_size:
            llm_kwargs = {"async_scheduling": False, **llm_kwargs}
        super()._create_engine(  # type: ignore[misc]
            engine_arguments(llm_kwargs, self.cfg["spec_rl"])
        )

    def _attach(
        self,
        engine_class: Any,
        cache: ClusterCache,
        run: RunContext,
        policy_version: int,
        sparsely_refitting: Refitting,
    ) -> str:
        """Wrap the engine in ``engine_class``, and return the id of this worker's node in Ray.

        Args:
            engine_class: SpeculativeLLM, AsyncSpeculativeLLM or one derived from it.
            cache: cache to draft from.
            run: the worker's run.
            policy_version: policy version of the engine's weights.
            sparsely_refitting: makes a context in which a sparse refit changes the weights, and at
                whose end a policy version begins. It is used in the receiver's threads.
        """
        self._speculative = engine_class(
            self.llm, cache, run.spec_rl, seed=run.seed, policy_version=policy_version
        )
        self._speculative.drafts_greedy = run.evaluates
        self._cache = cache
        self._recompute_kv = run.recompute_kv
        if run.needs_records:
            self._metadata = MetadataLog(births=run.spec_rl.clip_anchor == "birth")
        if self.cfg.get("refit_transport") in SPARSE_TRANSPORTS:
            SparseRefits(getattr(self, "_sparse_refit_receiver", None), sparsely_refitting)
        return str(ray.get_runtime_context().get_node_id())

    def spec_rl_pause(self, paused: bool) -> None:
        """Decode without drafts and keep nothing in the cache while ``paused``."""
        self._paused = paused

    def spec_rl_set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Change the share of rows decoded without a draft, from the next call on."""
        if self._speculative is not None:
            self._speculative.fresh_fraction = fresh_fraction

    def spec_rl_policy_version(self) -> int:
        """Return the policy version of the engine's weights."""
        return 0 if self._speculative is None else int(self._speculative.policy_version)

    def spec_rl_take_records(self) -> list[tuple[SequenceKey, RolloutMetadata]]:
        """Return the metadata of the rollouts since they were last taken."""
        return [] if self._metadata is None else self._metadata.take()

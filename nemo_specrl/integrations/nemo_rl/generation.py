"""The driver's side of NeMo-RL's generation: slots, balance, policy versions, metrics.

A subclass of ``VllmGeneration`` that gives each row what its engine needs to find the draft, and
otherwise is its base class. Copies of it are sent to other actors (the data plane's rollout actor,
the asynchronous collector): state that must be one is with the workers or in the cache.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from nemo_specrl.cache.cluster import ClusterCache, start_shards
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.errors import CacheError
from nemo_specrl.integrations.nemo_rl import compat
from nemo_specrl.integrations.nemo_rl.run import CACHE_FOLDER, SLOTS, Run, current
from nemo_specrl.rollout import prompt_key
from nemo_specrl.speculation.balance import balanced_order
from nemo_specrl.speculation.drafts import Row, assign_slots, select_drafts

__all__ = ["SpecVllmGeneration", "validating"]

PACKAGE = "nemo_specrl.integrations.nemo_rl"

logger = logging.getLogger(__name__)

_generations: weakref.WeakSet[SpecVllmGeneration] = weakref.WeakSet()


class SpecVllmGeneration(VllmGeneration):
    """``VllmGeneration`` with reuse, where the run that is being set up has it switched on.

    Attributes:
        worker_classes: full name of a stock worker class to the one that takes its place.
        cache: client of the rollout cache; None with speculation off.
    """

    worker_classes: ClassVar[dict[str, str]] = {
        compat.STOCK_WORKER: f"{PACKAGE}.worker.SpecVllmGenerationWorker",
        compat.STOCK_ASYNC_WORKER: f"{PACKAGE}.worker_async.SpecVllmAsyncGenerationWorker",
    }
    cache: ClusterCache | None = None
    _validating = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run = current()
        if run is None:
            super().__init__(*args, **kwargs)
            if (self.cfg.get("spec_rl") or {}).get("enabled"):
                logger.warning("spec_rl.enabled: there is reuse in GRPO and PPO only; none here")
            return
        with compat.worker_class(self.worker_classes):
            super().__init__(*args, **kwargs)
        self._run = run
        self._accepted = 0.0  # share of drafted tokens that were accepted lately
        self._length = float(self.cfg["max_new_tokens"])  # mean length of responses lately
        self.cache, policy_version = _open_cache(run)
        self._tell_workers(
            "spec_rl_attach", cache=self.cache, run=run, policy_version=policy_version
        )
        _generations.add(self)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """As the base class; rows come back in the order in which they were given."""
        if self.cache is None or self._validating or greedy or not len(data["input_ids"]):
            return super().generate(data, greedy=greedy)
        keys = [
            prompt_key(ids[:length].numpy())
            for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
        ]
        slots = assign_slots(keys)
        order = balanced_order(self._costs(keys, slots), self.dp_size)
        data = data.select_indices(order)
        data[SLOTS] = torch.tensor(slots)[order]
        output = super().generate(data, greedy=greedy)
        self._length = float(output["generation_lengths"].float().mean())
        return output.select_indices(np.argsort(order).tolist())

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """As the base class; the worker finds a slot for the row."""
        if self.cache is not None and not self._validating and not greedy:
            data = data.slice(0, data.size)  # the caller keeps its own
            data[SLOTS] = torch.full((data.size,), -1)
        async for result in super().generate_async(data, greedy=greedy):
            yield result

    def get_step_metrics(self) -> dict[str, float]:
        """With what reuse did since the last call, under ``spec_rl/``."""
        metrics = dict(super().get_step_metrics())
        if self.cache is None:
            return metrics
        taken = [m for m in self._tell_workers("spec_rl_take_metrics") if m is not None]
        total = sum(taken, EngineMetrics())
        total.cache_errors += self.cache.take_failures()
        self._accepted = total.accepted_tokens / max(1, total.draft_tokens)
        return metrics | total.as_dict()

    @property
    def policy_version(self) -> int:
        """Of the weights that generate: the number of refits, over all of a run's lives."""
        return int(self._tell_workers("spec_rl_policy_version")[0])

    def shutdown(self) -> bool:
        """As the base class; the cache's stores are closed."""
        cache, self.cache = self.cache, None
        if cache is not None and self in _generations:  # not a copy
            _generations.discard(self)
            try:
                cache.close()
            except Exception as error:  # whatever it is, the run is over
                logger.warning("closing the rollout cache: %s", error)
        return bool(super().shutdown())

    def _costs(self, keys: list[bytes], slots: list[int]) -> list[float]:
        """Tokens that each row is expected to decode."""
        assert self.cache is not None
        if self.dp_size < 2:
            return [1.0] * len(keys)
        choices = select_drafts(
            [Row(key, slot) for key, slot in zip(keys, slots, strict=True)],
            self.cache.get(keys),
            policy_version=-1,
            seed=self._run.seed,
            fresh_fraction=self._run.spec_rl.effective_fresh_fraction,
        )
        left = 1 - self._accepted
        return [
            self._length if choice.draft is None else left * len(choice.draft) for choice in choices
        ]

    def _tell_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker that owns an engine."""
        futures = self.worker_group.run_all_workers_single_data(
            method, run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"], **kwargs
        )
        return list(ray.get(futures))


@contextmanager
def validating(everywhere: bool) -> Iterator[None]:
    """While this process validates: its rollouts neither read nor write the cache.

    Args:
        everywhere: the rollouts are made by copies in other processes; the workers are told.
    """
    generations = [g for g in _generations if g.cache is not None]
    for generation in generations:
        generation._validating = True
        if everywhere:
            generation._tell_workers("spec_rl_pause", paused=True)
    try:
        yield
    finally:
        for generation in generations:
            generation._validating = False
            if everywhere:
                generation._tell_workers("spec_rl_pause", paused=False)


def _open_cache(run: Run) -> tuple[ClusterCache, int]:
    """The cache of a run, with what its last checkpoint has of it; and that policy version."""
    block = run.spec_rl.cache
    cache = start_shards(
        run.store_folder,
        keep=run.checkpoint is not None,
        partitions=block.partitions,
        replicas=block.replicas,
        deadline_s=block.deadline_ms / 1000,
        tokenizer_id=run.tokenizer_id,
        max_bytes=block.max_bytes_per_node,
        groups_per_prompt=block.groups_per_prompt,
    )
    if run.checkpoint is None:
        return cache, 0
    try:
        manifest, damaged = cache.restore(run.checkpoint / CACHE_FOLDER)
    except CacheError as error:  # rule 1: it can only cost speed
        logger.warning("rollout cache: %s; it starts cold", error)
        return cache, 0
    for line in damaged:
        logger.warning("rollout cache: %s; this part starts cold", line)
    return cache, manifest.policy_version

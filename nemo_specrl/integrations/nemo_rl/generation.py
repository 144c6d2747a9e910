"""The driver's side of NeMo-RL's generation: sample indices, balance, policy versions, metrics.

A subclass of ``VllmGeneration`` that gives each row what its engine needs to find the draft, and
otherwise is its base class. Copies of it are sent to other actors (the data plane's rollout actor,
the asynchronous collector): state that must be one is with the workers or in the cache.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from nemo_specrl.cache.cluster.driver import ClusterCache, start_shards
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.errors import CacheError, ConfigError
from nemo_specrl.integrations.nemo_rl import compat
from nemo_specrl.integrations.nemo_rl.metrics import counts, times
from nemo_specrl.integrations.nemo_rl.run import BLOCK, CACHE_FOLDER, SAMPLE_INDICES, Run, current
from nemo_specrl.rollout import prompt_key
from nemo_specrl.speculation.balance import balanced_order
from nemo_specrl.speculation.drafts import Row, assign_sample_indices, select_drafts

__all__ = ["SpecVllmGeneration", "validating"]

PACKAGE = "nemo_specrl.integrations.nemo_rl"

logger = logging.getLogger(__name__)

_generations: weakref.WeakSet[SpecVllmGeneration] = weakref.WeakSet()


class SpecVllmGeneration(VllmGeneration):
    """``VllmGeneration`` with reuse, where the run that is being set up has it switched on.

    Attributes:
        worker_classes: full name of a stock worker class to the one that takes its place.
        cache: client of the rollout cache; None with speculation off.
        fresh_fraction: share of rows decoded plainly although there is a draft.
    """

    worker_classes: ClassVar[dict[str, str]] = {
        compat.STOCK_WORKER: f"{PACKAGE}.worker.SpecVllmGenerationWorker",
        compat.STOCK_ASYNC_WORKER: f"{PACKAGE}.worker_async.SpecVllmAsyncGenerationWorker",
    }
    cache: ClusterCache | None = None
    _validating = False

    def __init__(self, cluster: Any, config: Any, **kwargs: Any) -> None:
        run = current()
        if run is None:
            if (config.get("spec_rl") or {}).get("enabled"):
                raise ConfigError(
                    f"{BLOCK}.enabled = true: there is reuse in NeMo-RL's GRPO and PPO, not in its "
                    "single controller, distillation or evaluation; set false"
                )
            super().__init__(cluster, config, **kwargs)
            return
        with compat.worker_class(self.worker_classes):
            super().__init__(cluster, config, **kwargs)
        self._run = run
        self._lookup_s = 0.0  # of the driver, since the last metrics
        self.fresh_fraction = run.spec_rl.effective_fresh_fraction
        self.cache, policy_version = _open_cache(run)
        nodes = self._tell_workers(
            "spec_rl_attach", cache=self.cache, run=run, policy_version=policy_version
        )
        # Where engines have nodes of their own, drafts lie there and not beside the trainer.
        self.cache.reshard(set(nodes))
        _generations.add(self)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """As the base class; rows come back in the order in which they were given."""
        if self.cache is None or self._validating or greedy or not len(data["input_ids"]):
            return super().generate(data, greedy=greedy)
        keys = [
            prompt_key(ids[:length].numpy())
            for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
        ]
        sample_indices = assign_sample_indices(keys)
        order = balanced_order(self._costs(keys, sample_indices), self.dp_size)
        data = data.select_indices(order)
        data[SAMPLE_INDICES] = torch.tensor(sample_indices)[order]
        output = super().generate(data, greedy=greedy)
        return output.select_indices(np.argsort(order).tolist())

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """As the base class; the worker finds a sample index for the row."""
        if self.cache is not None and not self._validating and not greedy:
            data = data.slice(0, data.size)  # the caller keeps its own
            data[SAMPLE_INDICES] = torch.full((data.size,), -1)
        async for result in super().generate_async(data, greedy=greedy):
            yield result

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """What reuse did since the last call: counts, and seconds."""
        assert self.cache is not None
        taken = [m for m in self._tell_workers("spec_rl_take_metrics") if m is not None]
        total = sum(taken, EngineMetrics())
        total.cache_errors += self.cache.take_failures()
        # Engines run side by side; so do the rows of asynchronous ones.
        timed = times(total, total.rows if self.cfg["vllm_cfg"]["async_engine"] else len(taken))
        timed["spec_rl_lookup"] += self._lookup_s
        self._lookup_s = 0.0
        counted = counts(total)
        with contextlib.suppress(CacheError):  # what is not known is not logged
            health = self.cache.health()
            counted["spec_rl/cache_nodes"] = float(health.nodes)
            counted["spec_rl/cache_missing_copies"] = float(health.missing)
        return counted, timed

    def save_cache(self, folder: Path) -> None:
        """Write the cache beside a checkpoint's weights; nothing once it is closed.

        Raises:
            StoreUnavailable: it cannot be written.
        """
        if self.cache is not None:
            self.cache.snapshot(folder, self.policy_version)

    def set_fresh_fraction(self, fresh_fraction: float) -> None:
        """Have another share of the rows decoded plainly, from the next batch on."""
        self.fresh_fraction = fresh_fraction
        self._tell_workers("spec_rl_set_fresh_fraction", fresh_fraction=fresh_fraction)

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

    def _costs(self, keys: list[bytes], sample_indices: list[int]) -> list[float]:
        """Tokens that each row is expected to decode."""
        assert self.cache is not None
        if self.dp_size < 2:
            return [1.0] * len(keys)
        started = time.perf_counter()
        # Asked of the engines, since the batch before may have been another copy's.
        asked = self._ask_workers("spec_rl_last_metrics")
        choices = select_drafts(
            [
                Row(key, sample_index)
                for key, sample_index in zip(keys, sample_indices, strict=True)
            ],
            self.cache.outlines(keys),
            policy_version=-1,
            seed=self._run.seed,
            fresh_fraction=self.fresh_fraction,
        )
        last = sum(ray.get(asked), EngineMetrics())
        length = last.response_tokens / last.rows if last.rows else self.cfg["max_new_tokens"]
        left = 1 - last.accepted_tokens / max(1, last.draft_tokens)
        self._lookup_s += time.perf_counter() - started
        return [length if choice.draft is None else left * len(choice.draft) for choice in choices]

    def _tell_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """What a method of every worker that owns an engine returns."""
        return list(ray.get(self._ask_workers(method, **kwargs)))

    def _ask_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls of a method of every worker that owns an engine."""
        return list(
            self.worker_group.run_all_workers_single_data(
                method, run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"], **kwargs
            )
        )


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

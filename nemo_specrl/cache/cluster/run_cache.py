"""The cache of a run on several nodes: its shards are started, and filled from a checkpoint."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.cluster_cache import CALL_SECONDS, ClusterCache
from nemo_specrl.cache.cluster.coordinator import START_SECONDS, Coordinator, Started
from nemo_specrl.cache.run_folders import restore_checkpoint
from nemo_specrl.config import CacheConfig
from nemo_specrl.errors import CacheError, StoreUnavailable, in_one_line

__all__ = ["open_run_cache", "start_shards"]

logger = logging.getLogger(__name__)


def open_run_cache(
    folder: Path,
    config: CacheConfig,
    *,
    tokenizer_id: str,
    checkpoint: Path | None,
    keep: bool = False,
) -> tuple[ClusterCache, int]:
    """Start a run's shards, and restore the cache from the checkpoint.

    Args:
        folder: folder of the run's store on each node's own disk.
        config: the ``spec_rl.cache:`` block.
        tokenizer_id: identity of the tokenizer.
        checkpoint: checkpoint from which the run resumes; None: the cache starts empty, or with the
            warm start, unless ``keep`` says otherwise.
        keep: whether it starts with what the nodes' disks have, although there is no checkpoint.

    Returns:
        A client of the shards; and the policy version of the checkpoint, 0 if there is none or its
        cache cannot be read. A missing cache costs only speed: what cannot be read is logged.

    Raises:
        CacheError: no node can open its part.
    """
    cache = start_shards(
        folder, config, keep=keep or checkpoint is not None, tokenizer_id=tokenizer_id
    )
    if checkpoint is None:
        return cache, 0
    otherwise = "it starts with what the nodes' disks have"
    return cache, restore_checkpoint(cache.restore, checkpoint, otherwise)


def start_shards(
    folder: Path, config: CacheConfig, *, keep: bool, tokenizer_id: str
) -> ClusterCache:
    """Start a shard on each node of the Ray cluster that this process is part of.

    Nodes that join later get a shard within seconds. The shards end with this process's job; their
    disks keep what they have, and a node that comes back to the run keeps what its disk has. A node
    whose folder cannot be used is left out with a warning, until it can.

    Args:
        folder: folder on each node's own disk.
        config: the ``spec_rl.cache:`` block.
        keep: whether to keep what is there, as a resumed run does; otherwise start empty, or with
            the warm start next to the folder (:mod:`nemo_specrl.cache.run_folders`).
        tokenizer_id: identity of the tokenizer.

    Raises:
        StoreUnavailable: no node has a folder that can be used.
    """
    options = {
        "max_bytes": config.max_bytes_per_node,
        "tokenizer_id": tokenizer_id,
        "groups_per_prompt": config.groups_per_prompt,
    }
    here = ray.get_runtime_context().get_node_id()
    actor: Any = ray.remote(Coordinator).options(
        num_cpus=0,
        max_concurrency=16,
        max_restarts=-1,
        # On this process's node: the run, and the use of a coordinator, end with it.
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    coordinator = actor.remote(
        str(folder), secrets.randbits(63), keep, config.partitions, config.replicas, options
    )
    try:
        started: Started = ray.get(
            coordinator.start.remote(), timeout=2 * START_SECONDS + CALL_SECONDS
        )
    except ray.exceptions.RayError as error:
        ray.kill(coordinator)
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        if isinstance(cause, CacheError):
            raise cause from None
        raise StoreUnavailable(f"{folder}: {in_one_line(error)}") from error
    for line in started.remarks:
        logger.warning("rollout cache: %s", line)
    return ClusterCache(
        started.view,
        coordinator,
        deadline_s=config.deadline_ms / 1000,
        tokenizer_id=tokenizer_id,
        incarnation=max(time.time_ns(), started.incarnation + 1),
        resumed=keep,
    )

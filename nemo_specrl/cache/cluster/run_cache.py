"""The cache of a run on several nodes: opened with what the run's checkpoint has of it."""

from __future__ import annotations

from pathlib import Path

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache, start_shards
from nemo_specrl.cache.run_folders import restore_checkpoint
from nemo_specrl.config import CacheConfig

__all__ = ["open_run_cache"]


def open_run_cache(
    folder: Path,
    config: CacheConfig,
    *,
    tokenizer_id: str,
    checkpoint: Path | None,
    keep: bool = False,
) -> tuple[ClusterCache, int]:
    """Start a run's shards, and restore what the checkpoint has of the cache.

    Args:
        folder: of the run's store on each node's own disk.
        config: the ``spec_rl.cache:`` block.
        tokenizer_id: identity of the tokenizer.
        checkpoint: from which the run resumes; None: the cache starts empty, or with the warm
            start, unless ``keep`` says otherwise.
        keep: it starts with what the nodes' disks have, although there is no checkpoint.

    Returns:
        A client of the shards; and the policy version of the checkpoint, 0 where there is none or
        its cache cannot be read. A cache costs speed alone: what cannot be read is logged.

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

"""The rollout cache: earlier responses on the nodes' disks, found again by their prompt's tokens.

It can cost speed, never correctness. :func:`open_cache` is all that an engine or a driver calls.

Modules, each of which imports only from those below it::

    cluster/      the cache of a Ray cluster: a shard a node, and their client
    local         the cache of one node: look-ups that never wait for a slow disk
    inspection    what is in a store, a snapshot or an export, and JSON lines of it
    store         one node's store under a hard size cap
    snapshot      copies of stores in checkpoints
    database      the SQLite file: opened, checked, moved aside where damaged
    codec         responses as bytes and back
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nemo_specrl.cache.local import LocalCache
    from nemo_specrl.cache.store import RolloutStore, StoreStats
    from nemo_specrl.config import CacheConfig
    from nemo_specrl.rollout import Rollout

__all__ = ["HistoryCache", "LocalCache", "RolloutStore", "StoreStats", "open_cache"]

_MODULES = {"LocalCache": "local", "RolloutStore": "store", "StoreStats": "store"}
logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Import a class at its first use."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"nemo_specrl.cache.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class HistoryCache(Protocol):
    """The earlier responses to prompts. No method raises; a failure is counted and logged once."""

    def get(
        self,
        keys: Sequence[bytes],
        timeout: float | None = None,
        known: Collection[int] = frozenset(),
    ) -> dict[bytes, list[Rollout]]:
        """Return the responses to prompts, oldest first, within ``timeout`` seconds; prompts
        without responses, and those that are late, are left out. None: the caller can wait for a
        slow disk, though not for other nodes for ever. Responses whose identities are known may
        come without tokens, which saves reading them.
        """

    def put(self, rollouts: Sequence[Rollout]) -> int:
        """Keep responses, and return how many were kept. It may wait for seconds."""

    def take_drafts(
        self, wanted: Mapping[bytes, int], policy_version: int, timeout: float
    ) -> dict[bytes, list[Rollout]]:
        """Return up to so many responses with log-probs for each prompt, within ``timeout``
        seconds; no other call gets them for this policy version.
        """

    def stats(self) -> dict[str, float]:
        """Return metrics by name (``monitoring.names``)."""

    def close(self) -> None:
        """Let go of it. Nothing that was put is lost."""


def open_cache(
    config: CacheConfig,
    vocabulary: str,
    *,
    cluster: bool | None = None,
    counts: Mapping[str, float] | None = None,
) -> HistoryCache | None:
    """Open the cache of this process.

    Args:
        config: the ``cache:`` block.
        vocabulary: identity of the tokenizer's vocabulary (``rollout.vocabulary_hash``).
        cluster: whether to share it over the nodes of the Ray cluster. None: where this process
            is, or was started by, a worker of Ray, or is connected to Ray.
        counts: what this process counts; on a cluster the driver learns it, through the shards.

    Returns:
        The cache. None, after one line in the log, where none can be had.
    """
    if config.dir is None:
        logger.info("rollout cache: none is kept, since cache.dir is not set")
        return None
    if cluster is None:
        ray = sys.modules.get("ray")
        cluster = "RAY_RAYLET_PID" in os.environ or bool(ray and ray.is_initialized())
    from nemo_specrl.errors import in_one_line

    try:
        if cluster:
            from nemo_specrl.cache.cluster.client import open_cluster_cache

            return open_cluster_cache(config, vocabulary, counts)
        from nemo_specrl.cache.local import LocalCache

        return LocalCache.open(config, vocabulary)
    except Exception as error:  # whatever it is, it may only cost speed
        logger.warning("rollout cache: %s; nothing is kept", in_one_line(error))
        return None

"""The cache of a cluster in the policy's checkpoints, as the training driver writes and reads it.

A checkpoint has a file for each shard, written by the shards themselves while training goes on; a
prompt is in that of its first living owner. It can be restored onto any number of nodes. What is
missing or damaged costs drafts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_specrl.cache.cluster.client import join_cluster
from nemo_specrl.cache.cluster.shard import FILES, find_shards
from nemo_specrl.config import CacheConfig
from nemo_specrl.errors import in_one_line

__all__ = ["ClusterCheckpoint"]

SUFFIX = ".rollouts"
STATS_SECONDS = 10.0
FILE_SECONDS = 60.0
FILE_BYTES_PER_SECOND = 20e6
"""A shard may take ``FILE_SECONDS`` for a file, and longer by its bytes at this speed, which is
that of a busy file system."""

logger = logging.getLogger(__name__)


class ClusterCheckpoint:
    """All shards of a cluster's cache, for the training driver. Nothing that it does raises.

    Args:
        config: the ``cache`` block, with a folder, as the engines have it.
        vocabulary: hash of the vocabulary.
    """

    def __init__(self, config: CacheConfig, vocabulary: str) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._saving: dict[Any, str] = {}
        self._until = 0.0

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each shard that answers (``StoreStats``), by node."""
        return self._living()[1]

    def engine_counts(self) -> dict[str, float]:
        """Return what the engines of all nodes have counted, some seconds ago, added up."""
        total: Counter[str] = Counter()
        for counts in self._asked(self._find(), "engine_counts").values():
            total.update(counts)
        return dict(total)

    def save(self, folder: Path, prompts: int | None = None) -> None:
        """Have the shards begin to write the cache; :meth:`wait` before the folder gets its name.

        Args:
            folder: folder for the cache alone, in the checkpoint, on a file system that the nodes
                share.
            prompts: number of prompts of the training data, if they come again: those that were
                used last are written. None: all.
        """
        shards, stats = self._living()
        nodes = sorted(shards)
        if prompts is not None:  # on one node, with room for an uneven division
            prompts = 64 + round(1.5 * prompts * self._config.replicas / max(1, len(nodes)))
        self._saving = {
            shards[node]
            .snapshot.options(concurrency_group=FILES)
            .remote(str(folder / f"{number:04d}{SUFFIX}"), nodes, prompts): node
            for number, node in enumerate(nodes)
        }
        size = max((of_node["bytes_on_disk"] for of_node in stats.values()), default=0.0)
        self._until = time.monotonic() + FILE_SECONDS + size / FILE_BYTES_PER_SECOND

    def wait(self) -> int:
        """Wait until what :meth:`save` began is written; return how many responses that are.

        A shard that fails, or is late by its bytes, is left out with a warning.
        """
        calls, self._saving = self._saving, {}
        left = self._until - time.monotonic()
        return sum(self._answers(calls, left, "does not save its part").values())

    def restore(self, folder: Path) -> int:
        """Give what a checkpoint has to the nodes that own it now, as older than what they have.

        Args:
            folder: what :meth:`save` wrote, or the folder of one store's copy.

        Returns:
            Number of responses that were read.
        """
        shards = self._living()[0]
        with contextlib.suppress(OSError):
            files = sorted(folder.glob(f"*{SUFFIX}"))
            sizes = [file.stat().st_size for file in files]
            if shards and files:
                nodes = sorted(shards)
                calls = {}
                for number, file in enumerate(files):
                    node = nodes[number % len(nodes)]
                    read = shards[node].restore.options(concurrency_group=FILES)
                    calls[read.remote(str(file), shards)] = f"{node} for {file.name}"
                left = FILE_SECONDS + sum(sizes) / FILE_BYTES_PER_SECOND
                return sum(self._answers(calls, left, "does not restore").values())
        logger.warning("rollout cache: nothing is restored from %s: %d nodes", folder, len(shards))
        return 0

    def end(self) -> None:
        """End all shards at once, as a driver does when the last engine has ended.

        Those of a job that has no such driver end by themselves, some minutes later.
        """
        for shard in self._find().values():
            import ray

            with contextlib.suppress(Exception):
                ray.kill(shard)

    def _find(self) -> dict[str, Any]:
        try:
            join_cluster()
            return find_shards(self._config, self._vocabulary, {})
        except Exception as error:  # Ray's
            logger.warning("rollout cache: its shards are not found: %s", in_one_line(error))
            return {}

    def _living(self) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        """Return the shards that answer, and their statistics."""
        shards = self._find()
        stats = self._asked(shards, "stats")
        return {node: shards[node] for node in stats}, stats

    def _asked(self, shards: Mapping[str, Any], method: str) -> dict[str, dict[str, float]]:
        """Return what a method of each shard answers, of those that do in time."""
        calls = {getattr(shard, method).remote(): node for node, shard in shards.items()}
        return self._answers(calls, STATS_SECONDS, "does not answer")

    @staticmethod
    def _answers(calls: Mapping[Any, str], seconds: float, problem: str) -> dict[str, Any]:
        """Return the answers that come in time; the others are logged and cancelled."""
        answers = {}
        if calls:
            import ray

            done, late = ray.wait(list(calls), num_returns=len(calls), timeout=max(0.0, seconds))
            for call in done:
                try:
                    answers[calls[call]] = ray.get(call)
                except Exception as error:  # the shard's, its store's or Ray's
                    why = in_one_line(error)
                    logger.warning(
                        "rollout cache: the shard of %s %s: %s", calls[call], problem, why
                    )
            for call in late:
                logger.warning("rollout cache: the shard of %s %s in time", calls[call], problem)
                with contextlib.suppress(Exception):
                    ray.cancel(call)
        return answers

"""The store of one node, behind a Ray actor that the other nodes' processes call.

Shards are named, one a node, and detached: engines come and go, and those on other nodes must still
find what an earlier engine of this node kept. A shard that nobody has called for some minutes ends
by itself, so that none outlives its job by more than that; the store on disk has everything.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from nemo_specrl.cache import snapshot as snapshots
from nemo_specrl.cache.cluster.placement import ranking
from nemo_specrl.cache.store import RolloutStore
from nemo_specrl.config import CacheConfig
from nemo_specrl.rollout import Rollout

__all__ = [
    "FILES",
    "IDLE_SECONDS",
    "NAMESPACE",
    "WRITES",
    "Shard",
    "find_shards",
    "make_shard",
]

NAMESPACE = "nemo_specrl"
IDLE_SECONDS = 600.0
"""A shard that nobody has called for so long ends. Engines may take minutes to start again."""
PIECE_BYTES = 8 * 2**20
"""Bytes of responses that one node sends to the others at once when a checkpoint is restored."""
PIECE_SECONDS = 60.0
READERS = 4
"""Look-ups that a shard answers at once."""
Groups = Sequence[tuple[bytes, list[bytes]]]
"""Prompts, the latest first, each with its records, newest first."""
WRITES, FILES = "writes", "files"
"""Groups of calls that do not hold up look-ups."""


def _prefix(config: CacheConfig, vocabulary: str) -> str:
    """The beginning of the names of the shards of one cache, before the node's address."""
    folder = os.path.abspath(config.dir or ".")  # links may lead elsewhere on another node
    return f"{xxhash.xxh3_64_hexdigest(f'{folder} {vocabulary}'.encode())}@"


def find_shards(config: CacheConfig, vocabulary: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shards that are there, by the address of their node.

    One call to Ray's GCS, and one for each shard that is not known yet.

    Args:
        config: the ``cache`` block.
        vocabulary: hash of the vocabulary.
        known: shards of which the caller has a handle that works.
    """
    import ray

    prefix = _prefix(config, vocabulary)
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            address = actor["name"].removeprefix(prefix)
            try:
                found[address] = known.get(address) or ray.get_actor(actor["name"], NAMESPACE)
            except ValueError:  # it has just ended
                continue
    return found


def make_shard(config: CacheConfig, vocabulary: str, address: str) -> Any:
    """Return this node's shard, which is made if there is none.

    Args:
        config: the ``cache`` block, with a folder that this node can use.
        vocabulary: hash of the vocabulary.
        address: address of this node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote
    actor = remote(concurrency_groups={WRITES: 2, FILES: 1})(Shard).options(
        name=_prefix(config, vocabulary) + address,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=READERS,
        # Ray's own Python, which it takes where a process is not its worker, may lack this package.
        runtime_env={"py_executable": sys.executable},
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    return actor.remote(config.model_dump(mode="json"), vocabulary, address, IDLE_SECONDS)


class Shard:
    """The store of one node, for the processes of other nodes.

    Args:
        config: the ``cache`` block as a dictionary.
        vocabulary: hash of the vocabulary.
        address: address of this node.
        idle_s: seconds without a call after which it ends. None: never.

    Raises:
        StoreUnavailable: the folder cannot be used.
    """

    def __init__(
        self, config: Mapping[str, Any], vocabulary: str, address: str, idle_s: float | None = None
    ) -> None:
        settings = CacheConfig(**config)
        assert settings.dir is not None
        self._address = address
        self._replicas = settings.replicas
        self._store = RolloutStore(
            settings.dir,
            vocabulary=vocabulary,
            max_bytes=settings.max_bytes_per_node,
            responses_per_prompt=settings.responses_per_prompt,
        )
        self._called_at = time.monotonic()
        self._engines: dict[str, dict[str, float]] = {}
        if idle_s is not None:
            threading.Thread(target=self._end_when_idle, args=(idle_s,), daemon=True).start()

    def _end_when_idle(self, idle_s: float) -> None:
        import ray

        while (left := self._called_at + idle_s - time.monotonic()) > 0:
            time.sleep(left)
        ray.kill(ray.get_runtime_context().current_actor)

    def ping(self, engine: str = "", counts: Mapping[str, float] | None = None) -> None:
        """Keep the shard from ending, and learn what an engine of this node has counted so far."""
        self._called_at = time.monotonic()
        if counts:
            self._engines[engine] = dict(counts)

    def engine_counts(self) -> dict[str, float]:
        """Return what this node's engines have counted, added up."""
        total: Counter[str] = Counter()
        for counts in list(self._engines.values()):
            total.update(counts)
        return dict(total)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, list[Rollout]]:
        """Return the responses to prompts, oldest first, as ``RolloutStore.get`` does."""
        self.ping()
        return self._store.get(keys)

    def put(self, rollouts: Sequence[Rollout]) -> int:
        """Keep responses; return how many were kept."""
        self.ping()
        return self._store.put(rollouts)

    def take_drafts(
        self, wanted: Mapping[bytes, int], policy_version: int
    ) -> dict[bytes, list[Rollout]]:
        """Return drafts, each of which no other call gets for this version.

        Args:
            wanted: number of rows by key.
            policy_version: the version for which they are drafts.

        Returns:
            The drafts by key. A key with an empty list: there are none left. A key that is absent:
            this node has no responses of the prompt.
        """
        self.ping()
        taken = self._store.take_drafts_of(wanted, policy_version)
        known = self._store.get([key for key in wanted if key not in taken], most=1)
        return taken | {key: [] for key in known}

    def stats(self) -> dict[str, float]:
        """Return the statistics of the store, by field of ``StoreStats``."""
        self.ping()
        return dict(vars(self._store.stats()))

    def sync(self) -> None:
        """Bring everything that was put onto the disk."""
        self._store.sync()

    def snapshot(self, file: str, nodes: Sequence[str], prompts: int | None) -> int:
        """Write the prompts of which this node is the first owner to a file of a checkpoint.

        Args:
            file: path on a file system that the nodes share.
            nodes: addresses of the nodes with a shard.
            prompts: the most recently used prompts of this node that may be written. None: all.

        Returns:
            Number of responses.
        """
        self.ping()
        groups = (
            (key, records)
            for key, records in self._store.scan(prompts)
            if ranking(key, nodes)[0] == self._address
        )
        return snapshots.write(Path(file), self._store.vocabulary, groups)

    def restore(self, file: str, shards: Mapping[str, Any]) -> int:
        """Read a file of a checkpoint, and give each prompt to its owners, as older than theirs.

        Args:
            file: path on a file system that the nodes share.
            shards: all shards, by the address of their node.

        Returns:
            Number of responses that were read.
        """
        import ray

        self.ping()
        responses = 0
        with snapshots.opened(Path(file), self._store.vocabulary) as groups:
            for part in _pieces(groups):
                by_node: dict[str, list[tuple[bytes, list[bytes]]]] = defaultdict(list)
                for key, records in part:
                    responses += len(records)
                    for node in ranking(key, shards)[: self._replicas]:
                        by_node[node].append((key, records))
                calls = [
                    shards[node].add_older.options(concurrency_group=WRITES).remote(mine)
                    for node, mine in by_node.items()
                    if node != self._address
                ]
                self.add_older(by_node[self._address])
                # A node that is late, or is gone by now, lacks drafts that its twin has.
                ray.wait(calls, num_returns=len(calls), timeout=PIECE_SECONDS) if calls else None
        return responses

    def add_older(self, groups: Groups) -> int:
        """Add prompts and their records, as ``RolloutStore.add_older`` does."""
        self.ping()
        return self._store.add_older(groups)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _pieces(groups: Iterable[tuple[bytes, list[bytes]]]) -> Iterator[Groups]:
    """Divide prompts and their records into pieces of about ``PIECE_BYTES``."""
    piece: list[tuple[bytes, list[bytes]]] = []
    size = 0
    for key, records in groups:
        piece.append((key, records))
        size += sum(map(len, records))
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece

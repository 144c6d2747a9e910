"""The rollout cache of a Ray cluster, as a training driver uses it.

Each node has a shard (:mod:`.shard`), which owns the store on the node's disk. The partitions of
the prompts are placed on ``replicas`` shards each (:mod:`.placement`). The keeper (:mod:`.keeper`)
has them copied and moved as nodes come and go. Clients (:mod:`.client`) look rollouts up and store
them.

What is guaranteed:

- A look-up neither raises an error nor takes longer than the deadline. Rollouts that are late,
  lost or out of reach count as absent.
- What was put before a ``sync`` is lost only if all copies of it are. The same holds for what was
  put before a ``deliver``, a second later.
- A look-up that begins after a ``sync`` or ``deliver`` returns nothing older than what was put
  before it, as long as a copy of that exists and has not been evicted.

What is not guaranteed:

- The last point, if the client that wrote could not reach a node from which others read: for the
  second that it takes to inform those, or, if the node is cut off from the keeper as well, until
  its lease ends (:data:`.shard.LEASE_SECONDS`). The same where Ray declares a node dead whose
  processes live on.
- That a prompt is found whose copies are all lost.
- That the newest rollout is found right after a restart of the whole job, before the disks have
  been compared.

Rollouts carry the incarnation of the run that put them: the wall clock of the driver's node when it
started or resumed. A resumed run's policy versions run back to those of its checkpoint; the
incarnation is why what it puts is newer than what its disks have of the steps that were lost.

This module imports Ray. It knows neither engines nor NeMo-RL.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.client import CALL_SECONDS, FAILED, POLL_SECONDS, CacheClient, ready
from nemo_specrl.cache.cluster.keeper import Keeper
from nemo_specrl.cache.cluster.membership import Health
from nemo_specrl.cache.cluster.transfers import BACKGROUND, in_one_line
from nemo_specrl.cache.snapshot import Manifest, PartitionFile, read_manifest, write_manifest
from nemo_specrl.cache.statistics import StoreStats
from nemo_specrl.errors import ForeignStore, StoreUnavailable

__all__ = ["ClusterCache", "start_shards"]


class ClusterCache(CacheClient):
    """The cache of a cluster: a client, and the operations that concern all shards."""

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of the shards that answer, by the name of the shard.

        A store may still have prompts of partitions that have moved to other shards.
        """
        refs = {shard.stats.remote(): node for node, shard in self._view.shards.items()}
        done = ready(refs, CALL_SECONDS)
        stats = {node: self._result(node, ref) for ref, node in refs.items() if ref in done}
        return {node: value for node, value in stats.items() if value is not FAILED}

    def health(self) -> Health:
        """Return how many nodes there are, and how many copies are missing or being made.

        Raises:
            StoreUnavailable: the keeper does not answer.
        """
        health: Health = self._call_keeper("health")
        return health

    def reshard(self, layout: Collection[str]) -> None:
        """Place the partitions on these nodes; they move in the background, and serve meanwhile.

        Call it when the engines are placed on other nodes. Only what has to move does.

        Args:
            layout: Ray's ids of the nodes with engines. Other nodes hold partitions only if these
                are fewer than ``replicas``. Empty: all nodes are equal, as at the start.

        Raises:
            ConfigError: one of them is no node of the Ray cluster.
            StoreUnavailable: the keeper does not answer.
        """
        self._call_keeper("reshard", sorted(layout))

    def snapshot(self, folder: Path, policy_version: int) -> Manifest:
        """Write the whole cache beside a checkpoint's weights.

        Args:
            folder: on a file system that every node sees.
            policy_version: of those weights.

        Raises:
            StoreUnavailable: a part could not be written by any shard. Then there is no manifest.
        """
        self.sync()
        folder.mkdir(parents=True, exist_ok=True)
        files: list[PartitionFile] = []
        failed: dict[str, str] = {}
        left = list(range(self.partitions))
        calls: dict[Any, tuple[str, list[int]]] = {}
        while left or calls:
            shares: dict[str, list[int]] = defaultdict(list)
            for partition in left:
                nodes = [n for n in self._view.routing.readers[partition] if n not in failed]
                if not nodes:
                    why = next(iter(failed.values()), "no shard")
                    raise StoreUnavailable(f"{folder}: {why}")
                shares[self._nearest(nodes) or nodes[0]].append(partition)
            for node, share in shares.items():
                write = self._view.shards[node].write_snapshot.options(concurrency_group=BACKGROUND)
                calls[write.remote(str(folder), share, self.partitions)] = node, share
            left = []
            done = ready(calls, POLL_SECONDS)
            self._request_view()  # which no longer has shards that are gone or stopped
            for ref, (node, share) in list(calls.items()):
                if ref in done:
                    try:
                        files += ray.get(ref)
                    except Exception as error:
                        failed[node] = in_one_line(error)
                        left += share
                elif node in self._view.shards:
                    continue
                else:
                    left += share
                del calls[ref]
        files.sort(key=lambda file: file.partition)
        manifest = Manifest(self.tokenizer_id, policy_version, self.partitions, tuple(files))
        write_manifest(folder, manifest)
        return manifest

    def restore(self, folder: Path) -> tuple[Manifest, list[str]]:
        """Merge a snapshot into the cache; what is newer in the shards stays.

        Args:
            folder: of the snapshot, on a file system that every node sees.

        Returns:
            Its manifest, and a line for each damaged partition, which is left out.

        Raises:
            StoreUnavailable: there is no snapshot, or its manifest is damaged.
            ForeignStore: it is of another tokenizer or of a newer release.
        """
        self.sync()
        manifest = read_manifest(folder)
        if manifest.tokenizer_id != self.tokenizer_id:
            raise ForeignStore(
                f"{folder} is of tokenizer {manifest.tokenizer_id!r}, not of {self.tokenizer_id!r}"
            )
        # With another number of partitions, any file may have prompts of any shard.
        same = manifest.partitions == self.partitions
        refs = []
        for node, shard in self._view.shards.items():
            mine = {p for p, nodes in enumerate(self._view.routing.writers) if node in nodes}
            files = [f for f in manifest.files if not same or f.partition in mine]
            read = shard.read_snapshot.options(concurrency_group=BACKGROUND)
            refs.append(read.remote(str(folder), files, mine, self.partitions))
        return manifest, sorted({line for lines in ray.get(refs) for line in lines})

    def close(self) -> None:
        """Send what is buffered, close the stores and end the actors."""
        self.sync()
        try:
            self._call_keeper("close")
        finally:
            ray.kill(self._keeper)

    def _call_keeper(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._keeper, method).remote(*args), timeout=CALL_SECONDS)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise StoreUnavailable(f"the cache's keeper: {in_one_line(error)}") from error


def start_shards(
    folder: Path,
    *,
    keep: bool,
    partitions: int,
    replicas: int,
    deadline_s: float,
    tokenizer_id: str,
    max_bytes: int,
    groups_per_prompt: int,
) -> ClusterCache:
    """Start a shard on each node of the Ray cluster that this process is part of.

    Nodes that join later get a shard within seconds. The shards end with this process's job; their
    disks keep what they have, and a node that comes back to the run keeps what its disk has.

    Args:
        folder: on each node's own disk.
        keep: keep what is there, as a resumed run does; otherwise start empty.
        partitions: number of partitions that the keys fall into.
        replicas: copies of each partition, on distinct nodes; fewer where there are fewer nodes.
        deadline_s: of look-ups, seconds.
        tokenizer_id: identity of the tokenizer.
        max_bytes: hard cap on each node, bytes.
        groups_per_prompt: rollouts kept for each sample index.

    Returns:
        A client of the shards.

    Raises:
        StoreUnavailable: a node's folder cannot be used.
    """
    incarnation = time.time_ns()
    options = {
        "max_bytes": max_bytes,
        "tokenizer_id": tokenizer_id,
        "groups_per_prompt": groups_per_prompt,
    }
    here = ray.get_runtime_context().get_node_id()
    actor: Any = ray.remote(Keeper).options(
        num_cpus=0,
        max_concurrency=16,
        max_restarts=-1,
        # Beside this process: the run ends with its node, and then there is no use for a keeper.
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    keeper = actor.remote(str(folder), incarnation, keep, partitions, replicas, options)
    try:
        view = ray.get(keeper.start.remote())
    except ray.exceptions.RayError as error:
        ray.kill(keeper)
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        if isinstance(cause, StoreUnavailable):
            raise cause from None
        raise StoreUnavailable(f"{folder}: {in_one_line(error)}") from error
    return ClusterCache(
        view,
        keeper,
        deadline_s=deadline_s,
        tokenizer_id=tokenizer_id,
        incarnation=incarnation,
        resumed=keep,
    )

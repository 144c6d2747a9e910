"""The rollout cache of a Ray cluster: what engines, drivers and checkpoints have of it.

Each node has a shard (:mod:`.shard`), which owns the store on the node's disk. Partitions of the
prompts are placed on ``replicas`` shards each (:mod:`.placement`), and the keeper (:mod:`.keeper`)
moves and copies them as nodes come and go; clients (:mod:`.client`) look up and write.

Promised: a look-up neither raises into a rollout nor holds it up beyond the deadline; what is late,
lost or out of reach counts as absent. What was put before a ``sync`` is lost only with all copies
of it; so is, a second later, what was put before a ``deliver``. A look-up that begins after either
gets nothing older than what was put before, while a copy of that lives and has not been evicted.

Not promised: the last where this client could not write to a node that others can read from, for
the second that it takes to tell them, or while its lease lasts (:data:`.shard.LEASE_SECONDS`) where
it is cut off; or where a node is declared dead while its processes live on; nor that a prompt is
found whose copies are all lost; nor, after a restart of the whole job, that the newest is found
before the disks have been compared.

Knows Ray; nothing of engines or of NeMo-RL.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.client import ASK_SECONDS, CALL_SECONDS, FAILED, CacheClient, ready
from nemo_specrl.cache.cluster.keeper import BACKGROUND, Keeper, last_line
from nemo_specrl.cache.cluster.membership import Health
from nemo_specrl.cache.snapshot import Manifest, PartitionFile, read_manifest, write_manifest
from nemo_specrl.cache.store import StoreStats
from nemo_specrl.errors import ForeignStore, StoreUnavailable

__all__ = ["ClusterCache", "start_shards"]


class ClusterCache(CacheClient):
    """The cache of a cluster: a client, and what a driver asks of all shards together."""

    def stats(self) -> dict[str, StoreStats]:
        """Of the shards that answer, by the name of the shard.

        A store may still have prompts of partitions that have moved elsewhere.
        """
        refs = {shard.stats.remote(): node for node, shard in self._view.shards.items()}
        done = ready(refs, CALL_SECONDS)
        stats = {node: self._result(node, ref) for ref, node in refs.items() if ref in done}
        return {node: value for node, value in stats.items() if value is not FAILED}

    def health(self) -> Health:
        """How many nodes there are, and copies missing or on their way.

        Raises:
            StoreUnavailable: the keeper does not answer.
        """
        health: Health = self._of_keeper("health")
        return health

    def reshard(self, layout: Collection[str]) -> None:
        """Have the partitions lie on these nodes, in the background; where they lie, they serve.

        Call it when the engines are placed on other nodes. Only what has to move does.

        Args:
            layout: ids in Ray of the nodes with engines; other nodes hold something only where
                these are fewer than ``replicas``. Empty: all nodes are equal, as at the start.

        Raises:
            ConfigError: one of them is no node of the Ray cluster.
            StoreUnavailable: the keeper does not answer.
        """
        self._of_keeper("reshard", sorted(layout))

    def snapshot(self, folder: Path, policy_version: int) -> Manifest:
        """Write all that is in the cache beside a checkpoint's weights.

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
                write = self._view.shards[node].write.options(concurrency_group=BACKGROUND)
                calls[write.remote(str(folder), share, self.partitions)] = node, share
            left = []
            done = ready(calls, ASK_SECONDS)
            self._ask_keeper()  # a shard that is gone or stopped is no longer in the view
            for ref, (node, share) in list(calls.items()):
                if ref in done:
                    try:
                        files += ray.get(ref)
                    except Exception as error:
                        failed[node] = last_line(error)
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
        """Take over a snapshot, where the shards have nothing newer.

        Returns:
            Its manifest, and a line for each partition that is damaged, which is left out.

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
        same = manifest.partitions == self.partitions  # else any file may have some of a shard's
        refs = []
        for node, shard in self._view.shards.items():
            mine = {p for p, nodes in enumerate(self._view.routing.writers) if node in nodes}
            files = [f for f in manifest.files if not same or f.partition in mine]
            read = shard.read.options(concurrency_group=BACKGROUND)
            refs.append(read.remote(str(folder), files, mine, self.partitions))
        return manifest, sorted({line for lines in ray.get(refs) for line in lines})

    def close(self) -> None:
        """Send what is buffered, close the stores and end the actors."""
        self.sync()
        try:
            self._of_keeper("close")
        finally:
            ray.kill(self._keeper)

    def _of_keeper(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._keeper, method).remote(*args), timeout=CALL_SECONDS)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise StoreUnavailable(f"the cache's keeper: {last_line(error)}") from error


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
    name: str | None = None,
) -> ClusterCache:
    """A shard on each node of the Ray cluster that this process is part of, and their client.

    Nodes that join later get theirs within seconds. The shards end with this process's job; their
    disks keep what they had, and a node that comes back to the run goes on with its disk.

    Args:
        folder: on each node's own disk.
        keep: go on with what is there, as a resumed run does; else start empty.
        partitions: into how many the keys fall.
        replicas: copies of each, on distinct nodes; fewer where there are fewer nodes.
        deadline_s: of look-ups, seconds.
        tokenizer_id: identity of the tokenizer.
        max_bytes: hard cap on each node, bytes.
        groups_per_prompt: rollouts kept for each sample index.
        name: the shards outlive this process's job, and whoever calls this with the same name finds
            them as they are, until they are closed; the other arguments do not count then.

    Raises:
        StoreUnavailable: a node's folder cannot be used.
    """
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
        # Where this process is: without it there is no run, and no use for a keeper.
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=name is not None),
        **({} if name is None else {"name": name, "lifetime": "detached", "get_if_exists": True}),
    )
    keeper = actor.remote(str(folder), uuid.uuid4().hex, keep, partitions, replicas, options)
    try:
        view = ray.get(keeper.start.remote())
    except ray.exceptions.RayError as error:
        ray.kill(keeper)
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        if isinstance(cause, StoreUnavailable):
            raise cause from None
        raise StoreUnavailable(f"{folder}: {last_line(error)}") from error
    return ClusterCache(view, keeper, deadline_s=deadline_s, tokenizer_id=tokenizer_id)

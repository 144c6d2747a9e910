"""The rollout cache of a Ray cluster: a store on every node, and the client that everyone uses.

Each node has one :class:`Shard`, an actor that owns the store on the node's disk. Partitions of the
prompts are placed on ``replicas`` shards each (:mod:`.placement`); a client writes to all of them
and reads from the nearest that answers. What a client cannot get within its deadline counts as
absent, and a shard that keeps failing is left alone for a while: the cache can only cost speed.

Knows stores and Ray; nothing of engines or of NeMo-RL.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.placement import Table, partition_of, place
from nemo_specrl.cache.slots import SlotClaims
from nemo_specrl.cache.snapshot import (
    Manifest,
    PartitionFile,
    key_range,
    read_manifest,
    read_partition,
    write_manifest,
    write_partition,
)
from nemo_specrl.cache.store import RolloutStore, StoreStats
from nemo_specrl.errors import CacheError, ForeignStore, StoreUnavailable
from nemo_specrl.rollout import Rollout

__all__ = ["ClusterCache", "Shard", "start_shards"]

PUT_AT_ONCE = 64
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 30.0
SYNC_SECONDS = 30.0
LOCK_SECONDS = 20.0

logger = logging.getLogger(__name__)


class Shard:
    """The store of one node, as an actor; its methods are :class:`ClusterCache`'s to call.

    Args:
        folder: on the node's own disk.
        keep: go on with what is in the folder; else it is emptied.
        options: of :class:`RolloutStore`.
    """

    def __init__(self, folder: str, keep: bool, options: Mapping[str, Any]) -> None:
        path = Path(folder)
        self.claims = SlotClaims()
        self.store = _open(path, options)
        if not keep and len(self.store):
            self.store.close()
            for file in path.glob("*.mdb"):
                file.unlink()
            self.store = _open(path, options)

    def get(self, keys: list[bytes]) -> dict[bytes, list[Rollout]]:
        """As :meth:`RolloutStore.get`."""
        return self.store.get(keys)

    def put(self, rollouts: list[Rollout]) -> None:
        """As :meth:`RolloutStore.put`; the slots are free again."""
        for rollout in rollouts:
            self.claims.release(rollout.key, rollout.slot)
        self.store.put(rollouts)

    def claim(self, key: bytes, policy_version: int) -> tuple[int, list[Rollout]]:
        """A slot for a row that comes alone (:class:`SlotClaims`), and the prompt's rollouts."""
        rollouts = self.store.get([key]).get(key, [])
        return self.claims.claim(key, rollouts, policy_version), rollouts

    def sync(self) -> None:
        """As :meth:`RolloutStore.sync`."""
        self.store.sync()

    def stats(self) -> StoreStats:
        """As :meth:`RolloutStore.stats`."""
        return self.store.stats()

    def write(self, folder: str, partitions: list[int], of: int) -> list[PartitionFile]:
        """Write some partitions of a snapshot; those without rollouts get no file."""
        files = []
        for partition in partitions:
            rollouts = self.store.scan(*key_range(partition, of))
            first = next(rollouts, None)
            if first is not None:
                files.append(write_partition(Path(folder), partition, _chain(first, rollouts)))
        return files

    def read(self, folder: str, files: list[PartitionFile], mine: set[int], of: int) -> list[str]:
        """Take over files of a snapshot, where the store has nothing newer.

        Args:
            folder: of the snapshot.
            files: in it; their partitions may be others than those of today.
            mine: partitions that this shard holds, out of ``of``.
            of: number of partitions.

        Returns:
            A line for each partition that is damaged, which is left out.
        """
        damaged = []
        for file in files:
            try:
                rollouts = [
                    rollout
                    for rollout in read_partition(Path(folder), file)
                    if partition_of(rollout.key, of) in mine
                ]
                here = self.store.get({rollout.key for rollout in rollouts})
                slots = {(key, r.slot) for key, group in here.items() for r in group}
                # Oldest first, since what is put last is the newest.
                self.store.put(r for r in reversed(rollouts) if (r.key, r.slot) not in slots)
            except CacheError as error:
                damaged.append(str(error))
        self.store.sync()
        return damaged

    def close(self) -> None:
        """Commit what is buffered and give the folder free."""
        self.store.close()


def _open(path: Path, options: Mapping[str, Any]) -> RolloutStore:
    """The store; the actor of a run that was killed may hold its folder for some seconds yet."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return RolloutStore(path, **options)
        except StoreUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def _chain(first: Rollout, rest: Iterable[Rollout]) -> Iterable[Rollout]:
    yield first
    yield from rest


@dataclass
class _Breaker:
    """Whether a shard is asked; after some failures in a row it is left alone for a while."""

    failures: int = 0
    open_until: float = 0.0

    @property
    def closed(self) -> bool:
        return time.monotonic() >= self.open_until

    def count(self, failed: bool) -> None:
        self.failures = self.failures + 1 if failed else 0
        if self.failures >= FAILURES_TO_OPEN:
            self.failures, self.open_until = 0, time.monotonic() + OPEN_SECONDS


class ClusterCache:
    """What engines, drivers and checkpoints have of the cache; can be sent to any process.

    Args:
        shards: node id to the actor that owns its store.
        partitions: into how many the keys fall.
        replicas: shards that hold each of them.
        deadline_s: a look-up that takes longer is answered without what is late, seconds.
        tokenizer_id: of the stores.

    Attributes:
        failures: calls of shards that failed or came too late, since they were last taken.
    """

    def __init__(
        self,
        shards: Mapping[str, Any],
        *,
        partitions: int,
        replicas: int,
        deadline_s: float,
        tokenizer_id: str,
    ) -> None:
        self.shards = dict(shards)
        self.partitions = partitions
        self.deadline_s = deadline_s
        self.tokenizer_id = tokenizer_id
        self.failures = 0
        self._table: Table = place(self.shards, partitions, replicas)
        self._breakers = {node: _Breaker() for node in self.shards}
        self._buffer: list[Rollout] = []
        self._sent: list[tuple[str, Any]] = []
        self._logged = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts with nothing on its way; what is, stays with the one that sent it."""
        breakers = {node: _Breaker() for node in self.shards}
        return self.__dict__ | {"_buffer": [], "_sent": [], "_breakers": breakers, "failures": 0}

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Rollouts by prompt key, newest first within a slot; what is late is absent.

        What this client has put is found: a shard does what one client asks in the order asked.
        """
        self._send()
        wanted: dict[str, list[bytes]] = defaultdict(list)
        here = ray.get_runtime_context().get_node_id()
        for key in dict.fromkeys(keys):
            node = self._nearest(self._table[partition_of(key, self.partitions)], here)
            if node is not None:
                wanted[node].append(key)
        refs = {self.shards[node].get.remote(some): node for node, some in wanted.items()}
        found: dict[bytes, list[Rollout]] = {}
        done = _ready(refs, self.deadline_s)
        for ref, node in refs.items():
            if ref in done:
                found |= self._result(node, ref) or {}
            else:
                self._failed(node, TimeoutError(f"no answer in {self.deadline_s:g} s"))
        return found

    async def claim(self, key: bytes, policy_version: int) -> tuple[int, list[Rollout]] | None:
        """A slot for a row that comes alone, and its prompt's rollouts; None when that is late.

        All clients ask the same shard, so that no slot is given to two rows.
        """
        node = self._nearest(self._table[partition_of(key, self.partitions)], None)
        if node is None:
            return None
        ref = self.shards[node].claim.remote(key, policy_version)
        try:
            claimed: tuple[int, list[Rollout]] = await asyncio.wait_for(ref, self.deadline_s)
        except Exception as error:  # the cache can only cost speed
            self._failed(node, error)
            return None
        self._breakers[node].count(failed=False)
        return claimed

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts: sent on in batches, and at the latest with ``flush`` or ``sync``."""
        self._buffer += rollouts
        if len(self._buffer) >= PUT_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send on what was put, and wait for nothing."""
        self._send()
        if len(self._sent) > PUT_AT_ONCE:
            self._settle(0)

    def sync(self) -> None:
        """Return when what was put would survive SIGKILL on every shard that answers."""
        self._send()
        nodes = {node for node, _ in self._sent}
        self._sent += [(node, self.shards[node].sync.remote()) for node in nodes]
        self._settle(SYNC_SECONDS)
        for node, _ in self._sent:
            self._failed(node, TimeoutError(f"not written in {SYNC_SECONDS:g} s"))
        self._sent = []

    def take_failures(self) -> int:
        """The number of failures since this was last asked."""
        failures, self.failures = self.failures, 0
        return failures

    def stats(self) -> dict[str, StoreStats]:
        """Of the shards that answer, by node."""
        refs = {node: shard.stats.remote() for node, shard in self.shards.items()}
        stats = {node: self._result(node, ref) for node, ref in refs.items()}
        return {node: value for node, value in stats.items() if value is not None}

    def snapshot(self, folder: Path, policy_version: int) -> Manifest:
        """Write all that is in the cache beside a checkpoint's weights.

        Args:
            folder: on a file system that every node sees.
            policy_version: of those weights.

        Raises:
            StoreUnavailable: a shard could not write its part. Then there is no manifest.
        """
        self.sync()
        folder.mkdir(parents=True, exist_ok=True)
        shares: dict[str, list[int]] = defaultdict(list)
        for partition, nodes in enumerate(self._table):
            shares[self._nearest(nodes, None) or nodes[0]].append(partition)
        refs = [
            self.shards[node].write.remote(str(folder), share, self.partitions)
            for node, share in shares.items()
        ]
        try:
            files = sorted(
                (file for part in ray.get(refs) for file in part), key=lambda f: f.partition
            )
        except ray.exceptions.RayError as error:
            raise StoreUnavailable(f"{folder}: {_last_line(error)}") from error
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
        for node, shard in self.shards.items():
            mine = {p for p, nodes in enumerate(self._table) if node in nodes}
            files = [f for f in manifest.files if not same or f.partition in mine]
            refs.append(shard.read.remote(str(folder), files, mine, self.partitions))
        return manifest, sorted({line for lines in ray.get(refs) for line in lines})

    def close(self) -> None:
        """Send what is buffered, close the stores and end the actors."""
        self.sync()
        for node, shard in self.shards.items():
            self._result(node, shard.close.remote())
            ray.kill(shard)

    def _nearest(self, nodes: tuple[str, ...], here: str | None) -> str | None:
        """The shard to ask: this node's own where it has a copy, else the first that answers."""
        for node in sorted(nodes, key=lambda node: node != here):
            if self._breakers[node].closed:
                return node
        return None

    def _send(self) -> None:
        by_node: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in self._buffer:
            for node in self._table[partition_of(rollout.key, self.partitions)]:
                if self._breakers[node].closed:
                    by_node[node].append(rollout)
        self._buffer = []
        self._sent += [(node, self.shards[node].put.remote(r)) for node, r in by_node.items()]

    def _settle(self, timeout: float) -> None:
        """Take the answers to what was sent, as far as they come in time; the rest stays sent."""
        done = _ready([ref for _, ref in self._sent], timeout)
        for node, ref in self._sent:
            if ref in done:
                self._result(node, ref)
        self._sent = [(node, ref) for node, ref in self._sent if ref not in done]

    def _result(self, node: str, ref: Any) -> Any:
        """What a shard answered, or None where it failed."""
        try:
            result = ray.get(ref)
        except Exception as error:  # the cache can only cost speed
            self._failed(node, error)
            return None
        self._breakers[node].count(failed=False)
        return result

    def _failed(self, node: str, error: Exception) -> None:
        self.failures += 1
        self._breakers[node].count(failed=True)
        if not self._logged:
            self._logged = True
            logger.warning(
                "rollout cache on node %s: %s; rows are decoded plainly. Further failures are "
                "counted in spec_rl/cache_errors",
                node,
                _last_line(error),
            )


def _ready(refs: Collection[Any], timeout: float) -> set[Any]:
    """Of calls, those that have an answer within ``timeout`` seconds."""
    if not refs:
        return set()  # which Ray does not take
    return set(ray.wait(list(refs), num_returns=len(refs), timeout=timeout)[0])


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"


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
    """A shard on each node of the Ray cluster that this process is part of, and their client.

    The shards end with this process's job; their disks keep what they had.

    Args:
        folder: on each node's own disk.
        keep: go on with what is there, as a resumed run does; else start empty.
        partitions: into how many the keys fall.
        replicas: copies of each, on distinct nodes; fewer where there are fewer nodes.
        deadline_s: of look-ups, seconds.
        tokenizer_id: identity of the tokenizer.
        max_bytes: hard cap on each node, bytes.
        groups_per_prompt: rollouts kept for each slot.

    Raises:
        StoreUnavailable: a node's folder cannot be used.
    """
    options = {
        "max_bytes": max_bytes,
        "tokenizer_id": tokenizer_id,
        "groups_per_prompt": groups_per_prompt,
    }
    shards: dict[str, Any] = {}
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    # Nodes of a test are processes of one machine, and share its disk.
    one_disk = len({node["NodeManagerAddress"] for node in nodes}) < len(nodes)
    for node in nodes:
        name = node["NodeID"]
        actor = ray.remote(Shard).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)
        )
        shards[name] = actor.remote(str(folder / name if one_disk else folder), keep, options)
    try:
        ray.get([shard.stats.remote() for shard in shards.values()])
    except ray.exceptions.RayError as error:
        raise StoreUnavailable(f"{folder}: {_last_line(error)}") from error
    return ClusterCache(
        shards,
        partitions=partitions,
        replicas=replicas,
        deadline_s=deadline_s,
        tokenizer_id=tokenizer_id,
    )

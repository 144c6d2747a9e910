"""Which nodes serve and receive each partition while nodes come and go.

A :class:`Routing` names, for each partition, the nodes that answer look-ups (``readers``, which
have all of it) and the nodes that receive what is written (``writers``: the readers, and nodes that
are about to become readers or have just stopped being one). :class:`Membership` records what
happens to nodes and derives one routing from the last, each with a higher epoch, such that

- a node becomes a reader only after it has everything the other readers have, including what was
  written while it was being copied;
- a node keeps receiving writes until no client can still be reading from it;
- a node that missed a write, or was away, stops being a reader until it has caught up, unless no
  other node has the partition;
- a partition whose last copy is lost starts again, with whatever is left of it on disks.

This holds as long as whoever acts on a routing makes it known to every member before copies are
made or the next routing is derived (:meth:`Membership.acknowledged`), and members make it known to
clients. Which of two rollouts is newer depends only on the rollouts (``cache.recency``), so copies
can be merged in any order and any number of times.

This module deals in names and numbers only. It does not import Ray and knows neither stores nor
actors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nemo_specrl.cache.cluster.placement import Table, place
from nemo_specrl.cache.partitions import partition_of
from nemo_specrl.rollout import Rollout

__all__ = [
    "ClusterView",
    "CopyTask",
    "Health",
    "Membership",
    "Routing",
    "missing_writes",
]


@dataclass(frozen=True)
class Routing:
    """The nodes of each partition.

    Args:
        epoch: grows with each routing.
        readers: for each partition, the nodes that have all of it; the first of them assigns its
            sample indices.
        writers: for each partition, the nodes that receive writes: its readers, and maybe others.
    """

    epoch: int
    readers: Table
    writers: Table

    def read(self, key: bytes) -> tuple[str, ...]:
        """Return the nodes that answer look-ups of a prompt."""
        return self.readers[partition_of(key, len(self.readers))]

    def write(self, key: bytes) -> tuple[str, ...]:
        """Return the nodes that receive a prompt's rollouts."""
        return self.writers[partition_of(key, len(self.writers))]


@dataclass(frozen=True)
class ClusterView:
    """A routing, and how to reach its nodes.

    Args:
        routing: the current one.
        shards: actor of each node, by the node's name.
        nodes: Ray's id of each node, by the node's name.
    """

    routing: Routing
    shards: Mapping[str, Any]
    nodes: Mapping[str, str]


class CopyTask(NamedTuple):
    """A copy to be made: what ``source`` has of a partition is merged into ``target``."""

    partition: int
    target: str
    source: str


class Health(NamedTuple):
    """How far the copies of a cache are from complete.

    Args:
        nodes: nodes that are present.
        missing: copies that are short of ``replicas``, over all partitions.
        moving: copies that are being made, or are not read from yet.
    """

    nodes: int
    missing: int
    moving: int


def missing_writes(
    rollouts: Iterable[Rollout], old: Routing, new: Routing
) -> dict[str, list[Rollout]]:
    """Return what each node still has to receive of rollouts that were sent by an old routing."""
    missing: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        for node in new.write(rollout.key):
            if node not in old.write(rollout.key):
                missing.setdefault(node, []).append(rollout)
    return missing


class Membership:
    """The nodes of a cache, and the routing that follows from what has happened to them.

    Args:
        partitions: number of partitions.
        replicas: number of copies of each partition, on distinct nodes; fewer if there are fewer
            nodes.
        epoch: routings count on from here.

    Attributes:
        routing: the current one. It names no node before the first :meth:`plan`.
        members: names of the nodes that are present.
        going_on: copies that the last :meth:`plan` does not disturb, if they are under way: they
            are still needed, their targets have received everything written since they began, and
            neither end has started again.
    """

    def __init__(self, partitions: int, replicas: int, epoch: int = 0) -> None:
        nobody: Table = ((),) * partitions
        self.routing = Routing(epoch, nobody, nobody)
        self.members: set[str] = set()
        self.going_on: set[CopyTask] = set()
        self._replicas = replicas
        self._preferred: frozenset[str] = frozenset()
        self._goal: Table = nobody
        # For each partition, nodes that a client with an old routing may still read from.
        self._may_read = nobody
        self._unmerged: dict[str, set[int]] = {}  # partitions whose data only this disk may have
        self._behind: dict[str, set[int]] = {}  # partitions of which a node lacks something
        self._missed: set[str] = set()  # nodes behind, which the routing does not reflect yet
        self._waiting: set[str] = set()  # nodes behind on everything, whose copies have not begun
        self._changed = False
        self._acknowledged = False
        self._copies: set[CopyTask] = set()  # still to be made

    @property
    def changed(self) -> bool:
        """Whether something has happened that requires a :meth:`plan`."""
        return self._changed and bool(self.members)

    @property
    def health(self) -> Health:
        """How far the copies are from complete."""
        copies = min(self._replicas, len(self.members))
        readers = self.routing.readers
        here = (sum(node in self.members for node in nodes) for nodes in readers)
        unfinished = {(copy.partition, copy.target) for copy in self._copies}
        for partition, goal in enumerate(self._goal):
            for node in self.members.intersection(goal):
                if node not in readers[partition] or partition in self._behind[node]:
                    unfinished.add((partition, node))
        return Health(
            nodes=len(self.members),
            missing=sum(max(0, copies - n) for n in here),
            moving=len(unfinished),
        )

    def join(self, name: str, holds: Collection[int]) -> None:
        """Add a node.

        Args:
            name: the node's own; the same one when it comes back with its disk.
            holds: partitions of which its disk has something.
        """
        self.members.add(name)
        self._unmerged[name] = set(holds)
        self._behind[name] = set(range(len(self._goal)))
        self._waiting.add(name)
        self._changed = True

    def leave(self, name: str) -> None:
        """Remove a node that is gone or does not answer."""
        self.members.discard(name)
        self._unmerged.pop(name, None)
        self._behind.pop(name, None)
        self._missed.discard(name)
        self._waiting.discard(name)
        self._changed = True

    def missed_write(self, name: str) -> None:
        """Record that a node did not receive something that was written to the others.

        Nothing changes if it is assumed to lack everything and no copy for it has begun.
        """
        if name in self.members and name not in self._waiting:
            self._missed.add(name)
            self._changed = True

    def outrun(self, epoch: int) -> None:
        """Make the next routing newer than one that an earlier coordinator has given out."""
        if self.routing.epoch < epoch:
            self.routing = replace(self.routing, epoch=epoch)
            self._changed = True

    def set_preferred_nodes(self, nodes: Collection[str]) -> None:
        """Place the partitions on these nodes, and on others only if these are too few."""
        if self._preferred != frozenset(nodes):
            self._preferred = frozenset(nodes)
            self._changed = True

    def plan(self) -> Routing:
        """Derive the routing that follows from everything that has happened.

        Copies that are under way must start again, or end, unless they are in ``going_on``.
        """
        for name in self._missed:
            self._behind[name] = set(range(len(self._goal)))
        self._waiting |= self._missed
        self._missed.clear()
        self._goal = place(self.members, len(self._goal), self._replicas, self._preferred)
        self._copies.clear()
        readers: list[tuple[str, ...]] = []
        for partition, goal in enumerate(self._goal):
            here = tuple(n for n in self.routing.readers[partition] if n in self.members)
            now = tuple(n for n in here if partition not in self._behind[n])
            holders = [n for n in sorted(self.members) if partition in self._unmerged[n]]
            if not now:  # every node that is left lacks something, which another one may have
                left = (n for n in self.routing.writers[partition] if n in self.members)
                holders = sorted({*holders, *left})
                now = here or tuple(n for n in goal if n in holders) or tuple(holders) or goal
            readers.append(now)
            self._copies.update(
                CopyTask(partition, node, source)
                for node in goal
                for source in (*holders, *([] if node in now else now[:1]))
                if source != node
            )
        self._changed = False
        begin = self._waiting
        self.going_on = {c for c in self._copies if c.target not in begin and c.source not in begin}
        return self._next(tuple(readers))

    def acknowledged(self) -> list[CopyTask]:
        """Record that every member knows the current routing.

        Returns:
            The copies that can be made now.
        """
        self._acknowledged = True
        self._waiting.clear()
        self._may_read = self.routing.readers
        return sorted(self._copies)

    def copied(self, copy: CopyTask) -> None:
        """Record that a copy has been made; one that is no longer wanted is ignored."""
        self._copies.discard(copy)

    def advance(self) -> bool:
        """Derive the next routing, in which nodes that have caught up are readers, if there is one.

        Returns:
            Whether there is a new routing, which every member must learn. There is none before the
            current one has been acknowledged.
        """
        if not self._acknowledged or self._changed:
            return False
        copying = {copy.partition for copy in self._copies}
        readers = []
        for partition, goal in enumerate(self._goal):
            if partition in copying:
                readers.append(self.routing.readers[partition])
                continue
            readers.append(goal)
            for partitions in (*self._unmerged.values(), *self._behind.values()):
                partitions.discard(partition)
        writers = self._writers(tuple(readers))
        if (tuple(readers), writers) == (self.routing.readers, self.routing.writers):
            return False
        self._next(tuple(readers))
        return True

    def _next(self, readers: Table) -> Routing:
        self.routing = Routing(self.routing.epoch + 1, readers, self._writers(readers))
        self._may_read = tuple(
            tuple(dict.fromkeys((*old, *new)))
            for old, new in zip(self._may_read, readers, strict=True)
        )
        self._acknowledged = False
        return self.routing

    def _writers(self, readers: Table) -> Table:
        return tuple(
            tuple(n for n in dict.fromkeys((*now, *goal, *old)) if n in self.members)
            for now, goal, old in zip(readers, self._goal, self._may_read, strict=True)
        )

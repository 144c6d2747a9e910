"""Who reads and who writes which partition while nodes come and go: the rules, and nothing else.

A :class:`Routing` says of each partition which nodes answer look-ups (``readers``, which have all
of it) and which get what is written (``writers``, the readers and those on their way to become
one). :class:`Membership` takes note of what happens to nodes and turns one routing into the next,
each with a higher epoch, so that

- a node becomes a reader once it has got everything that the other readers have, and what was
  written meanwhile;
- a node keeps getting what is written until nobody can be reading from it any more;
- a node that missed a write, or was away, is no reader until it has caught up, unless no other node
  has the partition;
- a partition whose last copy is lost begins anew, with whatever disks have left of it.

For that, whoever acts on it tells every member the routing before it copies anything or goes on to
the next (:meth:`Membership.told`), and members tell clients. What is newer is decided by policy
version and occurrence (:func:`recency`), so that copies may be merged in any order and any number
of times.

Knows names and numbers, as :mod:`.placement`; nothing of nodes, stores or actors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_specrl.cache.cluster.placement import Table, moves, place
from nemo_specrl.cache.snapshot import partition_of
from nemo_specrl.rollout import Rollout

__all__ = ["Copy", "Health", "Membership", "Routing", "View", "owed", "recency"]


@dataclass(frozen=True)
class Routing:
    """Where partitions lie.

    Args:
        epoch: grows with each routing.
        readers: by partition, nodes that have all of it; the first gives out its sample indices.
        writers: by partition, nodes that get what is put: its readers, and maybe others.
    """

    epoch: int
    readers: Table
    writers: Table

    def read(self, key: bytes) -> tuple[str, ...]:
        """The nodes that have a prompt."""
        return self.readers[partition_of(key, len(self.readers))]

    def write(self, key: bytes) -> tuple[str, ...]:
        """The nodes that get a prompt's rollouts."""
        return self.writers[partition_of(key, len(self.writers))]


@dataclass(frozen=True)
class View:
    """A routing, and how its nodes are reached.

    Args:
        routing: that holds.
        shards: name of a node to its actor.
        nodes: name of a node to its id in Ray.
    """

    routing: Routing
    shards: Mapping[str, Any]
    nodes: Mapping[str, str]


class Copy(NamedTuple):
    """A partition, or what a node has of it, that is to be merged into another node's."""

    partition: int
    target: str
    source: str


class Health(NamedTuple):
    """How far the copies of a cache are from what they should be.

    Args:
        nodes: that are there.
        missing: copies, over all partitions, that there are fewer of than ``replicas``.
        moving: copies that are being made now.
    """

    nodes: int
    missing: int
    moving: int


def recency(rollout: Rollout) -> tuple[int, int]:
    """What orders the rollouts of a sample index: the newer is the larger."""
    return rollout.policy_version, rollout.occurrence


def owed(rollouts: Iterable[Rollout], old: Routing, new: Routing) -> dict[str, list[Rollout]]:
    """By node, what it has yet to get of rollouts that were put by an old routing."""
    owed: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        for node in new.write(rollout.key):
            if node not in old.write(rollout.key):
                owed.setdefault(node, []).append(rollout)
    return owed


class Membership:
    """The nodes of a cache, and the routing that follows from what has happened to them.

    Args:
        partitions: into how many the keys fall.
        replicas: copies of each, on distinct nodes; fewer where there are fewer nodes.
        epoch: that routings count on from.

    Attributes:
        routing: the present one; nobody reads or writes before the first :meth:`plan`.
        members: names of the nodes that are there.
    """

    def __init__(self, partitions: int, replicas: int, epoch: int = 0) -> None:
        nobody: Table = ((),) * partitions
        self.routing = Routing(epoch, nobody, nobody)
        self.members: set[str] = set()
        self._replicas = replicas
        self._first: frozenset[str] = frozenset()
        self._goal: Table = nobody
        self._may_read = nobody  # by partition, whom a client may ask that knows an old routing
        self._unmerged: dict[str, set[int]] = {}  # what a disk may have and no other node has
        self._behind: dict[str, set[int]] = {}  # partitions of which a node lacks something
        self._missed: set[str] = set()  # nodes behind, of which the routing does not know yet
        self._changed = False
        self._told = False
        self._copies: set[Copy] = set()  # that have yet to be made

    @property
    def changed(self) -> bool:
        """Whether something has happened that asks for a :meth:`plan`."""
        return self._changed and bool(self.members)

    @property
    def health(self) -> Health:
        """How far the copies are from what they should be."""
        copies = min(self._replicas, len(self.members))
        here = (sum(node in self.members for node in nodes) for nodes in self.routing.readers)
        return Health(
            nodes=len(self.members),
            missing=sum(max(0, copies - n) for n in here),
            moving=len({(copy.partition, copy.target) for copy in self._copies}),
        )

    def join(self, name: str, holds: Collection[int]) -> None:
        """A node is there.

        Args:
            name: its own; the same one when it comes back with its disk.
            holds: partitions of which its disk has something.
        """
        self.members.add(name)
        self._unmerged[name] = set(holds)
        self._behind[name] = set(range(len(self._goal)))
        self._changed = True

    def leave(self, name: str) -> None:
        """A node is gone, or does not answer."""
        self.members.discard(name)
        self._unmerged.pop(name, None)
        self._behind.pop(name, None)
        self._missed.discard(name)
        self._changed = True

    def missed(self, name: str) -> None:
        """A node has not got something that was written to the others."""
        if name in self.members:
            self._missed.add(name)
            self._changed = True

    def prefer(self, first: Collection[str]) -> None:
        """Have these nodes hold the partitions, and others only where there are too few."""
        if self._first != frozenset(first):
            self._first = frozenset(first)
            self._changed = True

    def plan(self) -> Routing:
        """The routing after all that has happened; copies that are still needed begin anew."""
        for name in self._missed:
            self._behind[name] = set(range(len(self._goal)))
        self._missed.clear()
        self._goal = place(self.members, len(self._goal), self._replicas, self._first)
        self._copies.clear()
        readers: list[tuple[str, ...]] = []
        for partition, goal in enumerate(self._goal):
            here = tuple(n for n in self.routing.readers[partition] if n in self.members)
            now = tuple(n for n in here if partition not in self._behind[n])
            holders = [n for n in sorted(self.members) if partition in self._unmerged[n]]
            if not now:  # each that is left lacks something, which another may have
                left = (n for n in self.routing.writers[partition] if n in self.members)
                holders = sorted({*holders, *left})
                now = here or tuple(n for n in goal if n in holders) or tuple(holders) or goal
            readers.append(now)
            self._copies.update(
                Copy(partition, node, holder) for node in goal for holder in holders
            )
        for move in moves(tuple(readers), self._goal, self.members):
            self._copies.add(Copy(move.partition, move.target, move.sources[0]))
        self._copies = {copy for copy in self._copies if copy.source != copy.target}
        self._changed = False
        return self._next(tuple(readers))

    def told(self) -> list[Copy]:
        """Every member knows the present routing.

        Returns:
            The copies that can be made now, from where a partition lies to where it is to lie.
        """
        self._told = True
        self._may_read = self.routing.readers
        return sorted(self._copies)

    def copied(self, copy: Copy) -> None:
        """A copy has been made; one that is not wanted any more does not count."""
        self._copies.discard(copy)

    def settle(self) -> bool:
        """Go on to the next routing, if there is one: whoever has caught up becomes a reader.

        Returns:
            Whether there is one; it is to be told to all. False, too, before the present one is.
        """
        if not self._told or self._changed:
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
        self._told = False
        return self.routing

    def _writers(self, readers: Table) -> Table:
        return tuple(
            tuple(n for n in dict.fromkeys((*now, *goal, *old)) if n in self.members)
            for now, goal, old in zip(readers, self._goal, self._may_read, strict=True)
        )

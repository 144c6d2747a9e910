"""Which node holds which partition, and what has to move when the nodes change.

Pure functions: the same members, partitions and replicas give the same table in every process, so
that nobody has to be asked. Partitions are placed by rendezvous hashing (Thaler and Ravishankar,
doi:10.1109/90.663936): each node has a score for each partition, and the highest scores hold it. A
node that goes takes nothing but its own partitions out of their places, and one that comes takes
nothing but those on which it scores among the highest.

Knows names and numbers; nothing of nodes, stores or actors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import xxhash

from nemo_specrl.errors import ConfigError

__all__ = ["Move", "Table", "moves", "place"]

Table = tuple[tuple[str, ...], ...]
"""By partition, the nodes that hold it, the first of them answering for it."""


class Move(NamedTuple):
    """A copy of a partition that a node is to get.

    Args:
        partition: its index.
        target: the node that is to hold it.
        sources: nodes that held it before and still are members, the best first; none where the
            last copy is lost.
    """

    partition: int
    target: str
    sources: tuple[str, ...]


def place(
    members: Iterable[str], partitions: int, replicas: int, first: Collection[str] = ()
) -> Table:
    """The nodes of each partition: ``replicas`` of them, or all where there are fewer.

    Args:
        members: names of the nodes, in any order.
        partitions: how many there are.
        replicas: copies of each on distinct nodes.
        first: members that hold partitions before any other does; those that are none do not count.

    Raises:
        ConfigError: no members, the same one twice, or a number that is not positive.
    """
    names = sorted(members)
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"members: must be at least one node, each named once, got {names}")
    for name, value in (("partitions", partitions), ("replicas", replicas)):
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")
    ranks = {node: node not in first for node in names}
    return tuple(
        tuple(
            sorted(names, key=lambda node: (ranks[node], -_score(node, partition), node))[:replicas]
        )
        for partition in range(partitions)
    )


def moves(before: Table, after: Table, members: Collection[str]) -> list[Move]:
    """What has to be copied so that ``after`` holds; nothing else is.

    Args:
        before: the table by which the copies lie now.
        after: the table that is to hold.
        members: nodes that are there; the others' copies are lost.

    Raises:
        ConfigError: the tables have different numbers of partitions.
    """
    if len(before) != len(after):
        raise ConfigError(
            f"partitions: {len(before)} before and {len(after)} after; their number cannot change"
        )
    here = set(members)
    return [
        Move(partition, target, tuple(node for node in old if node in here))
        for partition, (old, new) in enumerate(zip(before, after, strict=True))
        for target in new
        if target not in old
    ]


def _score(node: str, partition: int) -> int:
    return xxhash.xxh3_64_intdigest(node.encode(), seed=partition)

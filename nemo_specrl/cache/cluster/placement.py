"""Placement of partitions on nodes, and the copies that a change of nodes requires.

Pure functions: the same members, partitions and replicas give the same table in every process, so
no process has to ask another. Partitions are placed by rendezvous hashing (Thaler and Ravishankar,
doi:10.1109/90.663936): each node has a score for each partition, and the nodes with the highest
scores hold it. When a node leaves, only its own partitions move; when one joins, only those on
which it scores among the highest.

This module deals in names and numbers only. It does not know nodes, stores or actors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import xxhash

from nemo_specrl.errors import ConfigError

__all__ = ["Move", "Table", "moves", "place"]

Table = tuple[tuple[str, ...], ...]
"""For each partition, the nodes that hold it; the first of them assigns its sample indices."""


class Move(NamedTuple):
    """A partition that a node has to receive.

    Args:
        partition: its index.
        target: the node that is to hold it.
        sources: members that held it before, the best first; none if the last copy is lost.
    """

    partition: int
    target: str
    sources: tuple[str, ...]


def place(
    members: Iterable[str], partitions: int, replicas: int, first: Collection[str] = ()
) -> Table:
    """Place each partition on ``replicas`` nodes, or on all where there are fewer.

    Args:
        members: names of the nodes, in any order.
        partitions: how many there are.
        replicas: copies of each on distinct nodes.
        first: nodes that are chosen before any other; those that are no members are ignored.

    Returns:
        The nodes of each partition.

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
    """List the copies that lead from one table to another, and no more than these.

    Args:
        before: the current table.
        after: the table to be reached.
        members: nodes that are present; copies on others are lost.

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

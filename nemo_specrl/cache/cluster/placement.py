"""Placement of partitions on nodes.

A pure function: the same members, partitions and replicas give the same table in every process, so
no process has to ask another. Partitions are placed by rendezvous hashing (Thaler and Ravishankar,
doi:10.1109/90.663936): each node has a score for each partition, and the nodes with the highest
scores hold it. When a node leaves, only its own partitions move; when one joins, only those on
which it scores among the highest.

This module deals in names and numbers only. It does not know nodes, stores or actors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import xxhash

__all__ = ["Table", "place"]

Table = tuple[tuple[str, ...], ...]
"""For each partition, the nodes that hold it; the first of them assigns its sample indices."""


def place(
    members: Iterable[str], partitions: int, replicas: int, first: Collection[str] = ()
) -> Table:
    """Place each partition on ``replicas`` nodes, or on all if there are fewer.

    Args:
        members: names of the nodes, in any order.
        partitions: number of partitions.
        replicas: number of copies of each, on distinct nodes.
        first: nodes that are chosen before any other; those that are not members are ignored.

    Returns:
        The nodes of each partition.
    """
    names = sorted(members)
    ranks = {node: node not in first for node in names}
    return tuple(
        tuple(
            sorted(names, key=lambda node: (ranks[node], -_score(node, partition), node))[:replicas]
        )
        for partition in range(partitions)
    )


def _score(node: str, partition: int) -> int:
    return xxhash.xxh3_64_intdigest(node.encode(), seed=partition)

"""Partitions of the prompts: equal ranges of the first 8 bytes of their keys."""

from __future__ import annotations

__all__ = ["key_range", "partition_of"]


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a prompt: the keys' first 8 bytes are cut into equal ranges.

    Args:
        key: a prompt's key, 16 bytes.
        partitions: number of partitions.
    """
    return int.from_bytes(key[:8], "big") * partitions >> 64


def key_range(partition: int, partitions: int) -> tuple[bytes, bytes | None]:
    """Return the first key of a partition, and the first key after it (None: there is none).

    Keys fall into equal ranges of their first 8 bytes (:func:`partition_of`).
    """
    first, behind = (-(-(p << 64) // partitions) for p in (partition, partition + 1))
    return first.to_bytes(8, "big"), None if behind >> 64 else behind.to_bytes(8, "big")

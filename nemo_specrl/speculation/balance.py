"""Which engine gets which rows, so that all of them finish at about the same time.

Knows costs and counts; nothing of rows, drafts or engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["balanced_order"]

WORTHWHILE = 0.95
"""Rows are moved only where the longest share gets at most this part of what it was."""


def balanced_order(costs: Sequence[float], shards: int) -> list[int]:
    """An order of rows whose contiguous shares, one for each engine, cost about the same.

    Shares are of ``ceil(n / shards)`` rows, the last ones shorter, as a batch is cut. The most
    expensive rows are dealt first, each to the share that has cost least and has room (longest
    processing time first; Graham, doi:10.1137/0117039). Rows stay in their order within a share,
    and all of them where moving them gains little: siblings that stay together share their prompt's
    prefill.

    Args:
        costs: expected cost of each row, in any unit.
        shards: number of engines.

    Returns:
        Indices of rows: the first share, then the second, and so on.
    """
    n = len(costs)
    size = -(-n // shards) if shards else n
    if shards < 2 or n <= size:
        return list(range(n))
    room = [min(size, n - start) for start in range(0, n, size)]
    shares: list[list[int]] = [[] for _ in room]
    loads = [(0.0, share) for share in range(len(room))]
    for row in sorted(range(n), key=lambda i: (-costs[i], i)):
        load, share = heapq.heappop(loads)
        shares[share].append(row)
        if len(shares[share]) < room[share]:
            heapq.heappush(loads, (load + costs[row], share))
    before = max(sum(costs[start : start + size]) for start in range(0, n, size))
    after = max(sum(costs[i] for i in share) for share in shares)
    if after > WORTHWHILE * before:
        return list(range(n))
    return [row for share in shares for row in sorted(share)]

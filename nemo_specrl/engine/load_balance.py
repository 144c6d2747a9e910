"""Distribution of rows over engines, so that all engines finish at about the same time.

The cost of a row is the number of tokens that it is expected to decode.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from nemo_specrl.speculation.draft_selection import Draft, mean_lengths

__all__ = ["WORTHWHILE", "balanced_order", "expected_costs", "row_costs"]

Prompt = TypeVar("Prompt", bound=Hashable)

WORTHWHILE = 0.95
"""Rows are moved only if that cuts the cost of the most expensive share to this fraction."""


def expected_costs(prompts: Sequence[Prompt], known: Mapping[Prompt, float]) -> list[float]:
    """Expect each row to cost as much as earlier rows of its prompt.

    Args:
        prompts: the prompts of the rows.
        known: mean cost of the earlier rows of a prompt, in any unit.

    Returns:
        The cost of each row; for prompts of which nothing is known, the mean of the known costs.
    """
    here = {prompt: known[prompt] for prompt in prompts if prompt in known}
    neutral = sum(here.values()) / len(here) if here else 1.0
    return [here.get(prompt, neutral) for prompt in prompts]


def row_costs(
    keys: Sequence[bytes],
    cached: Mapping[bytes, Sequence[Draft]],
    drafts: Sequence[Draft | None] | None = None,
    left: float = 1.0,
) -> list[float]:
    """Estimate the number of tokens that each row will decode.

    This is the mean length of the earlier responses to its prompt or, for a row with a draft, the
    part of the draft that is expected to be rejected.

    Args:
        keys: prompt key of each row.
        cached: earlier rollouts, or outlines of them, by prompt key.
        drafts: the draft of each row, or None for a plain row; None: no row has a draft.
        left: share of draft tokens that are not accepted, 0 to 1.
    """
    costs = expected_costs(keys, mean_lengths(cached))
    if drafts is None:
        return costs
    return [
        cost if draft is None else left * len(draft)
        for cost, draft in zip(costs, drafts, strict=True)
    ]


def balanced_order(costs: Sequence[float], shards: int) -> list[int]:
    """Order rows so that the contiguous shares of the engines cost about the same.

    Shares have ``ceil(n / shards)`` rows, and the last ones fewer, because that is how a batch is
    split. The most expensive rows are assigned first, each to the cheapest share with room (longest
    processing time first; Graham, doi:10.1137/0117039). Within a share rows keep their order. If
    moving rows gains little, all rows keep their order: rows of a group that stay together share
    their prompt's prefill.

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

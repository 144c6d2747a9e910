"""The order in which rows of a call go to the engine, and which of them share a verification."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from nemo_specrl.engine.requests import RolloutRequest

__all__ = ["duplicates_of", "in_order"]


def duplicates_of(requests: list[RolloutRequest]) -> dict[int, list[RolloutRequest]]:
    """Group requests that have the same prompt and the same draft.

    Equal drafts of a prompt have equal log-probs, so one prefill verifies them all, and each is
    judged with uniforms of its own. Short answers and policies of low entropy yield many of them.

    Returns:
        By the ``id`` of the first request of a group, the others.
    """
    first: dict[Any, RolloutRequest] = {}
    duplicates: dict[int, list[RolloutRequest]] = defaultdict(list)
    for request in requests:
        if request.draft is not None:
            content = (
                request.row.key,
                request.draft.tokens.tobytes(),
                request.engine_params.logprobs,
            )
            leader = first.setdefault(content, request)
            if leader is not request:
                duplicates[id(leader)].append(request)
    return duplicates


def in_order(
    requests: list[RolloutRequest],
    duplicates: dict[int, list[RolloutRequest]],
    *,
    siblings_draft: bool,
) -> list[RolloutRequest]:
    """Order by expected decoding, so that few rows are left when the batch nears its end.

    Rows without a draft come first, those of prompts with long earlier responses before the others;
    prompts without a history are taken for the mean of those that have one. Long drafts come before
    short ones. Duplicates are left out: they are judged when the first request of their group is
    verified.

    Args:
        requests: of the call.
        duplicates: see :func:`duplicates_of`.
        siblings_draft: rows draft from what the others of their prompt have decoded. Those of a
            prompt without a history have nothing else, and side by side they are at the same
            token: the first row of each such prompt comes before the second of any.
    """
    left_out = {id(other) for group in duplicates.values() for other in group}
    known = [r.earlier_length for r in requests if r.earlier_length is not None]
    neutral = sum(known) / len(known) if known else 0.0
    rank: Counter[bytes] = Counter()  # of the next row of a prompt
    places: dict[int, tuple[bool, int, float]] = {}
    for request in requests:
        if request.draft is not None:
            place = True, 0, -float(len(request.draft))
        elif request.earlier_length is not None:
            place = False, 0, -request.earlier_length
        else:
            place = False, rank[request.row.key], -neutral
            rank[request.row.key] += siblings_draft
        places[id(request)] = place
    rows = [request for request in requests if id(request) not in left_out]
    return sorted(rows, key=lambda request: places[id(request)])

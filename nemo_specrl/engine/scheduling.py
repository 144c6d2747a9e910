"""The order in which rows of a call go to the engine, and which of them share a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.requests import RolloutRequest

__all__ = ["in_order", "share_verifications", "verified_share"]


def share_verifications(requests: list[RolloutRequest]) -> None:
    """Let one verification serve all requests that have the same prompt and the same draft.

    Equal drafts of a prompt have equal log-probs, so one prefill verifies them all, and each is
    judged with its own uniforms. Short answers and low-entropy policies yield many of them. The
    first request of each group gets the others as its ``verification.duplicates``.
    """
    first: dict[Any, RolloutRequest] = {}
    for request in requests:
        if request.draft is not None:
            candidates = request.engine_params.logprobs
            content = (request.row.key, request.draft.tokens.tobytes(), candidates)
            leader = first.setdefault(content, request)
            if leader is not request:
                leader.verification.duplicates.append(request)


def in_order(
    requests: list[RolloutRequest], *, siblings_draft: bool, first: int = 0
) -> list[RolloutRequest]:
    """Order rows by expected decoding, so that few rows are left when the batch nears its end.

    Rows without a draft come first, those of prompts with long earlier responses before the others;
    prompts without a history are assumed to have the mean length of those that have one. Long
    drafts come before short ones. Duplicates are left out: they are judged when the first request
    of their group is verified.

    Args:
        requests: requests of the call, after :func:`share_verifications`.
        siblings_draft: whether rows draft from what the others of their prompt have decoded. Rows
            of a prompt without a history have nothing else, and if they run side by side they are
            at the same token: the first row of each such prompt therefore comes before the second
            of any.
        first: how many of the call's first rows come before all others.
    """
    left_out = {other.index for r in requests for other in r.verification.duplicates}
    known = [r.history.mean_length for r in requests if r.history.mean_length is not None]
    neutral = sum(known) / len(known) if known else 0.0
    rank: Counter[bytes] = Counter()  # rank of the next row of a prompt
    places: dict[int, tuple[bool, int, float]] = {}  # by index in the call
    for request in requests:
        length = request.history.mean_length
        if request.draft is not None:
            place = True, 0, -float(len(request.draft))
        elif length is not None:
            place = False, 0, -length
        else:
            place = False, rank[request.row.key], -neutral
            rank[request.row.key] += siblings_draft
        places[request.index] = place
    rows = [request for request in requests if request.index not in left_out]
    return sorted(rows, key=lambda request: (request.index >= first, places[request.index]))


def verified_share(requests: Iterable[RolloutRequest], limits: EngineLimits) -> float:
    """Return the share of the next step's tokens that are verified rather than decoded.

    Args:
        requests: requests that the engine has.
        limits: limits of the engine.
    """
    verified, decoding = 0, 0
    for request in requests:
        if request.verification.running:
            assert request.draft is not None
            verified += len(request.rules.prompt) + len(request.draft)
        else:
            decoding += 1
    verified = min(verified, limits.max_num_batched_tokens)
    return verified / max(1, verified + min(decoding, limits.max_num_seqs))

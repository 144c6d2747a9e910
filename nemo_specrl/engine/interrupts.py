"""What is kept of a response that was in the engine when an interrupt came."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.outputs import build_rollout
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.response import extend_logprobs
from nemo_specrl.engine.vllm.compat import logprobs_slice, tokens_so_far
from nemo_specrl.rollout import Finish, Rollout

if TYPE_CHECKING:
    from nemo_specrl.engine.async_rows import AsyncRow

__all__ = ["interrupted_rollouts", "keep_decoded", "note_decoded"]

logger = logging.getLogger(__name__)


def interrupted_rollouts(
    engine: Any,
    inflight: Mapping[str, RolloutRequest],
    vocabulary: int,
    weights: tuple[int, int],
    count_defect: Callable[[RolloutRequest], None],
) -> list[Rollout]:
    """Return the rollouts, marked partial, of rows that were in the engine at an interrupt.

    Args:
        engine: an ``LLMEngine`` or ``AsyncLLM``.
        inflight: requests by their id in the engine.
        vocabulary: number of tokens in the model's vocabulary.
        weights: policy version and fingerprint of its weights.
        count_defect: called with each request whose data is invalid.
    """
    partial = []
    for request_id, request in inflight.items():
        try:
            if not keep_decoded(engine, request_id, request, vocabulary):
                continue
            rollout = partial_rollout(request, *weights)
            if rollout is None:
                count_defect(request)
            else:
                partial.append(rollout)
        except Exception as error:  # the engine may have failed; the caller sees why
            logger.debug("nothing is kept of request %s: %r", request_id, error)
    return partial


def note_decoded(engine: Any, row: AsyncRow) -> None:
    """Note what an engine has decoded of a row that is being cancelled, if the engine has its
    request.

    Call this before vLLM learns of the cancellation and drops the request.
    """
    if row.request is None:
        return
    try:
        row.request.response.decoded = tokens_so_far(engine, row.request_id)
    except Exception as error:  # the row ends in any case
        logger.debug("nothing is known of request %s: %r", row.request_id, error)


def keep_decoded(engine: Any, request_id: str, request: RolloutRequest, vocabulary: int) -> bool:
    """Set the response of an interrupted request to all that the engine has decoded for it.

    Args:
        engine: an ``LLMEngine`` or ``AsyncLLM``.
        request_id: the request's id in the engine.
        request: as it was when the interrupt came.
        vocabulary: number of tokens in the model's vocabulary.

    Returns:
        Whether there is more than the accepted prefix of its draft, so that caching it is
        worthwhile.

    Raises:
        KeyError: the engine does not have the request.
    """
    if request.verification.running or not request.cacheable or request.turns is not None:
        return False  # a conversation cannot be continued
    tokens, logprobs = request.tokens, request.logprobs
    if request.rounds is None:  # otherwise its outputs have come token by token
        decoded, more = request.response.decoded or tokens_so_far(engine, request_id)
        tokens = tokens[: request.accepted] + decoded
        if request.accepted:
            assert logprobs is not None
            logprobs = logprobs_slice(logprobs, 0, request.accepted)
            extend_logprobs(logprobs, more)
        else:
            logprobs = more
    if len(tokens) <= request.accepted:
        return False
    request.response.replace(tokens, logprobs)
    request.response.check(tokens, logprobs, vocabulary)
    return True


def partial_rollout(
    request: RolloutRequest, policy_version: int, fingerprint: int
) -> Rollout | None:
    """Return the rollout, marked partial, of an interrupted request; None if its data has a defect.

    Args:
        request: with all that the engine has decoded (:func:`keep_decoded`).
        policy_version: policy version of the weights that decoded it.
        fingerprint: fingerprint of these weights; 0 if not known.
    """
    if request.response.defect:
        return None
    return build_rollout(request, Finish.PARTIAL, policy_version, fingerprint)

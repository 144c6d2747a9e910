"""Replay of rollouts that a process which died had made for the present step.

The cache keeps the journal, and the caller knows whether the weights are the same; here a rollout
of the journal becomes the result of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from nemo_specrl.engine.outputs import defect_of, text_of, unfinished_output
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["Journal", "replayed_output", "restore_request"]


@runtime_checkable
class Journal(Protocol):
    """A cache with a journal: :class:`~nemo_specrl.trainer.replay_journal.JournaledStore`."""

    def take(
        self, rows: Sequence[tuple[bytes, int]], policy_version: int, fingerprint: int
    ) -> list[Rollout | None]:
        """Remove and return the journal's rollout of each row, or None.

        Args:
            rows: prompt key and sample index of each.
            policy_version: of the step.
            fingerprint: of its weights.
        """
        ...


def restore_request(
    request: RolloutRequest, rollout: Rollout, vocabulary: int
) -> ResponseEnd | None:
    """Set a request to the state in which it ended when its rollout was made.

    Sets ``tokens``, ``logprobs``, ``accepted`` and ``replayed``.

    Args:
        request: one that the engine has not seen.
        rollout: what it ended as before, under the present weights.
        vocabulary: tokens that the model knows.

    Returns:
        How it ended; None where the rollout belongs to other parameters, another draft or another
        model.
    """
    from vllm.logprobs import FlatLogprobs

    n, tokens = len(rollout), rollout.tokens.tolist()
    logprobs = FlatLogprobs(
        start_indices=list(range(n)),
        end_indices=list(range(1, n + 1)),
        token_ids=list(tokens),
        logprobs=rollout.logprobs.tolist(),
        ranks=[None] * n,
        decoded_tokens=[None] * n,
    )
    if defect_of(tokens, logprobs, vocabulary):
        return None
    ending = request.rules.ending(rollout.tokens)
    if (ending.length, ending.finish) != (n, rollout.finish):
        return None
    # Tokens that the present weights did not decode came from a draft.
    accepted = int(np.count_nonzero(rollout.reused))
    if accepted:
        draft = request.draft
        if draft is None or not (
            np.array_equal(draft.tokens[:accepted], rollout.tokens[:accepted])
            and np.array_equal(draft.birth_logprobs[:accepted], rollout.birth_logprobs[:accepted])
        ):
            return None
    if rollout.fresh:
        request.draft = None  # it was decoded without one, whatever may be drafted now
    request.replayed = rollout
    request.accepted = accepted
    request.tokens, request.logprobs = tokens, logprobs
    return ending


def replayed_output(request: RolloutRequest, ending: ResponseEnd) -> RequestOutput:
    """An output for a restored request, in place of the one of an engine."""
    output = unfinished_output(request, "journal")
    output.outputs[0].text = text_of(request, ending)
    output.num_cached_tokens = len(request.rules.prompt) + len(request.tokens)
    return output

"""Replay of rollouts that a process had made for the present step before it died.

The cache keeps the journal, and the caller knows whether the weights are the same; this module
makes a rollout of the journal the result of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nemo_specrl.engine.caches import Journal
from nemo_specrl.engine.early_end import EndOfCall
from nemo_specrl.engine.outputs import text_of, unfinished_output
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.response import defect_of, flat_logprobs
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.vllm.compat import logprobs_slice
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.logprobs import FlatLogprobs

__all__ = ["replayed_output", "restore_request", "take_from_journal"]


def take_from_journal(
    journal: Journal,
    requests: list[RolloutRequest],
    policy_version: int,
    fingerprint: int,
    early_end: EndOfCall | None = None,
) -> list[tuple[RolloutRequest, Rollout]]:
    """Take what a journal holds for the requests of a step.

    Args:
        journal: journal of the process that died in this very step.
        requests: requests of the step's call.
        policy_version: policy version of the step.
        fingerprint: fingerprint of the step's weights.
        early_end: decides when the step's call ends before all of its rows have; None: it does not.

    Returns:
        Requests with the rollouts that were recorded for them under the same kind of sampling.
    """
    # The journal has no log-probs of candidates other than the sampled token.
    candidates = [r for r in requests if r.draftable and not r.user_params.logprobs]
    rows = [(r.row.key, r.row.sample_index) for r in candidates]

    def enough(ended: Sequence[bool]) -> bool:
        if early_end is None:
            return all(ended)
        indices = [r.index for r, done in zip(candidates, ended, strict=True) if done]
        return early_end.reached(indices)

    rollouts = journal.take(rows, policy_version, fingerprint, enough)
    return [
        (request, rollout)
        for request, rollout in zip(candidates, rollouts, strict=True)
        if rollout is not None and len(rollout) and rollout.raw == request.raw
    ]


def restore_request(
    request: RolloutRequest, rollout: Rollout, vocabulary: int
) -> ResponseEnd | None:
    """Restore the state in which a request ended when its rollout was made.

    Args:
        request: one that the engine has not seen.
        rollout: its earlier result, under the present weights.
        vocabulary: number of tokens in the model's vocabulary.

    Returns:
        How it ended; None if the rollout belongs to other parameters, another draft or another
        model, in which case the request is unchanged.
    """
    n, tokens = len(rollout), rollout.tokens.tolist()
    logprobs = flat_logprobs(tokens, rollout.logprobs.tolist())
    if defect_of(tokens, logprobs, vocabulary):
        return None
    if request.turns is not None:
        return _restore_turns(request, rollout, logprobs)
    end = request.rules.end_of(rollout.tokens)
    if (end.length, end.finish) != (n, rollout.finish):
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
    request.restore(rollout, accepted, logprobs)
    return end


def _restore_turns(
    request: RolloutRequest, rollout: Rollout, logprobs: FlatLogprobs
) -> ResponseEnd | None:
    """Restore a conversation by having its environment answer it turn by turn, as it did before."""
    assert request.turns is not None
    params, n, known = request.engine_params, len(rollout), 0
    whole: ResponseEnd | None = None
    while whole is None:
        end = request.rules.end_of(rollout.tokens[known:])
        if end.finish is None:
            break
        stop = known + end.length
        turn = rollout.tokens[known:stop].tolist()
        request.response.replace(turn, logprobs_slice(logprobs, known, stop))
        whole, known = request.end_turn(end), stop
        if whole is None:
            said = request.turns.said.tokens
            known = len(said)
            if said != rollout.tokens[:known].tolist():
                break
    request.join_turns()
    request.engine_params = params
    if whole is None or (known, whole.finish) != (n, rollout.finish):
        request.turns.forget()
        request.response.replace([], None)
        return None
    request.restore(rollout, 0, logprobs)
    return whole


def replayed_output(request: RolloutRequest, end: ResponseEnd) -> RequestOutput:
    """Make an output for a restored request, in place of the engine's."""
    output = unfinished_output(request, "journal")
    output.outputs[0].text = text_of(request, end)
    output.num_cached_tokens = len(request.rules.prompt) + len(request.tokens)
    return output

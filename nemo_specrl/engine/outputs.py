"""Completions and rollouts of requests that have ended, in vLLM's form and in the cache's.

Joins the outputs of vLLM's verification and continuation requests; runs no engine.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.prefix.verification import reference_logprobs, sampled_values
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.vllm.compat import no_logprobs
from nemo_specrl.errors import InvalidRollout
from nemo_specrl.rollout import Finish, Rollout
from nemo_specrl.speculation.acceptance import behaviour_logprobs

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import FlatLogprobs, SampleLogprobs

__all__ = [
    "RolloutInfo",
    "build_completion",
    "build_rollout",
    "defective_completion",
    "made_tokens",
    "request_outputs",
    "rollout_info",
    "text_of",
    "unfinished_output",
]

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutInfo:
    """What is known about a completion as a rollout; the completion's ``spec_rl`` attribute.

    Args:
        rollout: the rollout as the cache keeps it, with its prompt key and sample index.
        accepted: tokens of the completion that come from the draft.
        drafted: tokens that were verified, 0 if there was no draft or it was refused.
    """

    rollout: Rollout
    accepted: int = 0
    drafted: int = 0

    @property
    def fresh(self) -> bool:
        """Whether the completion is an ordinary sample of the policy, decoded without a draft of
        other weights (:func:`build_rollout`).
        """
        return self.rollout.fresh

    @property
    def policy_logprobs(self) -> Float32Array:
        """Log-prob of each token under the current policy, float32 ``[n]``, nats."""
        return self.rollout.logprobs

    @property
    def birth_logprobs(self) -> Float32Array:
        """Log-prob of each token under the policy that sampled it, float32 ``[n]``, nats."""
        return self.rollout.birth_logprobs

    @property
    def birth_versions(self) -> npt.NDArray[np.int64]:
        """Version of the policy that sampled each token, int64 ``[n]``."""
        return self.rollout.birth_versions


def rollout_info(completion: Any) -> RolloutInfo | None:
    """The :class:`RolloutInfo` of a completion; None if the engine ran without speculation."""
    return getattr(completion, "spec_rl", None)


def made_tokens(completion: Any) -> npt.NDArray[np.bool_] | None:
    """Which tokens of a conversation the policy made, bool ``[n]``; None: not a conversation.

    The others come from its environment; their log-probs are 0.
    """
    made: npt.NDArray[np.bool_] | None = getattr(completion, "made", None)
    return made


def with_values(logprobs: FlatLogprobs, values: Float32Array) -> FlatLogprobs:
    """Log-probs with these values for the tokens; other candidates of a position keep their own.

    Args:
        logprobs: one position per token.
        values: float32 ``[n]``, nats.
    """
    entries = list(logprobs.logprobs)
    for start, value in zip(logprobs.start_indices, values.tolist(), strict=True):
        entries[start] = value
    return dataclasses.replace(logprobs, logprobs=entries)


def build_completion(
    request: RolloutRequest,
    output: RequestOutput,
    end: ResponseEnd,
    rollout: Rollout,
    config: SpecRLConfig,
    limits: EngineLimits,
) -> CompletionOutput:
    """Build the completion of a request that has ended, for its caller.

    Args:
        request: its tokens and log-probs are the whole response.
        output: the engine's last output for it, of the verification or of the continuation.
        end: how the response ended.
        rollout: the response as the cache keeps it.
        config: the ``spec_rl:`` block.
        limits: limits of the engine.
    """
    assert request.logprobs is not None
    policy = sampled_values(request.logprobs)
    draft, accepted = request.draft, request.accepted
    completion = output.outputs[0]
    tokenizer = request.rules.tokenizer  # None in NeMo-RL's engines
    unnamed = of_several_requests(request) or request.accepted > 0 or rollout is request.replayed
    if unnamed and request.engine_params.detokenize and tokenizer is not None:
        name_tokens(request.logprobs, tokenizer)
    if joined_from_pieces(request):
        completion = dataclasses.replace(completion, text=text_of(request, end))
    logprobs: SampleLogprobs | None = None
    total = None
    if request.user_params.logprobs is not None:
        flat, values = request.logprobs, policy
        if draft is not None and config.reported_logprobs == "behaviour":
            old = reference_logprobs(draft, config)[:accepted]
            values = policy.copy()
            values[:accepted] = behaviour_logprobs(policy[:accepted], old, config.lenience)
            flat = with_values(flat, values)
        logprobs = flat if request.user_params.flat_logprobs else list(flat)
        total = float(values.sum(dtype=np.float64))
    completion = dataclasses.replace(
        completion,
        index=request.index_in_prompt,
        token_ids=request.tokens,
        routed_experts=_routes(request, output, limits),
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
    )
    completion.spec_rl = RolloutInfo(rollout, accepted, 0 if draft is None else len(draft))
    return completion


def of_several_requests(request: RolloutRequest) -> bool:
    """Whether the engine decoded a response in several requests: in rounds, or in turns."""
    return request.rounds is not None or request.turns is not None


def joined_from_pieces(request: RolloutRequest) -> bool:
    """Whether the engine gave a response in more than one piece."""
    whole = request.draft is None and request.response.detokenizer is None
    return of_several_requests(request) or not whole


def defective_completion(
    request: RolloutRequest,
    output: RequestOutput,
    end: ResponseEnd,
    limits: EngineLimits | None = None,
) -> CompletionOutput:
    """The completion of a request whose data from the engine has a defect, as the engine gave it.

    It has no attribute ``spec_rl``.

    Args:
        request: its tokens and log-probs are the part of the response that has come.
        output: the engine's last output for it.
        end: how the response ended.
        limits: limits of the engine; None: it ran without speculation.
    """
    completion = output.outputs[0]
    logprobs: SampleLogprobs | None = None
    total = None
    text = completion.text
    if request.user_params.logprobs is not None:
        logprobs = request.logprobs
        if logprobs is not None and not request.user_params.flat_logprobs:
            logprobs = list(logprobs)
        total = completion.cumulative_logprob
    if joined_from_pieces(request):
        total = None if total is None else math.nan  # it is the sum over all pieces
        try:
            text = text_of(request, end)
        except Exception as error:  # tokens that the tokenizer does not know
            logger.debug("a defective response has no text: %s", error)
    return dataclasses.replace(
        completion,
        index=request.index_in_prompt,
        text=text,
        token_ids=request.tokens,
        routed_experts=_routes(request, output, limits),
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
    )


def _routes(
    request: RolloutRequest, output: RequestOutput, limits: EngineLimits | None
) -> npt.NDArray[np.integer[Any]] | None:
    """Return the routed experts of a request's prompt and response, for NeMo-RL's router replay.

    They are those of the last request to the engine, whose prompt had all that came before it: the
    present weights have chosen them for an accepted prefix, too.

    Returns:
        Integers ``[tokens - 1, layers, experts of a token]``; none for the last token, which no
        step has read. ``[0, layers, experts of a token]`` if the engine did not return all of them:
        it cannot be told which are missing, and NeMo-RL's trainer then chooses the experts itself.
    """
    routes: npt.NDArray[np.integer[Any]] | None = output.outputs[0].routed_experts
    if limits is None or limits.routes is None:
        return routes
    prompt = request.rules.prompt if request.media is None else output.prompt_token_ids or []
    known = len(prompt) + len(request.tokens) - 1
    if routes is None or len(routes) < known:
        return np.zeros((0, *limits.routes), dtype=np.uint8)
    return routes[:known]


def unfinished_output(request: RolloutRequest, request_id: str) -> RequestOutput:
    """Make an output for a request that has ended without one from the engine."""
    from vllm import CompletionOutput, RequestOutput

    completion = CompletionOutput(
        index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None
    )
    return RequestOutput(
        request_id=request_id,
        prompt=request.text,
        prompt_token_ids=list(request.rules.prompt),
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


def build_rollout(
    request: RolloutRequest, finish: Finish, policy_version: int, fingerprint: int
) -> Rollout | None:
    """Build the rollout that the cache keeps of a request's tokens, with their births.

    It is fresh if no draft was verified. A draft that was rejected at its first token makes it not
    fresh, since the rejection was a choice. A draft that is itself a fresh rollout of the very same
    weights, cut off by an interrupt, leaves it fresh: both parts are samples of one policy.

    Args:
        request: its tokens are the response so far.
        finish: how the response ended, or PARTIAL.
        policy_version: policy version of the weights that judged and decoded. If the weights have
            changed in the meantime, ``request.versions`` records which of them made which tokens.
        fingerprint: fingerprint of the weights of this version; 0 if not known. A rollout of
            several versions has none.

    Returns:
        The rollout; None if the parts of the response contradict each other, which is then noted as
        its defect.
    """
    if request.logprobs is None:
        request.response.replace(request.tokens, no_logprobs())
    assert request.logprobs is not None
    try:
        values = sampled_values(request.logprobs)
        return _rollout(request, values, finish, policy_version, fingerprint)
    except (InvalidRollout, IndexError) as error:
        request.response.note_defect(str(error))
        return None


def _rollout(
    request: RolloutRequest,
    logprobs: Float32Array,
    finish: Finish,
    policy_version: int,
    fingerprint: int,
) -> Rollout:
    births = logprobs
    versions = request.versions.of(len(logprobs), policy_version)
    made_at = request.versions.at_end(len(logprobs), policy_version)
    if made_at != policy_version or (versions != policy_version).any():
        policy_version, fingerprint = made_at, 0
    draft, accepted = request.draft, request.accepted
    if draft is not None:
        births = logprobs.copy()
        births[:accepted] = draft.birth_logprobs[:accepted]
        versions[:accepted] = draft.birth_versions[:accepted]
    same_weights = (
        draft is not None
        and draft.fingerprint == fingerprint != 0
        and draft.policy_version == policy_version
    )
    return Rollout(
        request.row.key,
        request.row.sample_index,
        np.asarray(request.tokens, dtype=np.int32),
        logprobs,
        finish,
        policy_version,
        births,
        versions,
        request.history.occurrence,
        fingerprint,
        fresh=draft is None or (same_weights and draft.fresh),
        raw=request.raw,
    )


def name_tokens(logprobs: FlatLogprobs, tokenizer: Any) -> None:
    """Fill in, in place, the text of each token for which the engine has not done so."""
    names: dict[int, str] = {}
    for i, token in enumerate(logprobs.token_ids):
        if logprobs.decoded_tokens[i] is None:
            if token not in names:
                names[token] = tokenizer.decode([token])
            logprobs.decoded_tokens[i] = names[token]


def text_of(request: RolloutRequest, end: ResponseEnd) -> str:
    """The text of a response that the engine decoded in several pieces, as vLLM reports it."""
    if request.rules.tokenizer is None or not request.engine_params.detokenize:
        return ""
    if request.turns is not None:
        skip = request.engine_params.skip_special_tokens
        return str(request.rules.tokenizer.decode(request.tokens, skip_special_tokens=skip))
    if request.response.detokenizer is not None:
        return request.response.detokenizer.text
    detokenizer = request.rules.detokenizer()
    detokenizer.feed(request.tokens[:-1], stop_terminated=False)
    detokenizer.feed(request.tokens[-1:], stop_terminated=end.finish is Finish.STOP)
    return detokenizer.text


def request_outputs(
    requests: list[RolloutRequest], ended: dict[int, tuple[RequestOutput, CompletionOutput]]
) -> list[RequestOutput]:
    """Build one output for each prompt of the call, with its completions in order.

    Args:
        requests: all requests of the call, in order.
        ended: the engine's last output and the completion, by position in ``requests``.
    """
    outputs: list[RequestOutput] = []
    for i, request in enumerate(requests):
        carrier, completion = ended[i]
        if request.turns is not None:
            completion.made = request.turns.made(len(request.tokens))
        if request.index_in_prompt:
            outputs[-1].outputs.append(completion)
            continue
        carrier.prompt = request.text
        if request.media is None:  # otherwise only the engine's output has its placeholders
            carrier.prompt_token_ids = list(request.rules.prompt)
        if request.draft is not None or request.rounds is not None:
            carrier.prompt_logprobs = None
        carrier.outputs = [completion]
        outputs.append(carrier)
    return outputs

"""Outputs of responses whose prefix came from a draft, in the form that vLLM gives them.

Joins what vLLM's verification and continuation requests returned; runs no engine.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.requests import Request
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.engine.verification import reference_logprobs, sampled_values
from nemo_specrl.rollout import Finish, Rollout
from nemo_specrl.speculation.acceptance import behaviour_logprobs

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import FlatLogprobs, SampleLogprobs

__all__ = ["Reuse", "completed", "extend", "request_outputs", "reuse_of", "text_of"]

Float32Array = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False)
class Reuse:
    """What became of a completion's draft; stands in its ``spec_rl`` attribute.

    Args:
        fresh: whether the completion was decoded without a draft (:attr:`Rollout.fresh`).
        drafted: tokens that were offered for verification, 0 where there was no draft.
        accepted: tokens of the completion that come from the draft.
        policy_logprobs: of each token under the current policy, float32 ``[n]``, nats.
        birth_logprobs: of each token under the policy that sampled it, float32 ``[n]``, nats.
        birth_versions: policy version that sampled each token, int64 ``[n]``.
        rollout: the rollout as the cache keeps it, with its prompt key and sample index.
    """

    fresh: bool
    drafted: int
    accepted: int
    policy_logprobs: Float32Array
    birth_logprobs: Float32Array
    birth_versions: npt.NDArray[np.int64]
    rollout: Rollout


def reuse_of(completion: Any) -> Reuse | None:
    """The :class:`Reuse` of a completion, or None where the engine ran without speculation."""
    return getattr(completion, "spec_rl", None)


def extend(logprobs: FlatLogprobs, more: FlatLogprobs) -> None:
    """Add the positions of ``more`` behind those of ``logprobs``, in place."""
    shift = len(logprobs.logprobs)
    logprobs.start_indices += [i + shift for i in more.start_indices]
    logprobs.end_indices += [i + shift for i in more.end_indices]
    logprobs.token_ids += more.token_ids
    logprobs.logprobs += more.logprobs
    logprobs.ranks += more.ranks
    logprobs.decoded_tokens += more.decoded_tokens


def reported(
    logprobs: FlatLogprobs, values: Float32Array, *, wanted: int | None, flat: bool
) -> tuple[SampleLogprobs | None, float | None]:
    """Log-probs in the form that the request asked for, and their sum.

    Args:
        logprobs: one position a token.
        values: what the tokens carry, float32 ``[n]``; the other candidates keep their own.
        wanted: ``SamplingParams.logprobs``.
        flat: ``SamplingParams.flat_logprobs``.
    """
    if wanted is None:
        return None, None
    entries = list(logprobs.logprobs)
    for start, value in zip(logprobs.start_indices, values.tolist(), strict=True):
        entries[start] = value
    result = dataclasses.replace(logprobs, logprobs=entries)
    return (result if flat else list(result)), float(values.sum(dtype=np.float64))


def completed(
    request: Request,
    output: RequestOutput,
    ending: Ending,
    config: SpecRLConfig,
    policy_version: int,
    fingerprint: int,
) -> tuple[CompletionOutput, Rollout]:
    """What a request that has ended gives its caller, and the rollout that the cache keeps.

    Args:
        request: its tokens and log-probs are the whole response.
        output: the engine's last output for it, of the verification or of the continuation.
        ending: how the response ended.
        config: the ``spec_rl:`` block.
        policy_version: of the weights that judged and decoded.
        fingerprint: of the same.
    """
    assert request.logprobs is not None and ending.finish is not None
    policy = sampled_values(request.logprobs)
    rollout = kept(request, policy, ending.finish, policy_version, fingerprint)
    carried = policy
    draft, accepted = request.draft, request.accepted
    completion = output.outputs[0]
    if draft is not None:
        if config.reported_logprobs == "behaviour":
            old = reference_logprobs(draft, config)[:accepted]
            carried = policy.copy()
            carried[:accepted] = behaviour_logprobs(policy[:accepted], old, config.lenience)
        completion = dataclasses.replace(completion, text=text_of(request, ending))
    logprobs, total = reported(
        request.logprobs,
        carried,
        wanted=request.wanted.logprobs,
        flat=request.wanted.flat_logprobs,
    )
    completion = dataclasses.replace(
        completion,
        index=request.child,
        token_ids=request.tokens,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
    )
    drafted = 0 if draft is None else len(draft)
    completion.spec_rl = Reuse(
        rollout.fresh,
        drafted,
        accepted,
        policy,
        rollout.birth_logprobs,
        rollout.birth_versions,
        rollout,
    )
    return completion, rollout


def kept(
    request: Request,
    logprobs: Float32Array,
    finish: Finish,
    policy_version: int,
    fingerprint: int,
) -> Rollout:
    """The rollout that the cache keeps of a request's tokens, with their births.

    Args:
        request: its tokens are the response so far.
        logprobs: of them, under the weights that judged and decoded, float32 ``[n]``, nats.
        finish: how it ended, or PARTIAL.
        policy_version: of those weights.
        fingerprint: of the same.
    """
    births = logprobs
    versions = np.full(len(logprobs), policy_version, dtype=np.int64)
    draft, accepted = request.draft, request.accepted
    if draft is not None:
        births = logprobs.copy()
        births[:accepted] = draft.birth_logprobs[:accepted]
        versions[:accepted] = draft.birth_versions[:accepted]
    return Rollout(
        request.row.key,
        request.row.sample_index,
        np.asarray(request.tokens, dtype=np.int32),
        logprobs,
        finish,
        policy_version,
        births,
        versions,
        request.occurrence,
        fingerprint,
        fresh=draft is None,
    )


def text_of(request: Request, ending: Ending) -> str:
    """Text of a response that the engine did not decode in one piece."""
    if request.rules.tokenizer is None or not request.params.detokenize:
        return ""
    if request.detokenizer is not None:
        return request.detokenizer.text
    detokenizer = request.rules.detokenizer()
    detokenizer.feed(request.tokens[:-1], stop_terminated=False)
    detokenizer.feed(request.tokens[-1:], stop_terminated=ending.finish is Finish.STOP)
    return detokenizer.text


def request_outputs(
    requests: list[Request], ended: dict[int, tuple[RequestOutput, CompletionOutput]]
) -> list[RequestOutput]:
    """One output for each prompt of the call, its completions in order.

    Args:
        requests: of the call, in order.
        ended: by position in ``requests``, the engine's last output and the completion.
    """
    outputs: list[RequestOutput] = []
    for i, request in enumerate(requests):
        carrier, completion = ended[i]
        if request.child:
            outputs[-1].outputs.append(completion)
            continue
        carrier.prompt = request.text
        carrier.prompt_token_ids = list(request.rules.prompt)
        if request.draft is not None:
            carrier.prompt_logprobs = None
        carrier.outputs = [completion]
        outputs.append(carrier)
    return outputs

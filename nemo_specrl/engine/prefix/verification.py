"""Verification of drafts: the prefill's parameters, the verdict, the continuation's parameters.

Makes vLLM's sampling parameters and reads its outputs; runs no engine.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.response import defect_of, given_up
from nemo_specrl.engine.vllm.compat import logprobs_slice
from nemo_specrl.rollout import MAX_SAMPLE_INDEX, Rollout
from nemo_specrl.speculation.acceptance import (
    accepted_lengths,
    derived_seed,
    draft_uniforms,
    offsets_of,
)

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs


__all__ = [
    "continuation_params",
    "judge",
    "matching_logprobs",
    "readable_logprobs",
    "reference_logprobs",
    "sampled_values",
    "verification_params",
]

logger = logging.getLogger(__name__)

# Uniforms are keyed by policy version and sample index, so that a repeated step repeats them. A
# draft that the present policy version (or a later one, before a resume) has already judged or
# decoded was made with those very uniforms; judging it with them again would not be independent.
# Such a draft is judged with the uniforms of a sample index that no row can have.
RESUMED_SAMPLE_OFFSET = MAX_SAMPLE_INDEX + 1


def verification_params(request: RolloutRequest) -> SamplingParams:
    """Return sampling parameters of the request whose prompt is prompt + draft.

    ``prompt_logprobs=0`` yields the log-prob of each prompt token and nothing else. The one token
    that vLLM insists on decoding is discarded; decoded greedily, it consumes no randomness. Nothing
    is detokenized: only the texts of the accepted tokens are filled in later, if the request asks
    for them (``outputs.name_tokens``). Requests share these parameters: vLLM copies them for each.
    """
    return _prefill_params(request.engine_params.logprobs)


@functools.lru_cache(maxsize=16)
def _prefill_params(prompt_logprobs: int | None) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def continuation_params(
    request: RolloutRequest, policy_version: int, *, watch_stops: bool
) -> SamplingParams:
    """Return sampling parameters of the request that decodes the rest after the accepted prefix.

    The request's response watches for stop strings instead of vLLM if they may begin in the
    accepted prefix, or if vLLM would keep tokens after them.

    Args:
        request: a judged request, or one without a draft, whose parameters are left unchanged.
        policy_version: version of the weights that decode.
        watch_stops: whether a step of the engine may bring several tokens. Up to 0.31, vLLM keeps
            those that follow a stop string (v1/engine/detokenizer.py).
    """
    from vllm.sampling_params import RequestOutputKind

    if request.draft is None and not (request.rules.has_stop_strings and watch_stops):
        return request.engine_params
    params = copy.copy(request.engine_params)
    params.max_tokens = request.rules.budget - request.accepted
    if request.draft is not None and params.seed is not None:
        # The draft was drawn with this very stream; its continuation needs one of its own.
        params.seed = derived_seed(
            "continue", params.seed, policy_version, request.row.key, request.row.sample_index
        )
    if request.response.watch_stop_strings(request.rules):
        # vLLM would not look for a stop string that begins in the prefix.
        params.stop = []
        params.output_kind = RequestOutputKind.DELTA
    return params


def reference_logprobs(draft: Rollout, config: SpecRLConfig) -> npt.NDArray[np.float32]:
    """The log-probs to which acceptance compares the current policy's, float32 ``[n]``, nats."""
    birth = config.acceptance_reference == "birth"
    return draft.birth_logprobs if birth else draft.logprobs


def sampled_values(logprobs: FlatLogprobs) -> npt.NDArray[np.float32]:
    """Log-prob of the token at each position, float32 ``[n]``, nats.

    The token itself is the first entry of its position, whatever its rank (vllm/logprobs.py).
    """
    values = np.asarray(logprobs.logprobs, dtype=np.float32)
    return values[np.asarray(logprobs.start_indices, dtype=np.int64)]


def draft_logprobs(request: RolloutRequest, output: RequestOutput) -> FlatLogprobs | None:
    """The current policy's log-probs of a draft's tokens, one position per token.

    None if the engine's answer is not about this draft, so that it proves nothing: positions are
    missing, or name other tokens. Both occur with vLLM 0.20. Its V1 model runner forgets the first
    chunks of a prompt whose prefill was interrupted and returns uninitialised memory for them
    (v1/worker/gpu_input_batch.py); its V2 model runner returns nothing if the last chunk is one
    token long (v1/worker/gpu/sample/prompt_logprob.py).

    Args:
        request: the request with the draft.
        output: the output of its verification.
    """
    assert request.draft is not None
    draft = request.draft.tokens
    logprobs: Any = output.prompt_logprobs
    if logprobs is None or len(logprobs) != len(request.rules.prompt) + len(draft):
        return None
    return matching_logprobs(logprobs, draft)


def matching_logprobs(
    logprobs: FlatLogprobs, draft: Sequence[int] | npt.NDArray[np.int32]
) -> FlatLogprobs | None:
    """Return the last positions of a prompt's log-probs, if they match the draft that ends it.

    Args:
        logprobs: log-probs of a prompt, or of its end.
        draft: token ids of the draft.
    """
    start = len(logprobs) - len(draft)
    if start < 0:
        return None
    piece = logprobs_slice(logprobs, start, len(logprobs))
    starts = np.asarray(piece.start_indices, dtype=np.int64)
    if not np.all(starts < np.asarray(piece.end_indices)):  # positions without an entry
        return None
    named = np.asarray(piece.token_ids, dtype=np.int64)[starts]
    return piece if np.array_equal(named, draft) else None


def readable_logprobs(
    request: RolloutRequest, output: RequestOutput, vocabulary: int
) -> FlatLogprobs | None:
    """The log-probs of a draft's tokens if it can be judged by them, otherwise None.

    Args:
        request: the request with the draft.
        output: the output of its verification.
        vocabulary: number of tokens in the model's vocabulary.
    """
    assert request.draft is not None
    if given_up(output, 0) is not None:
        return None
    try:
        logprobs = draft_logprobs(request, output)
        tokens = request.draft.tokens.tolist()
        wrong = logprobs is not None and defect_of(tokens, logprobs, vocabulary)
    except (IndexError, TypeError, ValueError) as error:  # nothing that vLLM should return
        logger.debug("a verification cannot be read: %s", error)
        return None
    return None if wrong else logprobs


def judge(
    verified: list[tuple[RolloutRequest, FlatLogprobs]],
    config: SpecRLConfig,
    *,
    seed: int,
    policy_version: int,
) -> None:
    """Begin the response of each verified request with the accepted prefix of its draft.

    Args:
        verified: requests with the log-probs of their drafts (:func:`draft_logprobs`).
        config: the ``spec_rl:`` block.
        seed: seed of the run.
        policy_version: version of the weights that judge.
    """
    if not verified:
        return
    drafts: list[Rollout] = []
    for request, _ in verified:
        assert request.draft is not None
        drafts.append(request.draft)
    offsets = offsets_of([len(draft) for draft in drafts])
    lengths = accepted_lengths(
        np.concatenate([sampled_values(logprobs) for _, logprobs in verified]),
        np.concatenate([reference_logprobs(draft, config) for draft in drafts]),
        draft_uniforms(
            seed,
            policy_version,
            [request.row.key for request, _ in verified],
            [
                request.row.sample_index
                + (RESUMED_SAMPLE_OFFSET if draft.policy_version >= policy_version else 0)
                for (request, _), draft in zip(verified, drafts, strict=True)
            ],
            offsets,
        ),
        offsets,
        config.lenience,
    )
    for (request, logprobs), draft, length in zip(verified, drafts, lengths.tolist(), strict=True):
        whole = length == len(draft)
        request.accept(length, logprobs if whole else logprobs_slice(logprobs, 0, length))

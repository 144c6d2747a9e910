"""Verification: the prefill that judges a draft, the verdict, and what decodes on from it.

Makes vLLM's sampling parameters and reads its outputs; runs no engine.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.requests import Request
from nemo_specrl.rollout import Rollout
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
    "reference_logprobs",
    "sampled_values",
    "verification_params",
]

REPLAYED_OFFSET = 2**16  # above every sample index


def verification_params(request: Request) -> SamplingParams:
    """Of the request whose prompt is prompt + draft.

    ``prompt_logprobs=0`` yields the log-prob of each prompt token and nothing else. The one token
    that vLLM insists on decoding is thrown away; greedy, it draws no randomness.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=request.params.logprobs,
        flat_logprobs=True,
        detokenize=request.params.detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def continuation_params(request: Request, policy_version: int) -> SamplingParams:
    """Of the request that decodes on from the accepted prefix."""
    from vllm.sampling_params import RequestOutputKind

    params = copy.copy(request.params)
    params.max_tokens = request.rules.budget - request.accepted
    if params.seed is not None:
        # The draft was drawn with this very stream: its continuation needs one of its own.
        params.seed = derived_seed(
            "continue", params.seed, policy_version, request.row.key, request.row.sample_index
        )
    if params.stop and params.detokenize:
        # A stop string may begin in the prefix, where vLLM would not look for it.
        request.detokenizer = request.rules.detokenizer()
        request.detokenizer.feed(request.tokens, stop_terminated=False)
        params.stop = []
        params.output_kind = RequestOutputKind.DELTA
    return params


def reference_logprobs(draft: Rollout, config: SpecRLConfig) -> npt.NDArray[np.float32]:
    """What the current policy's log-probs are compared with, float32 ``[n]``, nats."""
    birth = config.acceptance_reference == "birth"
    return draft.birth_logprobs if birth else draft.logprobs


def sampled_values(logprobs: FlatLogprobs) -> npt.NDArray[np.float32]:
    """Log-prob of the token that stands at each position, float32 ``[n]``, nats.

    The token itself is the first entry of its position, whatever its rank (vllm/logprobs.py).
    """
    values = np.asarray(logprobs.logprobs, dtype=np.float32)
    return values[np.asarray(logprobs.start_indices, dtype=np.int64)]


def judge(
    verified: list[tuple[Request, RequestOutput]],
    config: SpecRLConfig,
    *,
    seed: int,
    policy_version: int,
) -> None:
    """Set the accepted prefix of each verified request: ``accepted``, ``tokens``, ``logprobs``.

    Args:
        verified: requests and what the engine returned for their verification.
        config: the ``spec_rl:`` block.
        seed: of the run.
        policy_version: of the weights that judge.
    """
    if not verified:
        return
    drafts, pieces = [], []
    for request, output in verified:
        assert request.draft is not None
        start = len(request.rules.prompt)
        prompt_logprobs: Any = output.prompt_logprobs
        drafts.append(request.draft)
        pieces.append(prompt_logprobs[start : start + len(request.draft)])
    offsets = offsets_of([len(draft) for draft in drafts])
    lengths = accepted_lengths(
        np.concatenate([sampled_values(piece) for piece in pieces]),
        np.concatenate([reference_logprobs(draft, config) for draft in drafts]),
        draft_uniforms(
            seed,
            policy_version,
            [request.row.key for request, _ in verified],
            # What these weights, or later ones, had a part in was made with the uniforms of this
            # step already, before a crash: it is judged by others.
            [
                request.row.sample_index
                + (REPLAYED_OFFSET if draft.policy_version >= policy_version else 0)
                for (request, _), draft in zip(verified, drafts, strict=True)
            ],
            offsets,
        ),
        offsets,
        config.lenience,
    )
    for (request, _), draft, piece, length in zip(
        verified, drafts, pieces, lengths.tolist(), strict=True
    ):
        request.accepted = length
        request.tokens = draft.tokens[:length].tolist()
        request.logprobs = piece[:length]

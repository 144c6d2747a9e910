"""Sampling parameters: which of them allow verification, and where they end a response.

Reads vLLM's ``SamplingParams``; runs no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from nemo_specrl.engine.vllm.detokenizer import Detokenizer
from nemo_specrl.errors import UnsupportedSampling
from nemo_specrl.rollout import Finish

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = ["ResponseEnd", "StopRules", "check_verifiable", "is_greedy", "is_raw"]

# Everything that changes the distribution a token is drawn from, with the values that leave it raw.
# Acceptance compares log-probs, and vLLM's prompt log-probs are those of the raw distribution,
# whatever the sampling parameters.
_RAW: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("temperature", (1, 1.0)),
    ("top_p", (1, 1.0)),
    ("top_k", (0, -1, None)),
    ("min_p", (0, 0.0)),
    ("presence_penalty", (0, 0.0)),
    ("frequency_penalty", (0, 0.0)),
    ("repetition_penalty", (1, 1.0)),
    ("min_tokens", (0,)),
    ("logit_bias", (None, {})),
    ("allowed_token_ids", (None, [])),
    ("bad_words", (None, [])),
    ("structured_outputs", (None,)),
    ("thinking_token_budget", (None,)),
    ("repetition_detection", (None,)),
    ("trace_decode_token_ids", (None, [])),
    ("watermarking", (None, False)),
)
# What vLLM's rejection sampler applies to the distribution by which it verifies a tree's drafts
# (v1/sample/rejection_sampler.py, apply_sampling_constraints; V2's, v1/worker/gpu/spec_decode/
# rejection_sampler.py, takes what the sampler itself applies). top_k is not included in V1: if only
# top_k is set, an engine on a CPU fails in a step without a draft
# (v1/sample/ops/topk_topp_sampler.py, apply_top_k_only).
_BY_TREES = {
    "proposer": frozenset({"temperature", "top_p", "bad_words"}),
    "v2": frozenset({"temperature", "top_p", "top_k", "bad_words"}),
}
# What no engine with a drafter supports: vLLM refuses the request (sampling_params.py,
# _validate_spec_decode), even with V2, whose sampler would apply min_p before rejection sampling.
_NOT_WITH_DRAFTERS = frozenset({"min_p", "logit_bias"})
# Log-probs of tokens other than the likeliest: a position's first entry may not be its own token.
_UNREADABLE = ("logprob_token_ids", "prompt_logprob_token_ids")


def is_greedy(params: SamplingParams) -> bool:
    """Whether the temperature is 0, within vLLM's tolerance."""
    return bool(params.temperature < 1e-5)


def is_raw(params: SamplingParams) -> bool:
    """Whether tokens are drawn from the raw distribution, as far as the request determines it."""
    return all(getattr(params, name, raw[0]) in raw for name, raw in _RAW)


def check_verifiable(
    params: SamplingParams, *, trees: Literal["v2", "proposer"] | None = None
) -> None:
    """Raise for sampling parameters under which a draft cannot be verified.

    Args:
        params: sampling parameters of a request.
        trees: how drafts reach the engine, if only drafts from trees are verified, by vLLM's own
            rejection sampler.

    Raises:
        UnsupportedSampling: names the parameter, its value and what to set.
    """
    for name, raw in _RAW:
        value = getattr(params, name, raw[0])
        if value in raw or (trees and name in _BY_TREES[trees]):
            continue
        if trees and name in _NOT_WITH_DRAFTERS:
            raise UnsupportedSampling(
                f"{name} = {value!r}: vLLM refuses it in every engine with a drafter; set {name}: "
                f"{raw[0]}, or spec_rl.enabled: false"
            )
        if trees:
            raise UnsupportedSampling(
                f"{name} = {value!r}: has not been shown to hold for drafts of trees, as "
                f"temperature and top_p have; set {name}: {raw[0]}, or "
                "spec_rl.enabled: false"
            )
        lossless = ""
        if name in _BY_TREES["proposer"]:
            lossless = ", or preset: lossless with an engine that has the tree proposer"
        raise UnsupportedSampling(
            f"{name} = {value!r}: drafts are verified by prompt log-probs, which are those of "
            f"raw sampling; set {name}: {raw[0]}, or spec_rl.enabled: false{lossless}"
        )
    for name in _UNREADABLE:
        if getattr(params, name, None) is not None:
            raise UnsupportedSampling(
                f"{name}: vLLM's answer cannot be put together from a draft and its continuation; "
                "leave it out, or set spec_rl.enabled: false"
            )


@dataclasses.dataclass(frozen=True)
class ResponseEnd:
    """Where and how a response ends.

    Args:
        length: tokens of the response.
        finish: how it ends; None while it continues; PARTIAL if the engine gave it up.
        stop_reason: the stop token or stop string that ended it, as vLLM reports it.
        given_up: the ``finish_reason`` that vLLM reports for a response that it gave up, such as
            "abort".
    """

    length: int
    finish: Finish | None
    stop_reason: int | str | None = None
    given_up: str | None = None

    @property
    def finish_reason(self) -> str:
        """The ``finish_reason`` that vLLM reports."""
        if self.given_up is not None:
            return self.given_up
        return "length" if self.finish is Finish.LENGTH else "stop"

    @classmethod
    def unfinished(cls, length: int, reason: str = "abort") -> ResponseEnd:
        """The end of a response that the engine gave up early.

        Args:
            length: tokens of the response.
            reason: the ``finish_reason`` that vLLM reports for it.
        """
        return cls(length, Finish.PARTIAL, given_up=reason)


@dataclasses.dataclass(frozen=True)
class StopRules:
    """The conditions that end a request's response, applied token by token as vLLM does.

    Args:
        params: sampling parameters, with ``n == 1``.
        prompt: token ids.
        max_model_len: the engine's limit for prompt and response together, tokens.
        eos: the engine's end-of-sequence token, or None.
        extra_eos: further end-of-sequence tokens, which vLLM treats as stop tokens.
        tokenizer: the engine's, or None; stop strings need one.
    """

    params: SamplingParams
    prompt: list[int]
    max_model_len: int
    eos: int | None
    extra_eos: frozenset[int]
    tokenizer: Any

    @property
    def budget(self) -> int:
        """The maximum number of tokens that the response may have."""
        room = self.max_model_len - len(self.prompt)
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    @property
    def has_stop_strings(self) -> bool:
        """Whether the response ends at a string, for which a detokenizer must watch."""
        return bool(self.params.stop and self.params.detokenize)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a response, including end-of-sequence."""
        stops = frozenset(self.params.stop_token_ids or ())
        if self.params.ignore_eos:
            return stops
        return stops | self.extra_eos | (frozenset() if self.eos is None else {self.eos})

    def end_at(self, length: int, token: int) -> ResponseEnd | None:
        """How a response of ``length`` tokens ends at its last one; None if it continues.

        Stop strings are not checked.
        """
        if token in self.stop_tokens:
            is_eos = token == self.eos and not self.params.ignore_eos
            return ResponseEnd(length, Finish.STOP, None if is_eos else token)
        return ResponseEnd(length, Finish.LENGTH) if length >= self.budget else None

    def detokenizer(self) -> Detokenizer:
        """Make a new detokenizer with the prompt and the stop strings."""
        return Detokenizer(self.tokenizer, self.prompt, self.params)

    def end_of(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> ResponseEnd:
        """Find where a response that begins with ``tokens`` ends."""
        tokens = np.asarray(tokens, dtype=np.int64)[: self.budget]
        hits = np.flatnonzero(np.isin(tokens, list(self.stop_tokens)))
        length = int(hits[0]) + 1 if len(hits) else len(tokens)
        last = int(tokens[length - 1]) if length else -1
        end = self.end_at(length, last) or ResponseEnd(length, None)
        if self.has_stop_strings:
            detokenizer = self.detokenizer()
            for i, token in enumerate(tokens[: end.length].tolist()):
                by_token = end.finish is Finish.STOP and i + 1 == end.length
                found = detokenizer.feed([token], stop_terminated=by_token)
                if found is not None:
                    return ResponseEnd(i + 1, Finish.STOP_STRING, found)
        return end

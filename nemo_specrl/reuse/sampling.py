"""Which sampling prefix reuse can verify, and where sampling parameters end a response.

Reads vLLM's ``SamplingParams``; runs no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.errors import UnsupportedSampling
from nemo_specrl.rollout import Finish

if TYPE_CHECKING:
    from vllm import SamplingParams

    from nemo_specrl.reuse.limits import EngineLimits

__all__ = ["ResponseEnd", "StopRules", "check_raw", "is_plain"]

RAW: dict[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "trace_decode_token_ids": (None, []),
    "watermarking": (None, False),
    "logprob_token_ids": (None, []),
}
"""Everything that changes the distribution of a token (or, for the last one, which log-probs come
back), with the values that leave it raw. Acceptance compares log-probs, and vLLM's prompt log-probs
are those of the raw distribution, whatever the sampling parameters."""


def check_raw(values: Mapping[str, Any] | SamplingParams, where: str = "") -> None:
    """Raise for sampling under which a draft cannot be verified.

    Args:
        values: sampling parameters by vLLM's names, as a recipe or a request has them. What is left
            out is raw.
        where: dotted path in front of the name, for the message.

    Raises:
        UnsupportedSampling: names the parameter, its value and what to set.
    """
    for name, raw in RAW.items():
        given = isinstance(values, Mapping)
        value = values.get(name, raw[0]) if given else getattr(values, name, raw[0])
        if value not in raw:
            raise UnsupportedSampling(
                f"{where}{name} = {value!r}: a reused prefix is verified by prompt log-probs, "
                f"which are those of raw sampling; set {name}: {raw[0]}, or preset: lossless"
            )


def is_plain(params: SamplingParams) -> bool:
    """Whether a request is decoded by vLLM alone: greedy ones, those for prompt log-probs, and
    those that ask for it with ``extra_args={"spec_rl": False}``.
    """
    asked = (params.extra_args or {}).get("spec_rl", True)
    return params.temperature < 1e-5 or params.prompt_logprobs is not None or asked is False


@dataclasses.dataclass(frozen=True)
class ResponseEnd:
    """Where and how a response ends.

    Args:
        length: tokens of the response.
        finish: how it ends; None while it continues.
        stop_reason: the stop token or stop string that ended it, as vLLM reports it.
        reason: ``finish_reason`` of a response that the engine gave up, such as "abort".
        text: text of the response, if a stop string was watched for.
    """

    length: int
    finish: Finish | None
    stop_reason: int | str | None = None
    reason: str | None = None
    text: str | None = None

    @property
    def finish_reason(self) -> str:
        """The ``finish_reason`` that vLLM reports."""
        return self.reason or ("length" if self.finish is Finish.LENGTH else "stop")


@dataclasses.dataclass(frozen=True)
class StopRules:
    """The conditions that end a response, applied token by token as vLLM does.

    Args:
        params: sampling parameters of the response.
        prompt: token ids.
        limits: of the engine.
    """

    params: SamplingParams
    prompt: list[int]
    limits: EngineLimits

    @property
    def budget(self) -> int:
        """The most tokens that the response may have."""
        room = self.limits.max_model_len - len(self.prompt)
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    @property
    def has_stop_strings(self) -> bool:
        """Whether the response ends at a string."""
        return bool(self.params.stop and self.params.detokenize)

    def end_of(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> ResponseEnd:
        """Find where a response that begins with these tokens ends."""
        stops = set(self.params.stop_token_ids or ())
        eos = None if self.params.ignore_eos else self.limits.eos
        if not self.params.ignore_eos:
            stops |= self.limits.extra_eos | ({eos} if eos is not None else set())
        within = np.asarray(tokens, dtype=np.int64)[: self.budget]
        hits = np.flatnonzero(np.isin(within, list(stops)))
        length = int(hits[0]) + 1 if len(hits) else len(within)
        end = ResponseEnd(length, Finish.LENGTH if length >= self.budget else None)
        if len(hits):
            last = int(within[length - 1])
            end = ResponseEnd(length, Finish.STOP, None if last == eos else last)
        if not self.has_stop_strings:
            return end
        text = self.text(within[:length].tolist(), by_token=end.finish is Finish.STOP)
        if text.stop_string is not None:
            return ResponseEnd(text.length, Finish.STOP_STRING, text.stop_string, text=text.content)
        return dataclasses.replace(end, text=text.content)

    def text(self, tokens: Sequence[int], *, by_token: bool) -> Text:
        """Return the text of a response, up to a stop string, by vLLM's own detokenizer.

        vLLM looks for stop strings in the text of one request. Here the text goes on from an
        accepted prefix into its continuation, so that a string across the seam is found.

        Args:
            tokens: token ids of the response.
            by_token: whether the last one is a stop token, whose text belongs to the response only
                if the parameters say so.
        """
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        tokenizer = self.limits.tokenizer if self.params.detokenize else None
        request: Any = SimpleNamespace(
            request_id="spec_rl", prompt_token_ids=self.prompt, sampling_params=self.params
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        # One at a time: up to vLLM 0.31, an update with several tokens keeps those behind a string.
        for i, token in enumerate(tokens):
            found = detokenizer.update([token], by_token and i + 1 == len(tokens))
            if found is not None:
                return Text(i + 1, detokenizer.get_next_output_text(True, False), found)
        return Text(len(tokens), detokenizer.get_next_output_text(True, False), None)


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of a response.

    Args:
        length: tokens up to the one that completes a stop string, or all.
        content: as a finished request reports it.
        stop_string: the first one in it; None if there is none.
    """

    length: int
    content: str
    stop_string: str | None

"""vLLM's incremental detokenizer for a response made by several requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams

__all__ = ["Detokenizer"]


class Detokenizer:
    """vLLM's incremental detokenizer for a response made by two requests.

    vLLM looks for stop strings in the text of one request. Here the text continues from the draft
    into its continuation, so that a stop string that begins in one and ends in the other is found.

    Args:
        tokenizer: the engine's.
        prompt: token ids.
        params: sampling parameters of the request, with its stop strings.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request: Any = SimpleNamespace(
            request_id="specrl", prompt_token_ids=list(prompt), sampling_params=params
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def feed(self, tokens: Sequence[int], *, stop_terminated: bool) -> str | None:
        """Add tokens up to the one that completes a stop string.

        Tokens are added one at a time: up to vLLM 0.31, an update with several keeps those after
        the stop string, and AsyncLLM merges outputs of several steps into one.

        Args:
            tokens: token ids.
            stop_terminated: whether the last one is a stop token, whose text belongs to the
                response only if the parameters say so.

        Returns:
            The stop string that was completed, or None.
        """
        for i, token in enumerate(tokens):
            last = i + 1 == len(tokens)
            found: str | None = self._detokenizer.update([token], stop_terminated and last)
            if found is not None:
                return found
        return None

    @property
    def tokens(self) -> list[int]:
        """The tokens added so far; the last one completes the stop string, if there was one."""
        return list(self._detokenizer.output_token_ids)

    @property
    def text(self) -> str:
        """The text of these tokens, as a finished request reports it."""
        return str(self._detokenizer.get_next_output_text(finished=True, delta=False))

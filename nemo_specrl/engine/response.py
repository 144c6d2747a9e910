"""The response of a request so far: its tokens, their log-probs, and how it ends.

A response may come in pieces: the accepted prefix of a draft, then what one or several requests of
the engine decode after it. Reads vLLM's outputs; runs no engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.sampling_rules import ResponseEnd, StopRules
from nemo_specrl.engine.vllm.compat import logprobs_slice, new_logprobs
from nemo_specrl.engine.vllm.detokenizer import Detokenizer
from nemo_specrl.rollout import Finish

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.logprobs import FlatLogprobs

__all__ = ["Response", "defect_of", "extend_logprobs", "flat_logprobs", "given_up"]

ROUNDING = 1e-3
"""How far above 0 a log-prob may be due to rounding, nats."""


@dataclasses.dataclass(eq=False)
class Response:
    """A response so far.

    Args:
        tokens: token ids.
        logprobs: their log-probs, one position per token; None before the first piece.
        detokenizer: watches for stop strings if vLLM cannot; None if nothing is watched for.
        defect: what is wrong with the data that the engine gave; empty while no defect is known. A
            row with a defect is returned to its caller as the engine gave it, and is not cached.
        decoded: what the last request had decoded, and its log-probs, when its row was cancelled;
            None if it was not.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: FlatLogprobs | None = None
    detokenizer: Detokenizer | None = None
    defect: str = ""
    decoded: tuple[list[int], FlatLogprobs] | None = None

    def replace(self, tokens: list[int], logprobs: FlatLogprobs | None) -> None:
        """Set the whole response so far: an accepted prefix, or what a journal or an engine has."""
        self.tokens, self.logprobs = tokens, logprobs

    def check(self, tokens: Sequence[int], logprobs: FlatLogprobs | None, vocabulary: int) -> None:
        """Note what is wrong with a piece of the response (:func:`defect_of`); the first counts."""
        if not self.defect:
            self.defect = defect_of(tokens, logprobs, vocabulary)

    def note_defect(self, defect: str) -> None:
        """Note what is wrong with the data of the response; the first defect counts."""
        self.defect = self.defect or defect

    def watch_stop_strings(self, rules: StopRules) -> bool:
        """Watch for stop strings from now on, instead of vLLM; False if the request has none."""
        if not rules.has_stop_strings:
            return False
        self.detokenizer = rules.detokenizer()
        self.detokenizer.feed(self.tokens, stop_terminated=False)
        return True

    def append(
        self, tokens: list[int], logprobs: FlatLogprobs, *, stop_terminated: bool
    ) -> str | None:
        """Append tokens, up to the one that completes a stop string.

        Args:
            tokens: token ids.
            logprobs: one position per token.
            stop_terminated: whether the last one is a stop token.

        Returns:
            The stop string, if ``detokenizer`` watches for them and has found one.
        """
        found = None
        if self.detokenizer is not None:
            found = self.detokenizer.feed(tokens, stop_terminated=stop_terminated)
            if found is not None:  # leave out what follows the stop string
                tokens = self.detokenizer.tokens[len(self.tokens) :]
                logprobs = logprobs_slice(logprobs, 0, len(tokens))
        self.tokens += tokens
        if self.logprobs is None:
            self.logprobs = logprobs
        else:
            extend_logprobs(self.logprobs, logprobs)
        return found

    def append_output(self, output: RequestOutput, vocabulary: int) -> ResponseEnd | None:
        """Append what the engine decoded, and note any defect in it.

        Args:
            output: output of the request that decodes the response.
            vocabulary: number of tokens in the model's vocabulary.

        Returns:
            How the response ended, or None while it continues.
        """
        completion = output.outputs[0]
        by_token = completion.finish_reason == "stop"
        tokens, logprobs = list(completion.token_ids), new_logprobs(completion)
        whole: Any = completion.logprobs
        if not tokens and whole is not None and completion.finish_reason in ("stop", "length"):
            logprobs = whole  # there should be none
        self.check(tokens, logprobs, vocabulary)
        found = self.append(tokens, logprobs, stop_terminated=by_token)
        if found is None and not output.finished:
            return None
        if found is None and (unfinished := given_up(output, len(self.tokens))) is not None:
            return unfinished
        reason = found or completion.stop_reason
        if isinstance(reason, str):
            return ResponseEnd(len(self.tokens), Finish.STOP_STRING, reason)
        if by_token:
            return ResponseEnd(len(self.tokens), Finish.STOP, reason)
        return ResponseEnd(len(self.tokens), Finish.LENGTH)


def defect_of(tokens: Sequence[int], logprobs: FlatLogprobs | None, vocabulary: int) -> str:
    """What is wrong with tokens and their log-probs as an engine gave them; empty if nothing is.

    An engine whose weights hold a NaN, or whose kernels fail on a batch, continues without an
    error.

    Args:
        tokens: token ids.
        logprobs: should have one position per token, whose first entry is the token's own.
        vocabulary: number of tokens in the model's vocabulary.
    """
    if logprobs is None:
        return f"no log-probs for {len(tokens)} tokens" if len(tokens) else ""
    starts, ends = logprobs.start_indices, logprobs.end_indices
    if len(starts) != len(tokens):
        return f"{len(starts)} log-probs for {len(tokens)} tokens"
    if not len(tokens):
        return ""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        return f"token {wrong} in a vocabulary of {vocabulary}"
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return "a token without a log-prob"
    for token, start in zip(tokens, starts, strict=True):
        if logprobs.token_ids[start] != token:
            return f"the log-prob of token {logprobs.token_ids[start]} for token {token}"
        if logprobs.logprobs[start] == -math.inf:
            return "a token of probability 0"
    if min(logprobs.token_ids) < 0 or max(logprobs.token_ids) >= vocabulary:
        return f"a candidate beyond a vocabulary of {vocabulary}"
    for value in logprobs.logprobs:
        if not value <= ROUNDING:  # NaN, too
            return f"a log-prob of {value}"
    return ""


def given_up(output: RequestOutput, length: int) -> ResponseEnd | None:
    """The end of a response of ``length`` tokens if the engine gave it up, otherwise None."""
    reason = output.outputs[0].finish_reason
    if not output.finished or reason in (None, "stop", "length"):
        return None
    return ResponseEnd.unfinished(length, str(reason))


def flat_logprobs(tokens: Sequence[int], values: Sequence[float]) -> FlatLogprobs:
    """Make log-probs of tokens that came with no output of the engine, one position per token.

    Args:
        tokens: token ids.
        values: their log-probs, nats.
    """
    from vllm.logprobs import FlatLogprobs

    n = len(tokens)
    return FlatLogprobs(
        start_indices=list(range(n)),
        end_indices=list(range(1, n + 1)),
        token_ids=list(tokens),
        logprobs=list(values),
        ranks=[None] * n,
        decoded_tokens=[None] * n,
    )


def extend_logprobs(logprobs: FlatLogprobs, more: FlatLogprobs) -> None:
    """Append the positions of ``more`` to ``logprobs``, in place."""
    shift = len(logprobs.logprobs)
    logprobs.start_indices += [i + shift for i in more.start_indices]
    logprobs.end_indices += [i + shift for i in more.end_indices]
    logprobs.token_ids += more.token_ids
    logprobs.logprobs += more.logprobs
    logprobs.ranks += more.ranks
    logprobs.decoded_tokens += more.decoded_tokens

"""One response in the making, without I/O: verify a draft, keep its prefix, decode the rest.

:meth:`Row.run` is a generator. It yields the requests that it wants made and is sent the engine's
output for each; how they reach an engine is the driver's business (``llm``, ``async_llm``).

A draft is verified in pieces, the next one only if the last was accepted whole. Each request is a
prefill of prompt and draft up to the end of the piece with ``prompt_logprobs``, and reads the
prefix cache: vLLM then computes the log-probs behind the cached blocks alone, and those of a piece
are valid if no more than what is in front of its first token came from the cache. So the prompt of
a group is prefilled once, and no piece twice. Where more was cached, because another row begins
with the same tokens, the piece is prefilled again without the cache.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.errors import InvalidRollout
from nemo_specrl.reuse.acceptance import accepted_length, behaviour_logprobs, random_stream
from nemo_specrl.reuse.sampling import ResponseEnd, StopRules
from nemo_specrl.rollout import Finish, Rollout

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

    from nemo_specrl.config import ReuseConfig
    from nemo_specrl.reuse.limits import EngineLimits
    from nemo_specrl.reuse.noise import RoundingNoise

__all__ = ["PIECE_TOKENS", "EngineRequest", "Reuse", "Row"]

PIECE_TOKENS = 512
"""Tokens of a draft that are verified at once, up to a few more."""
ROUNDING = 1e-3
"""How far above 0 a log-prob may be due to rounding, nats."""

Float32Array = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A request that a row wants made.

    Args:
        tokens: token ids of its prompt.
        params: its sampling parameters; one output comes back, the final one.
        cache_salt: keeps its blocks in the prefix cache apart from those of other salts, as in
            vLLM; None: there is none.
    """

    tokens: list[int]
    params: SamplingParams
    cache_salt: str | None = None

    @property
    def prompt(self) -> Any:
        """The prompt as vLLM takes it."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"prompt_token_ids": self.tokens, **salt}


@dataclasses.dataclass(frozen=True, eq=False)
class Reuse:
    """What is known about a response, as attribute ``spec_rl`` of its ``CompletionOutput``.

    Args:
        drafted: tokens of the draft, after it was cut to the request's limits; 0: there was none.
        verified: those of them that were verified.
        accepted: those of them that begin the response.
        policy_logprobs: log-prob of each token of the response under the current policy, float32
            ``[n]``, nats.
        old_logprobs: log-prob of each accepted token under the policy that made or verified it
            last, float32 ``[accepted]``, nats.
    """

    drafted: int
    verified: int
    accepted: int
    policy_logprobs: Float32Array
    old_logprobs: Float32Array

    @property
    def fresh(self) -> bool:
        """Whether the response is an ordinary sample of the policy: no draft was verified. One
        whose draft was rejected at its first token is not fresh, since that was a choice.
        """
        return self.verified == 0


class Row:
    """A response to a prompt.

    Args:
        prompt: token ids.
        params: sampling parameters of the response, with ``n`` 1.
        key: the prompt's key.
        names: what names the row in its run: seed, policy version, number of the row among those
            of its prompt. Random numbers are derived from them and the draft.
        policy_version: version of the weights that verify and decode.
        limits: of the engine.
        config: the ``reuse:`` block.
        draft: an earlier response, with log-probs; None: there is none.
        noise: measures rounding on a few fresh rows; None: not wanted.
        cache_salt: of all requests of the row.

    Attributes:
        drafted, verified, accepted: see :class:`Reuse`.
        prefilled: tokens of prompt and draft that verification prefilled.
        prefilled_again: tokens in front of the continuation that were not in the prefix cache.
        decoded: tokens that the engine decoded for the response.
        completion: the response, as vLLM returns it, once :meth:`run` has ended.
        output: the engine's last output; None if the row was aborted before there was one.
        rollout: the response as the cache keeps it; None if it should not be kept.
        valid: whether the engine's tokens and log-probs can be a response (no NaN).
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        key: bytes,
        names: tuple[int, int, int],
        policy_version: int,
        limits: EngineLimits,
        config: ReuseConfig,
        draft: Rollout | None = None,
        noise: RoundingNoise | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.prompt, self.params, self.key, self.names = prompt, params, key, names
        self.cache_salt = cache_salt
        self.policy_version, self.limits, self.config = policy_version, limits, config
        self.rules = StopRules(params, prompt, limits)
        self._noise = noise
        self._draft, self._draft_end = self._cut(draft)
        self.drafted = 0 if self._draft is None else len(self._draft)
        self.verified = self.accepted = 0
        self.prefilled = self.prefilled_again = self.decoded = 0
        self.valid = True
        self.output: RequestOutput | None = None
        self.completion: CompletionOutput | None = None
        self.rollout: Rollout | None = None
        self._tokens: list[int] = []
        self._logprobs: FlatLogprobs | None = None
        self._text = ""  # of what was decoded

    def run(self) -> Generator[EngineRequest, RequestOutput | None, None]:
        """Make the response.

        Yields:
            Requests for the engine, one after the other; each is answered with its final output, or
            with None if the row was aborted and the request was not made.
        """
        end = yield from self._reuse()
        if end is None:
            end = yield from self._decode()
        self._finish(end)
        if self.rollout is not None and end.finish is not Finish.PARTIAL and not self.verified:
            yield from self._measure_noise(self.rollout)

    def _cut(self, draft: Rollout | None) -> tuple[Rollout | None, ResponseEnd | None]:
        """Cut a draft to what may be verified, and say how it then ends; None: no part of it."""
        if draft is None or draft.logprobs is None or not len(draft):
            return None, None
        if int(draft.tokens.max()) >= self.limits.vocabulary:
            return None, None
        end = self.rules.end_of(draft.tokens)
        # The draft is part of a prompt, after which vLLM requires room for one token.
        room = self.limits.max_model_len - 1 - len(self.prompt)
        if end.length > room:
            end = ResponseEnd(room, None)
        if end.length <= 0:
            return None, None
        cut = dataclasses.replace(
            draft, tokens=draft.tokens[: end.length], logprobs=draft.logprobs[: end.length]
        )
        return cut, end

    def _reuse(self) -> Generator[EngineRequest, RequestOutput | None, ResponseEnd | None]:
        """Begin the response with the accepted prefix of the draft.

        Returns:
            How the response ended with it; None if it has to be decoded on.
        """
        if self._draft is None:
            return None
        draft, old = self._draft, self._draft.logprobs
        assert old is not None
        uniforms = random_stream("accept", *self.names, self.key, draft.tokens.tobytes())
        while self.accepted < len(draft):
            start, stop = self.accepted, self._piece_end(len(draft))
            logprobs = yield from self._score(start, stop)
            if isinstance(logprobs, ResponseEnd):
                return logprobs
            if logprobs is None:  # not to be verified: decoded on from here
                return None
            n = accepted_length(
                logprob_values(logprobs),
                old[start:stop],
                1.0 - uniforms.random(stop - start),  # (0, 1]: a ratio of 0 never accepts
                self.config.lenience,
            )
            self.verified += stop - start
            self.accepted += n
            self._append(draft.tokens[start : start + n].tolist(), piece_of(logprobs, 0, n))
            if n < stop - start:
                return None
        end = self._draft_end
        return None if end is None or end.finish is None else end

    def _piece_end(self, total: int) -> int:
        """Where the next piece ends: its last token is the first of a block, so that the log-prob
        of the token behind it is not hidden by what the piece leaves in the prefix cache.
        """
        stop = self.accepted + PIECE_TOKENS
        stop += (1 - len(self.prompt) - stop) % self.limits.block_size
        return min(stop, total)

    def _score(
        self, start: int, stop: int
    ) -> Generator[EngineRequest, RequestOutput | None, FlatLogprobs | ResponseEnd | None]:
        """Have a piece of the draft prefilled; return the log-probs of its tokens.

        Returns:
            One position per token; how the response ended if the engine gave it up; None if the
            engine's answer does not show these log-probs.
        """
        assert self._draft is not None
        piece = self._draft.tokens[start:stop]
        before = len(self.prompt) + start
        tokens = self.prompt + self._draft.tokens[:stop].tolist()
        # A prompt of whole blocks would come from the cache with what scores its last token.
        for reads_cache in (True, False) if before % self.limits.block_size else (False,):
            params = _prefill_params(self.params.logprobs, reads_cache=reads_cache)
            output = yield EngineRequest(tokens, params, self.cache_salt)
            if (end := self._given_up(output)) is not None or output is None:
                return end
            self.prefilled += len(tokens) - (output.num_cached_tokens or 0)
            logprobs = scored(output, before, piece, self.limits.vocabulary)
            if logprobs is not None:
                return logprobs
        return None

    def _given_up(self, output: RequestOutput | None) -> ResponseEnd | None:
        """How the response ended if the engine gave up a request of it, otherwise None."""
        self.output = output or self.output
        reason = "abort" if output is None else output.outputs[0].finish_reason
        if reason in ("stop", "length"):
            return None
        return ResponseEnd(len(self._tokens), Finish.PARTIAL, reason=reason or "abort")

    def _append(self, tokens: list[int], logprobs: FlatLogprobs) -> None:
        self._tokens += tokens
        if self._logprobs is None:
            self._logprobs = logprobs
        else:
            _extend(self._logprobs, logprobs)

    def _decode(self) -> Generator[EngineRequest, RequestOutput | None, ResponseEnd]:
        """Decode on from the accepted prefix, to the end of the response; return how it ended."""
        from vllm.sampling_params import RequestOutputKind

        params = copy.copy(self.params)
        params.n = 1
        params.logprobs = self.params.logprobs or 0
        params.flat_logprobs = True
        params.output_kind = RequestOutputKind.FINAL_ONLY
        options: dict[str, Any] = {"keep": False}  # the cache gets it with log-probs, from here
        if self.accepted:
            params.max_tokens = self.rules.budget - self.accepted
            options["prompt_length"] = len(self.prompt)
        if self.verified and params.seed is not None:
            # The draft may have been drawn with this very seed: its continuation needs another one.
            params.seed = int(
                random_stream("continue", *self.names, self.key, params.seed).integers(2**31)
            )
        params.extra_args = {**(params.extra_args or {}), "spec_rl": options}
        output = yield EngineRequest(self.prompt + self._tokens, params, self.cache_salt)
        self.output = output or self.output
        if output is None:
            return ResponseEnd(len(self._tokens), Finish.PARTIAL, reason="abort")
        if self.accepted and output.num_cached_tokens is not None:
            before = len(self.prompt) + self.accepted
            self.prefilled_again += before - output.num_cached_tokens
        completion: Any = output.outputs[0]
        tokens = list(completion.token_ids)
        self.decoded, self._text = len(tokens), completion.text
        logprobs = completion.logprobs
        self.valid = not defect(tokens, logprobs, self.limits.vocabulary)
        self._append(tokens, piece_of(logprobs, 0, len(tokens)) if logprobs else _no_logprobs())
        return self._end(completion)

    def _end(self, completion: CompletionOutput) -> ResponseEnd:
        """How the response ended with what was decoded last, which a stop string may cut."""
        length, reason = len(self._tokens), completion.finish_reason
        stop = completion.stop_reason
        if reason not in ("stop", "length"):
            return ResponseEnd(length, Finish.PARTIAL, reason=reason or "abort")
        finish = Finish.LENGTH if reason == "length" else Finish.STOP
        if isinstance(stop, str):
            finish = Finish.STOP_STRING
        end = ResponseEnd(length, finish, stop)
        if not (self.valid and self.rules.has_stop_strings):
            return end
        # vLLM did not see one that begins in the prefix, and up to 0.31 keeps the tokens that a
        # step brings behind one.
        text = self.rules.text(self._tokens, by_token=finish is Finish.STOP)
        if text.stop_string is None:
            return dataclasses.replace(end, text=text.content)
        self._tokens = self._tokens[: text.length]
        assert self._logprobs is not None
        self._logprobs = piece_of(self._logprobs, 0, text.length)
        return ResponseEnd(text.length, Finish.STOP_STRING, text.stop_string, text=text.content)

    def _finish(self, end: ResponseEnd) -> None:
        """Make the completion for the caller and the rollout for the cache."""
        flat = self._logprobs or _no_logprobs()
        policy = np.full(len(self._tokens), np.nan, np.float32)
        if self.valid:
            policy = logprob_values(flat)
        old = np.empty(0, np.float32)
        if self._draft is not None and self._draft.logprobs is not None:
            old = self._draft.logprobs[: self.accepted]
        assert end.finish is not None
        kept = len(self._tokens) > (self.accepted if end.finish is Finish.PARTIAL else 0)
        if self.valid and kept:
            try:
                tokens = np.asarray(self._tokens, np.int32)
                self.rollout = Rollout(self.key, tokens, end.finish, self.policy_version, policy)
            except InvalidRollout:
                self.valid = False
        self.completion = self._completion(end, flat, policy, old)
        self.completion.spec_rl = Reuse(self.drafted, self.verified, self.accepted, policy, old)

    def _completion(
        self, end: ResponseEnd, flat: FlatLogprobs, policy: Float32Array, old: Float32Array
    ) -> CompletionOutput:
        from vllm import CompletionOutput

        logprobs: Any = None
        total = None
        if self.params.logprobs is not None:
            if self.valid and self.accepted and self.config.reported_logprobs == "behaviour":
                n = self.accepted
                policy = policy.copy()
                policy[:n] = behaviour_logprobs(policy[:n], old, self.config.lenience)
                flat = _with_values(flat, policy)
            if self.params.detokenize and self.limits.tokenizer is not None:
                _name_tokens(flat, self.limits.tokenizer)
            logprobs = flat if self.params.flat_logprobs else list(flat)
            total = float(policy.sum(dtype=np.float64))
        last = None if self.output is None else self.output.outputs[0]
        text = end.text
        if text is None and self.accepted:
            text = self.rules.text(self._tokens, by_token=end.finish is Finish.STOP).content
        elif text is None:
            text = self._text
        routes = None if last is None else last.routed_experts
        known = len(self.prompt) + len(self._tokens) - 1
        return CompletionOutput(
            index=0,
            text=text,
            token_ids=self._tokens,
            cumulative_logprob=total,
            logprobs=logprobs,
            # Those of the last request cover all of the response, unless some were in the cache.
            routed_experts=None if routes is None or len(routes) < known else routes[:known],
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
        )

    def _measure_noise(
        self, rollout: Rollout
    ) -> Generator[EngineRequest, RequestOutput | None, None]:
        """Prefill a response that these weights have just decoded, if it is one of the first."""
        tokens = self.prompt + self._tokens
        if len(tokens) >= self.limits.max_model_len or self._noise is None:
            return
        if rollout.logprobs is None or not self._noise.take():
            return
        params = _prefill_params(None, reads_cache=False)
        output = yield EngineRequest(tokens, params, self.cache_salt)
        vocabulary = self.limits.vocabulary
        if output is not None:
            logprobs = scored(output, len(self.prompt), rollout.tokens, vocabulary)
            if logprobs is not None:
                self._noise.add(logprob_values(logprobs), rollout.logprobs)


@functools.lru_cache(maxsize=64)
def _prefill_params(logprobs: int | None, *, reads_cache: bool) -> SamplingParams:
    """Sampling parameters of a prefill that scores the end of its prompt.

    ``prompt_logprobs=0`` yields the log-prob of each prompt token and nothing else. The one token
    that vLLM insists on decoding is discarded; decoded greedily, it takes no randomness. Nothing is
    detokenized: in front of what was scored, V1 returns token ids that are none.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=logprobs or 0,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=not reads_cache,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"spec_rl": False},
    )


def scored(
    output: RequestOutput, before: int, piece: npt.NDArray[np.int32], vocabulary: int
) -> FlatLogprobs | None:
    """Return the log-probs of the last tokens of a prompt; None if the output does not show them.

    What came from the prefix cache has none: vLLM's V1 model runner returns uninitialised memory
    for it (v1/worker/gpu_model_runner.py, ``_get_prompt_logprobs_dict``), its V2 runner leaves it
    out (v1/worker/gpu/sample/prompt_logprob.py). So the positions are counted from the end.

    Args:
        output: of a request with ``prompt_logprobs``.
        before: number of tokens in front of the piece.
        piece: the prompt's last tokens, int32 ``[n]``.
        vocabulary: number of tokens that the model knows.
    """
    logprobs: Any = output.prompt_logprobs
    cached, total = output.num_cached_tokens or 0, before + len(piece)
    if logprobs is None or cached >= before or len(logprobs) not in (total, total - cached):
        return None
    scores = piece_of(logprobs, len(logprobs) - len(piece), len(logprobs))
    return None if defect(piece.tolist(), scores, vocabulary) else scores


def defect(tokens: Sequence[int], logprobs: Any, vocabulary: int) -> bool:
    """Whether tokens and their log-probs, as an engine gave them, cannot be right.

    An engine whose weights hold a NaN, or whose kernels fail on a batch, goes on without an error.

    Args:
        tokens: token ids.
        logprobs: should have one position per token, whose first entry is the token's own.
        vocabulary: number of tokens that the model knows.
    """
    if len(tokens) != len(logprobs or ()):
        return True
    if not len(tokens):
        return False
    starts = np.asarray(logprobs.start_indices, np.int64)
    if (starts >= np.asarray(logprobs.end_indices)).any() or max(tokens) >= vocabulary:
        return True
    named = np.asarray(logprobs.token_ids, np.int64)[starts]
    values = np.asarray(logprobs.logprobs, np.float64)[starts]
    fine = (values <= ROUNDING) & (values > -math.inf)  # false for NaN, too
    return not (np.array_equal(named, tokens) and fine.all() and min(tokens) >= 0)


def logprob_values(logprobs: FlatLogprobs) -> Float32Array:
    """Log-prob of the token at each position, float32 ``[n]``, nats.

    The token itself is the first entry of its position, whatever its rank (vllm/logprobs.py).
    """
    values = np.asarray(logprobs.logprobs, dtype=np.float32)
    return values[np.asarray(logprobs.start_indices, dtype=np.int64)]


def piece_of(logprobs: FlatLogprobs, start: int, stop: int) -> FlatLogprobs:
    """Return positions ``start`` to ``stop`` of log-probs; vLLM cannot make an empty slice up to
    0.28.
    """
    return logprobs[start:stop] if stop > start else _no_logprobs()


def _no_logprobs() -> FlatLogprobs:
    from vllm.logprobs import FlatLogprobs

    return FlatLogprobs()


def _extend(logprobs: FlatLogprobs, more: FlatLogprobs) -> None:
    """Append the positions of ``more`` to ``logprobs``, in place."""
    shift = len(logprobs.logprobs)
    logprobs.start_indices += [i + shift for i in more.start_indices]
    logprobs.end_indices += [i + shift for i in more.end_indices]
    for name in ("token_ids", "logprobs", "ranks", "decoded_tokens"):
        getattr(logprobs, name).extend(getattr(more, name))


def _name_tokens(logprobs: FlatLogprobs, tokenizer: Any) -> None:
    """Fill in, in place, the text of each token that has none: those of an accepted prefix."""
    for i, token in enumerate(logprobs.token_ids):
        if logprobs.decoded_tokens[i] is None:
            logprobs.decoded_tokens[i] = tokenizer.decode([token])


def _with_values(logprobs: FlatLogprobs, values: Float32Array) -> FlatLogprobs:
    """Log-probs with these values for the tokens; other entries of a position keep their own."""
    entries = list(logprobs.logprobs)
    for start, value in zip(logprobs.start_indices, values.tolist(), strict=True):
        entries[start] = value
    return dataclasses.replace(logprobs, logprobs=entries)

"""Requests: one for each rollout that a call of ``generate`` makes, with everything it becomes.

Reads the engine's limits; runs nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.policy_version import TokenVersions
from nemo_specrl.engine.request_checks import as_list, rendered_prompt
from nemo_specrl.engine.response import Response
from nemo_specrl.engine.sampling_rules import (
    ResponseEnd,
    StopRules,
    check_verifiable,
    is_greedy,
    is_raw,
)
from nemo_specrl.errors import ConfigError
from nemo_specrl.media import has_media, media_prompt_key
from nemo_specrl.rollout import MAX_SAMPLE_INDEX, Rollout, prompt_key
from nemo_specrl.speculation.acceptance import derived_seed
from nemo_specrl.speculation.draft_selection import Row, assign_sample_indices

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import FlatLogprobs

    from nemo_specrl.engine.round_state import RowInRounds
    from nemo_specrl.engine.turns import Turns

__all__ = ["RolloutRequest", "build_requests"]

NOT_WITH_MEDIA = (
    "prompts: behind images, sounds and videos, drafts are verified inside vLLM alone; set preset: "
    "lossless with tree.method: v2 or proposer, or spec_rl.enabled: false"
)


@dataclasses.dataclass(eq=False)
class DraftVerification:
    """The draft of a request and what has become of it.

    Args:
        draft: tokens to verify, cut to the request's rules and limits; None: no draft.
        end: how the request's rules end the draft.
        running: whether the draft is in the engine.
        accepted: number of accepted tokens of the draft.
        duplicates: requests of the same prompt with the same draft, which are judged by this
            verification, too.
    """

    draft: Rollout | None = None
    end: ResponseEnd | None = None
    running: bool = False
    accepted: int = 0
    duplicates: list[RolloutRequest] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        """Note that the draft is in the engine."""
        self.running = True

    def finish(self) -> None:
        """Note that the draft is no longer in the engine."""
        self.running = False

    def drop(self) -> None:
        """Forget the draft: the row is then decoded as if it had none."""
        self.draft, self.end, self.running = None, None, False

    def take_duplicates(self) -> list[RolloutRequest]:
        """Remove and return the requests that share this verification."""
        duplicates, self.duplicates = self.duplicates, []
        return duplicates


@dataclasses.dataclass(frozen=True)
class RowHistory:
    """What the cache knows about a row.

    Args:
        occurrence: how many rollouts the sample index had before this one.
        mean_length: mean length of the earlier responses to its prompt, tokens; None: not known.
    """

    occurrence: int = 0
    mean_length: float | None = None


@dataclasses.dataclass(eq=False)
class RolloutRequest:
    """One rollout on its way through the engine.

    The first fields say what the caller asked for. The others hold what happens to the request, and
    are changed only through their methods.

    Args:
        index: index of the request in its call.
        text: the prompt's text, if the caller gave one.
        index_in_prompt: index among the ``n`` rollouts of its prompt.
        user_params: the caller's sampling parameters.
        engine_params: the same for one rollout, with the log-probs that the cache needs.
        rules: what ends its response.
        row: prompt key and sample index.
        cacheable: whether it reads and writes the cache.
        history: what the cache knows about the row.
        verification: its draft.
        response: the response so far.
        versions: which weights verified and decoded it.
        replayed: the rollout of the journal from which it was completed.
        media: the caller's prompt, if it has images, sounds or videos. Only the engine, which gets
            it as it is, knows all of its tokens: ``rules`` has those without placeholders.
        rounds: state of verification in rounds, for a row that is decoded in rounds.
        turns: state of the conversation, if the row is one. ``rules`` and ``response`` are those of
            its present turn, until :meth:`join_turns`.
    """

    index: int
    text: str | None
    index_in_prompt: int
    user_params: SamplingParams
    engine_params: SamplingParams
    rules: StopRules
    row: Row
    cacheable: bool = True
    history: RowHistory = RowHistory()
    verification: DraftVerification = dataclasses.field(default_factory=DraftVerification)
    response: Response = dataclasses.field(default_factory=Response)
    versions: TokenVersions = dataclasses.field(default_factory=TokenVersions)
    replayed: Rollout | None = None
    media: Any = None
    rounds: RowInRounds | None = None
    turns: Turns | None = None

    @property
    def draft(self) -> Rollout | None:
        """The draft, cut to what may be verified."""
        return self.verification.draft

    @property
    def accepted(self) -> int:
        """Number of accepted tokens of the draft."""
        return self.verification.accepted

    @property
    def tokens(self) -> list[int]:
        """Token ids of the response so far."""
        return self.response.tokens

    @property
    def logprobs(self) -> FlatLogprobs | None:
        """Log-probs of these tokens, one position per token."""
        return self.response.logprobs

    @property
    def needs_request(self) -> bool:
        """Whether its present request is done, and the response continues in another one."""
        return self.rounds is not None and self.rounds.needs_request

    @functools.cached_property
    def raw(self) -> bool:
        """Whether its tokens are drawn from the raw distribution, so that a prefix may be reused:
        verification supports no other.
        """
        return is_raw(self.user_params)

    @property
    def draftable(self) -> bool:
        """Whether it may have a draft; a request for prompt log-probs gets the engine's answer."""
        return self.cacheable and self.user_params.prompt_logprobs is None

    @property
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt; for a conversation, those of its root."""
        return self.rules.prompt if self.turns is None else self.turns.root.prompt

    @property
    def made_tokens(self) -> int:
        """Number of the response's tokens that the policy made, as opposed to an environment."""
        return len(self.tokens) - (0 if self.turns is None else self.turns.observed_tokens)

    def end_turn(self, end: ResponseEnd) -> ResponseEnd | None:
        """Note that what the engine decodes has ended.

        Args:
            end: how it ended.

        Returns:
            How the response ended with it; None if a conversation continues with another turn.
        """
        if self.turns is None:
            return end
        whole = self.turns.follow(self.response, end)
        if whole is None:
            self.rules, self.response = self.turns.rules, Response()
            if (seed := self.engine_params.seed) is not None:
                self.engine_params = copy.copy(self.engine_params)
                self.engine_params.seed = derived_seed(
                    "turn", seed, self.turns.ended, self.row.key, self.row.sample_index
                )
        return whole

    def join_turns(self) -> None:
        """Make a conversation's response everything that was said after its root."""
        if self.turns is not None:
            self.rules, self.response = self.turns.root, self.turns.join(self.response)

    def assign_sample_index(self, sample_index: int) -> None:
        """Set the sample index that a cache has reserved for the row."""
        self.row = Row(self.row.key, sample_index)

    def set_history(self, occurrence: int, mean_length: float | None) -> None:
        """Note what the cache knows about the row (:class:`RowHistory`)."""
        self.history = RowHistory(occurrence, mean_length)

    def set_draft(self, draft: Rollout, limits: EngineLimits) -> bool:
        """Set the draft, cut to what may be verified.

        Returns:
            False if no part of it may be verified: it has tokens that the model does not know, or
            there is no room for it.
        """
        if int(draft.tokens.max()) >= limits.vocabulary:
            return False
        end = self.rules.end_of(draft.tokens)
        # The draft is part of the prompt, after which vLLM requires room for one token.
        room = limits.max_model_len - 1 - len(self.rules.prompt)
        if end.length > room:
            end = ResponseEnd(room, None)
        if end.length <= 0:
            return False
        self.verification.draft, self.verification.end = draft.prefix(end.length), end
        return True

    def begin_rounds(self, state: RowInRounds) -> RowInRounds:
        """Decode the rest of the response in rounds, from this state on; returns the state."""
        self.rounds = state
        return state

    def accept(self, length: int, logprobs: FlatLogprobs) -> None:
        """Begin the response with the first tokens of the draft.

        Args:
            length: number of accepted tokens.
            logprobs: one position per accepted token.
        """
        assert self.draft is not None
        self.verification.accepted = length
        self.response.replace(self.draft.tokens[:length].tolist(), logprobs)

    def restore(self, rollout: Rollout, accepted: int, logprobs: FlatLogprobs) -> None:
        """Complete the request from the rollout that a journal holds for it.

        Args:
            rollout: a rollout of these very weights.
            accepted: how many of its tokens came from the draft.
            logprobs: one position per token of the rollout.
        """
        if rollout.fresh:
            self.verification.draft = None  # it was decoded without one, whatever is drafted now
        self.replayed = rollout
        self.verification.accepted = accepted
        self.response.replace(rollout.tokens.tolist(), logprobs)


def build_requests(
    limits: EngineLimits,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams],
    sample_indices: Sequence[int] | None,
    prompt_keys: Sequence[bytes] | None = None,
    *,
    trees_alone: bool | None = False,
    greedy: bool = False,
) -> list[RolloutRequest]:
    """Make a request for each of the ``n`` rollouts of each prompt, in order.

    Args:
        limits: limits of the engine.
        prompts: as ``vllm.LLM.generate`` takes them.
        sampling_params: one for all, or one for each prompt.
        sample_indices: first sample index of each prompt. None: the k-th rollout of a prompt has
            sample index k.
        prompt_keys: key of each prompt (:func:`nemo_specrl.prompt_key`); None: computed here.
        trees_alone: only drafts from trees are verified, by vLLM's own rejection sampler; None:
            nothing is verified at all.
        greedy: greedy requests read and write the cache, too, if ``trees_alone`` is true.

    Raises:
        UnsupportedSampling: drafts cannot be verified under these parameters.
        ConfigError: the numbers of prompts, parameters and sample indices differ, a sample index
            occurs twice or is invalid, or a prompt is empty, too long, has tokens that the model
            does not know, or has images, sounds or videos when not only trees draft.
    """
    prompts = as_list(prompts)
    if not isinstance(sampling_params, Sequence):
        sampling_params = [sampling_params] * len(prompts)
    given = {"sampling_params": sampling_params, "sample_indices": sample_indices}
    _check_counts(len(prompts), {**given, "prompt_keys": prompt_keys})
    trees = limits.drafter if trees_alone else None
    greedy = greedy and bool(trees_alone)
    _check_params(sampling_params, trees=trees, verified=trees_alone is not None, greedy=greedy)
    rendered = [rendered_prompt(p, limits, f"prompts[{i}]") for i, p in enumerate(prompts)]
    media = [prompt if has_media(prompt) else None for prompt in prompts]
    if not trees_alone and any(media):
        raise ConfigError(NOT_WITH_MEDIA)
    if prompt_keys is None:
        keyed = zip(media, rendered, strict=True)
        prompt_keys = [media_prompt_key(m) if m else prompt_key(ids) for m, (_, ids) in keyed]
    rows = _rows(prompt_keys, [p.n for p in sampling_params], sample_indices)
    requests: list[RolloutRequest] = []
    for (text, tokens), whole, params in zip(rendered, media, sampling_params, strict=True):
        cacheable = greedy or not is_greedy(params)
        for index_in_prompt in range(params.n):
            engine_params = _engine_params(params, index_in_prompt)
            rules = _stop_rules(limits, engine_params, tokens)
            index = len(requests)
            made = index, text, index_in_prompt, params, engine_params, rules, rows[index]
            requests.append(RolloutRequest(*made, cacheable, media=whole))
    return requests


def _stop_rules(limits: EngineLimits, params: SamplingParams, prompt: list[int]) -> StopRules:
    return StopRules(
        params=params,
        prompt=prompt,
        max_model_len=limits.max_model_len,
        eos=limits.eos,
        extra_eos=limits.extra_eos,
        tokenizer=limits.tokenizer,
    )


def _check_counts(prompts: int, given: dict[str, Sequence[Any] | None]) -> None:
    """Raise for arguments that do not have one entry per prompt."""
    for name, values in given.items():
        if values is not None and len(values) != prompts:
            raise ConfigError(f"{name}: {len(values)} of them for {prompts} prompts")


def _check_params(
    sampling_params: Sequence[SamplingParams],
    *,
    trees: Literal["v2", "proposer"] | None,
    verified: bool,
    greedy: bool,
) -> None:
    """Raise for parameters that are not vLLM's, or under which drafts cannot be verified."""
    from vllm.sampling_params import SamplingParams

    for i, params in enumerate(sampling_params):
        if not isinstance(params, SamplingParams):
            raise ConfigError(
                f"sampling_params[{i}]: must be vllm.SamplingParams, got {type(params).__name__}"
            )
        if verified and (greedy or not is_greedy(params)):
            check_verifiable(params, trees=trees)


def _engine_params(params: SamplingParams, index_in_prompt: int) -> SamplingParams:
    """The caller's parameters for one rollout, with the log-probs that the cache needs."""
    from vllm.sampling_params import RequestOutputKind

    # Shallow copies: SamplingParams.clone() costs as much as looking a rollout up.
    engine_params = copy.copy(params)
    engine_params.n = 1
    if params.seed is not None:
        engine_params.seed = params.seed + index_in_prompt  # as vLLM's ParentRequest does
    engine_params.logprobs = params.logprobs or 0
    engine_params.flat_logprobs = True
    engine_params.output_kind = RequestOutputKind.FINAL_ONLY
    return engine_params


def _rows(
    prompt_keys: Sequence[bytes], counts: list[int], sample_indices: Sequence[int] | None
) -> list[Row]:
    """Return the prompt key and sample index of each rollout."""
    keys = [key for key, n in zip(prompt_keys, counts, strict=True) for _ in range(n)]
    if sample_indices is None:
        flat = assign_sample_indices(keys)
    else:
        flat = [
            sample_index + i
            for sample_index, n in zip(sample_indices, counts, strict=True)
            for i in range(n)
        ]
    for wrong in (index for index in flat if not 0 <= index <= MAX_SAMPLE_INDEX):
        raise ConfigError(f"sample_indices: {wrong} is not in 0..{MAX_SAMPLE_INDEX}")
    rows = [Row(key, sample_index) for key, sample_index in zip(keys, flat, strict=True)]
    if len(set(rows)) != len(rows):
        raise ConfigError("sample_indices: two rollouts of one prompt have the same sample index")
    return rows

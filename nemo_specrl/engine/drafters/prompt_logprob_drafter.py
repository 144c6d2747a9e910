"""Verification rounds: drafts from trees for engines that cannot load our proposer.

A round is one request. Its prompt is the row's prompt, its tokens so far and then a draft, and the
log-probs of that prompt (``prompt_logprobs``) verify the draft in one prefill. Draft token d is
accepted with probability p(d); otherwise a token is drawn from the rest of p, so that the response
has exactly the policy's distribution, whatever is proposed (rejection sampling, Leviathan et al.,
arXiv 2211.17192). The token that the request itself samples follows a draft that was accepted
whole; the request then continues to decode until the tree offers a draft that is worth another
request.

The token after a rejection is drawn here if it is among the likeliest few, whose log-probs come
with those of the draft. Otherwise a request of one token draws it, with those few excluded.

This module has the requests and the meaning of their outputs. The loops that submit them are in
``sync_engine`` and ``async_engine``; which tokens are likely is decided in
``speculation.suffix_tree``.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from nemo_specrl.config import TreeConfig
from nemo_specrl.engine.drafters.histories import PendingHistories
from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.prefix.verification import matching_logprobs, sampled_values
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.response import defect_of, given_up
from nemo_specrl.engine.round_state import RowInRounds
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.vllm.compat import logprobs_slice, new_logprobs
from nemo_specrl.rollout import Finish, Rollout
from nemo_specrl.speculation.acceptance import derived_seed, row_uniforms
from nemo_specrl.speculation.draft_selection import Row, response_id

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs


__all__ = ["PromptLogprobDrafter"]

CANDIDATES = 4
"""Number of likeliest tokens whose log-probs are requested at each position of a draft."""
MIN_GAIN = 3.0
"""Tokens that a draft must be expected to bring for a decoding row to stop for it, or half of a
longest draft if that is less."""
EXCLUDED = -100.0
"""Bias of a logit that leaves its token e^-100 of its weight; the largest that vLLM allows."""

_salts = itertools.count()


class PromptLogprobDrafter:
    """Makes the requests of rows that are decoded in rounds, and reads their outputs.

    Args:
        limits: limits of the engine.
        config: the ``tree:`` block.
        seed: seed of the run.

    Raises:
        IncompatibleVersion: the package's extension was not compiled.
    """

    def __init__(self, limits: EngineLimits, config: TreeConfig, seed: int) -> None:
        from nemo_specrl.speculation.suffix_tree import DraftTrees  # its index is native code

        self._limits = limits
        self._seed = seed
        self._max_draft = config.max_draft_tokens
        self._trees = DraftTrees(config.max_bytes)
        self._histories = PendingHistories()
        self._version = -1
        self._tries: dict[Row, int] = {}  # under the weights of this version
        self._made: dict[Row, bytes] = {}

    def add(
        self,
        requests: Sequence[RolloutRequest],
        cached: Mapping[bytes, Sequence[Rollout]],
        history: Mapping[bytes, Sequence[Rollout]],
        policy_version: int,
    ) -> None:
        """Take the rollouts of a look-up.

        Args:
            requests: for which the look-up was made.
            cached: the rollouts of these requests, at least.
            history: the rollouts of whole groups, from which all rows of their prompts draft.
            policy_version: policy version of the present weights.
        """
        self._histories.add(history, policy_version)
        self._begin_version(policy_version)
        for request in requests:
            made = [
                rollout.tokens.tobytes()
                for rollout in cached.get(request.row.key, ())
                if rollout.sample_index == request.row.sample_index
                and rollout.policy_version >= policy_version
            ]
            if made:
                self._made[request.row] = xxhash.xxh3_64_digest(b"\0".join(made))

    def _begin_version(self, policy_version: int) -> None:
        """Forget what is known of rows under other weights."""
        if policy_version != self._version:
            self._version, self._tries, self._made = policy_version, {}, {}

    def _start_row(self, request: RolloutRequest, policy_version: int) -> RowInRounds:
        """Make the state of a row at its start, after its accepted prefix.

        A row that these weights have decoded before (the step is repeated, or was interrupted)
        drafts from its earlier result. With the same randomness it would not be independent of that
        result, so the earlier result, and how often the row was opened, are part of the key.
        """
        self._begin_version(policy_version)
        key, index = request.row.key, request.row.sample_index
        tries = self._tries[request.row] = self._tries.get(request.row, 0) + 1
        stream = f"rounds {tries} {self._made.get(request.row, b'').hex()}"
        tree = self._trees.open(key, response_id(index, policy_version), self._histories.take(key))
        tree.extend(request.tokens)
        request.response.watch_stop_strings(request.rules)
        return RowInRounds(
            tree=tree,
            stream=stream,
            uniforms=row_uniforms(stream, self._seed, policy_version, key, index),
            salt=f"spec_rl-{next(_salts)}",
        )

    def next_request(
        self, request: RolloutRequest, policy_version: int, metrics: EngineMetrics
    ) -> tuple[dict[str, Any], SamplingParams]:
        """The next request of a row: its prompt, as vLLM takes it, and its sampling parameters."""
        row = request.rounds
        if row is None:
            row = request.begin_rounds(self._start_row(request, policy_version))
        started = time.perf_counter()
        row.draft = []
        if row.rejected is None and not row.skip_draft and not request.response.defect:
            row.draft, _ = self._draft(request, row)
        metrics.tree_s += time.perf_counter() - started
        metrics.tree_requests += 1
        metrics.tree_drafted_tokens += len(row.draft)
        params = self._params(request, row, policy_version)
        row.requests += 1
        row.policy_version = policy_version
        row.opening, row.needs_request, row.skip_draft = True, False, False
        return {
            "prompt_token_ids": request.rules.prompt + request.tokens + row.draft,
            "cache_salt": row.salt,
        }, params

    def _params(
        self, request: RolloutRequest, row: RowInRounds, policy_version: int
    ) -> SamplingParams:
        from vllm.sampling_params import RequestOutputKind

        params = copy.copy(request.engine_params)
        params.max_tokens = request.rules.budget - len(request.tokens) - len(row.draft)
        if params.seed is not None:
            key, index = request.row.key, request.row.sample_index
            purpose = f"{row.stream} {row.requests}"
            params.seed = derived_seed(purpose, params.seed, policy_version, key, index)
        params.output_kind = RequestOutputKind.DELTA
        params.stop = []  # request.response watches for them
        # The text is made at the end. Positions of the prompt that the prefix cache covers name
        # tokens that do not exist.
        params.detokenize = False
        if row.draft:
            params.prompt_logprobs = self._candidates(request)
            # What the cache covers has no log-probs; they are not needed before the draft.
            params.skip_reading_prefix_cache = False
        if row.rejected is not None:
            params.logit_bias = dict.fromkeys(row.rejected.token_ids, EXCLUDED)
            params.max_tokens = 1
        return params

    def _candidates(self, request: RolloutRequest) -> int:
        """Number of tokens whose log-probs are requested at each position of a draft; -1: all."""
        wanted, most = request.engine_params.logprobs or 0, self._limits.max_logprobs
        if wanted < 0:
            return wanted
        return max(wanted, CANDIDATES if most < 0 else min(CANDIDATES, most))

    def _draft(self, request: RolloutRequest, row: RowInRounds) -> tuple[list[int], float]:
        """Likely next tokens of a row, and the expected number of accepted ones.

        A draft leaves room for the token after it, and ends before a stop token: sampled after the
        draft, the stop token costs nothing extra, and vLLM notices it.
        """
        room = request.rules.budget - len(request.tokens) - 1
        draft, _, of_tokens = row.tree.proposal(min(self._max_draft, room))
        tokens, chances = array("i", draft).tolist(), array("f", of_tokens)
        stops, vocabulary = request.rules.stop_tokens, self._limits.vocabulary
        n = 0
        while n < len(tokens) and tokens[n] not in stops and tokens[n] < vocabulary:
            n += 1
        return tokens[:n], sum(chances[:n])

    def read_output(
        self,
        request: RolloutRequest,
        output: RequestOutput,
        policy_version: int,
        metrics: EngineMetrics,
    ) -> ResponseEnd | None:
        """Append what an output brings to its row.

        Args:
            request: the row's request.
            output: an output of its present request.
            policy_version: policy version of the present weights.
            metrics: where to count.

        Returns:
            How the response ended. None while it continues: in another request, which replaces the
            present one, if ``request.rounds.needs_request`` is set.
        """
        row = request.rounds
        assert row is not None
        if not (output.outputs[0].token_ids or output.finished):
            return None
        before = len(request.tokens)
        if row.opening:
            row.opening = False
            if before:
                prefix = len(request.rules.prompt) + before
                metrics.recomputed_tokens += max(0, prefix - (output.num_cached_tokens or 0))
        draft, row.draft = row.draft, []
        if draft:
            end = self._judge(request, row, draft, output, policy_version, metrics)
        elif row.rejected is not None:
            end = self._append_resampled(request, row, output)
        else:
            end = request.response.append_output(output, self._limits.vocabulary)
        if end is None:
            end = self._given_up(request, row, output)
        new = request.tokens[before:]
        metrics.decoded_tokens += len(new)
        metrics.tree_tokens += len(new)
        metrics.tree_steps += max(1, len(output.outputs[0].token_ids))
        started = time.perf_counter()
        if not request.response.defect:
            row.tree.extend(new)
        if end is None and not row.needs_request and not request.response.defect:
            _, gain = self._draft(request, row)
            row.needs_request = gain >= min(MIN_GAIN, self._max_draft / 2)
        metrics.tree_s += time.perf_counter() - started
        return end

    def _given_up(
        self, request: RolloutRequest, row: RowInRounds, output: RequestOutput
    ) -> ResponseEnd | None:
        """The end of a response that cannot continue, or None."""
        end = given_up(output, len(request.tokens))
        if end is None and row.needs_request and request.response.defect:
            known = range(self._limits.vocabulary)
            if not all(token in known for token in request.tokens):  # vLLM refuses such a prompt
                end = ResponseEnd.unfinished(len(request.tokens), "error")
        return end

    def _judge(
        self,
        request: RolloutRequest,
        row: RowInRounds,
        draft: list[int],
        output: RequestOutput,
        policy_version: int,
        metrics: EngineMetrics,
    ) -> ResponseEnd | None:
        """Append the accepted part of a draft, and the token after it."""
        start = len(request.rules.prompt) + len(request.tokens)
        logprobs: Any = output.prompt_logprobs
        # The log-prob of a token comes from the token before it, which must not have been cached.
        covered = start <= (output.num_cached_tokens or 0)
        proved = None
        if logprobs is not None and not covered and policy_version == row.policy_version:
            proved = matching_logprobs(logprobs, draft)
        if proved is None or defect_of(draft, proved, self._limits.vocabulary):
            metrics.refused_drafts += 1
            row.needs_request = row.skip_draft = True
            return None
        accepted, chosen = 0, 0
        for logprob in sampled_values(proved).tolist():
            u = 1.0 - row.uniforms.random()  # in (0, 1]: the impossible is never accepted
            if not u <= math.exp(logprob):
                chosen = self._resample_rejected(row, proved, accepted, u)
                break
            accepted += 1
        metrics.tree_accepted_tokens += accepted
        entries = [0] * accepted + ([chosen] if chosen else [])
        kept = _picked(proved, entries, request.engine_params.logprobs or 0)
        tokens = [kept.token_ids[i] for i in kept.start_indices]
        found = request.response.append(tokens, kept, stop_terminated=self._stops(request, tokens))
        if found is not None:
            return ResponseEnd(len(request.tokens), Finish.STOP_STRING, found)
        if accepted == len(draft):
            return request.response.append_output(output, self._limits.vocabulary)
        row.needs_request = True
        if not chosen:
            return None
        return request.rules.end_at(len(request.tokens), request.tokens[-1])

    def _resample_rejected(
        self, row: RowInRounds, proved: FlatLogprobs, position: int, u: float
    ) -> int:
        """Draw the token that replaces a rejected one, from the rest of p.

        ``u`` is uniform above the rejected token's probability: it is carried on through those of
        the other candidates.

        Returns:
            The number of the candidate's entry. 0 if the token is none of the candidates; the row's
            next request must then not draw any of them.
        """
        piece = logprobs_slice(proved, position, position + 1)
        total = math.exp(piece.logprobs[0])
        for i in range(1, len(piece.token_ids)):
            if piece.token_ids[i] != piece.token_ids[0]:  # the rejected token may be a likely one
                total += math.exp(piece.logprobs[i])
                if u <= total:
                    return i
        if len(set(piece.token_ids)) >= self._limits.vocabulary:  # rounding: nothing is left
            return len(piece.token_ids) - 1
        row.rejected = piece
        return 0

    def _append_resampled(
        self, request: RolloutRequest, row: RowInRounds, output: RequestOutput
    ) -> ResponseEnd | None:
        """Append the token of a request from which the candidates were excluded."""
        rejected, row.rejected = row.rejected, None
        assert rejected is not None
        completion = output.outputs[0]
        row.needs_request = True
        tokens, sampled = list(completion.token_ids), new_logprobs(completion)
        if not tokens:  # aborted
            return None
        request.response.check(tokens, sampled, self._limits.vocabulary)
        if request.response.defect:
            request.response.append(tokens, sampled, stop_terminated=self._stops(request, tokens))
            return request.rules.end_at(len(request.tokens), request.tokens[-1])
        logprob, rank = sampled.logprobs[0], sampled.ranks[0]
        if self._limits.logprobs_mode == "processed_logprobs":
            # vLLM reports log-probs of what it drew from, the rest of p.
            excluded = dict(zip(rejected.token_ids, rejected.logprobs, strict=True)).values()
            logprob += math.log1p(-min(sum(map(math.exp, excluded)), 1 - 1e-9))
            rank = None if rank is None else rank + sum(value > logprob for value in excluded)
        kept = _picked(rejected, [0], request.engine_params.logprobs or 0)
        kept.token_ids[0], kept.logprobs[0], kept.ranks[0] = tokens[0], logprob, rank
        stops = self._stops(request, tokens)
        found = request.response.append(tokens, kept, stop_terminated=stops)
        if found is not None:
            return ResponseEnd(len(request.tokens), Finish.STOP_STRING, found)
        return request.rules.end_at(len(request.tokens), request.tokens[-1])

    def _stops(self, request: RolloutRequest, tokens: list[int]) -> bool:
        """Whether tokens end in a stop token."""
        return bool(tokens) and tokens[-1] in request.rules.stop_tokens


def _picked(logprobs: FlatLogprobs, entries: list[int], candidates: int) -> FlatLogprobs:
    """The first positions, each with one of its entries before its likeliest candidates.

    Args:
        logprobs: entry 0 of a position is the token at it, the others are candidates.
        entries: by position, the number of the entry that goes first.
        candidates: how many are kept; -1: all.
    """
    picked = type(logprobs)()
    for position, entry in enumerate(entries):
        first, last = logprobs.start_indices[position], logprobs.end_indices[position]
        kept = last if candidates < 0 else min(last, first + 1 + candidates)
        which = [first + entry, *range(first + 1, kept)]
        picked.start_indices.append(len(picked.logprobs))
        picked.token_ids += [logprobs.token_ids[i] for i in which]
        picked.logprobs += [logprobs.logprobs[i] for i in which]
        picked.ranks += [logprobs.ranks[i] for i in which]
        picked.decoded_tokens += [logprobs.decoded_tokens[i] for i in which]
        picked.end_indices.append(len(picked.logprobs))
    return picked

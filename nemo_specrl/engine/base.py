"""What happens to a row on its way through an engine, whichever engine it is.

Finds drafts, judges them, adds up what was decoded and hands rollouts to the cache; the loops that
drive an engine are in ``speculative`` and ``asynchronous``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.assembly import completed, extend, kept
from nemo_specrl.engine.compat import check_version, tokens_so_far
from nemo_specrl.engine.drafting import Histories
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.replay import Journal, put_back, stand_in
from nemo_specrl.engine.requests import EngineLimits, Request
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.engine.verification import continuation_params, judge, sampled_values
from nemo_specrl.errors import ConfigError
from nemo_specrl.rollout import Finish, Rollout
from nemo_specrl.speculation.drafts import select_drafts

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["RolloutCache", "Speculation"]

logger = logging.getLogger(__name__)


class RolloutCache(Protocol):
    """What a cache of rollouts has to offer; :class:`nemo_specrl.RolloutStore` is one."""

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Rollouts by prompt key, newest first within a sample index."""
        ...

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts, each newer than what its prompt and sample index had."""
        ...


class Speculation:
    """The part that a synchronous and an asynchronous engine share.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: where rollouts are looked up and kept; :class:`RolloutCache`.
        config: the ``spec_rl:`` block.
        seed: of the run; acceptance draws from it.

    Raises:
        ConfigError: the engine and the configuration do not go together.
        IncompatibleVersion: the installed vLLM is not one that this release works with.
    """

    def __init__(self, llm: Any, cache: Any, config: SpecRLConfig, seed: int = 0) -> None:
        check_version()
        self._limits = EngineLimits.of(llm)
        mode = self._limits.logprobs_mode
        if config.enabled and not mode.endswith("logprobs"):
            raise ConfigError(f"logprobs_mode = {mode}: must be raw_logprobs or processed_logprobs")
        self.llm = llm
        self.cache = cache
        self.config = config
        self.seed = seed
        self.policy_version = 0
        self.fingerprint = 0
        self.fresh_fraction = config.fresh_fraction
        self.metrics = EngineMetrics()
        self._cache_error_logged = False
        if config.enabled and config.tree.enabled and not self._limits.drafts_from_trees:
            raise ConfigError(
                "spec_rl.tree.enabled = true: the engine was built without the tree proposer; pass "
                "nemo_specrl.engine.drafting.engine_options(config) to vllm.LLM, or set false"
            )
        self._histories = Histories()

    def _find_drafts(self, requests: list[Request]) -> None:
        candidates = [request for request in requests if request.draftable]
        try:
            cached = self.cache.get(list(dict.fromkeys(r.row.key for r in candidates)))
        except Exception as error:  # the cache can only cost speed
            self._count_cache_error(error)
            return
        self._choose(candidates, cached)

    def _choose(self, requests: list[Request], cached: dict[bytes, list[Rollout]]) -> None:
        """Offer each request its draft, if it has one."""
        if self._limits.drafts_from_trees:
            self._histories.add(cached)
        choices = select_drafts(
            [request.row for request in requests],
            cached,
            policy_version=self.policy_version,
            seed=self.seed,
            fresh_fraction=max(self.fresh_fraction, self.config.effective_fresh_fraction),
        )
        for request, (draft, occurrence) in zip(requests, choices, strict=True):
            request.occurrence = occurrence
            if draft is not None and not request.offer(draft, self._limits):
                self.metrics.refused_drafts += 1

    def _replay(self, requests: list[Request]) -> list[tuple[Request, RequestOutput, Ending]]:
        """Requests that a process which died had made to their end under these very weights.

        They are what they were then. What was made for this step by other weights is offered as a
        draft.
        """
        if not (self.fingerprint and isinstance(self.cache, Journal)):
            return []
        # Further candidates of a position are not kept.
        asking = [r for r in requests if r.draftable and not r.wanted.logprobs]
        try:
            places = [(r.row.key, r.row.sample_index) for r in asking]
            taken = self.cache.take(places, self.policy_version, self.fingerprint)
        except Exception as error:  # the cache can only cost speed
            self._count_cache_error(error)
            return []
        replayed = []
        for request, rollout in zip(asking, taken, strict=True):
            if rollout is None or not len(rollout):
                continue
            ending = None
            if rollout.fingerprint == self.fingerprint:
                ending = put_back(request, rollout)
            if ending is None:
                request.offer(rollout, self._limits)
                continue
            request.replayed = True
            self.metrics.replayed_rows += 1
            self.metrics.decoded_tokens += len(rollout) - request.accepted
            if request.draft is not None:
                self._count_draft(request)
            replayed.append((request, stand_in(request, ending), ending))
        return replayed

    def _decoding_params(self, request: Request) -> SamplingParams:
        """Sampling parameters of the request that decodes what verification has not brought."""
        params = (
            request.params
            if request.draft is None
            else continuation_params(request, self.policy_version)
        )
        if self._limits.drafts_from_trees and self.config.tree.enabled and request.draftable:
            return self._histories.attached(request, params, self.policy_version)
        return params

    def _count_draft(self, request: Request) -> bool:
        """Add a verdict to the metrics; whether the draft is all of the response."""
        assert request.draft is not None and request.ending is not None
        whole = request.accepted == len(request.draft) and request.ending.finish is not None
        self.metrics.drafts += 1
        self.metrics.draft_tokens += len(request.draft)
        self.metrics.accepted_tokens += request.accepted
        self.metrics.full_reuses += whole
        return whole

    def _judge(
        self, verified: list[tuple[Request, RequestOutput]]
    ) -> list[tuple[Request, RequestOutput, Ending | None]]:
        """Each verified request with its ending, or None where a continuation is to be decoded."""
        judge(verified, self.config, seed=self.seed, policy_version=self.policy_version)
        verdicts: list[tuple[Request, RequestOutput, Ending | None]] = []
        for request, output in verified:
            assert request.draft is not None and request.ending is not None
            request.verifying = False
            whole = self._count_draft(request)
            verdicts.append((request, output, request.ending if whole else None))
        return verdicts

    def _take(self, request: Request, output: RequestOutput) -> Ending | None:
        """Add what the engine decoded; how the response ended, None while it goes on."""
        completion = output.outputs[0]
        tokens, logprobs = list(completion.token_ids), completion.logprobs
        found = None
        if request.detokenizer is not None:
            by_token = completion.finish_reason == "stop"
            found = request.detokenizer.feed(tokens, stop_terminated=by_token)
            if found is not None:  # with what was decoded behind the stop string left out
                tokens = request.detokenizer.tokens[len(request.tokens) :]
                logprobs = logprobs[: len(tokens)]
        request.tokens += tokens
        if request.logprobs is None:
            request.logprobs = logprobs
        else:
            extend(request.logprobs, logprobs)
        self.metrics.decoded_tokens += len(tokens)
        if found is None and not output.finished:
            return None
        reason = found or completion.stop_reason
        if isinstance(reason, str):
            return Ending(len(request.tokens), Finish.STOP_STRING, reason)
        if completion.finish_reason == "stop":
            return Ending(len(request.tokens), Finish.STOP, reason)
        return Ending(len(request.tokens), Finish.LENGTH)

    def _finish(
        self, request: Request, output: RequestOutput, ending: Ending
    ) -> tuple[CompletionOutput, list[Rollout]]:
        """The completion of a request that has ended, and what the cache is to keep of it."""
        completion, rollout = completed(
            request, output, ending, self.config, self.policy_version, self.fingerprint
        )
        self.metrics.response_tokens += len(request.tokens)
        if request.replayed:
            return completion, []  # it is in the cache
        if request.draft is not None and request.accepted < len(request.tokens):
            prefill = len(request.rules.prompt) + request.accepted
            self.metrics.recomputed_tokens += prefill - (output.num_cached_tokens or 0)
        return completion, [rollout] if request.cacheable else []

    def _keep_unfinished(self, inflight: Mapping[str, Request]) -> None:
        """Journal the rows that an interrupt found under way, marked partial.

        Only what the engine has decoded is worth it: what else a row has is in its draft.
        """
        engine = getattr(self.llm, "llm_engine", self.llm)
        partial = []
        for request_id, request in inflight.items():
            if request.verifying or not request.cacheable:
                continue
            try:
                tokens, logprobs = tokens_so_far(engine, request_id)
            except Exception as error:  # it is the engine, perhaps, that has failed
                self._count_cache_error(error)
                return
            if not tokens:
                continue
            judged = np.empty(0, dtype=np.float32)
            if request.accepted:
                assert request.draft is not None and request.logprobs is not None
                judged = sampled_values(request.logprobs)[: request.accepted]
            request.tokens = request.tokens[: request.accepted] + tokens
            values = np.concatenate([judged, sampled_values(logprobs)])
            partial.append(
                kept(request, values, Finish.PARTIAL, self.policy_version, self.fingerprint)
            )
        self._keep(partial)

    def _keep(self, rollouts: list[Rollout]) -> None:
        try:
            if rollouts:
                self.cache.put(rollouts)
        except Exception as error:  # the cache can only cost speed
            self._count_cache_error(error)

    def _count_cache_error(self, error: Exception) -> None:
        self.metrics.cache_errors += 1
        if not self._cache_error_logged:
            self._cache_error_logged = True
            logger.warning(
                "rollout cache failed (%s: %s); rows are decoded plainly. Further failures are "
                "counted in spec_rl/cache_errors",
                type(error).__name__,
                error,
            )

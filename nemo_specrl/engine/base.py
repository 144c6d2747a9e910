"""The stages that synchronous and asynchronous engines share: look up, judge, finish, store.

The loops that drive an engine are in ``sync_engine`` and ``async_engine``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.caches import Journal, ResumedCache
from nemo_specrl.engine.drafters.histories import PendingHistories
from nemo_specrl.engine.drafters.method import check_other_processes, method_in
from nemo_specrl.engine.drafters.prompt_logprob_drafter import PromptLogprobDrafter
from nemo_specrl.engine.early_end import EndOfCall
from nemo_specrl.engine.interrupts import interrupted_rollouts
from nemo_specrl.engine.limits import EngineLimits
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.outputs import build_completion, build_rollout, defective_completion
from nemo_specrl.engine.policy_version import EngineWeights, refuse_kv_connector
from nemo_specrl.engine.prefix.noise import PrefillNoise
from nemo_specrl.engine.prefix.verification import (
    continuation_params,
    judge,
    readable_logprobs,
    sampled_values,
)
from nemo_specrl.engine.replay import replayed_output, restore_request, take_from_journal
from nemo_specrl.engine.request_checks import check_engine
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.response import given_up
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.vllm.compat import check_version, engine_of, routes_so_far
from nemo_specrl.engine.vllm.patches import extend_prompt_logprobs
from nemo_specrl.engine.vllm.prompt_logprob_memory import check_prompt_logprob_memory
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.rollout import Claim, Rollout
from nemo_specrl.speculation.acceptance import derived_seed
from nemo_specrl.speculation.draft_selection import mean_lengths, select_drafts

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["BaseSpeculativeLLM"]

logger = logging.getLogger(__name__)


class BaseSpeculativeLLM:
    """Base of :class:`SpeculativeLLM` and :class:`AsyncSpeculativeLLM`; see them for arguments.

    Attributes:
        draw_seed: what uniforms are derived from: the seed of the run, or another one if a
            cluster's cache says that the run was resumed. Rollouts of a lost step are drafts for
            those that replace them, which must not be made with the same randomness.
        drafts_greedy: greedy rows use the cache, too, if only vLLM verifies drafts.

    Raises:
        ConfigError: the engine does not fit the configuration
            (:func:`~nemo_specrl.engine.request_checks.check_engine`), has a KV connector, has no
            memory for verification or no tree proposer, or has its drafter in another process on a
            CPU, where this package is not installed.
        IncompatibleVersion: this release does not work with the installed vLLM.
    """

    def __init__(
        self, llm: Any, cache: Any, config: SpecRLConfig, seed: int = 0, policy_version: int = 0
    ) -> None:
        self.llm = llm
        self.cache = cache
        self.config = config
        self.seed = self.draw_seed = seed
        self._incarnation = 0
        if isinstance(cache, ResumedCache):
            self._incarnation = cache.incarnation
            if cache.resumed:
                self.draw_seed = derived_seed("draws", seed, 0, self._incarnation.to_bytes(8), 0)
        self._engine = engine_of(llm)
        self._weights = EngineWeights(self._engine, policy_version)
        self.fresh_fraction = config.fresh_fraction
        self.drafts_greedy = False
        self.metrics = EngineMetrics()
        self._warned: set[str] = set()  # texts of warnings that are logged only once
        self._histories = PendingHistories()
        self._prompt_logprob_drafter: PromptLogprobDrafter | None = None
        self._proposes = False
        if config.enabled:
            self._set_up()

    def _set_up(self) -> None:
        """Check the engine, and choose how drafts reach it."""
        check_version()
        refuse_kv_connector(self._engine.vllm_config)
        self._limits = EngineLimits.of(self.llm)
        check_engine(self._limits, self.config)
        method = method_in(self.config, self._limits)
        check_prompt_logprob_memory(self.llm)
        self._noise = PrefillNoise(self._limits.dtype_bytes, self._limits.max_model_len)
        check_other_processes(self._engine, self._limits.drafter)
        try:
            extend_prompt_logprobs()
        except IncompatibleVersion as error:  # it costs only speed
            logger.warning("%s", error)
        self._proposes = method in ("v2", "proposer")
        if method == "rounds":
            self._prompt_logprob_drafter = PromptLogprobDrafter(
                self._limits, self.config.tree, self.draw_seed
            )

    @property
    def policy_version(self) -> int:
        """Version of the weights in the engine."""
        return self._weights.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._begin_version(version)

    def _begin_version(self, version: int) -> None:
        """Drop the KV blocks of the old weights and begin a policy version."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the weights in the engine; 0 if not known."""
        return self._weights.fingerprint

    @fingerprint.setter
    def fingerprint(self, fingerprint: int) -> None:
        self._weights.fingerprint = fingerprint

    def _find_drafts(self, requests: list[RolloutRequest]) -> None:
        """Look up the prompts of a call in the cache and offer each request its draft."""
        candidates = [request for request in requests if request.draftable]
        try:
            cached = self.cache.get(list(dict.fromkeys(r.row.key for r in candidates)))
            self._set_drafts(candidates, cached)
        except Exception as error:  # whatever fails in the cache, rows are decoded without it
            self._count_cache_error(error)

    def _set_drafts(
        self,
        requests: list[RolloutRequest],
        cached: dict[bytes, list[Rollout]],
        claim: Claim | None = None,
    ) -> None:
        """Offer each request the draft that the cached rollouts hold for it, if any.

        What the ``claim`` of a single row returned may be only a part of its prompt's group.
        """
        history = cached if claim is None or claim.whole else {}
        if self._proposes:
            self._histories.add(history, self.policy_version)
        if self._prompt_logprob_drafter is not None:
            self._prompt_logprob_drafter.add(requests, cached, history, self.policy_version)
        choices = select_drafts(
            [request.row for request in requests],
            cached,
            policy_version=self.policy_version,
            incarnation=self._incarnation,
            seed=self.seed,
            fresh_fraction=self._fresh_share,
        )
        lengths = mean_lengths(cached)
        if claim is not None:
            lengths = mean_lengths({requests[0].row.key: claim.group})
        for request, (draft, occurrence) in zip(requests, choices, strict=True):
            request.set_history(occurrence, lengths.get(request.row.key))
            if draft is None or not (draft.raw and request.raw):
                continue
            if request.turns is not None or request.media is not None:
                continue  # an environment must see each turn end; images have no tokens here
            own = draft.fresh and self._of_these_weights(draft)
            if (self._lossless and not own) or self._limits.adapters_on_cpu:
                continue  # the prompt's tree drafts it
            if not request.set_draft(draft, self._limits):
                self.metrics.refused_drafts += 1

    @property
    def _fresh_share(self) -> float:
        return max(self.fresh_fraction, self.config.effective_fresh_fraction)

    @property
    def _verified_by(self) -> dict[str, bool]:
        """Arguments for ``build_requests`` that say what verifies drafts."""
        return {"trees_alone": self._proposes and self._lossless, "greedy": self.drafts_greedy}

    @property
    def _lossless(self) -> bool:
        """Whether no prefix may be reused. The part of an interrupted response that the present
        weights decoded is not a draft but its beginning, and is continued all the same.
        """
        return self._fresh_share >= 1

    def _of_these_weights(self, rollout: Rollout) -> bool:
        return rollout.fingerprint == self.fingerprint != 0

    def _replay(
        self, requests: list[RolloutRequest], early_end: EndOfCall | None = None
    ) -> list[tuple[RolloutRequest, RequestOutput, ResponseEnd]]:
        """Complete requests from the journal of a process that died in this very step.

        A rollout that these weights (by fingerprint) had already made for a request is taken as it
        was recorded. A rollout that other weights had made for this step, or whose routes are
        requested, becomes the request's draft, or goes to the tree if no prefix is reused.
        """
        if not (self.fingerprint and isinstance(self.cache, Journal)):
            return []
        try:
            weights = self.policy_version, self.fingerprint
            found = take_from_journal(self.cache, requests, *weights, early_end)
        except Exception as error:  # whatever fails in the cache, rows are decoded without it
            self._count_cache_error(error)
            return []
        replayed = []
        for request, rollout in found:
            known = self._of_these_weights(rollout) and self._limits.routes is None
            end = restore_request(request, rollout, self._limits.vocabulary) if known else None
            if end is None:
                if not self._lossless:
                    request.set_draft(rollout, self._limits)
                elif self._limits.drafter is not None:
                    self._histories.append(rollout)
                continue
            self.metrics.replayed_rows += 1
            self.metrics.decoded_tokens += request.made_tokens - request.accepted
            if request.draft is not None:
                self._count_draft(request)
            replayed.append((request, replayed_output(request, end), end))
        return replayed

    def _next_request(self, request: RolloutRequest) -> tuple[dict[str, Any], SamplingParams]:
        """Prompt and sampling parameters of the request that decodes after the tokens so far."""
        if self._prompt_logprob_drafter is not None and request.draftable:
            return self._prompt_logprob_drafter.next_request(
                request, self.policy_version, self.metrics
            )
        params = continuation_params(
            request, self.policy_version, watch_stops=self._limits.steps_of_several_tokens
        )
        if self._proposes and request.draftable:
            params = self._histories.with_history(request, params, self.policy_version)
        if request.media is not None:
            return request.media, params
        return {"prompt_token_ids": request.rules.prompt + request.tokens}, params

    def _count_draft(self, request: RolloutRequest) -> bool:
        """Count a judged draft; return True if the draft is the whole response."""
        assert request.draft is not None and request.verification.end is not None
        whole = (
            request.accepted == len(request.draft) and request.verification.end.finish is not None
        )
        self.metrics.drafts += 1
        self.metrics.draft_tokens += len(request.draft)
        self.metrics.accepted_tokens += request.accepted
        self.metrics.full_reuses += whole
        return whole

    def _judge(
        self, verified: list[tuple[RolloutRequest, RequestOutput]], version: int
    ) -> list[tuple[RolloutRequest, RequestOutput, ResponseEnd | None]]:
        """Judge verified drafts.

        A draft is refused if the engine's output does not show its log-probs: the row is then
        decoded from the start, as a fresh one. A row whose verification was aborted ends.

        Args:
            verified: requests with the outputs of their verifications.
            version: policy version of the weights that verified them.

        Returns:
            Each request with its output and its end, or None if decoding must continue.
        """
        readable = []
        for request, output in verified:
            request.verification.finish()
            logprobs = readable_logprobs(request, output, self._limits.vocabulary)
            if logprobs is None:
                self._refuse_draft(request)
            else:
                readable.append((request, logprobs))
                draft = request.draft
                if draft is not None and draft.fresh and self._of_these_weights(draft):
                    self._noise.add(sampled_values(logprobs), draft.logprobs, self.metrics)
        judge(readable, self.config, seed=self.draw_seed, policy_version=version)
        verdicts: list[tuple[RolloutRequest, RequestOutput, ResponseEnd | None]] = []
        for request, output in verified:
            if request.draft is None:
                unfinished = given_up(output, 0)
                aborted = unfinished is not None and unfinished.given_up == "abort"
                verdicts.append((request, output, unfinished if aborted else None))
            else:
                whole = self._count_draft(request)
                verdicts.append((request, output, request.verification.end if whole else None))
        return verdicts

    def _measures_noise(self, request: RolloutRequest) -> bool:
        """Whether to prefill a response that has ended once more (``PrefillNoise``)."""
        return not self._lossless and self._noise.can_measure(request)

    def _refuse_draft(self, request: RolloutRequest) -> None:
        """Drop a draft that could not be verified; the row is then decoded without one."""
        request.verification.drop()
        self.metrics.refused_drafts += 1

    def _append_decoded(self, request: RolloutRequest, output: RequestOutput) -> ResponseEnd | None:
        """Append what the engine decoded to a request.

        Returns:
            How the response ended, or None while it continues: in another request
            (``_next_request``) if ``request.needs_request`` says so.
        """
        if self._prompt_logprob_drafter is not None and request.rounds is not None:
            return self._prompt_logprob_drafter.read_output(
                request, output, self.policy_version, self.metrics
            )
        before = len(request.tokens)
        end = request.response.append_output(output, self._limits.vocabulary)
        new = len(request.tokens) - before
        self.metrics.decoded_tokens += new
        if self._proposes and request.draftable:  # the proposer knows nothing of stop strings
            self.metrics.tree_tokens -= len(output.outputs[0].token_ids) - new
        if end is not None and not output.finished:
            output.outputs[0].routed_experts = routes_so_far(self._engine, output.request_id)
        return end

    def _finish(
        self, request: RolloutRequest, output: RequestOutput, end: ResponseEnd
    ) -> tuple[CompletionOutput, list[Rollout]]:
        """Return the completion of a request that has ended, and the rollouts to cache (0 or 1).

        A row whose data is invalid is returned as the engine gave it, and is not cached.
        """
        request.join_turns()
        self.metrics.response_tokens += request.made_tokens
        assert end.finish is not None
        rollout = request.replayed
        if rollout is None and not request.response.defect:
            rollout = build_rollout(request, end.finish, self.policy_version, self.fingerprint)
        if rollout is None:
            self._count_defect(request)
            return defective_completion(request, output, end, self._limits), []
        completion = build_completion(request, output, end, rollout, self.config, self._limits)
        if request.replayed is not None:
            return completion, []  # it is in the cache already
        cached = output.num_cached_tokens  # None if the call ended before the engine reported it
        continued = request.draft and request.accepted < len(request.tokens)
        if request.rounds is None and continued and cached is not None:
            self.metrics.recomputed_tokens += len(request.rules.prompt) + request.accepted - cached
        # The accepted part of the draft of a response that was given up is in the cached draft.
        decoded = end.given_up is None or len(request.tokens) > request.accepted
        return completion, [rollout] if request.cacheable and decoded else []

    def _count_defect(self, request: RolloutRequest) -> None:
        """Count a row whose data is invalid, and log the first one."""
        self.metrics.uncached_rows += 1
        self._warn_once(
            "the engine gave a row with %s; such rows are returned as they are, not cached, "
            "and counted in spec_rl/uncached_rows",
            request.response.defect,
        )

    def _interrupted_rollouts(self, inflight: Mapping[str, RolloutRequest]) -> list[Rollout]:
        """Return the rollouts, marked partial, of the requests of an interrupt, by their ids."""
        return interrupted_rollouts(
            self._engine,
            inflight,
            self._limits.vocabulary,
            (self.policy_version, self.fingerprint),
            self._count_defect,
        )

    def _store(self, rollouts: list[Rollout]) -> None:
        """Put rollouts into the cache; failures are counted."""
        try:
            if rollouts:
                self.cache.put(rollouts)
        except Exception as error:  # whatever fails in the cache, rows are decoded without it
            self._count_cache_error(error)

    def _count_cache_error(self, error: Exception) -> None:
        """Count a failure of the cache and log the first one."""
        self.metrics.cache_errors += 1
        self._warn_once(
            "rollout cache failed (%s: %s); rows are decoded plainly. Further failures are "
            "counted in spec_rl/cache_errors",
            type(error).__name__,
            error,
        )

    def _warn_once(self, text: str, *values: Any) -> None:
        """Log a warning the first time that it occurs, whatever its values."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)

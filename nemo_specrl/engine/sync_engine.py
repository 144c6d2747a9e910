"""SpeculativeLLM: ``vllm.LLM.generate`` with the last rollout of each prompt as a draft.

A draft is verified in one prefill of prompt + draft (``prompt_logprobs``). The prefix that the
current policy accepts is kept, and decoding continues from the first rejected token, on the prefix
cache that the verification filled. Each row moves through the engine's step loop independently: its
continuation starts as soon as its draft is judged, and only a window of rows is in the engine at a
time, so that the KV blocks of a prefix are still there when its continuation reads them.

Refits, rewards and batches belong to the caller. Source of the method: SPEC-RL, arXiv 2509.23232.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.base import BaseSpeculativeLLM
from nemo_specrl.engine.call import Call, checked_requests, logged, progress_bar
from nemo_specrl.engine.data_parallel import call_of_all, has_unfinished_rows, step_along
from nemo_specrl.engine.early_end import EndOfCall, check_early_end, give_up
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.outputs import request_outputs, unfinished_output
from nemo_specrl.engine.plain_turns import generate_plainly
from nemo_specrl.engine.policy_version import one_adapter, reset_prefix_cache
from nemo_specrl.engine.prefix.verification import verification_params
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.engine.response import given_up
from nemo_specrl.engine.run_ahead import RunAhead, decode_ahead, run_ahead_requests
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.scheduling import in_order, share_verifications, verified_share
from nemo_specrl.engine.turns import Environment
from nemo_specrl.engine.vllm.compat import forget_broken_step, interrupts_deferred, unknown_requests

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["STORE_SECONDS", "SpeculativeLLM"]

STORE_SECONDS = 0.25
"""How long finished rollouts wait for others before all of them are cached in one put."""


class SpeculativeLLM(BaseSpeculativeLLM):
    """A drop-in for ``vllm.LLM.generate`` that reuses earlier rollouts.

    Args:
        llm: a running ``vllm.LLM``, built with ``**engine_options(config)``. Its ``logprobs_mode``
            must be ``raw_logprobs`` or ``processed_logprobs``.
        cache: where rollouts are looked up and stored: a :class:`~nemo_specrl.RolloutStore`, or
            anything with the same ``get`` and ``put`` (``caches.RolloutCache``). A failed call is
            counted in ``metrics.cache_errors``, and the row is decoded without a draft.
        config: the ``spec_rl:`` block. Its ``cache`` and ``monitor`` blocks are not read here.
        seed: seed of the run, a non-negative int, from which the acceptance uniforms are derived.
        policy_version: version of the weights that the engine holds now, a non-negative int.

    Attributes:
        policy_version: version of the weights in the engine. The caller raises it after every refit
            and at no other time. Setting it resets the engine's prefix cache, which has KV blocks
            of the old weights, and raises ConfigError if vLLM does not reset it because requests
            are running; the old version is then kept.
        fingerprint: hash of these weights, with their adapter if there is one
            (:func:`~nemo_specrl.engine.weight_fingerprint.fingerprint`), set after
            ``policy_version``. 0 means unknown, as it is after each change of ``policy_version``,
            and nothing is replayed from a journal.
        fresh_fraction: share of rows that are decoded without a draft, from the configuration
            until the caller changes it.
        drafts_greedy: see :class:`BaseSpeculativeLLM`.
        metrics: :class:`EngineMetrics` of the last call.

    Raises:
        ConfigError: the engine does not fit the configuration: ``logprobs_mode`` returns logits; it
            has logits processors, a watermark or a KV connector; LoRA on a CPU with prefix reuse;
            built without ``engine_options(config)``; too little memory for prompt log-probs.
        IncompatibleVersion: the installed vLLM is not supported, or the extension is not compiled.
    """

    llm: LLM

    def _begin_version(self, version: int) -> None:
        reset_prefix_cache(self.llm)
        self._weights.begin(version)

    @call_of_all
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sample_indices: Sequence[int] | None = None,
        prompt_keys: Sequence[bytes] | None = None,
        upcoming: Sequence[Any] = (),
        environment: Environment | None = None,
        early_end: EndOfCall | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Generate responses to ``prompts``; returns what ``vllm.LLM.generate`` returns.

        Greedy requests bypass the cache (``drafts_greedy``); with ``enabled: false`` all do.

        Args:
            prompts: token ids or text, as ``vllm.LLM.generate`` takes them.
            sampling_params: one for all, or one for each prompt; None: the engine's defaults.
            sample_indices: first sample index of each prompt, for groups that come in several
                calls. None: the k-th row of a prompt in this call has sample index k.
            prompt_keys: key of each prompt, if the caller has already computed them.
            upcoming: prompts of the next calls, the nearest first, for which the engine decodes
                when it would be idle (with ``run_ahead.enabled``; otherwise ignored).
            environment: makes each row a conversation (``turns``) whose root is its prompt.
            early_end: decides when to give up the remaining rows (``early_end``); None: never.
            use_tqdm: whether to show a progress bar, or a function that makes one.
            lora_request: as in vLLM; one for all prompts of a policy version.

        Returns:
            One output per prompt, in order; ``spec_rl`` of completions: ``outputs.RolloutInfo``.

        Raises:
            UnsupportedSampling: drafts cannot be verified under these parameters.
            ConfigError: prompts, parameters or sample indices are invalid or do not fit each
                other, or the weights or the adapter are not those that ``policy_version`` stands
                for. In that case no row has begun.
        """
        check_early_end(early_end, self.config.enabled, environment)
        if not self.config.enabled:
            options = {"use_tqdm": use_tqdm, "lora_request": lora_request}
            return generate_plainly(self.llm, prompts, sampling_params, environment, **options)
        self.metrics = EngineMetrics()
        started = time.perf_counter()
        asked = prompts, sampling_params, sample_indices, prompt_keys
        requests = checked_requests(
            self.llm, self._limits, asked, environment=environment, **self._verified_by
        )
        lora_request = one_adapter(lora_request, sum(not r.index_in_prompt for r in requests))
        if any(request.cacheable for request in requests):
            self._weights.check(lora_request)
        call = self._call(requests, upcoming, lora_request, use_tqdm, early_end)
        results = self._run(call, requests, started)
        self._measure_noise(requests, lora_request)
        assembling = time.perf_counter()
        outputs = request_outputs(requests, results)
        self.metrics.assembly_s += time.perf_counter() - assembling
        self._count_tree_drafts()
        return outputs

    def _run(
        self, call: Call, requests: list[RolloutRequest], started: float
    ) -> dict[int, tuple[RequestOutput, CompletionOutput]]:
        """Take all requests of a call through the engine, each at its own pace.

        Args:
            call: its state.
            requests: requests of the call.
            started: when the call began, by ``time.perf_counter``.

        Returns:
            The engine's last output and the completion, by index in ``requests``.
        """
        try:
            # 1. Look up: drafts from the cache, and complete rows from a journal.
            self._find_drafts(requests)
            for request, output, replayed_end in self._replay(requests, call.early_end):
                self._finish_row(call, request, output, replayed_end)
            self.metrics.rows = len(requests)
            self.metrics.lookup_s = time.perf_counter() - started
            self._put_in_order(call, requests)
            while True:
                if call.early_end is not None and call.early_end.reached(call.results):
                    self._end_early(call, requests)
                # 2. Submit: drafts to be verified, and rows without a draft to be decoded.
                self._finish_aborted(call)
                self._submit_waiting(call)
                # The engine itself says whether there is more to do, as in vLLM's own loop: those
                # of a data-parallel group step until all have finished theirs (data_parallel).
                if not has_unfinished_rows(self.llm.llm_engine):
                    break
                # 3. Step the engine, which verifies and decodes side by side.
                outputs = self._step(call)
                stepped = time.perf_counter()
                # 4. Judge: the accepted prefix of a draft is kept, and decoding continues after it.
                for request, output, end in self._read_outputs(call, outputs):
                    if end is None:
                        self._submit(call, request)
                    else:
                        # 5. Finish: the completion for the caller, the rollout for the cache.
                        self._finish_row(call, request, output, end)
                # 6. Store: finished rollouts are put into the cache, many at a time.
                self._store_finished(call)
                self.metrics.assembly_s += time.perf_counter() - stepped
            self._finish_aborted(call)
        finally:
            self._close(call)
        return call.results

    def _call(
        self,
        requests: list[RolloutRequest],
        upcoming: Sequence[Any],
        lora_request: Any,
        use_tqdm: bool | Callable[..., Any],
        early_end: EndOfCall | None,
    ) -> Call:
        """Make the state of a call whose rows have not begun."""
        ahead = RunAhead(
            self.llm.llm_engine,
            self._limits.max_num_seqs,
            self._run_ahead_requests(upcoming, requests),
            self.metrics,
        )
        return Call(ahead, lora_request, progress_bar(use_tqdm, len(requests)), early_end)

    def _put_in_order(self, call: Call, requests: list[RolloutRequest]) -> None:
        """Queue the rows of a call in the order of submission; their drafts are known."""
        to_run = [request for request in requests if request.replayed is None]
        share_verifications(to_run)
        siblings_draft = self._proposes or self._prompt_logprob_drafter is not None
        first = 0 if call.early_end is None else call.early_end.first_rows
        call.waiting.extend(in_order(to_run, siblings_draft=siblings_draft, first=first))

    def _submit_waiting(self, call: Call) -> None:
        """Fill up the engine with waiting rows, then with rows of upcoming prompts."""
        # Allow twice what runs at once: the engine never waits for this loop, and the blocks of a
        # verified prefix are not evicted before its continuation has read them. In rounds, a row
        # must not wait for others between its requests.
        window = self._limits.max_num_seqs * (2 if self._prompt_logprob_drafter is None else 1)
        while call.waiting and len(call.inflight) < window:
            request = call.waiting.popleft()
            if request.draft is None:
                self._submit(call, request)
                continue
            request.verification.start()
            prompt = {"prompt_token_ids": request.rules.prompt + request.draft.tokens.tolist()}
            self._add(call, call.inflight, request, prompt, verification_params(request))
        if not call.inflight:
            call.ahead.end()
            return
        for request in call.ahead.fill(len(call.inflight)):
            self._add(call, call.ahead.rows, request, *self._next_request(request))

    def _submit(self, call: Call, request: RolloutRequest) -> None:
        """Have a request decoded, after the tokens that it already has."""
        self._add(call, call.inflight, request, *self._next_request(request))

    def _add(
        self,
        call: Call,
        rows: dict[str, RolloutRequest],
        request: RolloutRequest,
        prompt: dict[str, Any],
        params: SamplingParams,
    ) -> None:
        """Add a request to the engine after noting it in ``rows``: an interrupt may come at any
        time, and must find every request that the engine may have.
        """
        request_id = str(next(self.llm.request_counter))
        rows[request_id] = request
        self.llm.llm_engine.add_request(request_id, prompt, params, lora_request=call.lora_request)

    def _step(self, call: Call) -> list[RequestOutput]:
        """Step the engine once; its time is divided between verification and decoding by tokens."""
        share = verified_share([*call.inflight.values(), *call.ahead.rows.values()], self._limits)
        stepping = time.perf_counter()
        with interrupts_deferred(self.llm.llm_engine):
            outputs: list[RequestOutput] = self.llm.llm_engine.step()
        step_s = time.perf_counter() - stepping
        self.metrics.verify_s += share * step_s
        self.metrics.decode_s += (1 - share) * step_s
        return outputs

    def _read_outputs(
        self, call: Call, outputs: list[RequestOutput]
    ) -> Iterator[tuple[RolloutRequest, RequestOutput, ResponseEnd | None]]:
        """Append what was decoded, and judge what was verified.

        Yields:
            Each request that has left the engine, with its output and its end; None if the response
            continues in another request.
        """
        verified: list[tuple[RolloutRequest, RequestOutput]] = []
        for output in outputs:
            if call.ahead.read_output(output) or output.request_id not in call.inflight:
                continue  # aborted a step ago
            request = call.inflight[output.request_id]
            if not request.verification.running:
                end = self._append_decoded(request, output)
                if end is None and not request.needs_request:
                    continue
                if not output.finished:
                    self.llm.llm_engine.abort_request([output.request_id])
                del call.inflight[output.request_id]
                yield request, output, end and request.end_turn(end)
            elif output.finished:
                del call.inflight[output.request_id]
                verified.append((request, output))
                if given_up(output, 0) is None:
                    duplicates = request.verification.take_duplicates()
                    verified += [(duplicate, copy.copy(output)) for duplicate in duplicates]
                else:  # only that request was aborted, not these
                    self._decode_duplicates(call, request)
        yield from self._judge(verified, self.policy_version)

    def _decode_duplicates(self, call: Call, request: RolloutRequest) -> None:
        """Decode rows without a draft that waited for a verification which was aborted."""
        for duplicate in request.verification.take_duplicates():
            self._refuse_draft(duplicate)
            self._submit(call, duplicate)

    def _finish_row(
        self, call: Call, request: RolloutRequest, output: RequestOutput, end: ResponseEnd
    ) -> None:
        """Complete a request that has ended."""
        completion, rollouts = self._finish(request, output, end)
        call.add_result(request, output, completion, rollouts)

    def _finish_aborted(self, call: Call) -> None:
        """Finish rows that another caller had the engine abort: it does not report them."""
        call.ahead.forget_aborted()
        for request_id in unknown_requests(self.llm.llm_engine, call.inflight):
            request = call.inflight.pop(request_id)
            output = unfinished_output(request, request_id)
            output.outputs[0].finish_reason = "abort"
            if request.verification.running:
                self._decode_duplicates(call, request)
                self._refuse_draft(request)
            self._finish_row(call, request, output, ResponseEnd.unfinished(len(request.tokens)))

    def _end_early(self, call: Call, requests: list[RolloutRequest]) -> None:
        """Give up the remaining rows; what they have becomes partial rollouts."""
        call.waiting.clear()
        vocabulary = self._limits.vocabulary
        self.metrics.decoded_tokens += give_up(self.llm.llm_engine, call.inflight, vocabulary)
        call.inflight.clear()
        for request in (r for r in requests if r.index not in call.results):
            output, length = unfinished_output(request, "put off"), len(request.tokens)
            self._finish_row(call, request, output, ResponseEnd.unfinished(length))

    def _store_finished(self, call: Call) -> None:
        """Put finished rollouts into the cache, unless others were put only a moment ago."""
        if time.perf_counter() - call.stored_at > STORE_SECONDS:
            self._store(call.take_unstored())
            call.stored_at = time.perf_counter()

    def _close(self, call: Call) -> None:
        """Leave the engine reusable, whatever has happened, and keep what there is.

        No failure here replaces the exception that the caller should see.
        """
        engine = self.llm.llm_engine
        try:
            call.unstored += self._interrupted_rollouts(call.inflight)
        finally:
            try:
                with logged("ending what was run ahead"):
                    call.ahead.end()
            finally:
                with logged("ending the rows in the engine"):
                    if call.inflight:
                        engine.abort_request(list(call.inflight))
                        forget_broken_step(engine)
        self._store(call.unstored)
        with logged("closing the progress bar"):
            if call.progress is not None:
                call.progress.close()

    def run_ahead(
        self, upcoming: Sequence[Any], params: SamplingParams, until: Callable[[], bool]
    ) -> EngineMetrics:
        """Decode for upcoming prompts between two calls (``run_ahead.decode_ahead``)."""
        requests = self._run_ahead_requests(upcoming, [], params)
        places = self._limits.max_num_seqs
        return decode_ahead(self.llm, places, requests, self._next_request, until)

    def _run_ahead_requests(
        self, upcoming: Sequence[Any], requests: list[RolloutRequest], params: Any = None
    ) -> list[RolloutRequest]:
        """Requests for upcoming prompts, if the configuration enables run-ahead."""
        if not self.config.run_ahead.enabled:
            return []
        at = {"seed": self.draw_seed, "policy_version": self.policy_version}
        return run_ahead_requests(self._limits, upcoming, requests, params, **at)

    def _measure_noise(self, requests: list[RolloutRequest], lora_request: Any) -> None:
        """Prefill a few responses that were just decoded, once in the life of the engine."""
        chosen = [r for r in requests if self._measures_noise(r)]
        if chosen:
            self._noise.prefill(self.llm, chosen, self.metrics, lora_request)
        else:  # another engine of a data-parallel group may have chosen some
            step_along(self.llm.llm_engine)

    def _count_tree_drafts(self) -> None:
        """Add the proposer's counts, if there is one and its process can be asked."""
        if not self._proposes:
            return
        from nemo_specrl.engine.drafters.counts import NO_COUNTS, take_counts

        try:
            self.metrics.add_draft_counts(self.llm.collective_rpc(take_counts))
        except Exception as error:  # vLLM sends functions to other processes only if allowed to
            self._warn_once(NO_COUNTS, type(error).__name__, error)

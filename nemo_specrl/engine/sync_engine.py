"""SpeculativeLLM: ``vllm.LLM.generate`` with the last rollout of each prompt as a draft.

A draft is verified in one prefill of prompt + draft (``prompt_logprobs``). The prefix that the
current policy accepts stands, and decoding continues from the first rejected token, on the prefix
cache that the verification filled. Each row moves through the engine's step loop by itself: its
continuation starts as soon as its draft is judged, and only a window of rows is in the engine at a
time, so that the KV blocks of a prefix are still there when its continuation reads them.

Refits, rewards and batches belong to the caller. Source of the method: SPEC-RL, arXiv 2509.23232.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.base import BaseSpeculativeLLM
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.outputs import given_up, request_outputs, unfinished_output
from nemo_specrl.engine.policy_version import one_adapter, reset_prefix_cache
from nemo_specrl.engine.prefix.verification import verification_params
from nemo_specrl.engine.request_checks import check_params
from nemo_specrl.engine.requests import RolloutRequest, build_requests
from nemo_specrl.engine.run_ahead import RunAhead, run_ahead_requests
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.scheduling import duplicates_of, in_order
from nemo_specrl.engine.vllm.compat import forget_broken_step, interrupts_deferred, unknown_requests
from nemo_specrl.errors import UnsupportedSampling
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["STORE_SECONDS", "SpeculativeLLM"]

logger = logging.getLogger(__name__)

STORE_SECONDS = 0.25
"""How long finished rollouts wait for others before they are cached, in one put for all of them."""


@dataclasses.dataclass(eq=False)
class _Call:
    """The state of one call of ``generate``.

    Args:
        position: of each request in the call, by its ``id``.
        waiting: requests that the engine has not had yet.
        duplicates: see :func:`~nemo_specrl.engine.scheduling.duplicates_of`.
        ahead: rows of upcoming prompts.
        lora_request: as in vLLM.
        progress: a progress bar, or None.
        inflight: requests by the id that the engine knows them by.
        ended: the engine's last output and the completion, by position.
        finished: rollouts that are not in the cache yet.
        stored_at: when rollouts were last put into it.
    """

    position: dict[int, int]
    waiting: deque[RolloutRequest]
    duplicates: dict[int, list[RolloutRequest]]
    ahead: RunAhead
    lora_request: Any
    progress: Any
    inflight: dict[str, RolloutRequest] = dataclasses.field(default_factory=dict)
    ended: dict[int, tuple[RequestOutput, CompletionOutput]] = dataclasses.field(
        default_factory=dict
    )
    finished: list[Rollout] = dataclasses.field(default_factory=list)
    stored_at: float = dataclasses.field(default_factory=time.perf_counter)


class SpeculativeLLM(BaseSpeculativeLLM):
    """A drop-in for ``vllm.LLM.generate`` that reuses earlier rollouts.

    Verification needs up to ``prompt_logprob_bytes(llm)`` of memory beside the KV cache
    (``vllm.prompt_logprob_memory``), a bound that the engine's ``max_num_batched_tokens`` sets.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: where rollouts are looked up and kept (:class:`RolloutCache`).
        config: the ``spec_rl:`` block of the recipe.
        seed: seed of the run, from which the uniforms of acceptance are derived.
        policy_version: of the weights that the engine has now.

    Attributes:
        policy_version: version of the weights in the engine. The caller raises it after every refit
            and at no other time. Setting it resets the engine's prefix cache, which has KV blocks
            of the old weights, and raises ConfigError where vLLM does not reset it because
            requests are running; the version is the old one then.
        fingerprint: of these weights, with their adapter if there is one
            (:func:`~nemo_specrl.engine.weight_fingerprint.fingerprint`), set after
            ``policy_version``. 0 means unknown, as it is after each change of ``policy_version``,
            and nothing is replayed from a journal.
        fresh_fraction: share of rows that are decoded without a draft, from the configuration
            until the caller changes it.
        metrics: :class:`EngineMetrics` of the last call.

    Raises:
        ConfigError: the engine's ``logprobs_mode`` is one of logits, or it has a KV connector.
        IncompatibleVersion: this release does not work with the installed vLLM.
    """

    llm: LLM

    def _begin_version(self, version: int) -> None:
        reset_prefix_cache(self.llm)
        self._weights.begin(version)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sample_indices: Sequence[int] | None = None,
        prompt_keys: Sequence[bytes] | None = None,
        upcoming: Sequence[Any] = (),
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Generate responses to ``prompts``; returns what ``vllm.LLM.generate`` returns.

        Greedy requests neither read nor write the cache. With ``enabled: false`` this is
        ``llm.generate`` itself.

        Args:
            prompts: token ids or text, as ``vllm.LLM.generate`` takes them.
            sampling_params: one for all, or one for each prompt; None: the engine's defaults.
            sample_indices: first sample index of each prompt. None: the k-th row of a prompt in
                this call has sample index k. Must be given where the rows of a group come in
                several calls.
            prompt_keys: key of each prompt, where the caller has computed them already.
            upcoming: prompts of the calls that come next, the nearest first. With
                ``run_ahead.enabled`` the engine decodes for them where it would be idle, and drafts
                from that when they come; else they are not looked at.
            use_tqdm: whether to show a progress bar, or a function that makes one.
            lora_request: as in vLLM. The adapter is part of the policy: all prompts have the same
                one, and ``policy_version`` is raised before another one is used.

        Returns:
            One output per prompt, in order. Each completion has an attribute ``spec_rl``, a
            :class:`~nemo_specrl.engine.outputs.RolloutInfo`.

        Raises:
            UnsupportedSampling: drafts cannot be verified under these parameters.
            ConfigError: the numbers of prompts, parameters and sample indices differ, a sample
                index occurs twice, a prompt or sampling parameters cannot be (no token, too many
                of them, tokens that the model does not know, ...), or the weights or the adapter
                are other ones than those that ``policy_version`` stands for. No row has begun then.
        """
        if not self.config.enabled:
            plain: list[RequestOutput] = self.llm.generate(
                prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request
            )
            return plain
        self.metrics = EngineMetrics()
        started = time.perf_counter()
        requests = self._requests(prompts, sampling_params, sample_indices, prompt_keys)
        lora_request = one_adapter(
            lora_request, sum(request.index_in_prompt == 0 for request in requests)
        )
        if any(request.cacheable for request in requests):
            self._weights.check(lora_request)
        self._find_drafts(requests)
        replayed = self._replay(requests)
        self.metrics.rows = len(requests)
        self.metrics.lookup_s = time.perf_counter() - started
        ended = self._run(requests, replayed, upcoming, lora_request, use_tqdm)
        self._measure_noise(requests, lora_request)
        assembling = time.perf_counter()
        outputs = request_outputs(requests, ended)
        self.metrics.assembly_s += time.perf_counter() - assembling
        if self._proposes:
            self._count_tree_drafts()
        return outputs

    def _requests(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sample_indices: Sequence[int] | None,
        prompt_keys: Sequence[bytes] | None,
    ) -> list[RolloutRequest]:
        """The requests of a call, all of them checked."""
        default = sampling_params is None
        params = self.llm.get_default_sampling_params() if default else sampling_params
        try:
            requests = build_requests(
                self._limits,
                prompts,
                params,
                sample_indices,
                prompt_keys,
                trees_alone=self._trees_alone,
            )
        except UnsupportedSampling as error:
            if not default:
                raise
            raise UnsupportedSampling(
                "the engine's default sampling parameters (the model's generation_config.json, or "
                f"override_generation_config): {error}"
            ) from None
        prompts = [request for request in requests if not request.index_in_prompt]
        check_params(self.llm.llm_engine, ((r.rules.prompt, r.user_params) for r in prompts))
        return requests

    def _run(
        self,
        requests: list[RolloutRequest],
        replayed: list[tuple[RolloutRequest, RequestOutput, ResponseEnd]],
        upcoming: Sequence[Any],
        lora_request: Any,
        use_tqdm: bool | Callable[..., Any],
    ) -> dict[int, tuple[RequestOutput, CompletionOutput]]:
        """Run all requests to their ends.

        Args:
            requests: all requests of the call.
            replayed: those that the journal completed.
            upcoming: prompts of the calls that come next.
            lora_request: as in vLLM.
            use_tqdm: whether to show a progress bar, or a function that makes one.

        Returns:
            The engine's last output and the completion, by position in ``requests``.
        """
        to_run = [request for request in requests if request.replayed is None]
        duplicates = duplicates_of(to_run)
        siblings_draft = self._proposes or self._prompt_logprob_drafter is not None
        ahead = RunAhead(
            self.llm.llm_engine,
            self._limits.max_num_seqs,
            self._run_ahead_requests(upcoming, requests),
            lambda request, rows: self._add(call, rows, request, *self._next_request(request)),
            self.metrics,
        )
        call = _Call(
            position={id(request): i for i, request in enumerate(requests)},
            waiting=deque(in_order(to_run, duplicates, siblings_draft=siblings_draft)),
            duplicates=duplicates,
            ahead=ahead,
            lora_request=lora_request,
            progress=_progress(use_tqdm, len(requests)),
        )
        try:
            for restored, stub, how in replayed:
                self._end(call, restored, stub, how)
            while self._goes_on(call):
                self._step(call)
            self._end_gone(call)
        finally:
            self._leave(call)
        return call.ended

    def _goes_on(self, call: _Call) -> bool:
        """Fill the engine up; whether it has to be stepped once more.

        It says so itself, as in vLLM's own loop: among data-parallel engines that step together,
        those that have done their rows run empty batches until all have (v1/engine/llm_engine.py).
        """
        self._end_gone(call)
        # Twice what runs at once: the engine never waits for this loop, and the blocks of a
        # verified prefix are not evicted before its continuation has read them. In rounds, a row
        # must not wait behind others between its requests.
        window = self._limits.max_num_seqs * (2 if self._prompt_logprob_drafter is None else 1)
        while call.waiting and len(call.inflight) < window:
            request = call.waiting.popleft()
            if request.draft is None:
                self._submit(call, request)
                continue
            request.verifying = True
            prompt = {"prompt_token_ids": request.rules.prompt + request.draft.tokens.tolist()}
            self._add(call, call.inflight, request, prompt, verification_params(request))
        if call.inflight:
            call.ahead.fill(len(call.inflight))
        else:
            call.ahead.end()
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def _submit(self, call: _Call, request: RolloutRequest) -> None:
        """Have a request decoded, behind the tokens that it has."""
        self._add(call, call.inflight, request, *self._next_request(request))

    def _add(
        self,
        call: _Call,
        rows: dict[str, RolloutRequest],
        request: RolloutRequest,
        prompt: dict[str, Any],
        params: SamplingParams,
    ) -> None:
        """Add a request to the engine, after noting it in ``rows``: an interrupt may come at any
        time, and must find all that the engine may have.
        """
        request_id = str(next(self.llm.request_counter))
        rows[request_id] = request
        self.llm.llm_engine.add_request(request_id, prompt, params, lora_request=call.lora_request)

    def _step(self, call: _Call) -> None:
        """Step the engine once and take its outputs."""
        share = self._verified_share([*call.inflight.values(), *call.ahead.rows.values()])
        stepping = time.perf_counter()
        with interrupts_deferred(self.llm.llm_engine):
            outputs = self.llm.llm_engine.step()
        stepped = time.perf_counter()
        self.metrics.verify_s += share * (stepped - stepping)
        self.metrics.decode_s += (1 - share) * (stepped - stepping)
        verified: list[tuple[RolloutRequest, RequestOutput]] = []
        for output in outputs:
            if call.ahead.take(output) or output.request_id not in call.inflight:
                continue  # aborted a step ago
            request = call.inflight[output.request_id]
            if not request.verifying:
                self._take(call, request, output)
            elif output.finished:
                del call.inflight[output.request_id]
                verified.append((request, output))
                verified += self._of_duplicates(call, request, output)
        for request, output, ending in self._judge(verified):
            if ending is not None:
                self._end(call, request, output, ending)
            else:
                self._submit(call, request)
        if time.perf_counter() - call.stored_at > STORE_SECONDS:
            finished, call.finished = call.finished, []
            self._store(finished)
            call.stored_at = time.perf_counter()
        self.metrics.assembly_s += time.perf_counter() - stepped

    def _take(self, call: _Call, request: RolloutRequest, output: RequestOutput) -> None:
        """Take an output of a row that is being decoded."""
        ending = self._append_decoded(request, output)
        if ending is None and not request.finished_round:
            return
        if not output.finished:
            self.llm.llm_engine.abort_request([output.request_id])
        del call.inflight[output.request_id]
        if ending is None:
            self._submit(call, request)
        else:
            self._end(call, request, output, ending)

    def _of_duplicates(
        self, call: _Call, request: RolloutRequest, output: RequestOutput
    ) -> list[tuple[RolloutRequest, RequestOutput]]:
        """The rows that share a verification. Where it was aborted, that was not about them."""
        others = call.duplicates.pop(id(request), [])
        if given_up(output, 0) is None:
            return [(other, copy.copy(output)) for other in others]
        for other in others:
            self._refuse_draft(other)
            self._submit(call, other)
        return []

    def _end(
        self, call: _Call, request: RolloutRequest, output: RequestOutput, ending: ResponseEnd
    ) -> None:
        """Complete a request that has ended."""
        completion, rollouts = self._finish(request, output, ending)
        call.ended[call.position[id(request)]] = output, completion
        call.finished += rollouts
        if call.progress is not None:
            call.progress.update(1)

    def _end_gone(self, call: _Call) -> None:
        """End rows that somebody has had the engine abort, of which it says nothing."""
        call.ahead.forget_gone()
        for request_id in unknown_requests(self.llm.llm_engine, call.inflight):
            request = call.inflight.pop(request_id)
            output = unfinished_output(request, request_id)
            output.outputs[0].finish_reason = "abort"
            if request.verifying:
                self._of_duplicates(call, request, output)
                self._refuse_draft(request)
            self._end(call, request, output, ResponseEnd.unfinished(len(request.tokens)))

    def _leave(self, call: _Call) -> None:
        """Leave an engine that can be used again, whatever has happened, and keep what there is.

        Nothing that fails here takes the place of the exception that the caller should see.
        """
        engine = self.llm.llm_engine
        try:
            call.finished += self._unfinished(call.inflight)
        finally:
            try:
                with _logged("ending what was run ahead"):
                    call.ahead.end()
            finally:
                with _logged("ending the rows in the engine"):
                    if call.inflight:
                        engine.abort_request(list(call.inflight))
                        forget_broken_step(engine)
        self._store(call.finished)
        with _logged("closing the progress bar"):
            if call.progress is not None:
                call.progress.close()

    def _run_ahead_requests(
        self, upcoming: Sequence[Any], requests: list[RolloutRequest]
    ) -> list[RolloutRequest]:
        """Requests for upcoming prompts, where the configuration has them run ahead."""
        if not self.config.run_ahead.enabled:
            return []
        return run_ahead_requests(
            self._limits,
            upcoming,
            requests,
            seed=self.draw_seed,
            policy_version=self.policy_version,
        )

    def _measure_noise(self, requests: list[RolloutRequest], lora_request: Any) -> None:
        """Prefill a few responses that have just been decoded, once in the life of the engine."""
        chosen = [r for r in requests if self._measures_noise(r)][: self._noise.wanted]
        if not chosen:
            return
        started = time.perf_counter()
        self._noise.wanted -= len(chosen)
        outputs = self.llm.generate(
            [{"prompt_token_ids": r.rules.prompt + r.tokens} for r in chosen],
            [verification_params(r) for r in chosen],
            use_tqdm=False,
            lora_request=lora_request,
        )
        for request, output in zip(chosen, outputs, strict=True):
            self._take_noise(request, output)
        self.metrics.verify_s += time.perf_counter() - started

    def _count_tree_drafts(self) -> None:
        """Add what the proposer did, where its process can be asked."""
        from nemo_specrl.engine.drafters.v1_proposer import take_counts

        try:
            self._add_tree_counts(self.llm.collective_rpc(take_counts))
        except Exception as error:  # vLLM sends functions to other processes only where it may
            self._miss_tree_counts(error)

    def _verified_share(self, requests: Iterable[RolloutRequest]) -> float:
        """Share of the next step's tokens that are verified rather than decoded."""
        verified, decoding = 0, 0
        for request in requests:
            if request.verifying:
                assert request.draft is not None
                verified += len(request.rules.prompt) + len(request.draft)
            else:
                decoding += 1
        verified = min(verified, self._limits.max_num_batched_tokens)
        return verified / max(1, verified + min(decoding, self._limits.max_num_seqs))


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an exception instead of raising it."""
    try:
        yield
    except Exception as error:
        logger.warning("%s failed: %r", what, error)


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """A progress bar over rows, or None."""
    if not use_tqdm:
        return None
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)

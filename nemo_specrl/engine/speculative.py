"""SpeculativeLLM: ``vllm.LLM.generate`` with the last rollout of each prompt as a draft.

A draft is verified in one prefill of prompt + draft (``prompt_logprobs``). The prefix that the
current policy accepts stands, and decoding continues from the first rejected token, on the prefix
cache that the verification filled. Each row moves through the engine's step loop by itself: its
continuation starts as soon as its draft is judged, and only a window of rows is in the engine at a
time, so that the KV blocks of a prefix are still there when its continuation reads them.

Refits, rewards and batches belong to the caller. Source of the method: SPEC-RL, arXiv 2509.23232.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.assembly import request_outputs
from nemo_specrl.engine.base import RolloutCache, Speculation
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.requests import Request, build_requests
from nemo_specrl.engine.run_ahead import RunAhead, run_ahead_requests
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.engine.verification import verification_params
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["RolloutCache", "SpeculativeLLM"]

STORE_SECONDS = 0.25
"""How long finished rollouts wait for others before they are cached, in one put for all of them."""


class SpeculativeLLM(Speculation):
    """A drop-in for ``vllm.LLM.generate`` that reuses earlier rollouts.

    Verification needs up to ``compat.prompt_logprob_bytes(llm)`` of memory beside the KV cache, a
    bound that the engine's ``max_num_batched_tokens`` sets.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: where rollouts are looked up and kept (:class:`RolloutCache`).
        config: the ``spec_rl:`` block of the recipe.
        seed: seed of the run, from which the uniforms of acceptance are derived.

    Attributes:
        policy_version: version of the weights in the engine. The caller raises it with every refit
            and at no other time.
        fingerprint: of these weights (:func:`~nemo_specrl.engine.fingerprint.fingerprint`), set
            with ``policy_version``. 0 means unknown, and nothing is replayed from a journal.
        fresh_fraction: share of rows that are decoded without a draft, from the configuration
            until the caller changes it.
        metrics: :class:`EngineMetrics` of the last call.

    Raises:
        ConfigError: the engine's ``logprobs_mode`` is one of logits.
        IncompatibleVersion: this release does not work with the installed vLLM.
    """

    llm: LLM

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
            lora_request: as in vLLM.

        Returns:
            One output per prompt, in order. Each completion has an attribute ``spec_rl``, a
            :class:`~nemo_specrl.engine.assembly.Reuse`.

        Raises:
            UnsupportedSampling: drafts cannot be verified under these parameters.
            ConfigError: the numbers of prompts, parameters and sample indices differ, or a sample
                index occurs twice.
            Exception: vLLM's own, for a prompt that it refuses; the engine can be used again.
        """
        if not self.config.enabled:
            plain: list[RequestOutput] = self.llm.generate(
                prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request
            )
            return plain
        self.metrics = EngineMetrics()
        started = time.perf_counter()
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        requests = build_requests(
            self._limits, prompts, sampling_params, sample_indices, prompt_keys
        )
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

    def _run(
        self,
        requests: list[Request],
        replayed: list[tuple[Request, RequestOutput, Ending]],
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
        engine, metrics = self.llm.llm_engine, self.metrics
        to_run = [request for request in requests if request.replayed is None]
        duplicates = _duplicates(to_run)
        siblings_draft = self._proposes or self._rounds is not None
        waiting = deque(_in_order(to_run, duplicates, siblings_draft=siblings_draft))
        position = {id(request): i for i, request in enumerate(requests)}
        inflight: dict[str, Request] = {}
        ended: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        progress = _progress(use_tqdm, len(requests))
        finished: list[Rollout] = []
        stored_at = time.perf_counter()
        # Twice what runs at once: the engine never waits for this loop, and the blocks of a
        # verified prefix are not evicted before its continuation has read them. In rounds, a row
        # must not wait behind others between its requests.
        window = self._limits.max_num_seqs * (2 if self._rounds is None else 1)

        def add(prompt: dict[str, Any], params: SamplingParams) -> str:
            request_id = str(next(self.llm.request_counter))
            engine.add_request(request_id, prompt, params, lora_request=lora_request)
            return request_id

        def submit(request: Request, prompt: dict[str, Any], params: SamplingParams) -> None:
            inflight[add(prompt, params)] = request

        ahead = RunAhead(
            engine,
            self._limits.max_num_seqs,
            self._run_ahead_requests(upcoming, requests),
            lambda request: add(*self._next_request(request)),
            metrics,
        )

        def finish(request: Request, output: RequestOutput, ending: Ending) -> None:
            completion, rollouts = self._finish(request, output, ending)
            ended[position[id(request)]] = output, completion
            finished.extend(rollouts)
            if progress is not None:
                progress.update(1)

        try:
            for restored, stub, how in replayed:
                finish(restored, stub, how)
            while waiting or inflight:
                while waiting and len(inflight) < window:
                    request = waiting.popleft()
                    if request.draft is None:
                        submit(request, *self._next_request(request))
                    else:
                        request.verifying = True
                        tokens = request.rules.prompt + request.draft.tokens.tolist()
                        submit(request, {"prompt_token_ids": tokens}, verification_params(request))
                ahead.fill(len(inflight))
                share = self._verified_share([*inflight.values(), *ahead.rows.values()])
                stepping = time.perf_counter()
                outputs = engine.step()
                stepped = time.perf_counter()
                metrics.verify_s += share * (stepped - stepping)
                metrics.decode_s += (1 - share) * (stepped - stepping)
                verified: list[tuple[Request, RequestOutput]] = []
                for output in outputs:
                    if ahead.take(output) or output.request_id not in inflight:
                        continue  # aborted a step ago
                    request = inflight[output.request_id]
                    if request.verifying:
                        if output.finished:
                            del inflight[output.request_id]
                            verified.append((request, output))
                            same = duplicates[id(request)]
                            verified += [(other, copy.copy(output)) for other in same]
                        continue
                    ending = self._append_decoded(request, output)
                    if ending is None and not request.finished_round:
                        continue
                    del inflight[output.request_id]
                    if not output.finished:
                        engine.abort_request([output.request_id])
                    if ending is None:
                        submit(request, *self._next_request(request))
                    else:
                        finish(request, output, ending)
                for request, output, ending in self._judge(verified):
                    if ending is not None:
                        finish(request, output, ending)
                    else:
                        submit(request, *self._next_request(request))
                if time.perf_counter() - stored_at > STORE_SECONDS:
                    self._store(finished)
                    finished, stored_at = [], time.perf_counter()
                metrics.assembly_s += time.perf_counter() - stepped
        finally:
            self._store(finished)
            ahead.end()
            if inflight:  # an error or an interrupt: leave an engine that can be used again
                self._store_unfinished(inflight)
                engine.abort_request(list(inflight))
            if progress is not None:
                progress.close()
        return ended

    def _run_ahead_requests(
        self, upcoming: Sequence[Any], requests: list[Request]
    ) -> list[Request]:
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

    def _measure_noise(self, requests: list[Request], lora_request: Any) -> None:
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
        from nemo_specrl.engine.proposer import take_counts

        try:
            self._add_tree_counts(self.llm.collective_rpc(take_counts))
        except Exception as error:  # vLLM sends functions to other processes only where it may
            self._miss_tree_counts(error)

    def _verified_share(self, requests: Iterable[Request]) -> float:
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


def _duplicates(requests: list[Request]) -> dict[int, list[Request]]:
    """Group requests that have the same prompt and the same draft.

    Equal drafts of a prompt have equal log-probs, so one prefill verifies them all, and each is
    judged with uniforms of its own. Short answers and policies of low entropy yield many of them.

    Returns:
        By the ``id`` of the first request of a group, the others.
    """
    first: dict[Any, Request] = {}
    duplicates: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        if request.draft is not None:
            content = (request.row.key, request.draft.tokens.tobytes(), request.params.logprobs)
            leader = first.setdefault(content, request)
            if leader is not request:
                duplicates[id(leader)].append(request)
    return duplicates


def _in_order(
    requests: list[Request], duplicates: dict[int, list[Request]], *, siblings_draft: bool
) -> list[Request]:
    """Order by expected decoding, so that few rows are left when the batch nears its end.

    Rows without a draft come first, those of prompts with long earlier responses before the others;
    prompts without a history are taken for the mean of those that have one. Long drafts come before
    short ones. Duplicates are left out: they are judged when the first request of their group is
    verified.

    Args:
        requests: of the call.
        duplicates: see :func:`_duplicates`.
        siblings_draft: rows draft from what the others of their prompt have decoded. Those of a
            prompt without a history have nothing else, and side by side they are at the same
            token: the first row of each such prompt comes before the second of any.
    """
    left_out = {id(other) for group in duplicates.values() for other in group}
    known = [r.earlier_length for r in requests if r.earlier_length is not None]
    neutral = sum(known) / len(known) if known else 0.0
    rank: Counter[bytes] = Counter()  # of the next row of a prompt
    places: dict[int, tuple[bool, int, float]] = {}
    for request in requests:
        if request.draft is not None:
            place = True, 0, -float(len(request.draft))
        elif request.earlier_length is not None:
            place = False, 0, -request.earlier_length
        else:
            place = False, rank[request.row.key], -neutral
            rank[request.row.key] += siblings_draft
        places[id(request)] = place
    rows = [request for request in requests if id(request) not in left_out]
    return sorted(rows, key=lambda request: places[id(request)])


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """A progress bar over rows, or None."""
    if not use_tqdm:
        return None
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)

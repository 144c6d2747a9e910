"""SpeculativeLLM: ``vllm.LLM.generate`` that drafts the last rollout of each prompt.

A draft is verified in one prefill of prompt + draft (``prompt_logprobs``); what the current policy
accepts stands, and decoding goes on from the first rejected token, on the prefix cache that the
verification filled. Each row moves on by itself through the engine's step loop: a continuation
starts as soon as its draft is judged, and only a window of rows is in the engine at a time, so
that the KV blocks of a prefix are still there when its continuation reads them.

The caller's policy version and cache are all it knows of training; refits, rewards and batches
belong to the caller. Source of the method: SPEC-RL, arXiv 2509.23232.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.assembly import request_outputs
from nemo_specrl.engine.base import RolloutCache, Speculation
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.proposer import take_counts
from nemo_specrl.engine.requests import Request, build_requests
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.engine.verification import verification_params
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["RolloutCache", "SpeculativeLLM"]

logger = logging.getLogger(__name__)

KEEP_SECONDS = 0.25  # so long what is finished waits for others: a put of many costs what one does


class SpeculativeLLM(Speculation):
    """A drop-in for ``vllm.LLM.generate`` that reuses earlier rollouts.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: where rollouts are looked up and kept; :class:`RolloutCache`.
        config: the ``spec_rl:`` block.
        seed: of the run; acceptance draws from it.

    Attributes:
        policy_version: to be moved by the caller with every refit, and at no other time.
        fingerprint: of the weights (:func:`~nemo_specrl.engine.fingerprint.fingerprint`), moved
            with it; 0: not known, and nothing is taken from a journal.
        fresh_fraction: share of rows decoded plainly; the config's, until the caller turns it.
        metrics: :class:`EngineMetrics` of the last call.

    Raises:
        ConfigError: the engine and the configuration do not go together.
        IncompatibleVersion: the installed vLLM is not one that this release works with.

    Memory: verification takes up to ``compat.prompt_logprob_bytes(llm)`` beside the KV cache, a
    bound set by ``max_num_batched_tokens`` of the engine.
    """

    llm: LLM

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sample_indices: Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Responses to ``prompts``, in their order, as ``vllm.LLM.generate`` returns them.

        Each completion has an attribute ``spec_rl``, a :class:`~nemo_specrl.engine.assembly.Reuse`.
        Greedy requests neither read nor write the cache. With ``enabled: false`` this is
        ``llm.generate`` itself.

        Args:
            prompts: token-id or text prompts, as ``vllm.LLM.generate`` takes them.
            sampling_params: one for all, or one for each prompt.
            sample_indices: first sample index of each prompt. None: the k-th row of a prompt in
            this call has
                sample index k. To be given where the rows of a group come in several calls.
            use_tqdm: show a progress bar, or what makes one.
            lora_request: as in vLLM.

        Raises:
            UnsupportedSampling: sampling under which drafts cannot be verified.
            ConfigError: prompts and parameters, or sample indices, do not fit each other.
            Exception: vLLM's own, for a prompt that it refuses. The engine can be used again.
        """
        if not self.config.enabled:
            return self.llm.generate(
                prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request
            )
        self.metrics = EngineMetrics()
        started = time.perf_counter()
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        requests = build_requests(self._limits, prompts, sampling_params, sample_indices)
        self._find_drafts(requests)
        replayed = self._replay(requests)
        self.metrics.rows = len(requests)
        self.metrics.lookup_s = time.perf_counter() - started
        ended = self._run(requests, replayed, lora_request, use_tqdm)
        assembling = time.perf_counter()
        outputs = request_outputs(requests, ended)
        self.metrics.assembly_s += time.perf_counter() - assembling
        if self._limits.drafts_from_trees:
            self._count_tree_drafts()
        return outputs

    def _run(
        self,
        requests: list[Request],
        replayed: list[tuple[Request, RequestOutput, Ending]],
        lora_request: Any,
        use_tqdm: bool | Callable[..., Any],
    ) -> dict[int, tuple[RequestOutput, CompletionOutput]]:
        """Drive every request to its end: its last output and its completion, by position."""
        engine, metrics = self.llm.llm_engine, self.metrics
        to_run = [request for request in requests if not request.replayed]
        twins = _twins(to_run)
        waiting = deque(_order(to_run, but=twins))
        position = {id(request): i for i, request in enumerate(requests)}
        inflight: dict[str, Request] = {}
        ended: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        progress = _progress(use_tqdm, len(requests))
        finished: list[Rollout] = []
        kept_at = time.perf_counter()

        def submit(request: Request, tokens: list[int], params: SamplingParams) -> None:
            request_id = str(next(self.llm.request_counter))
            engine.add_request(
                request_id, {"prompt_token_ids": tokens}, params, lora_request=lora_request
            )
            inflight[request_id] = request

        def finish(request: Request, output: RequestOutput, ending: Ending) -> None:
            completion, rollouts = self._finish(request, output, ending)
            ended[position[id(request)]] = output, completion
            finished.extend(rollouts)
            if progress is not None:
                progress.update(1)

        try:
            for taken, stand_in, how in replayed:
                finish(taken, stand_in, how)
            while waiting or inflight:
                # Twice what runs at once: the engine never waits for us, and the blocks of a
                # verified prefix are not driven out before its continuation has read them.
                while waiting and len(inflight) < 2 * self._limits.max_num_seqs:
                    request = waiting.popleft()
                    prompt = request.rules.prompt
                    if request.draft is None:
                        submit(request, prompt, self._decoding_params(request))
                    else:
                        request.verifying = True
                        draft = request.draft.tokens.tolist()
                        submit(request, prompt + draft, verification_params(request))
                share = self._verified_share(inflight.values())
                stepping = time.perf_counter()
                outputs = engine.step()
                stepped = time.perf_counter()
                metrics.verify_s += share * (stepped - stepping)
                metrics.decode_s += (1 - share) * (stepped - stepping)
                verified: list[tuple[Request, RequestOutput]] = []
                for output in outputs:
                    if output.request_id not in inflight:
                        continue  # aborted a step ago
                    request = inflight[output.request_id]
                    if request.verifying:
                        if output.finished:
                            del inflight[output.request_id]
                            verified.append((request, output))
                            verified += [(twin, copy.copy(output)) for twin in twins[id(request)]]
                        continue
                    ending = self._take(request, output)
                    if ending is not None:
                        del inflight[output.request_id]
                        if not output.finished:
                            engine.abort_request([output.request_id])
                        finish(request, output, ending)
                for request, output, ending in self._judge(verified):
                    if ending is not None:
                        finish(request, output, ending)
                    else:
                        prefix = request.rules.prompt + request.tokens
                        submit(request, prefix, self._decoding_params(request))
                if time.perf_counter() - kept_at > KEEP_SECONDS:
                    self._keep(finished)
                    finished, kept_at = [], time.perf_counter()
                metrics.assembly_s += time.perf_counter() - stepped
        finally:
            self._keep(finished)
            if inflight:  # an error or an interrupt: leave an engine that can be used again
                self._keep_unfinished(inflight)
                engine.abort_request(list(inflight))
            if progress is not None:
                progress.close()
        return ended

    def _count_tree_drafts(self) -> None:
        """Add what the proposer did, where its process can be asked."""
        try:
            counts = self.llm.collective_rpc(take_counts)[0]
        except Exception as error:  # vLLM sends functions to other processes only where it may
            logger.debug("the tree proposer's counts are not known: %s", error)
            return
        self.metrics.tree_steps += counts.steps
        self.metrics.tree_drafted_tokens += counts.drafted
        self.metrics.tree_accepted_tokens += counts.accepted
        self.metrics.tree_s += counts.seconds

    def _verified_share(self, requests: Iterable[Request]) -> float:
        """Share of the coming step's tokens that are verified rather than decoded."""
        verified, decoding = 0, 0
        for request in requests:
            if request.verifying:
                assert request.draft is not None
                verified += len(request.rules.prompt) + len(request.draft)
            else:
                decoding += 1
        verified = min(verified, self._limits.max_num_batched_tokens)
        return verified / max(1, verified + min(decoding, self._limits.max_num_seqs))


def _twins(requests: list[Request]) -> dict[int, list[Request]]:
    """The requests with the same draft as an earlier one, by that one's id.

    Equal drafts of a prompt have equal log-probs: one prefill verifies them all, and each is judged
    with uniforms of its own. Short answers and policies that have become sure give many of them.
    """
    first: dict[Any, Request] = {}
    twins: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        if request.draft is not None:
            wanted = (request.params.logprobs, request.params.detokenize)
            alike = (request.row.key, request.draft.tokens.tobytes(), wanted)
            same = first.setdefault(alike, request)
            if same is not request:
                twins[id(same)].append(request)
    return twins


def _order(requests: list[Request], but: dict[int, list[Request]]) -> list[Request]:
    """Longest expected decoding first: rows without a draft, then long drafts before short ones.

    Those in ``but`` are left out: they wait for their twin.
    """
    left_out = {id(twin) for group in but.values() for twin in group}
    return sorted(
        (request for request in requests if id(request) not in left_out),
        key=lambda r: float("-inf") if r.draft is None else -len(r.draft),
    )


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """A progress bar over rows, or None."""
    if not use_tqdm:
        return None
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)

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

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.assembly import completed, extend, request_outputs
from nemo_specrl.engine.compat import check_version
from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.requests import EngineLimits, Request, build_requests
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.engine.verification import continuation_params, judge, verification_params
from nemo_specrl.errors import ConfigError
from nemo_specrl.rollout import Finish, Rollout
from nemo_specrl.speculation.drafts import select_drafts

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["RolloutCache", "SpeculativeLLM"]

logger = logging.getLogger(__name__)


class RolloutCache(Protocol):
    """What a cache of rollouts has to offer; :class:`nemo_specrl.RolloutStore` is one."""

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Rollouts by prompt key, newest first within a slot."""
        ...

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts, each newer than what its prompt and slot had."""
        ...


class SpeculativeLLM:
    """A drop-in for ``vllm.LLM.generate`` that reuses earlier rollouts.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: where rollouts are looked up and kept; :class:`RolloutCache`.
        config: the ``spec_rl:`` block.
        seed: of the run; acceptance draws from it.

    Attributes:
        policy_version: to be moved by the caller with every refit, and at no other time.
        fresh_fraction: share of rows decoded plainly; the config's, until the caller turns it.
        metrics: :class:`EngineMetrics` of the last call.

    Raises:
        ConfigError: the engine and the configuration do not go together.
        IncompatibleVersion: the installed vLLM is not one that this release works with.

    Memory: verification takes up to ``compat.prompt_logprob_bytes(llm)`` beside the KV cache, a
    bound set by ``max_num_batched_tokens`` or ``long_prefill_token_threshold`` of the engine.
    """

    def __init__(
        self,
        llm: LLM,
        cache: RolloutCache,
        config: SpecRLConfig,
        *,
        seed: int = 0,
    ) -> None:
        check_version()
        mode = str(getattr(llm.llm_engine.vllm_config.model_config, "logprobs_mode", "logprobs"))
        if config.enabled and not mode.endswith("logprobs"):
            raise ConfigError(f"logprobs_mode = {mode}: must be raw_logprobs or processed_logprobs")
        self.llm = llm
        self.cache = cache
        self.config = config
        self.seed = seed
        self.policy_version = 0
        self.fresh_fraction = config.fresh_fraction
        self.metrics = EngineMetrics()
        self._limits = EngineLimits.of(llm)
        self._cache_error_logged = False

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slots: Sequence[int] | None = None,
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
            slots: first slot of each prompt. None: the k-th row of a prompt in this call has
                slot k. To be given where the rows of a group come in several calls.
            use_tqdm: show a progress bar, or what makes one.
            lora_request: as in vLLM.

        Raises:
            UnsupportedSampling: sampling under which drafts cannot be verified.
            ConfigError: prompts and parameters, or slots, do not fit each other.
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
        requests = build_requests(self._limits, prompts, sampling_params, slots)
        self._find_drafts(requests)
        self.metrics.rows = len(requests)
        self.metrics.lookup_s = time.perf_counter() - started
        ended = self._run(requests, lora_request, use_tqdm)
        assembling = time.perf_counter()
        outputs = request_outputs(requests, ended)
        self.metrics.assembly_s += time.perf_counter() - assembling
        return outputs

    def _find_drafts(self, requests: list[Request]) -> None:
        candidates = [request for request in requests if request.draftable]
        try:
            cached = self.cache.get(list(dict.fromkeys(r.row.key for r in candidates)))
        except Exception as error:  # the cache can only cost speed
            self._count_cache_error(error)
            return
        choices = select_drafts(
            [request.row for request in candidates],
            cached,
            policy_version=self.policy_version,
            seed=self.seed,
            fresh_fraction=max(self.fresh_fraction, self.config.effective_fresh_fraction),
        )
        for request, (draft, visit) in zip(candidates, choices, strict=True):
            request.visit = visit
            if draft is not None and not request.offer(draft, self._limits):
                self.metrics.refused_drafts += 1

    def _run(
        self, requests: list[Request], lora_request: Any, use_tqdm: bool | Callable[..., Any]
    ) -> dict[int, tuple[RequestOutput, CompletionOutput]]:
        """Drive every request to its end: its last output and its completion, by position."""
        engine, metrics = self.llm.llm_engine, self.metrics
        waiting = deque(_order(requests))
        position = {id(request): i for i, request in enumerate(requests)}
        inflight: dict[str, Request] = {}
        ended: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        progress = _progress(use_tqdm, len(requests))

        def submit(request: Request, tokens: list[int], params: SamplingParams) -> None:
            request_id = str(next(self.llm.request_counter))
            engine.add_request(
                request_id, {"prompt_token_ids": tokens}, params, lora_request=lora_request
            )
            inflight[request_id] = request

        def finish(request: Request, output: RequestOutput, ending: Ending) -> None:
            ended[position[id(request)]] = output, self._finish(request, output, ending)
            if progress is not None:
                progress.update(1)

        try:
            while waiting or inflight:
                # Twice what runs at once: the engine never waits for us, and the blocks of a
                # verified prefix are not driven out before its continuation has read them.
                while waiting and len(inflight) < 2 * self._limits.max_num_seqs:
                    request = waiting.popleft()
                    prompt = request.rules.prompt
                    if request.draft is None:
                        submit(request, prompt, request.params)
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
                        submit(request, prefix, continuation_params(request, self.policy_version))
                metrics.assembly_s += time.perf_counter() - stepped
        finally:
            if inflight:  # an error or an interrupt: leave an engine that can be used again
                engine.abort_request(list(inflight))
            if progress is not None:
                progress.close()
        return ended

    def _judge(
        self, verified: list[tuple[Request, RequestOutput]]
    ) -> list[tuple[Request, RequestOutput, Ending | None]]:
        """Each verified request with its ending, or None where a continuation is to be decoded."""
        metrics = self.metrics
        judge(verified, self.config, seed=self.seed, policy_version=self.policy_version)
        verdicts: list[tuple[Request, RequestOutput, Ending | None]] = []
        for request, output in verified:
            assert request.draft is not None and request.ending is not None
            request.verifying = False
            whole = request.accepted == len(request.draft) and request.ending.finish is not None
            metrics.drafts += 1
            metrics.draft_tokens += len(request.draft)
            metrics.accepted_tokens += request.accepted
            metrics.full_reuses += whole
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

    def _finish(self, request: Request, output: RequestOutput, ending: Ending) -> CompletionOutput:
        """The completion of a request that has ended; its rollout is journaled at once."""
        completion, rollout = completed(request, output, ending, self.config, self.policy_version)
        self.metrics.response_tokens += len(request.tokens)
        if request.draft is not None and request.accepted < len(request.tokens):
            prefill = len(request.rules.prompt) + request.accepted
            self.metrics.recomputed_tokens += prefill - (output.num_cached_tokens or 0)
        if request.cacheable:
            try:
                self.cache.put([rollout])
            except Exception as error:  # the cache can only cost speed
                self._count_cache_error(error)
        return completion

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


def _order(requests: list[Request]) -> list[Request]:
    """Longest expected decoding first: rows without a draft, then long drafts before short ones."""
    return sorted(requests, key=lambda r: float("-inf") if r.draft is None else -len(r.draft))


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """A progress bar over rows, or None."""
    if not use_tqdm:
        return None
    from tqdm import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)

"""AsyncSpeculativeLLM: ``AsyncLLM.generate`` with the last rollout of a prompt as a draft.

Rows come one by one and each is a coroutine, while vLLM's own loop drives the engine. The weights
may be replaced while a row is in the engine. A draft whose verification saw two sets of weights is
dropped, since its log-probs belong to neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.assembly import request_outputs
from nemo_specrl.engine.base import Speculation
from nemo_specrl.engine.requests import Request, build_requests
from nemo_specrl.engine.sampling import Ending
from nemo_specrl.engine.verification import verification_params
from nemo_specrl.errors import ConfigError
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["AsyncSpeculativeLLM", "ClaimingCache"]


class ClaimingCache(Protocol):
    """A cache that assigns sample indices, such as
    :class:`nemo_specrl.cache.cluster.driver.ClusterCache`.
    """

    async def claim(self, key: bytes, policy_version: int) -> tuple[int, list[Rollout]] | None:
        """Reserve a sample index for a row of a prompt.

        Returns:
            The sample index and the prompt's rollouts; None when none can be had now, a failure
            that the cache has counted.
        """
        ...

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts; each replaces the one that its prompt and sample index had."""
        ...

    def flush(self) -> None:
        """Send what was put, without waiting for it to arrive."""
        ...


class AsyncSpeculativeLLM(Speculation):
    """A drop-in for ``AsyncLLM.generate`` that reuses earlier rollouts.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: assigns sample indices and keeps rollouts (:class:`ClaimingCache`).
        config: the ``spec_rl:`` block of the recipe.
        seed: seed of the run, from which the uniforms of acceptance are derived.

    Attributes:
        policy_version: version of the weights in the engine. The caller raises it with every refit
            and at no other time.
        fingerprint: of these weights, set with ``policy_version``; 0: not known.
        fresh_fraction: share of rows that are decoded without a draft, from the configuration
            until the caller changes it.
        metrics: :class:`EngineMetrics` since the caller last replaced it. Rows wait concurrently,
            so that its times are sums over rows and may exceed the time that has passed.

    Raises:
        ConfigError: the engine's ``logprobs_mode`` is one of logits, or ``run_ahead`` is enabled.
        IncompatibleVersion: this release does not work with the installed vLLM.
    """

    llm: AsyncLLM
    cache: ClaimingCache

    def __init__(self, llm: Any, cache: Any, config: SpecRLConfig, seed: int = 0) -> None:
        super().__init__(llm, cache, config, seed)
        if config.enabled and config.run_ahead.enabled:
            raise ConfigError(
                "spec_rl.run_ahead.enabled = true: an asynchronous engine is asked for one row at "
                "a time and does not know which prompts come next; set it to false"
            )
        self._decoding: Any = contextlib.nullcontext()
        if self._rounds is not None:
            # No more rows than the engine runs at once: between two requests, a row must not wait
            # in the engine's queue, where its blocks would be evicted.
            engines = llm.vllm_config.parallel_config.data_parallel_size
            self._decoding = asyncio.Semaphore(self._limits.max_num_seqs * engines)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Generate one response to a prompt and yield it once, when it is complete.

        Where the row has no sample index (speculation is off, the request is greedy, the cache
        does not answer) this is ``AsyncLLM.generate`` itself, with all its outputs.

        Args:
            prompt: token ids or text.
            sampling_params: with ``n == 1``.
            request_id: unique. The verification, and rounds after the first, run under ids derived
                from it.
            kwargs: passed to ``AsyncLLM.generate``.

        Yields:
            The output; its completion has an attribute ``spec_rl``, a
            :class:`~nemo_specrl.engine.assembly.Reuse`.

        Raises:
            UnsupportedSampling: drafts cannot be verified under these parameters.
            ConfigError: ``sampling_params.n`` is not 1.
        """
        if sampling_params.n != 1:
            raise ConfigError(f"n = {sampling_params.n}: must be 1; ask once for each response")
        [request] = build_requests(self._limits, prompt, sampling_params, None)
        claimed, started = None, time.perf_counter()
        if self.config.enabled and request.draftable:
            claimed = await self._claim(request)
        if claimed is None:  # no draft, and no sample index to cache the result under
            async for output in self.llm.generate(prompt, sampling_params, request_id, **kwargs):
                yield output
            return
        self.metrics.rows += 1
        claimed_at = time.perf_counter()
        self.metrics.lookup_s += claimed_at - started
        output, ending = None, None
        if request.draft is not None:
            output, ending = await self._verify(request, request_id, kwargs)
        verified_at = time.perf_counter()
        self.metrics.verify_s += verified_at - claimed_at
        if ending is None:
            async with self._decoding:
                output, ending = await self._decode(request, request_id, kwargs)
        self.metrics.decode_s += time.perf_counter() - verified_at
        assert output is not None
        if self._measures_noise(request):
            await self._measure_noise(request, request_id, kwargs)
        completion, rollouts = self._finish(request, output, ending)
        self._store(rollouts)
        self.cache.flush()
        yield request_outputs([request], {0: (output, completion)})[0]

    async def count_tree_drafts(self) -> None:
        """Add to the metrics what the tree proposer did since the last call.

        To be called before the metrics are taken, since rows have no step of their own in which to
        ask the engine. Nothing is added without a proposer, or where its process cannot be asked.
        """
        if not self._proposes:
            return
        from nemo_specrl.engine.proposer import take_counts

        try:
            self._add_tree_counts(await self.llm.collective_rpc(take_counts))
        except Exception as error:  # vLLM sends functions to other processes only where it may
            self._miss_tree_counts(error)

    async def _claim(self, request: Request) -> Request | None:
        """Reserve a sample index for a request and offer it its draft; None where none is had."""
        try:
            claimed = await self.cache.claim(request.row.key, self.policy_version)
        except Exception as error:  # the cache can only cost speed
            self._count_cache_error(error)
            return None
        if claimed is None:
            return None
        sample_index, rollouts = claimed
        request.row = type(request.row)(request.row.key, sample_index)
        self._offer_drafts([request], {request.row.key: rollouts})
        return request

    async def _verify(
        self, request: Request, request_id: str, kwargs: Any
    ) -> tuple[RequestOutput | None, Ending | None]:
        """Verify and judge the draft of a request.

        Returns:
            The engine's output, and how the response ended; None where decoding has to go on.
        """
        assert request.draft is not None
        version = self.policy_version
        request.verifying = True
        prompt = {"prompt_token_ids": request.rules.prompt + request.draft.tokens.tolist()}
        stream = self.llm.generate(
            prompt, verification_params(request), f"{request_id}-verify", **kwargs
        )
        outputs = [output async for output in stream]
        if version != self.policy_version:  # log-probs of two sets of weights
            self._refuse_draft(request)
            return None, None
        [(_, output, ending)] = self._judge([(request, outputs[-1])])
        return output, ending

    async def _measure_noise(self, request: Request, request_id: str, kwargs: Any) -> None:
        """Prefill a response that has just been decoded; of the first few rows of the engine."""
        self._noise.wanted -= 1
        version, started = self.policy_version, time.perf_counter()
        prompt = {"prompt_token_ids": request.rules.prompt + request.tokens}
        params = verification_params(request)
        stream = self.llm.generate(prompt, params, f"{request_id}-noise", **kwargs)
        outputs = [output async for output in stream]
        if outputs and version == self.policy_version:
            self._take_noise(request, outputs[-1])
        self.metrics.verify_s += time.perf_counter() - started

    async def _decode(
        self, request: Request, request_id: str, kwargs: Any
    ) -> tuple[RequestOutput, Ending]:
        """Decode what the draft did not bring; the last output and how the response ended."""
        version, ended, number = self.policy_version, False, 0
        try:
            while True:
                prompt, params = self._next_request(request)
                name = f"{request_id}-{number}" if number else request_id
                number += 1
                stream = self.llm.generate(prompt, params, name, **kwargs)
                try:
                    async for output in stream:
                        ending = self._append_decoded(request, output)
                        if ending is not None:
                            ended = True
                            return output, ending
                        if request.finished_round:
                            break
                    else:
                        raise RuntimeError(f"request {name} ended without an output")
                finally:
                    # Ends a request whose row has ended by a stop string, or goes on in another.
                    await stream.aclose()
        finally:
            if not ended and version == self.policy_version:  # cancelled
                self._store_unfinished({request_id: request})

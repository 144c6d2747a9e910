"""AsyncSpeculativeLLM: ``AsyncLLM.generate`` that drafts the last rollout of a prompt.

The asynchronous twin of ``speculative``: rows come one by one and each is a coroutine, vLLM's own
loop drives the engine. Weights may move while a row is in the engine; a verdict of two weights is
no verdict, and such a draft is dropped.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Protocol

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
    """A cache that gives out sample indices;
    :class:`nemo_specrl.cache.cluster.driver.ClusterCache` is one."""

    async def claim(self, key: bytes, policy_version: int) -> tuple[int, list[Rollout]] | None:
        """A sample index for a row of a prompt and the prompt's rollouts.

        None: none can be had now, which the cache has counted.
        """
        ...

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts, each newer than what its prompt and sample index had."""
        ...

    def flush(self) -> None:
        """Send on what was put; waits for nothing."""
        ...


class AsyncSpeculativeLLM(Speculation):
    """A drop-in for ``AsyncLLM.generate`` that reuses earlier rollouts.

    Args:
        llm: a running engine. Its ``logprobs_mode`` must be one of log-probs, not of logits.
        cache: gives out sample indices and keeps rollouts; :class:`ClaimingCache`.
        config: the ``spec_rl:`` block.
        seed: of the run; acceptance draws from it.

    Attributes:
        policy_version: to be moved by the caller with every refit, and at no other time.
        fingerprint: of the weights, moved with it; 0: not known.
        metrics: :class:`EngineMetrics` since the caller last replaced it. Rows wait side by side,
            so that its times are sums of what each row waited.

    Raises:
        ConfigError: the engine and the configuration do not go together.
        IncompatibleVersion: the installed vLLM is not one that this release works with.
    """

    llm: AsyncLLM
    cache: ClaimingCache

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """One response to a prompt: its last output, as ``AsyncLLM.generate`` gives it.

        Args:
            prompt: token-id or text prompt.
            sampling_params: with ``n == 1``.
            request_id: unique; the requests that it becomes have names of their own.
            kwargs: of ``AsyncLLM.generate``.

        Raises:
            UnsupportedSampling: sampling under which drafts cannot be verified.
            ConfigError: several responses are asked for.
        """
        if sampling_params.n != 1:
            raise ConfigError(f"n = {sampling_params.n}: must be 1; ask once for each response")
        [request] = build_requests(self._limits, prompt, sampling_params, None)
        claimed, started = None, time.perf_counter()
        if self.config.enabled and request.draftable:
            claimed = await self._claim(request)
        if claimed is None:  # nothing to draft, and no sample index to keep it in
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
            output, ending = await self._decode(request, request_id, kwargs)
        self.metrics.decode_s += time.perf_counter() - verified_at
        assert output is not None
        completion, rollouts = self._finish(request, output, ending)
        self._keep(rollouts)
        self.cache.flush()
        yield request_outputs([request], {0: (output, completion)})[0]

    async def _claim(self, request: Request) -> Request | None:
        """The request with its sample index and draft, or None."""
        try:
            claimed = await self.cache.claim(request.row.key, self.policy_version)
        except Exception as error:  # the cache can only cost speed
            self._count_cache_error(error)
            return None
        if claimed is None:
            return None
        sample_index, rollouts = claimed
        request.row = type(request.row)(request.row.key, sample_index)
        self._choose([request], {request.row.key: rollouts})
        return request

    async def _verify(
        self, request: Request, request_id: str, kwargs: Any
    ) -> tuple[RequestOutput | None, Ending | None]:
        """Judge the draft; its ending where all of it stands and nothing is left to decode."""
        assert request.draft is not None
        version = self.policy_version
        request.verifying = True
        prompt = {"prompt_token_ids": request.rules.prompt + request.draft.tokens.tolist()}
        stream = self.llm.generate(
            prompt, verification_params(request), f"{request_id}-verify", **kwargs
        )
        outputs = [output async for output in stream]
        if version != self.policy_version:  # log-probs of two weights: the row begins anew
            request.draft, request.verifying = None, False
            self.metrics.refused_drafts += 1
            return None, None
        [(_, output, ending)] = self._judge([(request, outputs[-1])])
        return output, ending

    async def _decode(
        self, request: Request, request_id: str, kwargs: Any
    ) -> tuple[RequestOutput, Ending]:
        """Decode what the draft did not bring."""
        params = self._decoding_params(request)
        prompt = {"prompt_token_ids": request.rules.prompt + request.tokens}
        stream = self.llm.generate(prompt, params, request_id, **kwargs)
        version, ended = self.policy_version, False
        try:
            async for output in stream:
                ending = self._take(request, output)
                if ending is not None:
                    ended = True
                    return output, ending
        finally:
            if not ended and version == self.policy_version:  # cancelled
                self._keep_unfinished({request_id: request})
            await stream.aclose()  # ends the request where a stop string ended the response
        raise RuntimeError(f"request {request_id} ended without an output")

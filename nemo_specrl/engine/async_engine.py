"""AsyncSpeculativeLLM: ``AsyncLLM.generate`` with the last rollout of a prompt as a draft.

Rows arrive one by one; each is a coroutine, and vLLM's own loop drives the engine. The weights may
change while rows are in progress (``refit``): for each token, the version that made it is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.async_rows import AsyncRow, AsyncRows, Watched
from nemo_specrl.engine.base import BaseSpeculativeLLM
from nemo_specrl.engine.caches import ClaimingCache
from nemo_specrl.engine.in_flight import WeightUpdates, salted
from nemo_specrl.engine.interrupts import note_decoded
from nemo_specrl.engine.outputs import request_outputs, unfinished_output
from nemo_specrl.engine.policy_version import RUNNING, one_adapter, reset_caches
from nemo_specrl.engine.prefix.verification import verification_params
from nemo_specrl.engine.requests import RolloutRequest, build_requests
from nemo_specrl.engine.sampling_rules import ResponseEnd
from nemo_specrl.engine.vllm.compat import assigns_own_ids, has_unfinished_requests
from nemo_specrl.errors import ConfigError

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["AsyncSpeculativeLLM"]

T = TypeVar("T")


class AsyncSpeculativeLLM(BaseSpeculativeLLM):
    """A drop-in for ``AsyncLLM.generate`` that reuses earlier rollouts.

    Args:
        llm: a running ``AsyncLLM``; the same requirements apply as for ``SpeculativeLLM``.
        cache: assigns sample indices and stores rollouts (``caches.ClaimingCache``): a
            ``nemo_specrl.cache.cluster.cluster_cache.ClusterCache``, which needs Ray. A
            :class:`~nemo_specrl.RolloutStore` does not assign sample indices and cannot be used.
        config, seed, policy_version: see ``SpeculativeLLM``.

    Attributes:
        policy_version: version of the weights in the engine, which :meth:`refit` changes.
        fingerprint: fingerprint of these weights; 0 if not known.
        fresh_fraction: share of rows that are decoded without a draft, from the configuration
            until the caller changes it.
        metrics: :class:`EngineMetrics` since the caller last replaced it. Rows wait concurrently,
            so its times are sums over rows and may exceed the elapsed time.

    Raises:
        ConfigError: the engine does not fit the configuration (as for ``SpeculativeLLM``),
            ``run_ahead`` is enabled, or VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set.
        IncompatibleVersion: this release does not work with the installed vLLM.
    """

    llm: AsyncLLM
    cache: ClaimingCache

    def __init__(
        self, llm: Any, cache: Any, config: SpecRLConfig, seed: int = 0, policy_version: int = 0
    ) -> None:
        super().__init__(llm, cache, config, seed, policy_version)
        if config.enabled and config.run_ahead.enabled:
            raise ConfigError(
                "spec_rl.run_ahead.enabled = true: an asynchronous engine is asked for one row at "
                "a time and does not know which prompts come next; set it to false"
            )
        if config.enabled and not assigns_own_ids():
            raise ConfigError(
                "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION = 1: the requests of a row have one id, and "
                "outputs of one would be taken for those of another; unset it"
            )
        self._rows = AsyncRows(llm)
        self._updates = WeightUpdates(llm, self._rows)
        self._decoding: asyncio.Semaphore | None = None
        if self._prompt_logprob_drafter is not None:
            # Admit no more rows than the engine runs at once: between two requests, a row must not
            # wait in the engine's queue, where its blocks would be evicted.
            engines = llm.vllm_config.parallel_config.data_parallel_size
            self._decoding = asyncio.Semaphore(self._limits.max_num_seqs * engines)

    def _begin_version(self, version: int) -> None:
        raise ConfigError(
            f"policy_version = {version}: the prefix cache of an asynchronous engine is reset by a "
            f"coroutine; use `await set_policy_version({version})`, or pass the first version to "
            "the constructor"
        )

    async def refit(
        self,
        update: Callable[[], Awaitable[T]],
        version: int,
        *,
        fingerprint: int = 0,
        recompute_kv: bool = True,
    ) -> T:
        """Change the weights of the engine; its rows continue with the new ones.

        A draft that is being verified at that moment is verified again.

        Args:
            update: changes the weights.
            version: version of the new weights.
            fingerprint: fingerprint of the new weights; 0 if not known.
            recompute_kv: recompute the KV blocks of rows in progress, by a prefill of each.
                Otherwise they continue with those of the old weights, which no other row reads.

        Returns:
            What ``update`` returned. The version begins even if ``update`` raises.

        Raises:
            ConfigError: rows are in progress and are verified in rounds (``tree.method``), or this
                vLLM (0.20) cannot recompute their KV blocks. Nothing has changed.
        """
        async with self._updates.paused(recompute_kv) as running:
            if self._prompt_logprob_drafter is not None:
                self.check_idle()
            try:
                return await update()
            finally:
                await reset_caches(self.llm, recompute_kv=recompute_kv)
                self._weights.begin(version, fingerprint)
                for row, made in running.items():
                    row.change_weights(made, version)

    async def set_policy_version(self, version: int, fingerprint: int = 0) -> None:
        """Begin a policy version after a refit that was made without :meth:`refit`.

        Resets the engine's prefix cache, which holds KV blocks of the old weights.

        Args:
            version: version of the weights that the engine has now.
            fingerprint: fingerprint of these weights; 0 if not known.

        Raises:
            ConfigError: rows are in progress, or vLLM did not reset the prefix cache because other
                requests are in progress. The old policy version is then kept.
        """
        self.check_idle()
        reset = await reset_caches(self.llm)
        self.check_idle()  # a row begun in the meantime would be of two versions
        if not reset:
            raise ConfigError(f"the prefix cache was not reset: {RUNNING}")
        self._weights.begin(version, fingerprint)

    def check_idle(self) -> None:
        """Raise ConfigError while a row is in progress, or another request is running."""
        if self._rows.begun or has_unfinished_requests(self.llm):
            raise ConfigError(f"new weights after policy version {self.policy_version}: {RUNNING}")

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Generate one response to a prompt and yield it once, when it is complete.

        If the row has no sample index (speculation is off, the request is greedy, or the cache does
        not answer), this is ``AsyncLLM.generate`` itself, with all its outputs.

        Args:
            prompt: token ids or text.
            sampling_params: with ``n == 1``.
            request_id: unique. All requests of the row run under it, one after the other.
            kwargs: passed to ``AsyncLLM.generate``.

        Yields:
            The output; its completion's ``spec_rl`` is an ``outputs.RolloutInfo``.

        Raises:
            UnsupportedSampling: drafts cannot be verified under these parameters.
            ConfigError: ``sampling_params.n`` is not 1, or the adapter (``lora_request``) is not
                that of the policy version's first row.
        """
        if not self.config.enabled:
            async for output in self.llm.generate(prompt, sampling_params, request_id, **kwargs):
                yield output
            return
        if sampling_params.n != 1:
            raise ConfigError(f"n = {sampling_params.n}: must be 1; ask once for each response")
        [request] = build_requests(
            self._limits, prompt, sampling_params, None, None, **self._verified_by
        )
        if request.draftable:
            self._weights.check(one_adapter(kwargs.get("lora_request"), 1))
        with self._rows.row(request_id, request) as row:
            drafted = await self._run(row, request, kwargs)
        if drafted is not None:
            yield drafted
            return
        # There is no draft, and no sample index under which to cache the result.
        async for output in self.generate_plain(prompt, sampling_params, request_id, **kwargs):
            yield output

    async def generate_plain(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Generate without the cache, as ``AsyncLLM.generate`` does, while weights may change.

        The request waits while the weights change, and reads no KV blocks of other weights.
        """
        with self._rows.row(request_id, None) as row:
            async for output in self._stream(row, prompt, sampling_params, kwargs):
                yield output

    async def _run(
        self, row: AsyncRow, request: RolloutRequest, kwargs: Any
    ) -> RequestOutput | None:
        """Take a row through the engine, in the stages of ``SpeculativeLLM._run``.

        Args:
            row: a row that has not ended.
            request: the row's request.
            kwargs: keyword arguments of ``AsyncLLM.generate``.

        Returns:
            The row's output; None if it can have no sample index, in which case nothing was done.
        """
        await self._rows.admit(row)
        # 1. Look up: a sample index and a draft from the cache.
        started = time.perf_counter()
        claimed = await self._claim(request) if request.draftable else None
        if claimed is None and not row.aborted:
            return None
        stored = False
        try:
            self.metrics.rows += 1
            self.metrics.lookup_s += time.perf_counter() - started
            # 2 to 4. Submit, step and judge: vLLM's own loop steps the engine.
            output, end = await self._verify_and_decode(row, request, kwargs)
            # 5. Finish: the completion for the caller, the rollout for the cache.
            completion, rollouts = self._finish(request, output, end)
            finished = request_outputs([request], {0: (output, completion)})[0]
            # 6. Store.
            if claimed is not None:
                self._store(rollouts)
                stored = bool(rollouts)
            return finished
        finally:
            self.cache.flush()
            if claimed is not None and not stored:  # another row may take its sample index
                self.cache.release(request.row.key, request.row.sample_index)

    async def _verify_and_decode(
        self, row: AsyncRow, request: RolloutRequest, kwargs: Any
    ) -> tuple[RequestOutput, ResponseEnd]:
        """Have a row's draft verified and the rest decoded; return its last output and its end."""
        output, end = None, None
        started = time.perf_counter()
        if request.draft is not None and not row.aborted:
            output, end = await self._verify(row, request, kwargs)
        verified_at = time.perf_counter()
        self.metrics.verify_s += verified_at - started
        if end is None:
            output, end = await self._decode(row, request, kwargs)
        self.metrics.decode_s += time.perf_counter() - verified_at
        assert output is not None
        if self._measures_noise(request):
            await self._measure_noise(row, request, kwargs)
        return output, end

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort rows, as ``AsyncLLM.abort`` does, including those not in the engine at the moment.

        They come back with ``finish_reason`` "abort" and the tokens that they have so far.
        """
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        await self.llm.abort(list(names), internal)
        await self._rows.abort(names)

    async def pause_generation(self, **kwargs: Any) -> None:
        """Pause the engine, as ``AsyncLLM.pause_generation`` does (``AsyncRows.pausing``)."""
        mode = "wait" if kwargs.get("wait_for_inflight_requests") else kwargs.get("mode", "abort")
        await self._rows.pausing(mode, self.llm.pause_generation, kwargs)

    async def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """Put the engine to sleep, as ``AsyncLLM.sleep`` does, treating rows as in a pause."""
        mode = kwargs.get("mode", "abort")
        await self._rows.pausing(mode, self.llm.sleep, {"level": level, **kwargs})

    async def count_tree_drafts(self) -> None:
        """Add to the metrics what the tree proposer did since the last call.

        Call this before taking the metrics: rows have no step of their own in which to ask the
        engine. Nothing is added without a proposer, or if its process cannot be asked.
        """
        if not self._proposes:
            return
        from nemo_specrl.engine.drafters.counts import NO_COUNTS, take_counts

        try:
            self.metrics.add_draft_counts(await self.llm.collective_rpc(take_counts))
        except Exception as error:  # vLLM sends functions to other processes only if allowed to
            self._warn_once(NO_COUNTS, type(error).__name__, error)

    async def _claim(self, request: RolloutRequest) -> RolloutRequest | None:
        """Reserve a sample index for a request and offer it its draft; None if there is none."""
        try:
            claim = await self.cache.claim(request.row.key, self.policy_version)
            if claim is None:
                return None
            request.assign_sample_index(claim.sample_index)
        except Exception as error:  # whatever fails in the cache, rows are decoded without it
            self._count_cache_error(error)
            return None
        try:
            self._set_drafts([request], {request.row.key: claim.rollouts}, claim)
        except Exception as error:  # as above; the sample index stays reserved
            self._count_cache_error(error)
        return request

    async def _place(self, row: AsyncRow) -> bool:
        """Wait for a place among the rows that the engine decodes; False if the row was aborted."""
        if self._decoding is None:
            return not row.aborted
        places = self._decoding
        return await row.wait_for(places.acquire(), places.release)

    async def _verify(
        self, row: AsyncRow, request: RolloutRequest, kwargs: Any
    ) -> tuple[RequestOutput | None, ResponseEnd | None]:
        """Verify and judge the draft of a request.

        Returns:
            The engine's output, and how the response ended; None if decoding must continue.
        """
        assert request.draft is not None
        request.verification.start()
        prompt = {"prompt_token_ids": request.rules.prompt + request.draft.tokens.tolist()}
        params = verification_params(request)
        outputs, anew = [], True
        while anew:  # the log-probs are of several weights
            outputs = [o async for o in self._stream(row, prompt, params, kwargs)]
            anew = row.spans_refit and not row.aborted
        if not outputs:  # aborted before it began
            self._refuse_draft(request)
            return None, None
        version = request.versions.at_end(0, self.policy_version)
        [(_, output, end)] = self._judge([(request, outputs[-1])], version)
        return output, end

    async def _measure_noise(self, row: AsyncRow, request: RolloutRequest, kwargs: Any) -> None:
        """Prefill a just-decoded response, for the first few rows of the engine only."""
        self._noise.rows_left -= 1
        started = time.perf_counter()
        prompt = {"prompt_token_ids": request.rules.prompt + request.tokens}
        outputs = [o async for o in self._stream(row, prompt, verification_params(request), kwargs)]
        if outputs and request.versions.single:
            self._noise.add_prefill(request, outputs[-1], self.metrics)
        self.metrics.verify_s += time.perf_counter() - started

    async def _decode(
        self, row: AsyncRow, request: RolloutRequest, kwargs: Any
    ) -> tuple[RequestOutput, ResponseEnd]:
        """Decode the rest after the draft; return the last output and how the response ended."""
        ended = False
        placed = await self._place(row)
        try:
            while placed and not row.aborted:
                prompt, params = self._next_request(request)
                async with contextlib.aclosing(self._stream(row, prompt, params, kwargs)) as stream:
                    # Closing ends a request whose row ended by a stop string, or continues in
                    # another request.
                    async for output in stream:
                        end = self._append_decoded(request, output)
                        if end is not None:
                            ended = True
                            return output, end
                        if request.needs_request:
                            break
                    else:
                        raise RuntimeError(f"request {row.request_id} ended without an output")
            output, ended = unfinished_output(request, row.request_id), True
            return output, ResponseEnd.unfinished(len(request.tokens))
        finally:
            if placed and self._decoding is not None:
                self._decoding.release()
            if not ended:  # cancelled
                self._store(self._interrupted_rollouts({row.request_id: request}))

    async def _stream(
        self, row: AsyncRow, prompt: Any, params: SamplingParams, kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a row's request, which runs under the row's own id."""
        await self._updates.wait()
        row.enter(self.policy_version)
        prompt = salted(prompt, self.policy_version)
        try:
            async with contextlib.aclosing(
                self.llm.generate(prompt, params, row.request_id, **kwargs)
            ) as stream:
                async for output in Watched(stream, lambda: note_decoded(self.llm, row)):
                    row.answered = True
                    yield output
        finally:
            row.in_engine = False

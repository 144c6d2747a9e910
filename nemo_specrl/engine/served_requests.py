"""Requests that others send to an engine, such as those of vLLM's HTTP server.

They come without a row: nothing says which prompt of a batch they belong to, or that they are a
turn of a conversation. The history is therefore found by the request's own tokens. A prompt that
begins with one seen before is a later turn and drafts from what the engine has for that one, its
root (``drafters.roots``). Any other prompt may be a root: the cache is asked for it, once for each
policy version, and its first request brings the history to the engine.

What such a request yields is not cached: only the client that led a conversation knows it as a
whole, and puts it into the cache. It is told which weights made each turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.async_rows import AsyncRow
from nemo_specrl.engine.drafters.roots import ROOTS, Roots
from nemo_specrl.engine.policy_version import TokenVersions
from nemo_specrl.engine.requests import RolloutRequest, build_requests
from nemo_specrl.errors import ConfigError, UnsupportedSampling
from nemo_specrl.media import content_tokens, has_media

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

__all__ = ["ServedTurn", "ServingSpeculativeLLM"]

SERVED = 1 << 63
"""Bit of the identity of a response without a sample index; identities with one are below it."""


class ServedTurn(NamedTuple):
    """What a request yielded: its prompt and response, the weights that made its tokens, and the
    prompt's key.
    """

    prompt: list[int]
    tokens: list[int]
    versions: TokenVersions
    key: bytes


class ServingSpeculativeLLM(AsyncSpeculativeLLM):
    """An :class:`AsyncSpeculativeLLM` whose engine also serves requests that come without a row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._roots = Roots(ROOTS)
        self._served = itertools.count()
        self._asked: set[bytes] = set()  # roots for which the cache was asked
        self._asked_at = -1  # the policy version

    async def serve(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        drafting: bool = True,
        note: Callable[[ServedTurn], None] | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run ``AsyncLLM.generate``, with drafts from the history of the prompt's root.

        A request that cannot be drafted for is decoded without drafts: one with parameters under
        which drafts cannot be verified, a greedy one, one with ``n`` above 1, or one with images
        that vLLM has not rendered yet (its HTTP server renders them).

        Args:
            prompt: as ``AsyncLLM.generate`` takes it.
            sampling_params: likewise.
            request_id: unique.
            drafting: whether to ask the cache, draft, and count the request; False in validation.
            note: called with what the request yielded, if it ran to its end.
            kwargs: passed to ``AsyncLLM.generate``.

        Yields:
            The outputs of ``AsyncLLM.generate``.
        """
        request = self._request(prompt, sampling_params)
        if request is None:
            async for output in self.generate_plain(prompt, sampling_params, request_id, **kwargs):
                yield output
            return
        tokens: list[int] = []
        with self._rows.row(request_id, request) as row:
            await self._rows.admit(row)
            if drafting:
                sampling_params = await self._with_history(row, request, sampling_params)
            started = time.perf_counter()
            async for output in self._stream(row, prompt, sampling_params, kwargs):
                tokens = _appended(tokens, output, sampling_params)
                yield output
        if drafting:
            self.metrics.rows += 1
            self.metrics.decode_s += time.perf_counter() - started
            self.metrics.decoded_tokens += len(tokens)
            self.metrics.response_tokens += len(tokens)
        if note is not None and not row.aborted:
            made = list(tokens)
            turn = ServedTurn(request.prompt_tokens, made, request.versions, request.row.key)
            note(turn)

    def _request(self, prompt: Any, params: SamplingParams) -> RolloutRequest | None:
        """Build the request, if it can be drafted for."""
        if not self._proposes or params.n != 1:
            return None
        if has_media(prompt) and "mm_placeholders" not in prompt:
            return None  # the images' positions are not known
        try:
            [request] = build_requests(self._limits, prompt, params, None, trees_alone=True)
        except (ConfigError, UnsupportedSampling):
            return None  # the engine says what is wrong, if anything is
        return request if request.draftable else None

    async def _with_history(
        self, row: AsyncRow, request: RolloutRequest, params: SamplingParams
    ) -> SamplingParams:
        """Add to a request's parameters what the drafter needs, and the history if it is a root."""
        key, version = request.row.key, self.policy_version
        if self._asked_at != version:
            self._asked, self._asked_at = set(), version
        root = content_tokens(request.prompt_tokens, _rendered_media(request.media))
        if self._roots.key_of(root, key) == key and key not in self._asked:
            self._asked.add(key)  # other requests of this prompt do not wait for the answer
            started = time.perf_counter()
            await row.wait_for(self._look_up(key, version))
            self.metrics.lookup_s += time.perf_counter() - started
        return self._histories.with_identity(request, params, SERVED | next(self._served) << 16)

    async def _look_up(self, key: bytes, version: int) -> None:
        """Have the cached responses to a prompt sent with its next request."""
        try:
            claim = await self.cache.claim(key, version)
            if claim is None:  # it was late: the prompt's next request asks again
                self._asked.discard(key)
                return
            self.cache.release(key, claim.sample_index)  # the conversation's leader gives it one
            if claim.whole:  # otherwise a row has already brought it
                self._histories.add({key: claim.rollouts}, version)
        except Exception as error:  # whatever fails in the cache, rows are decoded without it
            self._count_cache_error(error)


def _rendered_media(prompt: Any) -> Iterator[tuple[str, int, int]]:
    """Content name, first position and number of placeholders of a rendered prompt's media.

    Args:
        prompt: a prompt; None if it has no media.
    """
    for kind, places in (prompt or {}).get("mm_placeholders", {}).items():
        for name, place in zip(prompt["mm_hashes"][kind], places, strict=True):
            yield name, place.offset, place.length


def _appended(tokens: list[int], output: RequestOutput, params: SamplingParams) -> list[int]:
    """Return the response so far, given an output that has all of it, or only what is new.

    Existing tokens are not copied: a response has as many outputs as it has tokens.
    """
    from vllm.sampling_params import RequestOutputKind

    made: list[int] = output.outputs[0].token_ids  # a list, whatever vLLM's annotation
    if params.output_kind is not RequestOutputKind.DELTA:
        return made
    tokens += made
    return tokens

"""Weight updates in flight: new weights for an ``AsyncLLM`` whose rows continue with them.

The engine is paused between two steps, with all rows where they are, and what it has sent is taken
in: the tokens that a row has at that point were made by the old weights, and all later ones will be
made by the new ones. No request is on its way to the engine in the meantime.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from nemo_specrl.engine.async_rows import RETRY_SECONDS, AsyncRow, AsyncRows
from nemo_specrl.engine.vllm.compat import (
    keeps_tokens_at_reset,
    made_so_far,
    take_in_outputs,
)
from nemo_specrl.errors import ConfigError

__all__ = ["WeightUpdates", "salted"]


class WeightUpdates:
    """Holds rows back while the weights of their engine change.

    Args:
        llm: the ``AsyncLLM``.
        rows: all rows that have requests in it.
    """

    def __init__(self, llm: Any, rows: AsyncRows) -> None:
        self._llm, self._rows = llm, rows
        self._one = asyncio.Lock()
        self._none = asyncio.Event()
        self._none.set()

    async def wait(self) -> None:
        """Wait until no update is under way."""
        while not self._none.is_set():
            await self._none.wait()

    @contextlib.asynccontextmanager
    async def paused(self, recompute_kv: bool) -> AsyncIterator[dict[AsyncRow, int]]:
        """Keep the engine from stepping.

        An engine that its user has paused, or put to sleep, stays so afterwards.

        Args:
            recompute_kv: whether to reset the KV blocks of running requests.

        Yields:
            The rows whose request has not ended, and how many tokens it has made.

        Raises:
            ConfigError: some requests have not ended, and this vLLM would lose a token of each at
                the reset.
        """
        async with self._one:
            self._none.clear()
            try:
                await self._settle()
                paused = await self._llm.is_paused()
                if not paused:
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                try:
                    await take_in_outputs(self._llm)
                    found = {row: made_so_far(self._llm, row.request_id) for row in self._rows}
                    made = {row: n for row, n in found.items() if n is not None and row.in_engine}
                    if made and recompute_kv and not keeps_tokens_at_reset(self._llm):
                        raise ConfigError(
                            "recompute_kv = True: this vLLM (0.20) would lose a token of each row "
                            "in progress; set False, or install 0.25.1 or later"
                        )
                    yield made
                finally:
                    if not paused:
                        await self._llm.resume_generation()
            finally:
                self._none.set()

    async def _settle(self) -> None:
        """Wait until all requests on their way to the engine have reached it."""
        rows = list(self._rows)
        while rows := [row for row in rows if row.in_engine and not self._is_known(row)]:
            await asyncio.sleep(RETRY_SECONDS)

    def _is_known(self, row: AsyncRow) -> bool:
        return row.answered or made_so_far(self._llm, row.request_id) is not None


def salted(prompt: Any, policy_version: int) -> Any:
    """Return a prompt whose KV blocks in the prefix cache are found under one policy version only.

    Args:
        prompt: as vLLM takes it. One that is neither text, tokens nor a dict stays as it is.
        policy_version: policy version of the weights that prefill it.
    """
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, list):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, dict):
        return prompt
    return {**prompt, "cache_salt": f"{policy_version} {prompt.get('cache_salt') or ''}"}

"""The counts of a running engine, read by one call of its core."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nemo_specrl.monitoring import names as metric

__all__ = ["METHOD", "counts", "counts_async", "tokens_per_step"]

METHOD = "spec_rl_counts"
"""Method that ``core_patches`` gives vLLM's engine core."""


def counts(llm: Any) -> dict[str, float]:
    """The counts of a ``vllm.LLM`` or ``LLMEngine`` since it began.

    Returns:
        Numbers by the names in ``monitoring.names.ENGINE_COUNTS``, and ``spec_rl/drafting``: 1, or
        0, and nothing else, where the engine does not draft from history.
    """
    client = getattr(llm, "llm_engine", llm).engine_core
    try:
        if hasattr(client, "engine_core"):  # in this process
            return dict(getattr(client.engine_core, METHOD)())
        return dict(client.call_utility(METHOD))
    except Exception as error:
        return _off(error)


async def counts_async(llm: Any) -> dict[str, float]:
    """The same for an ``AsyncLLM``, summed over its data-parallel engines."""
    client = llm.engine_core
    total: Counter[str] = Counter()
    try:
        for engine in getattr(client, "core_engines", None) or [client.core_engine]:
            total.update(await client._call_utility_async(METHOD, engine=engine))
    except Exception as error:
        return _off(error)
    return {**total, metric.DRAFTING: float(total[metric.DRAFTING] > 0)}


def _off(error: Exception) -> dict[str, float]:
    if METHOD not in str(error):  # not the absence of the method, which stands for no drafts
        raise error
    return {metric.DRAFTING: 0.0}


def tokens_per_step(now: dict[str, float], before: dict[str, float] | None = None) -> float | None:
    """Tokens of a row per step of the engine between two counts; None: no response has ended."""
    tokens, accepted = (
        now.get(name, 0.0) - (before or {}).get(name, 0.0)
        for name in (metric.ENGINE_RESPONSE_TOKENS, metric.ACCEPTED_TOKENS)
    )
    return tokens / (tokens - accepted) if tokens > accepted else None

"""The engines' metrics under NeMo-RL's names, and NeMo-RL's under the plug-in's for Prometheus.

In NeMo-RL's logger counts are in ``train/`` and times in ``timing/train/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.monitoring import names as metric

__all__ = ["counts", "evaluation_summary", "step_record", "times"]

PLAIN = {
    metric.ENGINE_VERIFY_S: metric.VERIFY_S,
    metric.ENGINE_DECODED_TOKENS: metric.DECODED_TOKENS,
    metric.ENGINE_RESPONSE_TOKENS: metric.RESPONSE_TOKENS,
    metric.ENGINE_HELDOUT_TOKENS: metric.HELDOUT_TOKENS,
    metric.ENGINE_PUT_OFF_PROMPTS: metric.PUT_OFF_PROMPTS,
    metric.ENGINE_PUT_OFF_TOKENS: metric.PUT_OFF_TOKENS,
}
"""What the embedded trainer's records have in addition to the engine's metrics."""

TIMES = {
    metric.LOOKUP_S: "spec_rl_lookup",
    metric.ENGINE_VERIFY_S: "spec_rl_verification",
    metric.DECODE_S: "spec_rl_decoding",
    metric.ASSEMBLY_S: "spec_rl_assembly",
}

STEP_TIMES = {
    "total_step_time": metric.STEP_S,
    "policy_training": metric.TRAIN_S,
    # Only the driver's calls to synchronous engines; rollouts of asynchronous ones overlap.
    "spec_rl_rollout": metric.ROLLOUT_S,
    "spec_rl_heldout_decoding": metric.HELDOUT_DECODE_S,
} | {timed: name for name, timed in TIMES.items()}


def counts(metrics: EngineMetrics) -> dict[str, float]:
    """Return everything but the times, by name under ``train/``."""
    return {name: value for name, value in metrics.as_dict().items() if name not in TIMES}


def times(metrics: EngineMetrics, concurrent: int) -> dict[str, float]:
    """Return mean seconds, by name under ``timing/train/``.

    Args:
        metrics: the sum over what ran at the same time.
        concurrent: the number of engines (or, with asynchronous engines, rows) that did. Only their
            mean is comparable with the seconds of a step.
    """
    values = metrics.as_dict()
    return {timed: values[name] / max(1, concurrent) for name, timed in TIMES.items()}


def evaluation_summary(counted: Mapping[str, float]) -> str:
    """Return a line on what an evaluation drafted.

    Args:
        counted: :func:`counts` of all of its rows, and what is known about the cache.
    """
    line = f"spec_rl: {counted.get(metric.ENGINE_RESPONSE_TOKENS, 0):.0f} tokens of responses"
    if metric.TREE_TOKENS_PER_STEP in counted:
        line += (
            f", {counted[metric.TREE_TOKENS_PER_STEP]:.2f} per row and engine step (1 without "
            f"drafts); {counted[metric.TREE_DRAFTED_TOKENS]:.0f} draft tokens verified, "
            f"{counted[metric.TREE_ACCEPTED_FRACTION]:.0%} of them accepted"
        )
    if metric.CACHE_BYTES in counted:
        line += f"; {counted[metric.CACHE_BYTES] / 2**20:.1f} MiB of rollouts in the cache"
    errors = counted.get(metric.CACHE_ERRORS, 0)
    return line + (f"; {errors:.0f} errors of the cache" if errors else "")


def step_record(
    step: int, values: Mapping[str, float], seconds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a step's record, with the names used in the embedded trainer's records.

    Args:
        step: number of the step.
        values: what was logged under ``train/``.
        seconds: what was logged under ``timing/train/``.
    """
    timed = {name: seconds[key] for key, name in STEP_TIMES.items() if key in seconds}
    record = {metric.STEP: step, **values, **timed}
    return record | {name: record[engines] for engines, name in PLAIN.items() if engines in record}

"""What reuse did, in NeMo-RL's metrics: counts as ``train/...``, seconds as ``timing/train/...``.

Not every trainer asks its generation for metrics of a step (asynchronous GRPO of v0.7.0 does not),
and their timers are local variables of theirs. But all of them end a step by logging what their
timer measured, through the logger that ``setup`` made: there ours are added.
"""

from __future__ import annotations

from typing import Any

from nemo_specrl.engine.metrics import EngineMetrics

__all__ = ["counts", "log_with", "times"]

LAST_OF_A_STEP = "timing/train"
TIMES = {
    "spec_rl/lookup_s": "spec_rl_lookup",
    "spec_rl/verify_s": "spec_rl_verification",
    "spec_rl/decode_s": "spec_rl_decoding",
    "spec_rl/assembly_s": "spec_rl_assembly",
}


def counts(metrics: EngineMetrics) -> dict[str, float]:
    """All but the seconds, by name in ``train/...``."""
    return {name: value for name, value in metrics.as_dict().items() if name not in TIMES}


def times(metrics: EngineMetrics, side_by_side: int) -> dict[str, float]:
    """Seconds, by name in ``timing/train/...``.

    Args:
        metrics: the sum over what ran at the same time.
        side_by_side: how many those were. Their mean is what compares with the seconds of a step.
    """
    values = metrics.as_dict()
    return {timed: values[name] / max(1, side_by_side) for name, timed in TIMES.items()}


def log_with(logger: Any, generation: Any) -> None:
    """Have NeMo-RL's logger log, at the end of each step, what ``generation`` did in it."""
    original = logger.log_metrics

    def log_metrics(metrics: Any, step: int, prefix: str | None = "", **kwargs: Any) -> None:
        if prefix == LAST_OF_A_STEP and generation.cache is not None:
            counted, timed = generation.take_metrics()
            original(counted, step, "train")
            metrics = {**metrics, **timed}
        original(metrics, step, prefix, **kwargs)

    logger.log_metrics = log_metrics

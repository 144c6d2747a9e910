"""The engines' metrics under NeMo-RL's names: counts in ``train/``, times in ``timing/train/``."""

from __future__ import annotations

from nemo_specrl.engine.metrics import EngineMetrics

__all__ = ["counts", "times"]

TIMES = {
    "spec_rl/lookup_s": "spec_rl_lookup",
    "spec_rl/verify_s": "spec_rl_verification",
    "spec_rl/decode_s": "spec_rl_decoding",
    "spec_rl/assembly_s": "spec_rl_assembly",
}


def counts(metrics: EngineMetrics) -> dict[str, float]:
    """Everything but the times, by name under ``train/``."""
    return {name: value for name, value in metrics.as_dict().items() if name not in TIMES}


def times(metrics: EngineMetrics, concurrent: int) -> dict[str, float]:
    """Mean seconds, by name under ``timing/train/``.

    Args:
        metrics: the sum over what ran at the same time.
        concurrent: the number of engines (or, with asynchronous engines, rows) that did. Only
            their mean compares with the seconds of a step.
    """
    values = metrics.as_dict()
    return {timed: values[name] / max(1, concurrent) for name, timed in TIMES.items()}

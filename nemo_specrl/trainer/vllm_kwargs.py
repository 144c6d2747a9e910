"""Checks of a recipe's ``vllm_kwargs:`` that do not need vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrl.config import MAX_COUNT, WrongKey

__all__ = ["check_vllm_kwargs"]

SET_BY_RECIPE = {
    "model": "policy.model_name",
    "tokenizer": "policy.model_name",
    "seed": "grpo.seed or ppo.seed",
    "dtype": "vllm_cfg.precision",
    "max_model_len": "vllm_cfg.max_model_len",
    "gpu_memory_utilization": "vllm_cfg.gpu_memory_utilization",
    "enforce_eager": "vllm_cfg.enforce_eager",
    "skip_tokenizer_init": "stop_strings",
    "enable_prefix_caching": "the trainer: it is always on",
    "disable_log_stats": "the trainer: it is always true",
    "worker_extension_cls": "the trainer, for refits",
}
"""Arguments of ``vllm.LLM`` that are set elsewhere, and where."""


def check_vllm_kwargs(values: Mapping[str, Any]) -> None:
    """Refuse arguments of ``vllm.LLM`` that are set elsewhere, or whose numbers are out of range.

    Raises:
        WrongKey: names the key and what is wrong with it.
    """
    for name, value in values.items():
        key = f"vllm_kwargs.{name}"
        if name in SET_BY_RECIPE:
            raise WrongKey(key, value, f"is set by {SET_BY_RECIPE[name]}; leave it out here")
        counts = name in ("max_num_seqs", "max_num_batched_tokens")
        if counts and not (type(value) is int and 1 <= value <= MAX_COUNT):
            raise WrongKey(key, value, f"must be a whole number from 1 to {MAX_COUNT}")
        if not all(map(math.isfinite, _floats(value))):
            raise WrongKey(key, value, "must be a finite number")


def _floats(value: Any) -> Iterator[float]:
    """Yield all floating-point numbers in a YAML value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)

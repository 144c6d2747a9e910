"""The workers of quantized generation (``policy.generation.quant_cfg``), which draft like others.

They have their own environment, with modelopt, and no other process imports this module. NeMo-RL's
classes exist only with Ray's decorator, and what Ray makes of a class cannot be reliably inherited
from. What they add to NeMo-RL's usual workers is therefore repeated here, with the same function
and names that they use.
"""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches

from nemo_specrl.nemo_rl.async_worker import ASYNC_OPTIONS, SpecVllmAsyncGenerationWorkerImpl
from nemo_specrl.nemo_rl.compat import QUANTIZED, lookup
from nemo_specrl.nemo_rl.sync_worker import SpecVllmGenerationWorkerImpl

__all__ = [
    "SpecVllmQuantAsyncGenerationWorker",
    "SpecVllmQuantAsyncGenerationWorkerImpl",
    "SpecVllmQuantGenerationWorker",
    "SpecVllmQuantGenerationWorkerImpl",
]

_configure = lookup(QUANTIZED, "_configure_quant_engine_kwargs")
_VARIABLES = lookup(QUANTIZED, "_EXTRA_ENV_VARS")


class _Quantized:
    """What NeMo-RL's ``VllmQuantGenerationWorker`` adds; a mixin before the plug-in's workers."""

    cfg: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["extra_env_vars"] = _VARIABLES
        super().__init__(*args, **kwargs)

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        _configure(self.cfg, llm_kwargs)
        super()._create_engine(llm_kwargs)  # type: ignore[misc]


class SpecVllmQuantGenerationWorkerImpl(_Quantized, SpecVllmGenerationWorkerImpl):
    """The worker's methods, without Ray's decorator."""


class SpecVllmQuantAsyncGenerationWorkerImpl(_Quantized, SpecVllmAsyncGenerationWorkerImpl):
    """The same with an asynchronous engine."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecVllmQuantGenerationWorker(SpecVllmQuantGenerationWorkerImpl):
    """The Ray actor."""


@ray.remote(**ASYNC_OPTIONS)
class SpecVllmQuantAsyncGenerationWorker(SpecVllmQuantAsyncGenerationWorkerImpl):
    """The Ray actor."""

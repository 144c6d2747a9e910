"""The workers of quantized generation (``policy.generation.quant_cfg``), which draft as others do.

They have an environment of their own, with modelopt, and no other process imports this module.
NeMo-RL decorates its classes where it defines them: what they were before is Ray's to know.
"""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.modelopt.models.generation.vllm_quant_worker import (
    VllmQuantAsyncGenerationWorker,
    VllmQuantGenerationWorker,
)

from nemo_specrl.nemo_rl.async_worker import SpecVllmAsyncGenerationWorkerImpl
from nemo_specrl.nemo_rl.compat import undecorated
from nemo_specrl.nemo_rl.sync_worker import SpecVllmGenerationWorkerImpl

__all__ = [
    "SpecVllmQuantAsyncGenerationWorker",
    "SpecVllmQuantAsyncGenerationWorkerImpl",
    "SpecVllmQuantGenerationWorker",
    "SpecVllmQuantGenerationWorkerImpl",
]

_Quantized: Any = undecorated(VllmQuantGenerationWorker)
_AsyncQuantized: Any = undecorated(VllmQuantAsyncGenerationWorker)


class SpecVllmQuantGenerationWorkerImpl(SpecVllmGenerationWorkerImpl, _Quantized):
    """The plug-in's methods come first, then those of quantization, then NeMo-RL's."""


class SpecVllmQuantAsyncGenerationWorkerImpl(SpecVllmAsyncGenerationWorkerImpl, _AsyncQuantized):
    """The same with an asynchronous engine."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SpecVllmQuantGenerationWorker(SpecVllmQuantGenerationWorkerImpl):
    """The Ray actor."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class SpecVllmQuantAsyncGenerationWorker(SpecVllmQuantAsyncGenerationWorkerImpl):
    """The Ray actor."""

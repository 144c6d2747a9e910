"""Quantized generation on a CPU: NeMo-RL's workers and modelopt's fake quantization."""

from __future__ import annotations

from typing import Any

import ray
import torch
from modelopt.torch.quantization.nn.modules.tensor_quantizer import TensorQuantizer
from nemo_rl.modelopt.models.generation.vllm_quant_patch import FakeQuantWorker
from vllm.v1.worker.cpu_worker import CPUWorker

from nemo_specrl.nemo_rl.quantized_workers import (
    SpecVllmQuantAsyncGenerationWorkerImpl,
    SpecVllmQuantGenerationWorkerImpl,
)
from tests.support.nemo_rl.cpu import StockAsyncWorkerImpl, StockWorkerImpl

LARGEST = 64.0
"""The largest activation that is not clipped; Megatron would send each layer's own at a refit."""


class CpuFakeQuantWorker(FakeQuantWorker, CPUWorker):  # type: ignore[misc]
    """vLLM's worker with the quantizers of NeMo-RL."""

    def compile_or_warm_up_model(self) -> Any:
        taken = super().compile_or_warm_up_model()
        for module in self.model_runner.model.modules():
            if isinstance(module, TensorQuantizer) and module.is_enabled:
                torch.nn.init.constant_(module.amax, LARGEST)
        return taken


class SpecQuantWorkerImpl(SpecVllmQuantGenerationWorkerImpl, StockWorkerImpl):
    pass


class SpecQuantAsyncWorkerImpl(SpecVllmQuantAsyncGenerationWorkerImpl, StockAsyncWorkerImpl):
    pass


@ray.remote
class SpecQuantWorker(SpecQuantWorkerImpl):
    pass


@ray.remote
class SpecQuantAsyncWorker(SpecQuantAsyncWorkerImpl):
    pass

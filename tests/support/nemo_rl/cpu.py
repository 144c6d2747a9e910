"""Changes that let NeMo-RL's vLLM workers run on a CPU; the plug-in's own code is not changed.

NeMo-RL assumes a GPU: NUMA binding by GPU, sleep mode, weights through CUDA's IPC. Each class or
function below replaces one such part, in tests only.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

if os.environ.get("NEMO_SPECRL_TEST_V2"):
    from tests.support import v2_cpu

import ray
import torch

if not torch.cuda.is_available():  # NVTX raises on CPU builds
    torch.cuda.nvtx.range_push = lambda *a, **k: 0
    torch.cuda.nvtx.range_pop = lambda *a, **k: 0

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.nemo_rl.async_worker import ASYNC_OPTIONS, SpecVllmAsyncGenerationWorkerImpl
from nemo_specrl.nemo_rl.compat import (
    STOCK_ASYNC_WORKER,
    STOCK_QUANT_ASYNC_WORKER,
    STOCK_QUANT_WORKER,
    STOCK_WORKER,
    substituted_workers,
)
from nemo_specrl.nemo_rl.context import current_run
from nemo_specrl.nemo_rl.generation import SpecVllmGeneration
from nemo_specrl.nemo_rl.sync_worker import SpecVllmGenerationWorkerImpl
from tests.support.nemo_rl import counting

counting.install()
if os.environ.get("NEMO_SPECRL_TEST_V2") and v2_cpu.READY:
    # The kernels of drafting would take minutes; test_kernels checks that these are equal to them.
    from nemo_specrl.engine.drafters.v2 import arrays
    from tests.support import v2_numpy

    arrays.kernels = v2_numpy

_QUANTIZED = "tests.support.nemo_rl.quantized"
WEIGHTS = "NEMO_SPECRL_TEST_WEIGHTS"
"""File through which the policy's weights reach the engines, instead of CUDA's IPC."""


def _load(self: Any, path: str) -> bool:
    from safetensors.torch import load_file

    self.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()))
    return True


# vLLM refuses an extension with an attribute that its CPU worker already has.
_TAKEN = ("__dict__", "__weakref__", "__module__", "synchronize_device")
CpuExtension = type(
    "CpuExtension",
    (),
    {name: v for name, v in vars(VllmInternalWorkerExtension).items() if name not in _TAKEN}
    | {"__module__": __name__, "cpu_load": _load, "report_device_id": lambda self: "cpu"},
)


class OnCpu:
    """Changes that both workers need; a base class before NeMo-RL's."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        local_cpu_environment()  # by the process: in vLLM 0.20 it depends on it
        # Packed weights cannot be loaded in place.
        import vllm.model_executor.layers.utils as utils

        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
            layer, "cpu_linear", torch.nn.functional.linear
        )
        llm_kwargs |= {
            "enable_sleep_mode": False,
            "worker_extension_cls": f"{__name__}.CpuExtension",
        }
        if "worker_cls" in llm_kwargs:  # that of fake quantization
            llm_kwargs["worker_cls"] = f"{_QUANTIZED}.CpuFakeQuantWorker"
        super()._create_engine(llm_kwargs)

    def post_init(self) -> None:
        self.vllm_device_ids = self.report_device_id()

    def report_device_id(self) -> list[str]:
        return [f"cpu-{os.getpid()}"]

    def sleep(self) -> bool:
        self.llm.llm_engine.reset_prefix_cache()
        return True

    def wake_up(self, **kwargs: Any) -> bool:
        return True

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> bool:
        done = self.llm.collective_rpc("cpu_load", args=(os.environ[WEIGHTS],))
        self.llm.llm_engine.reset_prefix_cache()
        return all(done)


class AsyncOnCpu(OnCpu):
    """The same changes for the asynchronous worker."""

    async def post_init_async(self) -> None:
        self.vllm_device_ids = self.report_device_id()

    async def report_device_id_async(self) -> list[str]:
        return self.report_device_id()

    async def sleep_async(self) -> bool:
        await self.llm.reset_prefix_cache()
        return True

    async def wake_up_async(self, **kwargs: Any) -> bool:
        return True

    async def prepare_refit_info_async(self, state_dict_info: Any) -> None:
        pass

    async def init_collective_async(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def update_weights_via_ipc_zmq_async(self, *args: Any, **kwargs: Any) -> bool:
        done = await self.llm.collective_rpc("cpu_load", args=(os.environ[WEIGHTS],))
        await self.llm.reset_prefix_cache()
        return all(done)

    update_weights_from_collective_async = update_weights_via_ipc_zmq_async


class StockAsyncWorkerImpl(AsyncOnCpu, VllmAsyncGenerationWorkerImpl):
    pass


class SpecAsyncWorkerImpl(SpecVllmAsyncGenerationWorkerImpl, StockAsyncWorkerImpl):
    pass


class StockWorkerImpl(OnCpu, VllmGenerationWorkerImpl):
    pass


class SpecWorkerImpl(SpecVllmGenerationWorkerImpl, StockWorkerImpl):
    """The plug-in's methods come first, then those for the CPU, then NeMo-RL's."""


@ray.remote
class StockWorker(StockWorkerImpl):
    pass


@ray.remote
class SpecWorker(SpecWorkerImpl):
    pass


@ray.remote
class StockAsyncWorker(StockAsyncWorkerImpl):
    pass


@ray.remote(**ASYNC_OPTIONS)
class SpecAsyncWorker(SpecAsyncWorkerImpl):
    pass


class CpuGeneration(SpecVllmGeneration):
    worker_classes: ClassVar = {
        STOCK_WORKER: f"{__name__}.SpecWorker",
        STOCK_ASYNC_WORKER: f"{__name__}.SpecAsyncWorker",
        STOCK_QUANT_WORKER: f"{_QUANTIZED}.SpecQuantWorker",
        STOCK_QUANT_ASYNC_WORKER: f"{_QUANTIZED}.SpecQuantAsyncWorker",
    }
    stock_classes: ClassVar = {
        STOCK_WORKER: f"{__name__}.StockWorker",
        STOCK_ASYNC_WORKER: f"{__name__}.StockAsyncWorker",
    }

    def __init__(self, cluster: Any, config: Any, **kwargs: Any) -> None:
        if current_run() is not None:
            super().__init__(cluster, config, **kwargs)
            return
        with substituted_workers(self.stock_classes, config):
            super().__init__(cluster, config, **kwargs)

    def prepare_refit_info(self, state_dict_info: Any) -> None:
        pass

"""Changes that let NeMo-RL's vLLM workers run on a CPU; the plug-in's own code is not changed.

NeMo-RL assumes a GPU: NUMA binding by GPU, sleep mode, weights through CUDA's IPC. Each class or
function below replaces one such part, in tests only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch

if not torch.cuda.is_available():  # NVTX raises on CPU builds
    torch.cuda.nvtx.range_push = lambda *a, **k: 0
    torch.cuda.nvtx.range_pop = lambda *a, **k: 0

from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from tests.support.nemo_rl.recording import METRICS

SLOW = "NEMO_SPECRL_TEST_SLOW"
"""If set, a file that does not exist yet: the engine that makes it takes twice as long."""
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
        # Packed weights cannot be loaded in place.
        import vllm.model_executor.layers.utils as utils

        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
            layer, "cpu_linear", torch.nn.functional.linear
        )
        llm_kwargs |= {
            "enable_sleep_mode": False,
            # vLLM 0.29 does not load a tied head again.
            "load_format": "auto",
            "worker_extension_cls": f"{__name__}.CpuExtension",
        }
        super()._create_engine(llm_kwargs)

    def post_init(self) -> None:
        self.vllm_device_ids = self.report_device_id()

    def report_device_id(self) -> list[str]:
        return [f"cpu-{os.getpid()}"]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        output = super().generate(*args, **kwargs)
        if SLOW in os.environ and not hasattr(self, "_slow"):
            with contextlib.suppress(FileExistsError):
                Path(os.environ[SLOW]).touch(exist_ok=False)
                self._slow = True
        if getattr(self, "_slow", False):
            time.sleep(time.monotonic() - begun)
        return output

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


class WorkerImpl(OnCpu, VllmGenerationWorkerImpl):
    pass


class AsyncWorkerImpl(AsyncOnCpu, VllmAsyncGenerationWorkerImpl):
    pass


@ray.remote
class Worker(WorkerImpl):
    pass


@ray.remote
class AsyncWorker(AsyncWorkerImpl):
    pass


class GenerationOnCpu:
    """Gives NeMo-RL's generation the workers above; a base class before it, or the plug-in's."""

    def __init__(self, cluster: Any, config: Any, **kwargs: Any) -> None:
        original = vllm_generation.resolve_generation_worker_cls
        kind = "AsyncWorker" if config["vllm_cfg"]["async_engine"] else "Worker"
        ACTOR_ENVIRONMENT_REGISTRY[f"{__name__}.{kind}"] = sys.executable
        vllm_generation.resolve_generation_worker_cls = lambda *_: f"{__name__}.{kind}"
        try:
            super().__init__(cluster, config, **kwargs)
        finally:
            vllm_generation.resolve_generation_worker_cls = original

    def prepare_refit_info(self, state_dict_info: Any) -> None:
        pass

    def shutdown(self) -> bool:
        """Write vLLM's counters of the whole job first, since some trainers log none of them.

        After a failure, ``__del__`` calls this when Ray has ended: NeMo-RL's own would wait for it.
        """
        if not ray.is_initialized():
            return True
        if hasattr(self, "worker_group"):
            counters = {str(name): n for name, n in self._get_raw_spec_counters().items()}
            if counters:  # a second call finds engines that have ended
                Path(os.environ[METRICS]).with_name("counters.json").write_text(
                    json.dumps(counters)
                )
        return super().shutdown()


class StockGeneration(GenerationOnCpu, VllmGeneration):
    """Without the plug-in's part of the driver."""

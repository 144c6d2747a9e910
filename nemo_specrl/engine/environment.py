"""The environment of an engine on a CPU, set before vLLM is imported."""

from __future__ import annotations

import os
import re

from nemo_specrl.errors import ConfigError

__all__ = ["local_cpu_environment"]


def local_cpu_environment() -> None:
    """Set the environment of a small in-process CPU engine. Call it before importing vLLM.

    One thread is fastest for small models: two spend more time waiting for each other than working.
    ``torch.compile`` is off, since it would spend 10 s only on a helper for log-probs
    (v1/sample/ops). Values that the user has set are kept.

    Raises:
        ConfigError: a variable that must be a number is not one. vLLM would not say which variable,
            and OpenMP would take all cores instead.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    for name, form, right in (
        ("VLLM_CPU_KVCACHE_SPACE", r"\d{1,6}", "a whole number of GiB"),
        ("OMP_NUM_THREADS", r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", "a number of threads"),
    ):
        if not re.fullmatch(form, os.environ[name].strip(), re.ASCII):
            raise ConfigError(f"{name} = {os.environ[name][:100]!r}: must be {right}; or unset it")

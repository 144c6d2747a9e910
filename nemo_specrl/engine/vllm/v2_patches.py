"""What is replaced in vLLM's V2 model runner so that it drafts from history.

Three functions of the runner and one of the configuration are wrapped; none is copied. Engines that
were not built with :func:`speculator_options` behave as before. Known are the versions in
``SOURCES``; with others, :func:`install` raises IncompatibleVersion, which names the function, and
plain decoding goes on.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from nemo_specrl.engine.vllm.compat import EXTRA_ARG
from nemo_specrl.engine.vllm.patches import check_source, to_be_replaced
from nemo_specrl.errors import IncompatibleVersion

__all__ = ["drafts_from_history", "install", "speculator_of", "speculator_options"]

DRAFTER = "v2"
SPECULATOR = "nemo_specrl.engine.drafters.v2.speculator.HistorySpeculator"
"""A class above this module, which therefore names it, as engines do with V1's proposer."""

SOURCES: dict[str, dict[str, str]] = {
    "init_speculator": {"f4cfdd06537c0f84": "0.25.1", "b5854375c89a8dd1": "0.32.0"},
    "add_requests": {"37ced69082168d1a": "0.25.1", "5c0348221ed2e87f": "0.32.0"},
    "_remove_request": {"a87e6efafc82f59b": "0.25.1", "86f1b21e7787064e": "0.32.0"},
    "_get_v2_model_runner_unsupported_features": {
        "4110550e86c8419c": "0.25.1",
        "bcd9027fd2112355": "0.32.0",
    },
}
"""XXH3 of the source of each function that is wrapped, and a version that has it."""


def speculator_options(num_speculative_tokens: int, max_bytes: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an engine that drafts from history in its V2 runner.

    To vLLM the method is ``ngram_gpu``, which asynchronous scheduling and, from 0.32 on, the V2
    runner know; the speculator is put in its place.

    Args:
        num_speculative_tokens: that every row drafts in every step.
        max_bytes: memory on the device for responses.
    """
    return {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": num_speculative_tokens,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 1,
        },
        "additional_config": {EXTRA_ARG: {"drafter": DRAFTER, "max_bytes": max_bytes}},
    }


def drafts_from_history(vllm_config: Any) -> bool:
    """Whether an engine was built with :func:`speculator_options`."""
    options = getattr(vllm_config, "additional_config", None)
    ours = options.get(EXTRA_ARG) if isinstance(options, dict) else None
    return vllm_config.speculative_config is not None and (ours or {}).get("drafter") == DRAFTER


def speculator_of(runner: Any) -> Any | None:
    """The HistorySpeculator of a model runner, or None."""
    speculator = getattr(runner, "speculator", None)
    return speculator if type(speculator).__name__ == SPECULATOR.rsplit(".", 1)[1] else None


def install() -> None:
    """Have V2 runners draft from history where their engine asks for it. May be called again.

    Raises:
        IncompatibleVersion: a function that is wrapped is missing, or not one that is known.
    """
    try:
        from vllm.config import VllmConfig
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    except ImportError as error:
        raise IncompatibleVersion(f"this vLLM has no V2 model runner ({error})") from None
    wrappers = (
        (model_runner, "init_speculator", _init_speculator),
        (GPUModelRunner, "add_requests", _add_requests),
        (GPUModelRunner, "_remove_request", _remove_request),
        (VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_features),
    )
    originals = [
        to_be_replaced(owner, name, f"this vLLM's V2 model runner has no {name}")
        for owner, name, _ in wrappers
    ]
    for original in originals:
        if original is not None:
            check_source(original, SOURCES[original.__name__])
    for (owner, name, wrap), original in zip(wrappers, originals, strict=True):
        if original is not None:
            wrapper = functools.wraps(original)(wrap(original))
            wrapper.of_nemo_specrl = True  # type: ignore[attr-defined]
            setattr(owner, name, wrapper)


def _init_speculator(original: Any) -> Any:
    def init_speculator(vllm_config: Any, device: Any, *args: Any) -> Any:
        if not drafts_from_history(vllm_config):
            return original(vllm_config, device, *args)
        module, name = SPECULATOR.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)(vllm_config, device)

    return init_speculator


def _add_requests(original: Any) -> Any:
    def add_requests(self: Any, scheduler_output: Any) -> None:
        original(self, scheduler_output)
        speculator = speculator_of(self)
        if speculator is not None:
            for request in scheduler_output.scheduled_new_reqs:
                row = self.req_states.req_id_to_index[request.req_id]
                speculator.add_request(row, request, self.req_states)

    return add_requests


def _remove_request(original: Any) -> Any:
    def _remove_request(self: Any, req_id: str) -> bool:
        speculator = speculator_of(self)
        row = self.req_states.req_id_to_index.get(req_id)
        if speculator is not None and row is not None:
            speculator.remove_request(row)
        return bool(original(self, req_id))

    return _remove_request


def _unsupported_features(original: Any) -> Any:
    """Before 0.32, vLLM holds that its V2 runner has no n-gram drafts; here it has others."""

    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        features: list[str] = original(self)
        if drafts_from_history(self):
            features = [feature for feature in features if "ngram" not in feature]
        return features

    return _get_v2_model_runner_unsupported_features

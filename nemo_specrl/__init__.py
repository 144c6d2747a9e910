"""Faster rollouts for reinforcement learning of language models with NeMo-RL and vLLM.

This module has the public names. Each is imported when it is first used, so that the command line
responds at once, and everything else works if vLLM is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_specrl import errors
    from nemo_specrl.cache import RolloutStore
    from nemo_specrl.config import SpecRLConfig
    from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
    from nemo_specrl.engine.drafters.method import engine_options
    from nemo_specrl.engine.drafters.sent_histories import send_histories
    from nemo_specrl.engine.sync_engine import SpeculativeLLM
    from nemo_specrl.rollout import Finish, Rollout, prompt_key
    from nemo_specrl.speculation.acceptance import accepted_length

__version__ = "0.1.0"

__all__ = [
    "AsyncSpeculativeLLM",
    "Finish",
    "Rollout",
    "RolloutStore",
    "SpecRLConfig",
    "SpeculativeLLM",
    "__version__",
    "accepted_length",
    "engine_options",
    "errors",
    "prompt_key",
    "send_histories",
]

_MODULES = {
    "AsyncSpeculativeLLM": "engine.async_engine",
    "Finish": "rollout",
    "Rollout": "rollout",
    "RolloutStore": "cache",
    "SpecRLConfig": "config",
    "SpeculativeLLM": "engine.sync_engine",
    "accepted_length": "speculation.acceptance",
    "engine_options": "engine.drafters.method",
    "prompt_key": "rollout",
    "send_histories": "engine.drafters.sent_histories",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name == "errors":
        return importlib.import_module("nemo_specrl.errors")
    if name in _MODULES:
        return getattr(importlib.import_module(f"nemo_specrl.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

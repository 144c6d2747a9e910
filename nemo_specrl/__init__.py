"""Rollouts that draft from a prompt's earlier responses, in vLLM and NeMo-RL.

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
    from nemo_specrl.engine.counts import counts
    from nemo_specrl.engine.options import engine_options
    from nemo_specrl.reuse.acceptance import accepted_length
    from nemo_specrl.reuse.async_llm import AsyncPrefixReuse
    from nemo_specrl.reuse.llm import PrefixReuse
    from nemo_specrl.rollout import Finish, Rollout, prompt_key

__version__ = "0.1.0"

__all__ = [
    "AsyncPrefixReuse",
    "Finish",
    "PrefixReuse",
    "Rollout",
    "RolloutStore",
    "SpecRLConfig",
    "__version__",
    "accepted_length",
    "counts",
    "engine_options",
    "errors",
    "prompt_key",
]

_MODULES = {
    "AsyncPrefixReuse": "reuse.async_llm",
    "Finish": "rollout",
    "PrefixReuse": "reuse.llm",
    "Rollout": "rollout",
    "RolloutStore": "cache",
    "SpecRLConfig": "config",
    "accepted_length": "reuse.acceptance",
    "counts": "engine.counts",
    "engine_options": "engine.options",
    "prompt_key": "rollout",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name == "errors":
        return importlib.import_module("nemo_specrl.errors")
    if name in _MODULES:
        return getattr(importlib.import_module(f"nemo_specrl.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

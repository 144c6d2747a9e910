"""Faster rollouts for reinforcement learning of language models with NeMo-RL and vLLM.

This module has the public names. ``SpeculativeLLM`` and ``RolloutStore`` import vLLM and LMDB when
they are first used, so that everything else works where neither is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_specrl import errors
from nemo_specrl.config import SpecRLConfig
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from nemo_specrl.speculation.acceptance import accepted_length

if TYPE_CHECKING:
    from nemo_specrl.cache import RolloutStore
    from nemo_specrl.engine.speculative import SpeculativeLLM

__version__ = "0.1.0"

__all__ = [
    "Finish",
    "Rollout",
    "RolloutStore",
    "SpecRLConfig",
    "SpeculativeLLM",
    "__version__",
    "accepted_length",
    "errors",
    "prompt_key",
]


def __getattr__(name: str) -> Any:
    """Import ``RolloutStore`` or ``SpeculativeLLM`` at its first use."""
    if name == "RolloutStore":
        from nemo_specrl.cache import RolloutStore

        return RolloutStore
    if name == "SpeculativeLLM":
        from nemo_specrl.engine.speculative import SpeculativeLLM

        return SpeculativeLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

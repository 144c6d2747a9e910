"""Builds the engines of a recipe: one in the trainer's process, or several Ray actors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.generation.in_process import InProcessEngine
from nemo_specrl.trainer.recipe import Recipe

if TYPE_CHECKING:
    from nemo_specrl.trainer.generation.ray_engines import RayEngines

__all__ = ["build_generation"]


def build_generation(
    recipe: Recipe, fixed: dict[str, Any], resume_from: Path | None
) -> InProcessEngine | RayEngines:
    """Build the engine or engines, and restore the cache from the checkpoint.

    Args:
        recipe: the whole recipe.
        fixed: the part of the recipe that a resumed run cannot change; it identifies the run whose
            journal may be used.
        resume_from: the checkpoint; None at the start of a run, when the cache is empty.

    Raises:
        ConfigError: vLLM refuses the model or an argument, or Ray is not installed.
        CacheError: the cache is in use, belongs to another tokenizer, or cannot be written.
        EngineError: an engine in a process of its own died.
    """
    if recipe.engines is not None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "policy.generation.colocated.enabled = False: ray is not installed; pip install "
                "ray, or set it to true for one engine in the trainer's process"
            )
        from nemo_specrl.trainer.generation.ray_engines import RayEngines

        return RayEngines(recipe, resume_from)
    return InProcessEngine.open(recipe, fixed, resume_from)

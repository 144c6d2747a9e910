"""What would be refused of a recipe's file, on a login node: ``nemo-specrl check RECIPE``.

The file is read by NeMo-RL's own loader, with all that it inherits. No engine, Ray or tokenizer is
started.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_specrl.errors import ConfigError, IncompatibleVersion, first_line
from nemo_specrl.nemo_rl.compat import option
from nemo_specrl.nemo_rl.recipe import BLOCK, check_recipe, read_block

__all__ = ["check_file", "load"]


def check_file(path: Path, overrides: Sequence[str] = ()) -> str:
    """Say in one line what the plug-in does with a recipe.

    Args:
        path: the recipe's file.
        overrides: as on the command line of NeMo-RL's scripts, such as ``grpo.max_num_steps=3``.

    Raises:
        ConfigError: the recipe cannot be read, or asks for something that the plug-in cannot do.
        IncompatibleVersion: NeMo-RL is not found.
    """
    recipe = load(path, overrides)
    if "policy" in recipe:
        controller = option(recipe, "async_rl") is not None
        spec_rl = check_recipe(recipe, controller=controller)
    else:
        spec_rl = read_block(recipe.get("generation"), "generation.spec_rl")
    if spec_rl is None:
        return f"{path}: spec_rl is off, since there is no {BLOCK}.enabled=true"
    return f"{path}: runs with preset {spec_rl.preset}, cache in {spec_rl.cache.dir} on each node"


def load(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a recipe as NeMo-RL's scripts see it.

    Raises:
        ConfigError: it cannot be read.
        IncompatibleVersion: NeMo-RL is not found.
    """
    home = os.environ.get("NEMO_RL_HOME")
    if home and home not in sys.path:
        sys.path.insert(0, home)
    try:
        config: Any = importlib.import_module("nemo_rl.utils.config")
        from omegaconf import OmegaConf
    except ImportError as error:
        raise IncompatibleVersion(
            f"NeMo-RL's loader of recipes cannot be imported ({error}); set NEMO_RL_HOME to a "
            "checkout, in an environment with omegaconf and hydra-core"
        ) from None
    # Recipes outside the checkout inherit stock ones through this variable.
    os.environ.setdefault("NEMO_RL_HOME", str(Path(config.__file__).resolve().parents[2]))
    config.register_omegaconf_resolvers()
    try:
        loaded = config.load_config(path)
        if overrides:
            loaded = config.parse_hydra_overrides(loaded, list(overrides))
        recipe: Any = OmegaConf.to_container(loaded, resolve=True)
    except Exception as error:  # of YAML, OmegaConf, Hydra or the disk
        raise ConfigError(f"{path}: {first_line(error)}") from None
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path}: must be a mapping of keys")
    return recipe

"""``nemo-specrl run SCRIPT``: runs a stock NeMo-RL script with the plug-in installed.

The plug-in is registered before the script imports any algorithm, and its folder is put on the
``PYTHONPATH`` of all workers. The script and its arguments are not changed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib import metadata
from pathlib import Path

import nemo_specrl
from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.install import install
from nemo_specrl.nemo_rl.recipe import PLUGIN
from nemo_specrl.nemo_rl.recipe_file import check_file

__all__ = ["launch"]

OWN = ("torch", "vllm", "ray")
"""Packages that a worker must import from its own environment."""


def launch(script: Path, arguments: list[str]) -> None:
    """Run ``script`` as ``python script arguments...`` would, with the plug-in registered.

    The recipe is checked before the script loads models and data, which may take minutes.

    Raises:
        ConfigError: there is no such script, workers could not import the plug-in, or the recipe
            asks for something that it cannot do.
        IncompatibleVersion: NeMo-RL is missing, or this release does not work with its version.
    """
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such file; give a script of NeMo-RL, such as examples/run_grpo.py"
        )
    folder = plugin_folder()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder is not None and str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, paths)])
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)  # as NeMo-RL's scripts read it
    recipe, overrides = parser.parse_known_args(arguments)
    if recipe.config is not None:
        check_file(recipe.config, overrides)
    install()
    runpy.run_path(str(script), run_name="__main__")


def plugin_folder() -> Path | None:
    """Find the folder from which workers with their own environment import the plug-in.

    vLLM's processes find it by the metadata beside it, which pip writes.

    Returns:
        The folder, or None if workers share this environment (NEMO_RL_PY_EXECUTABLES_SYSTEM=1).

    Raises:
        ConfigError: there is no metadata, or the folder has packages that would shadow the
            workers' own.
    """
    if not any(p.name == PLUGIN for p in metadata.entry_points(group="vllm.general_plugins")):
        raise ConfigError(
            "vLLM's processes would not load nemo_specrl, since pip has not installed it; install "
            "it by 'pip install --no-deps --target DIR', with DIR on PYTHONPATH"
        )
    if os.environ.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") == "1":
        return None
    folder = Path(nemo_specrl.__file__).resolve().parents[1]
    shadowing = [name for name in OWN if (folder / name).is_dir()]
    if shadowing:
        raise ConfigError(
            f"nemo_specrl in {folder}: workers have a Python of their own and cannot use this copy "
            f"({shadowing[0]} lies beside it); build a wheel ('pip wheel --no-deps .' in a "
            "checkout of nemo_specrl), install it by 'pip install --no-deps --target DIR "
            "nemo_specrl-*.whl' and put DIR first on PYTHONPATH"
        )
    return folder

"""``nemo-specrl run SCRIPT``: a stock NeMo-RL script, with the plug-in registered.

Registers before the script imports any algorithm, puts the plug-in where every worker's Python
finds it, and runs the script unchanged with its own arguments.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import nemo_specrl
from nemo_specrl.errors import ConfigError
from nemo_specrl.integrations.nemo_rl.compat import register

__all__ = ["launch", "plugin_folder"]

COMPILED = ("lmdb", "xxhash")
"""What the plug-in needs in a worker and NeMo-RL's environments do not have."""
HEAVY = ("torch", "vllm", "ray")


def launch(script: Path, arguments: list[str]) -> None:
    """Run ``script`` as ``python script arguments...`` would.

    Raises:
        ConfigError: there is no such script, or workers could not import the plug-in.
        IncompatibleVersion: NeMo-RL is missing, or not one that this release works with.
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
    register()
    import nemo_rl

    # Recipes beside the checkout inherit stock ones through this.
    os.environ.setdefault("NEMO_RL_HOME", str(Path(nemo_rl.__file__).resolve().parents[1]))
    runpy.run_path(str(script), run_name="__main__")


def plugin_folder() -> Path | None:
    """The folder that brings the plug-in to workers which have a Python of their own.

    None where workers run in this very environment (NEMO_RL_PY_EXECUTABLES_SYSTEM=1).

    Raises:
        ConfigError: the plug-in lies in an environment whose other packages would come before the
            workers' own, or without its compiled dependencies.
    """
    if os.environ.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") == "1":
        return None
    folder = Path(nemo_specrl.__file__).resolve().parents[1]
    heavy = [name for name in HEAVY if (folder / name).is_dir()]
    missing = [name for name in COMPILED if not (folder / name).is_dir()]
    if heavy or missing:
        why = f"{heavy[0]} lies beside it" if heavy else f"{missing[0]} does not lie beside it"
        raise ConfigError(
            f"nemo_specrl in {folder}: workers have a Python of their own and cannot use this copy "
            f"({why}); install it by 'pip install --no-deps --target DIR nemo-specrl "
            f"{' '.join(COMPILED)}' and put DIR first on PYTHONPATH"
        )
    return folder

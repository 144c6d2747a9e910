"""The names of NeMo-RL that the plug-in relies on, and the check that this version has them.

NeMo-RL chooses its generation backend by the string ``policy.generation.backend``. It has no
registry of backends (algorithms/grpo.py, ``setup``) and refuses strings other than "vllm" in many
places, so the plug-in replaces classes and functions by name; :mod:`.install` does that.

Works with v0.8.0, as far as its files could be read, and with main of August 2026 (commit
7ea279ab), on which the tests run. v0.7.0 is too old: its vLLM 0.20 takes no drafter.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_specrl.errors import IncompatibleVersion

__all__ = [
    "ALGORITHMS",
    "CHECKPOINT_MANAGER",
    "CONTROLLER",
    "CONTROLLER_SETUP",
    "GENERATION",
    "LOGGER",
    "check",
    "first_of",
    "lookup",
    "option",
    "rebind",
    "with_worker",
]

KNOWN = "v0.8.0, and main of August 2026"
GENERATION = ("nemo_rl.models.generation.vllm.vllm_generation", "VllmGeneration")
CHECKPOINT_MANAGER = ("nemo_rl.utils.checkpoint", "CheckpointManager")
LOGGER = ("nemo_rl.utils.logger", "Logger")
TIMEOUT_CHECKER = ("nemo_rl.utils.timer", "TimeoutChecker")
ENVIRONMENTS = ("nemo_rl.distributed.ray_actor_environment_registry", "ACTOR_ENVIRONMENT_REGISTRY")
VENVS = ("nemo_rl.utils.venvs", "create_local_venv_on_each_node")
CONTROLLER = ("nemo_rl.algorithms.single_controller", "SingleControllerActor")
CONTROLLER_SETUP = ("nemo_rl.algorithms.single_controller_utils.setup", "setup_single_controller")
REQUIRED = (
    *(GENERATION, CHECKPOINT_MANAGER, LOGGER, TIMEOUT_CHECKER, CONTROLLER, CONTROLLER_SETUP),
    ("nemo_rl.models.generation.vllm", "VllmGeneration"),
)
ALGORITHMS = ("grpo", "ppo", "distillation")
WORKER_KEY = "worker_extension_cls_fqn"
"""Key of the generation block by which v0.8.0 takes another worker class
(NVIDIA-NeMo/RL#3809)."""


def check() -> Any:
    """Return the ``nemo_rl`` package, after a check of the names in ``REQUIRED``.

    Raises:
        IncompatibleVersion: NeMo-RL cannot be imported, or lacks one of the names.
    """
    try:
        import nemo_rl
    except ImportError as error:
        raise IncompatibleVersion(
            f"NeMo-RL cannot be imported ({error}); run in its container, or put a checkout's root "
            "on PYTHONPATH"
        ) from None
    for place in REQUIRED:
        lookup(*place)
    return nemo_rl


def lookup(module: str, name: str) -> Any:
    """Import ``module`` and return its attribute ``name``.

    Raises:
        IncompatibleVersion: this version of NeMo-RL does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise IncompatibleVersion(
            f"this NeMo-RL has no {module}.{name} ({error}); this release of nemo_specrl works "
            f"with {KNOWN}"
        ) from None


def rebind(name: str, old: Any, new: Any) -> None:
    """Bind ``name`` to ``new`` in every module of NeMo-RL where it is bound to ``old``."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("nemo_rl") and getattr(module, name, None) is old:
            setattr(module, name, new)


def first_of(parts: Any, place: tuple[str, str]) -> Any:
    """Return the first of ``parts`` that is an instance of a class of NeMo-RL.

    Their order differs from version to version.

    Raises:
        IncompatibleVersion: none of them is.
    """
    kind = lookup(*place)
    for part in parts:
        if isinstance(part, kind):
            return part
    raise IncompatibleVersion(
        f"this NeMo-RL makes no {place[1]} where one is expected; this release of nemo_specrl "
        f"works with {KNOWN}"
    )


def option(config: Any, path: str, default: Any = None) -> Any:
    """Read a dotted key of a recipe, whose blocks are models in some places and dicts in others.

    Returns:
        Its value; ``default`` where it or a block above it is absent or null.
    """
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if config is None:
            return default
    return config


@contextmanager
def with_worker(worker: str, config: Any) -> Iterator[None]:
    """Make ``VllmGeneration`` use another worker class inside this context.

    v0.8.0 takes it from the recipe's generation block. Before, it can be changed only in
    ``resolve_generation_worker_cls``, to which the constructor passes the stock class's name.

    Args:
        worker: full name of the class.
        config: the generation block.
    """
    kind = "_async.VllmAsync" if config["vllm_cfg"]["async_engine"] else ".Vllm"
    stock = f"nemo_rl.models.generation.vllm.vllm_worker{kind}GenerationWorker"
    registry = lookup(*ENVIRONMENTS)
    if worker not in registry:
        registry[worker] = _python_of(stock, registry[stock])
    if WORKER_KEY in lookup("nemo_rl.models.generation.vllm.config", "VllmConfig").__annotations__:
        config[WORKER_KEY] = worker
        try:
            yield
        finally:
            del config[WORKER_KEY]
        return
    module: Any = importlib.import_module(GENERATION[0])
    original = module.resolve_generation_worker_cls
    module.resolve_generation_worker_cls = lambda default, config: worker
    try:
        yield
    finally:
        module.resolve_generation_worker_cls = original


def _python_of(worker: str, executable: str) -> str:
    """Return the Python executable of a stock worker class, for the class that replaces it.

    For an executable that starts with "uv", NeMo-RL makes an environment on each node, named after
    the class (distributed/worker_groups.py). The class that replaces it needs the same one, so it
    is made, or found, under the name of the stock class.
    """
    if not executable.startswith("uv"):
        return executable
    return str(lookup(*VENVS)(executable, worker))

"""The names of NeMo-RL that the plug-in relies on, and the check that this version has them.

NeMo-RL chooses its generation backend by the string ``policy.generation.backend``. It has no
registry of backends (algorithms/grpo.py, ``setup``) and refuses strings other than "vllm" in many
places, so the plug-in replaces classes and functions by name; :mod:`.install` does that.

Of NeMo-RL's official interfaces, the key ``WORKER_EXTENSION`` is used if it exists;
docs/reference/patches.md says what else there is, and why the rest is replaced.

Known to work: v0.7.0, and main up to August 2026 (commit 7ea279ab).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_specrl.engine.vllm.environment import Engines, v2_wanted
from nemo_specrl.errors import ConfigError, IncompatibleVersion

__all__ = [
    "ALGORITHMS",
    "CHECKPOINT_ENGINE_UPDATE",
    "CONTROLLER",
    "CONTROLLER_SETUP",
    "EVALUATION",
    "GENERATION",
    "KNOWN",
    "QUANTIZED",
    "STOCK_ASYNC_WORKER",
    "STOCK_QUANT_ASYNC_WORKER",
    "STOCK_QUANT_WORKER",
    "STOCK_WORKER",
    "block_enabled",
    "check",
    "check_controller",
    "engines_of",
    "get_option",
    "lookup",
    "model_of",
    "pinned_vllm",
    "queued_behind",
    "rebind",
    "returns_routes",
    "substituted_workers",
]

KNOWN = "v0.7.0, and main up to August 2026"
GENERATION = "nemo_rl.models.generation.vllm.vllm_generation"
ENVIRONMENTS = "nemo_rl.distributed.ray_actor_environment_registry"
VENVS = "nemo_rl.utils.venvs"
ALGORITHMS = ("grpo", "ppo", "distillation")
EVALUATION = "nemo_rl.evals.eval"
CONTROLLER = ("nemo_rl.algorithms.single_controller", "SingleControllerActor")
CONTROLLER_SETUP = (
    "nemo_rl.algorithms.single_controller_utils.setup",
    "setup_single_controller",
)
"""The single controller and its setup, which v0.7.0 does not have."""
CONTROLLER_METHODS = ("_advantage_stage", "_sync_weights", "ping")
"""Methods of its actor: called with the batch of a part of a step, at its end, and to ask whether
it has ended."""
STOCK_WORKER = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
STOCK_ASYNC_WORKER = "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker"
QUANTIZED = "nemo_rl.modelopt.models.generation.vllm_quant_worker"
STOCK_QUANT_WORKER = f"{QUANTIZED}.VllmQuantGenerationWorker"
STOCK_QUANT_ASYNC_WORKER = f"{QUANTIZED}.VllmQuantAsyncGenerationWorker"
WORKER_EXTENSION = "worker_extension_cls_fqn"
"""Key of the generation block that gives NeMo-RL after August 2026 another worker class."""
CHECKPOINT_ENGINE_UPDATE = "update_weights_from_checkpoint_engine"
"""The call that main's ``checkpoint_engine_rpc`` gets at a refit through NIXL or a user's engine
(models/generation/vllm/checkpoint_engine.py)."""
REQUIRED = (
    ("nemo_rl.models.generation.vllm", "VllmGeneration"),
    (GENERATION, "VllmGeneration"),
    (GENERATION, "resolve_generation_worker_cls"),
    ("nemo_rl.models.generation.vllm.vllm_worker", "VllmGenerationWorkerImpl"),
    ("nemo_rl.models.generation.vllm.vllm_worker_async", "VllmAsyncGenerationWorkerImpl"),
    (ENVIRONMENTS, "ACTOR_ENVIRONMENT_REGISTRY"),
    ("nemo_rl.utils.checkpoint", "CheckpointManager"),
    ("nemo_rl.utils.logger", "Logger"),
    ("nemo_rl.utils.timer", "TimeoutChecker"),
    (VENVS, "create_local_venv_on_each_node"),
)


def check() -> Any:
    """Check that NeMo-RL can be imported and has the names in ``REQUIRED``.

    Returns:
        The ``nemo_rl`` package.

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
    for module, name in REQUIRED:
        lookup(module, name)
    return nemo_rl


def check_controller() -> None:
    """Check that the single controller's actor has the methods in ``CONTROLLER_METHODS``.

    Raises:
        IncompatibleVersion: it lacks one of them, so the plug-in would not be called there.
    """
    actor = lookup(*CONTROLLER).__ray_metadata__.modified_class
    for name in CONTROLLER_METHODS:
        if not hasattr(actor, name):
            raise IncompatibleVersion(
                f"this NeMo-RL has no {'.'.join(CONTROLLER)}.{name}; this release of nemo_specrl "
                f"works with {KNOWN}"
            )


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


def pinned_vllm(home: Path) -> str | None:
    """Return the version of vLLM that a NeMo-RL checkout makes its workers use; None: not known."""
    try:
        found = re.search(r"\bvllm==([0-9.]*[0-9])", (home / "pyproject.toml").read_text())
    except OSError:
        return None
    return found[1] if found else None


def engines_of(generation: Any) -> Engines:
    """Return what is known about a recipe's engines before the workers start.

    The driver's environment usually has no vLLM. The workers' environments are made for the version
    that the checkout pins, and get the variables of ``vllm_cfg.env_vars`` (vllm_generation.py).
    """
    own = (generation.get("vllm_cfg") or {}).get("env_vars") or {}
    environment = {**os.environ, **{str(name): str(value) for name, value in own.items()}}
    if importlib.util.find_spec("vllm") is not None:
        return dataclasses.replace(Engines.here(), v2_wanted=v2_wanted(environment))
    nemo_rl = importlib.util.find_spec("nemo_rl")
    folders = (nemo_rl and nemo_rl.submodule_search_locations) or ()
    versions = (pinned_vllm(Path(folder).parent) for folder in folders)
    return Engines.elsewhere(next(versions, None), environment)


def model_of(name: str) -> Mapping[str, Any]:
    """Return a model's configuration, as in its config.json; empty if it cannot be read.

    The workers read it, too (vllm_worker.py, ``AutoConfig``). What is not known here is left to
    them to refuse. No code of the model is run.
    """
    try:
        from transformers import PretrainedConfig

        return dict(PretrainedConfig.get_config_dict(name)[0])
    except Exception:  # from transformers, the hub, or the network
        return {}


def get_option(block: Any, name: str, default: Any) -> Any:
    """Read a key of a block, which is a dict in some versions of NeMo-RL and a model in others."""
    if block is None:
        return default
    if isinstance(block, Mapping):
        return block.get(name, default)
    return getattr(block, name, default)


def block_enabled(master_config: Any, block: str) -> bool:
    """Whether an optional block of the recipe is present and enabled."""
    return bool(get_option(getattr(master_config, block, None), "enabled", False))


def returns_routes(policy: Any) -> bool:
    """Whether a recipe's engines return the routed experts of each token, for router replay."""
    # NeMo-RL's setup turns the one key into the other, after the recipe has been read.
    asked = (policy["generation"].get("vllm_kwargs") or {}).get("enable_return_routed_experts")
    return bool(asked or (policy.get("router_replay") or {}).get("enabled"))


@contextmanager
def substituted_workers(names: dict[str, str], config: Any) -> Iterator[None]:
    """Make every ``VllmGeneration`` built inside this context use other worker classes.

    NeMo-RL after August 2026 takes the class from the recipe's generation block, where it is set
    inside this context (``WORKER_EXTENSION``; NVIDIA-NeMo/RL#3809). Before, it can be changed only
    in ``resolve_generation_worker_cls``, to which the constructor passes the stock class's name.

    Args:
        names: full name of each stock worker class, and of the class that replaces it.
        config: the generation block.

    Raises:
        ConfigError: from the constructor, for a stock worker class that is not in ``names``.
    """
    if WORKER_EXTENSION in lookup(GENERATION, "VllmConfig").__annotations__:
        stock = STOCK_ASYNC_WORKER if config["vllm_cfg"]["async_engine"] else STOCK_WORKER
        before = {key: value for key, value in config.items() if key == WORKER_EXTENSION}
        config[WORKER_EXTENSION] = _with_environment(names[stock], stock)
        try:
            yield
        finally:
            del config[WORKER_EXTENSION]
            config.update(before)
        return
    module: Any = importlib.import_module(GENERATION)
    original = module.resolve_generation_worker_cls

    def resolve(default: str, config: Any) -> str:
        stock = original(default, config)
        if stock not in names:
            raise ConfigError(
                f"the generation worker {stock} cannot reuse rollouts; set "
                "policy.generation.spec_rl.enabled=false"
            )
        return _with_environment(names[stock], stock)

    module.resolve_generation_worker_cls = resolve
    try:
        yield
    finally:
        module.resolve_generation_worker_cls = original


@contextmanager
def queued_behind(worker_group: Any, queue: Callable[[list[Any]], None]) -> Iterator[None]:
    """Make a second call to the workers after each sharded call made inside this context.

    ``VllmGeneration.generate`` makes that call and waits for its results, in one method. A worker
    handles calls in order, so the second call begins when its part of the first is done.

    Args:
        worker_group: NeMo-RL's ``RayWorkerGroup``.
        queue: makes the second call, given Ray's references to each worker's result of the first.
    """
    original = worker_group.run_all_workers_sharded_data

    def run_all_workers_sharded_data(*args: Any, **kwargs: Any) -> Any:
        bundle = original(*args, **kwargs)
        queue(list(bundle.futures))
        return bundle

    worker_group.run_all_workers_sharded_data = run_all_workers_sharded_data
    try:
        yield
    finally:
        del worker_group.run_all_workers_sharded_data


def _with_environment(worker: str, stock: str) -> str:
    """Return the name of a worker class, after making its environment known to NeMo-RL."""
    registry = lookup(ENVIRONMENTS, "ACTOR_ENVIRONMENT_REGISTRY")
    if worker not in registry:
        registry[worker] = _python_of(stock, registry[stock])
    return worker


def _python_of(worker: str, executable: str) -> str:
    """Return the Python executable of a stock worker class, for the class that replaces it.

    For an executable that starts with "uv", NeMo-RL makes an environment on each node, named after
    the class (distributed/worker_groups.py). The class that replaces it needs the same one, so it
    is made, or found, under the name of the stock class, by NeMo-RL's own rules for that
    (utils/venvs.py: NEMO_RL_VENV_DIR, NRL_FORCE_REBUILD_VENVS).
    """
    if not executable.startswith("uv"):
        return executable
    return str(lookup(VENVS, "create_local_venv_on_each_node")(executable, worker))

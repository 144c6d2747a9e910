"""Every name of NeMo-RL that the plug-in replaces or relies upon; checked when it registers.

NeMo-RL chooses its backend by the string ``policy.generation.backend`` and has no registry
(algorithms/grpo.py, ``setup``), and other strings than "vllm" are refused in many places. So
``VllmGeneration`` is replaced in the module that the algorithms import it from, before they do;
``setup`` and ``validate`` of the algorithms are wrapped. Nothing is written to disk, and without
``spec_rl.enabled`` all of it does what it did before.

Known to fit: v0.7.0 and main up to August 2026 (commit 7ea279ab).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_specrl.errors import ConfigError, IncompatibleVersion
from nemo_specrl.integrations.nemo_rl.run import BLOCK, CACHE_FOLDER, Run, running

__all__ = ["register", "replace", "worker_class"]

KNOWN = "v0.7.0, and main up to August 2026"
GENERATION = "nemo_rl.models.generation.vllm.vllm_generation"
ENVIRONMENTS = "nemo_rl.distributed.ray_actor_environment_registry"
ALGORITHMS = ("grpo", "ppo")
RELIED_UPON = (
    ("nemo_rl.models.generation.vllm", "VllmGeneration"),
    (GENERATION, "VllmGeneration"),
    (GENERATION, "resolve_generation_worker_cls"),
    ("nemo_rl.models.generation.vllm.vllm_worker", "VllmGenerationWorkerImpl"),
    ("nemo_rl.models.generation.vllm.vllm_worker_async", "VllmAsyncGenerationWorkerImpl"),
    (ENVIRONMENTS, "ACTOR_ENVIRONMENT_REGISTRY"),
    ("nemo_rl.utils.checkpoint", "CheckpointManager"),
    ("nemo_rl.utils.logger", "Logger"),
)
STOCK_WORKER = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
STOCK_ASYNC_WORKER = "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker"


def register() -> None:
    """Put the plug-in's classes in NeMo-RL's places; a second call does nothing.

    Raises:
        IncompatibleVersion: NeMo-RL cannot be imported, or lacks a name that is needed.
    """
    try:
        import nemo_rl
    except ImportError as error:
        raise IncompatibleVersion(
            f"NeMo-RL cannot be imported ({error}); run in its container, or put a checkout's root "
            "on PYTHONPATH"
        ) from None
    if getattr(nemo_rl, "_nemo_specrl", False):
        return
    for module, name in RELIED_UPON:
        _named(module, name)
    from nemo_specrl.integrations.nemo_rl.generation import SpecVllmGeneration

    replace("VllmGeneration", _named(GENERATION, "VllmGeneration"), SpecVllmGeneration)
    for algorithm in ALGORITHMS:
        module = f"nemo_rl.algorithms.{algorithm}"
        for name, wrap in (
            ("setup", functools.partial(_with_run, algorithm=algorithm)),
            ("validate", functools.partial(_without_cache, everywhere=False)),
        ):
            original = _named(module, name)
            replace(name, original, wrap(original))
    # Validation of the data plane's trainer runs in an actor; it imports this lazily.
    original = _named("nemo_rl.algorithms.grpo_sync", "validate_sync")
    replace("validate_sync", original, _without_cache(original, everywhere=True))
    nemo_rl._nemo_specrl = True


@contextmanager
def worker_class(names: dict[str, str]) -> Iterator[None]:
    """While a ``VllmGeneration`` is built: other worker classes than the stock ones.

    ``VllmGeneration.__init__`` names its worker in the code; what it asks then,
    ``resolve_generation_worker_cls``, is the only way in.

    Args:
        names: full name of a stock worker class to that of ours.
    """
    module: Any = importlib.import_module(GENERATION)
    registry = _named(ENVIRONMENTS, "ACTOR_ENVIRONMENT_REGISTRY")
    original = module.resolve_generation_worker_cls

    def resolve(default: str, config: Any) -> str:
        stock = original(default, config)
        if stock not in names:
            raise ConfigError(
                f"the generation worker {stock} does not know reuse; set "
                "policy.generation.spec_rl.enabled=false"
            )
        registry.setdefault(names[stock], _environment(stock, registry[stock]))
        return names[stock]

    module.resolve_generation_worker_cls = resolve
    try:
        yield
    finally:
        module.resolve_generation_worker_cls = original


def _environment(worker: str, executable: str) -> str:
    """The Python of the stock worker, ready made where there is one.

    Environments that "uv run" names are built anew on each node for each class name
    (utils/venvs.py): minutes, for a second copy of what the container has already.
    """
    root = os.environ.get("NEMO_RL_VENV_DIR")
    ready = Path(root or "/nonexistent") / worker / "bin" / "python"
    return str(ready) if executable.startswith("uv") and ready.exists() else executable


def _with_run(original: Callable[..., Any], algorithm: str) -> Callable[..., Any]:
    """``setup``, which gets to know the plug-in's part of the recipe first."""

    @functools.wraps(original)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        run = Run.of(master_config, algorithm)
        if run is not None and kwargs.get("processor") is not None:
            raise ConfigError(
                f"{BLOCK}.enabled = true: drafts are of text, and this recipe has a processor of "
                "images; set false"
            )
        with running(run):
            parts = original(master_config, *args, **kwargs)
        if run is not None:
            from nemo_specrl.integrations.nemo_rl.anchor import anchor_at_birth
            from nemo_specrl.integrations.nemo_rl.checkpoints import save_with
            from nemo_specrl.integrations.nemo_rl.generation import SpecVllmGeneration
            from nemo_specrl.integrations.nemo_rl.metrics import log_with
            from nemo_specrl.integrations.nemo_rl.monitor import Watch, watch, watch_training

            manager = _named("nemo_rl.utils.checkpoint", "CheckpointManager")
            logger = _part(parts, _named("nemo_rl.utils.logger", "Logger"))
            generation = _part(parts, SpecVllmGeneration)
            assert generation.cache is not None
            saved = [generation.save_cache]
            log_with(logger, generation)
            if run.spec_rl.clip_anchor == "birth":  # before the monitor, which sees the batch first
                anchor_at_birth(parts[0], generation.cache)
            if run.spec_rl.monitor.enabled:
                watching = Watch(
                    generation.cache,
                    run.spec_rl,
                    seed=run.seed,
                    steps_per_epoch=_steps_per_epoch(parts),
                    set_fresh_fraction=generation.set_fresh_fraction,
                    state=run.checkpoint and run.checkpoint / CACHE_FOLDER,
                )
                if algorithm == "ppo":
                    watch_training(parts[0], logger, watching)
                else:
                    watch(logger, watching)
                saved.append(watching.save)
            save_with(_part(parts, manager), saved)
        return parts

    return setup


def _part(parts: tuple[Any, ...], kind: type) -> Any:
    """What ``setup`` has made of a kind; versions put them in different places."""
    return next(part for part in parts if isinstance(part, kind))


def _steps_per_epoch(parts: tuple[Any, ...]) -> int:
    """Batches in a pass over the training data: the first loader's, before that of validation."""
    from torch.utils.data import DataLoader

    for part in parts:
        if isinstance(part, DataLoader):
            return max(1, len(part))
        if hasattr(part, "dataloaders"):  # main's MultipleDataloaderWrapper
            return max(1, sum(len(loader) for loader in part.dataloaders.values()))
    raise IncompatibleVersion(f"setup of this NeMo-RL gives no data loader; known are {KNOWN}")


def _without_cache(original: Callable[..., Any], everywhere: bool) -> Callable[..., Any]:
    """``validate``, during which rollouts neither read nor write the cache (design, rule 8)."""

    @functools.wraps(original)
    def validate(*args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.integrations.nemo_rl.generation import validating

        with validating(everywhere):
            return original(*args, **kwargs)

    return validate


def _named(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise IncompatibleVersion(
            f"this NeMo-RL has no {module}.{name} ({error}); this release of nemo_specrl works "
            f"with {KNOWN}"
        ) from None


def replace(name: str, old: Any, new: Any) -> None:
    """Bind ``name`` to ``new`` in every module of NeMo-RL that has it bound to ``old``."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("nemo_rl") and getattr(module, name, None) is old:
            setattr(module, name, new)

"""Puts the plug-in's classes and hooks in NeMo-RL's places.

``VllmGeneration`` and ``TimeoutChecker`` are replaced in every module that has imported them,
``setup`` and ``validate`` of the algorithms are wrapped. Nothing is written to disk, and without
``spec_rl.enabled`` all of them do what they did before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.nemo_rl import compat, job_state
from nemo_specrl.nemo_rl.compat import get_option
from nemo_specrl.nemo_rl.context import RunContext, setting_up
from nemo_specrl.nemo_rl.drift_monitor import StepMonitor
from nemo_specrl.nemo_rl.evaluation import evaluation_run
from nemo_specrl.nemo_rl.hooks import Hooks
from nemo_specrl.nemo_rl.look_ahead import LookAhead
from nemo_specrl.nemo_rl.metrics_log import StepLog, metrics_file
from nemo_specrl.nemo_rl.partial_rollouts import PartialRollouts
from nemo_specrl.nemo_rl.recipe_checks import check_elsewhere
from nemo_specrl.nemo_rl.rollout_metadata import MetadataTable
from nemo_specrl.nemo_rl.save_deadline import bounded, check_time_left

__all__ = ["install", "rebind"]


def install() -> None:
    """Replace NeMo-RL's classes and functions by the plug-in's; a second call does nothing.

    Raises:
        ConfigError: the job's time is over before it has begun (:mod:`.deadline`).
        IncompatibleVersion: NeMo-RL cannot be imported, or lacks a name that is needed.
    """
    check_time_left()
    nemo_rl = compat.check()
    if getattr(nemo_rl, "_nemo_specrl", False):
        return
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    rebind("VllmGeneration", compat.lookup(compat.GENERATION, "VllmGeneration"), SpecVllmGeneration)
    checker = compat.lookup("nemo_rl.utils.timer", "TimeoutChecker")
    rebind("TimeoutChecker", checker, bounded(checker))
    for algorithm in compat.ALGORITHMS:
        module = f"nemo_rl.algorithms.{algorithm}"
        setup = compat.lookup(module, "setup")
        rebind("setup", setup, _wrapped_setup(setup, algorithm))
        validate = compat.lookup(module, "validate")
        rebind("validate", validate, _wrapped_validate(validate, everywhere=False))
    sampling = compat.lookup("nemo_rl.algorithms.grpo", "dynamic_sampling")
    rebind("dynamic_sampling", sampling, _wrapped_dynamic_sampling(sampling))
    # Validation of the data plane's trainer runs in an actor, and the trainer imports this lazily.
    validate = compat.lookup("nemo_rl.algorithms.grpo_sync", "validate_sync")
    rebind("validate_sync", validate, _wrapped_validate(validate, everywhere=True))
    setup = compat.lookup(compat.EVALUATION, "setup")
    rebind("setup", setup, _wrapped_evaluation(setup))
    for module, name in compat.WITHOUT_REUSE:
        try:
            setup = compat.lookup(module, name)
        except IncompatibleVersion:  # nor can a script import it
            continue
        rebind(name, setup, _refusing_setup(setup))
    nemo_rl._nemo_specrl = True


def rebind(name: str, old: Any, new: Any) -> None:
    """Bind ``name`` to ``new`` in every module of NeMo-RL where it is bound to ``old``."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("nemo_rl") and getattr(module, name, None) is old:
            setattr(module, name, new)


def _wrapped_setup(original: Callable[..., Any], algorithm: str) -> Callable[..., Any]:
    """``setup`` of an algorithm, which reads the ``spec_rl:`` block first and adds the hooks."""

    @functools.wraps(original)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        images = kwargs.get("processor") is not None
        run = RunContext.of(master_config, algorithm, images=images)
        if run is not None:
            # Before the engines start, which may hang. The hooks send heartbeats.
            heartbeat.connect()
        job_state.started(master_config.checkpointing)
        with setting_up(run):
            parts = original(master_config, *args, **kwargs)
        if run is not None:
            _add_hooks(run, parts, master_config, algorithm)
            parts = _with_wrapped_loader(run, parts)
        return parts

    return setup


def _wrapped_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    """``setup`` of an evaluation, which reads the ``spec_rl:`` block first."""

    @functools.wraps(original)
    def setup(master_config: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        with setting_up(evaluation_run(master_config, tokenizer)):
            return original(master_config, tokenizer, *args, **kwargs)

    return setup


def _refusing_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """``setup`` of what makes rollouts without the plug-in, which must not be asked for it."""

    @functools.wraps(original)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        policy = getattr(master_config, "policy", None)
        check_elsewhere(master_config.generation if policy is None else policy.get("generation"))
        return original(master_config, *args, **kwargs)

    return setup


def _add_hooks(run: RunContext, parts: tuple[Any, ...], master_config: Any, algorithm: str) -> None:
    """Wrap what ``setup`` has returned."""
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    generation = _part(parts, SpecVllmGeneration)
    records = MetadataTable(generation.take_records)
    monitor = None
    if run.spec_rl.monitor.enabled:
        monitor = StepMonitor(
            records,
            run.spec_rl,
            steps_per_epoch=_steps_per_epoch(parts),
            set_fresh_fraction=generation.set_fresh_fraction,
            state=run.checkpoint and run.checkpoint / CACHE_FOLDER,
        )
    hooks = Hooks(
        generation,
        records,
        monitor,
        anchor_at_birth=run.spec_rl.clip_anchor == "birth",
        # PPO's trainers do not all write their rows to the logger, but train on a batch that has
        # the rewards. The batch that GRPO trains on has none, and its trainers all write them.
        rewards_in_batch=algorithm == "ppo",
        log=StepLog(run.label, metrics_file(run), _total_steps(parts, master_config, algorithm)),
        served=run.served,
    )
    hooks.install(
        policy=parts[0],
        logger=_part(parts, compat.lookup("nemo_rl.utils.logger", "Logger")),
        checkpointer=_part(parts, compat.lookup("nemo_rl.utils.checkpoint", "CheckpointManager")),
    )


def _with_wrapped_loader(run: RunContext, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """What ``setup`` has returned, with a training loader for run-ahead and partial rollouts."""
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    ahead, partial = run.spec_rl.run_ahead.enabled, run.partial_rollouts
    if not ahead and not partial.enabled:
        return parts
    loader, generation = _loader(parts), _part(parts, SpecVllmGeneration)
    tell = generation.set_upcoming if ahead else lambda prompts: None
    wrapped: Any = LookAhead(loader, tell)
    if partial.enabled:
        wrapped = PartialRollouts(loader, partial, run.group, tell)
        if run.checkpoint is not None:
            wrapped.restore(run.checkpoint / CACHE_FOLDER)
        generation.partial_rollouts = wrapped
    return tuple(wrapped if part is loader else part for part in parts)


def _part(parts: tuple[Any, ...], kind: type) -> Any:
    """The object of a class among those that ``setup`` returns; their order differs by version."""
    return next(part for part in parts if isinstance(part, kind))


def _steps_per_epoch(parts: tuple[Any, ...]) -> int:
    """Batches in a pass over the training data."""
    loader = _loader(parts)
    several = getattr(loader, "dataloaders", None)  # main's MultipleDataloaderWrapper
    return max(1, len(loader) if several is None else sum(map(len, several.values())))


def _loader(parts: tuple[Any, ...]) -> Any:
    """The loader of the training data, which comes before that of validation."""
    from torch.utils.data import DataLoader

    for part in parts:
        if isinstance(part, DataLoader) or hasattr(part, "dataloaders"):
            return part
    raise IncompatibleVersion(
        f"setup of this NeMo-RL returns no data loader; this release of nemo_specrl works with "
        f"{compat.KNOWN}"
    )


def _total_steps(parts: tuple[Any, ...], master_config: Any, algorithm: str) -> int:
    """Steps after which the run ends: with dynamic sampling, at the latest."""
    own = getattr(master_config, algorithm)
    steps = int(get_option(own, "max_num_steps", 0))
    asynchronous = get_option(get_option(own, f"async_{algorithm}", None), "enabled", False)
    # The asynchronous trainer counts no epochs, and several data loaders have no end.
    if asynchronous or get_option(master_config.data, "use_multiple_dataloader", False):
        return steps
    return min(steps, int(get_option(own, "max_num_epochs", 1)) * _steps_per_epoch(parts))


def _wrapped_validate(original: Callable[..., Any], everywhere: bool) -> Callable[..., Any]:
    """``validate``, during which rollouts neither read nor write the cache."""

    @functools.wraps(original)
    def validate(*args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.nemo_rl.generation import validating

        with validating(everywhere):
            return original(*args, **kwargs)

    return validate


def _wrapped_dynamic_sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """``dynamic_sampling``, which does not see the groups that were put off."""

    @functools.wraps(original)
    def dynamic_sampling(batch: Any, std: Any, baseline: Any, *args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.nemo_rl.generation import completed

        return original(*completed(batch, std, baseline), *args, **kwargs)

    return dynamic_sampling

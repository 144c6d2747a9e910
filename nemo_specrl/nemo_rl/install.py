"""Puts the plug-in's classes and hooks in place of NeMo-RL's.

``VllmGeneration``, ``TimeoutChecker`` and the single controller's actor are replaced in every
module that has imported them, and ``setup`` and ``validate`` of the algorithms are wrapped. Nothing
is written to disk, and without ``spec_rl.enabled`` all of them behave as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.nemo_rl import compat, job_state
from nemo_specrl.nemo_rl.compat import get_option, rebind
from nemo_specrl.nemo_rl.context import RunContext, setting_up
from nemo_specrl.nemo_rl.evaluation import evaluation_run
from nemo_specrl.nemo_rl.hooks import make_hooks
from nemo_specrl.nemo_rl.look_ahead import LookAhead
from nemo_specrl.nemo_rl.partial_rollouts import PartialRollouts
from nemo_specrl.nemo_rl.save_deadline import bind_timeout_checker, check_time_left

__all__ = ["install"]


def install() -> None:
    """Replace NeMo-RL's classes and functions by the plug-in's; a second call does nothing.

    Raises:
        ConfigError: the job's time is over before it has begun (:mod:`.save_deadline`).
        IncompatibleVersion: NeMo-RL cannot be imported, or lacks a name that is needed.
    """
    check_time_left()
    nemo_rl = compat.check()
    if getattr(nemo_rl, "_nemo_specrl", False):
        return
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    rebind("VllmGeneration", compat.lookup(compat.GENERATION, "VllmGeneration"), SpecVllmGeneration)
    bind_timeout_checker()
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
    _install_single_controller()
    nemo_rl._nemo_specrl = True


def _install_single_controller() -> None:
    """Wrap the setup of main's single controller, and replace its actor; v0.7.0 has none."""
    try:
        setup, actor = (compat.lookup(*n) for n in (compat.CONTROLLER_SETUP, compat.CONTROLLER))
    except IncompatibleVersion:  # a script cannot import it either
        return
    from nemo_specrl.nemo_rl.single_controller import ControllerStarter

    rebind("setup_single_controller", setup, _wrapped_controller_setup(setup))
    rebind("SingleControllerActor", actor, ControllerStarter())


def _wrapped_setup(original: Callable[..., Any], algorithm: str) -> Callable[..., Any]:
    """Wrap an algorithm's ``setup``: it reads the ``spec_rl:`` block first and adds the hooks."""

    @functools.wraps(original)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        with _set_up(master_config, algorithm, kwargs) as run:
            parts = original(master_config, *args, **kwargs)
        if run is not None:
            _add_hooks(run, parts, master_config, algorithm)
            parts = _with_wrapped_loader(run, parts)
        return parts

    return setup


def _wrapped_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``setup`` of an evaluation so that it first reads the ``spec_rl:`` block."""

    @functools.wraps(original)
    def setup(master_config: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        with setting_up(evaluation_run(master_config, tokenizer)):
            return original(master_config, tokenizer, *args, **kwargs)

    return setup


def _wrapped_controller_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the single controller's setup so that it first reads the ``spec_rl:`` block."""

    @functools.wraps(original)
    def setup(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        with _set_up(master_config, "grpo", kwargs, single_controller=True) as run:
            if run is not None:
                compat.check_controller()
            return original(master_config, *args, **kwargs)

    return setup


@contextmanager
def _set_up(
    master_config: Any, algorithm: str, options: dict[str, Any], **known: Any
) -> Iterator[RunContext | None]:
    """Yield the run that NeMo-RL sets up inside this context, from its recipe.

    Args:
        master_config: NeMo-RL's MasterConfig.
        algorithm: the name of the algorithm's block.
        options: by name, the arguments of NeMo-RL's ``setup``.
        known: what the recipe does not say (``recipe_checks.check_recipe``).
    """
    images = options.get("processor") is not None
    run = RunContext.of(master_config, algorithm, images=images, **known)
    if run is not None:
        # This comes before the engines start, which may hang. The hooks send heartbeats.
        heartbeat.connect()
    job_state.started(master_config.checkpointing)
    with setting_up(run):
        yield run


def _add_hooks(run: RunContext, parts: tuple[Any, ...], master_config: Any, algorithm: str) -> None:
    """Wrap what ``setup`` returned."""
    from nemo_specrl.nemo_rl.generation import SpecVllmGeneration

    hooks = make_hooks(
        run,
        _part(parts, SpecVllmGeneration),
        loader_length=_loader_length(parts),
        total_steps=_total_steps(parts, master_config, algorithm),
        # PPO's trainers do not all write their rows to the logger, but train on a batch that has
        # the rewards. The batch on which GRPO trains has none, but all of its trainers write their
        # rows.
        rewards_in_batch=algorithm == "ppo",
    )
    hooks.install(
        policy=parts[0],
        logger=_part(parts, compat.lookup("nemo_rl.utils.logger", "Logger")),
        checkpointer=_part(parts, compat.lookup("nemo_rl.utils.checkpoint", "CheckpointManager")),
    )


def _with_wrapped_loader(run: RunContext, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what ``setup`` returned, with a training loader for run-ahead and partial rollouts."""
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
    """Return the object of a class from what ``setup`` returned; the order varies by version."""
    return next(part for part in parts if isinstance(part, kind))


def _loader_length(parts: tuple[Any, ...]) -> int:
    """Number of batches in a pass over the training data."""
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
    """Number of steps after which the run ends; with dynamic sampling, an upper bound."""
    own = getattr(master_config, algorithm)
    steps = int(get_option(own, "max_num_steps", 0))
    asynchronous = get_option(get_option(own, f"async_{algorithm}", None), "enabled", False)
    # The asynchronous trainer counts no epochs, and several data loaders have no end.
    if asynchronous or get_option(master_config.data, "use_multiple_dataloader", False):
        return steps
    return min(steps, int(get_option(own, "max_num_epochs", 1)) * _loader_length(parts))


def _wrapped_validate(original: Callable[..., Any], everywhere: bool) -> Callable[..., Any]:
    """Wrap ``validate`` so that rollouts neither read nor write the cache in the meantime."""

    @functools.wraps(original)
    def validate(*args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.nemo_rl.generation import validating

        with validating(everywhere):
            return original(*args, **kwargs)

    return validate


def _wrapped_dynamic_sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dynamic_sampling`` so that it does not see the groups that were put off."""

    @functools.wraps(original)
    def dynamic_sampling(batch: Any, std: Any, baseline: Any, *args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.nemo_rl.generation import completed

        return original(*completed(batch, std, baseline), *args, **kwargs)

    return dynamic_sampling

"""Puts the plug-in's classes in place of NeMo-RL's, and wraps ``setup`` of its algorithms.

``VllmGeneration``, ``TimeoutChecker`` and the single controller's actor are replaced in every
module that has imported them. Nothing is written to disk, and without ``spec_rl.enabled`` all of
them behave as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_specrl.monitoring import heartbeat
from nemo_specrl.nemo_rl import compat, job_state
from nemo_specrl.nemo_rl.compat import rebind
from nemo_specrl.nemo_rl.recipe import BLOCK, Run, run_of, setting_up
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
    from nemo_specrl.nemo_rl.single_controller import ControllerStarter

    rebind("VllmGeneration", compat.lookup(*compat.GENERATION), SpecVllmGeneration)
    bind_timeout_checker()
    for algorithm in compat.ALGORITHMS:
        module = f"nemo_rl.algorithms.{algorithm}"
        setup, validate = compat.lookup(module, "setup"), compat.lookup(module, "validate")
        rebind("setup", setup, _wrapped_setup(setup))
        rebind("validate", validate, _wrapped_validate(validate))
    setup = compat.lookup(*compat.CONTROLLER_SETUP)
    rebind("setup_single_controller", setup, _wrapped_controller_setup(setup))
    rebind("SingleControllerActor", compat.lookup(*compat.CONTROLLER), ControllerStarter())
    nemo_rl._nemo_specrl = True


def _wrapped_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an algorithm's ``setup``: it reads the ``spec_rl:`` block first and adds the hooks."""

    @functools.wraps(original)
    def setup(master_config: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.nemo_rl.generation import SpecVllmGeneration
        from nemo_specrl.nemo_rl.steps import StepHooks

        run = _read(master_config, tokenizer, kwargs)
        with _resumed(run):
            parts = original(master_config, tokenizer, *args, **kwargs)
        if run is not None:
            generation = next(part for part in parts if isinstance(part, SpecVllmGeneration))
            StepHooks(run, generation).install(parts)
        return parts

    return setup


def _wrapped_controller_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the single controller's setup so that it first reads the ``spec_rl:`` block."""

    @functools.wraps(original)
    def setup(master_config: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        with _resumed(_read(master_config, tokenizer, kwargs, controller=True)):
            return original(master_config, tokenizer, *args, **kwargs)

    return setup


def _read(recipe: Any, tokenizer: Any, options: dict[str, Any], **known: bool) -> Run | None:
    """Read the run that ``setup`` is about to build, and say in one line what the plug-in does."""
    run = run_of(recipe, tokenizer, images=options.get("processor") is not None, **known)
    # Use print, as NeMo-RL's own driver does, since its loggers show only warnings.
    if run is None:
        print(f"nemo_specrl: off, since the recipe has no {BLOCK}.enabled=true", flush=True)
    else:
        print(f"nemo_specrl: {run.summary}", flush=True)
        # This comes before the engines start, which may hang. The hooks send heartbeats.
        heartbeat.connect()
    job_state.started(recipe.checkpointing)
    return run


@contextmanager
def _resumed(run: Run | None) -> Iterator[None]:
    """Let NeMo-RL build a run inside this context, and give its engines their earlier cache."""
    from nemo_specrl.nemo_rl.steps import restore

    with setting_up(run):
        yield
    if run is not None:
        restore(run)


def _wrapped_validate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate`` so that its rows reuse no prefixes, which would bias them."""

    @functools.wraps(original)
    def validate(*args: Any, **kwargs: Any) -> Any:
        from nemo_specrl.nemo_rl.generation import validating

        with validating():
            return original(*args, **kwargs)

    return validate

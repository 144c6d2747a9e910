"""Data-parallel groups: engines in processes of their own that step together.

vLLM makes such a group of in-process engines where ``VLLM_DP_SIZE`` is above 1, for mixtures of
experts that are divided among them. Each step of the model is one of all engines: all have to ask
``has_unfinished_requests`` equally often, which is a collective, and each True stands for one step
of each engine. One that has no rows runs an empty batch then (v1/engine/llm_engine.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from nemo_specrl.errors import EngineError

__all__ = ["call_of_all", "has_unfinished_rows", "in_group", "step_along"]

logger = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_left: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that have left their group."""


def in_group(engine: Any) -> bool:
    """Whether an ``LLMEngine`` is one of a data-parallel group that its callers step."""
    return getattr(engine, "dp_group", None) is not None


def has_unfinished_rows(engine: Any) -> bool:
    """Whether an ``LLMEngine`` or another one of its group has rows left; asked before each step.

    Raises:
        EngineError: another engine has left the group.
    """
    try:
        return bool(engine.has_unfinished_requests())
    except Exception as error:  # of whatever class; torch fails once more when it describes it
        if not in_group(engine):
            raise
        raise EngineError(
            "another engine of the data-parallel group has failed, and says why; start all of them "
            "again"
        ) from error


def step_along(engine: Any) -> None:
    """Step an engine that has no rows until those of its group have none; others return at once.

    Args:
        engine: an ``LLMEngine``.
    """
    while has_unfinished_rows(engine):
        engine.step()


def call_of_all(
    generate: Callable[Concatenate[Any, _Args], _Result],
) -> Callable[Concatenate[Any, _Args], _Result]:
    """Have an engine whose call fails leave its group, since it steps with the others no more.

    vLLM's own ``LLM`` leaves them waiting for its next step, until a time-out of 30 minutes. Here
    their calls fail, too: at once where they wait in ``has_unfinished_requests``. Those that wait
    in a step of the model do so until this process ends.

    Args:
        generate: method of an object that has a ``vllm.LLM`` as ``llm``.

    Returns:
        The method, which raises EngineError where its engine has left its group before.
    """

    @functools.wraps(generate)
    def generate_or_leave(self: Any, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        engine = self.llm.llm_engine
        if engine in _left:
            raise EngineError(
                "this engine has left its data-parallel group, since a call has failed; start all "
                "engines of the group again"
            )
        try:
            return generate(self, *args, **kwargs)
        except BaseException as error:
            if in_group(engine):
                _leave(engine, error)
            raise

    return generate_or_leave


def _leave(engine: Any, error: BaseException) -> None:
    """Close the connections to the other engines of the group."""
    logger.error(
        "a call of this engine failed (%s: %s), so it leaves its data-parallel group. Calls of the "
        "other engines in the group will fail, too; restart all of them",
        type(error).__name__,
        error,
    )
    _left.add(engine)
    if engine.external_launcher_dp:
        return  # the group is that of the model, too
    from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group

    with contextlib.suppress(Exception):  # the caller should see the error that came first
        stateless_destroy_torch_distributed_process_group(engine.dp_group)
    engine.dp_group = None  # connections are closed with the last reference to the group

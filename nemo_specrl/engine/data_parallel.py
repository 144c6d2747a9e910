"""Data-parallel groups: engines in processes of their own that step together.

vLLM makes such a group of in-process engines if ``VLLM_DP_SIZE`` is above 1, for mixtures of
experts that are divided among them. Each step of the model is a step of all engines: all must call
``has_unfinished_requests``, which is a collective, equally often, and each True means one step of
each engine. An engine that has no rows then runs an empty batch (v1/engine/llm_engine.py).
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
    """Whether an ``LLMEngine`` belongs to a data-parallel group that its callers step."""
    return getattr(engine, "dp_group", None) is not None


def has_unfinished_rows(engine: Any) -> bool:
    """Whether an ``LLMEngine`` or another engine of its group has rows left; call before each step.

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
    """Step an engine without rows until its group has none left; other engines return at once.

    Args:
        engine: an ``LLMEngine``.
    """
    while has_unfinished_rows(engine):
        engine.step()


def call_of_all(
    generate: Callable[Concatenate[Any, _Args], _Result],
) -> Callable[Concatenate[Any, _Args], _Result]:
    """Make an engine whose call fails leave its group, since it no longer steps with the others.

    vLLM's own ``LLM`` leaves the others waiting for its next step, until a timeout of 30 minutes.
    Here their calls fail, too: at once if they wait in ``has_unfinished_requests``. Those that wait
    in a step of the model do so until this process ends.

    Args:
        generate: method of an object that has a ``vllm.LLM`` as ``llm``.

    Returns:
        The method, which raises EngineError if its engine has already left its group.
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
        return  # the model uses the same group
    from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group

    with contextlib.suppress(Exception):  # the caller should see the error that came first
        stateless_destroy_torch_distributed_process_group(engine.dp_group)
    engine.dp_group = None  # connections close with the last reference to the group

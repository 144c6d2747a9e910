"""The driver's calls of the engines' workers, and how long a step waits for their answers."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from nemo_specrl.errors import EngineError

__all__ = ["EngineCalls", "seconds_left", "step_end"]

ANSWER_SECONDS = 60.0
"""For an engine's worker to do what a run cannot go on without."""
STEP_SECONDS = 10.0
"""For all questions of a step to engines and cache together, which it can go on without."""
LEAST_SECONDS = 1.0
"""For one of them, however long the ones before it took."""

logger = logging.getLogger(__name__)


def step_end() -> float:
    """When a step that begins to ask now goes on, by ``time.monotonic``."""
    return time.monotonic() + STEP_SECONDS


def seconds_left(until: float) -> float:
    """Seconds for the next question of such a step."""
    return max(LEAST_SECONDS, until - time.monotonic())


class EngineCalls:
    """Calls of a method of every worker that owns an engine.

    A copy in another process begins without open questions.

    Args:
        worker_group: NeMo-RL's ``RayWorkerGroup``.
    """

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        self._open: list[tuple[int, str, Any]] = []  # engine, method, and what Ray will have
        self._silent: set[int] = set()  # engines of which it was said that they do not answer

    def __reduce__(self) -> Any:
        return type(self), (self._worker_group,)

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method, and return what Ray will have of it from each engine."""
        return list(
            self._worker_group.run_all_workers_single_data(
                method, run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"], **kwargs
            )
        )

    def tell(self, method: str, *, within_s: float = ANSWER_SECONDS, **kwargs: Any) -> list[Any]:
        """Call a method, and return what all engines answer.

        Raises:
            EngineError: one of them has not answered in time.
        """
        try:
            return list(ray.get(self.call(method, **kwargs), timeout=within_s))
        except ray.exceptions.GetTimeoutError:
            raise EngineError(f"{method}: an engine has not answered in {within_s:g} s") from None

    def ask(self, method: str, until: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method that a step can go on without, and return what is answered in time.

        The step waits for an engine only if that has answered all earlier questions: one that hangs
        holds up one step, not each of them. It still does what it was called for, and what it
        answers then is returned where the same is asked next. One that has died has no answer.

        Args:
            method: to be called.
            until: when the step goes on, by ``time.monotonic``; None: as if it began to ask now.
            kwargs: arguments of the method.
        """
        within_s = seconds_left(step_end() if until is None else until)
        answered = _answered([call for _, _, call in self._open], 0)
        owing = {engine for engine, _, call in self._open if call not in answered}
        calls = self.call(method, **kwargs)
        awaited = [call for engine, call in enumerate(calls) if engine not in owing]
        answered |= _answered(awaited, within_s)
        late = len(awaited) - len(answered.intersection(awaited))
        if late:
            logger.warning(
                "%s: no answer from %d of %d engines within %.0f s; continuing without them. Late "
                "answers will be counted in a later step",
                *(method, late, len(calls), within_s),
            )
        self._open += [(engine, method, call) for engine, call in enumerate(calls)]
        mine = [one for one in self._open if one[1] == method and one[2] in answered]
        self._open = [o for o in self._open if o[1] != method or o[2] not in answered]
        return [answer for engine, _, call in mine for answer in self._answer(engine, call)]

    def _answer(self, engine: int, call: Any) -> list[Any]:
        """The answer of an engine; none where it has died."""
        try:
            return [ray.get(call)]
        except ray.exceptions.RayActorError as error:
            if engine not in self._silent:
                self._silent.add(engine)
                logger.warning("engine %d does not answer: %s", engine, error)
            return []


def _answered(calls: list[Any], within_s: float) -> set[Any]:
    """The calls that are answered within so many seconds."""
    if not calls:
        return set()  # which Ray does not take
    return set(ray.wait(calls, num_returns=len(calls), timeout=within_s)[0])

"""The driver's calls to the engines' workers, and how long a step waits for their answers."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from nemo_specrl.errors import EngineError

__all__ = ["EngineCalls", "seconds_left", "step_end"]

ANSWER_SECONDS = 60.0
"""Time for an engine's worker to do what a run cannot continue without."""
STEP_SECONDS = 10.0
"""Time for all questions of a step to engines and cache together, without which it can continue."""
LEAST_SECONDS = 1.0
"""Minimum time for one of them, however long the previous ones took."""

logger = logging.getLogger(__name__)


def step_end() -> float:
    """When a step that begins to ask now continues, by ``time.monotonic``."""
    return time.monotonic() + STEP_SECONDS


def seconds_left(until: float) -> float:
    """Seconds for the next question of such a step."""
    return max(LEAST_SECONDS, until - time.monotonic())


class EngineCalls:
    """Calls a method of every worker that owns an engine.

    A copy in another process begins without open questions.

    Args:
        worker_group: NeMo-RL's ``RayWorkerGroup``.
    """

    def __init__(self, worker_group: Any) -> None:
        self._worker_group = worker_group
        self._open: list[tuple[int, str, Any]] = []  # engine, method, and Ray's reference
        self._silent: set[int] = set()  # engines already reported as not answering

    def __reduce__(self) -> Any:
        return type(self), (self._worker_group,)

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method, and return Ray's reference to the result of each engine."""
        return list(
            self._worker_group.run_all_workers_single_data(
                method, run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"], **kwargs
            )
        )

    def tell(self, method: str, *, within_s: float = ANSWER_SECONDS, **kwargs: Any) -> list[Any]:
        """Call a method, and return what all engines answer.

        Raises:
            EngineError: one of them did not answer in time.
        """
        try:
            return list(ray.get(self.call(method, **kwargs), timeout=within_s))
        except ray.exceptions.GetTimeoutError:
            raise EngineError(f"{method}: an engine has not answered in {within_s:g} s") from None

    def ask(self, method: str, until: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method without which a step can continue, and return the answers that come in
        time.

        The step waits for an engine only if it has answered all earlier questions: a hanging engine
        delays one step, not each of them. It still handles the call, and its late answer is
        returned when the same is asked next. An engine that has died has no answer.

        Args:
            method: method to call.
            until: when the step continues, by ``time.monotonic``; None: as if it began to ask now.
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
        """Return the answer of an engine; empty if it has died."""
        try:
            return [ray.get(call)]
        except ray.exceptions.RayActorError as error:
            if engine not in self._silent:
                self._silent.add(engine)
                logger.warning("engine %d does not answer: %s", engine, error)
            return []


def _answered(calls: list[Any], within_s: float) -> set[Any]:
    """Return the calls that are answered within this many seconds."""
    if not calls:
        return set()  # Ray does not accept an empty list
    return set(ray.wait(calls, num_returns=len(calls), timeout=within_s)[0])

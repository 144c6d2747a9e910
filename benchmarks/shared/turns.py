"""Turns of engines that are timed side by side in one process."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nemo_specrl.cache import store
from nemo_specrl.engine import sync_engine
from nemo_specrl.engine.sync_engine import STORE_SECONDS

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
SLICE = 0.03
"""Processor seconds of an engine's turn; with 0.1, ratios of two runs differed two to three times
as much."""


class Turns:
    """Lets engines of one process take turns, each in a thread of its own, some steps at a time.

    Other work on a machine changes its speed within seconds. Engines that take turns are affected
    alike. Only the thread whose turn it is runs.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._expected: dict[Hashable, float] = {}
        self._used: dict[Hashable, float] = {}
        self._turn: Hashable | None = None
        self._began = 0.0

    def run(self, work: Mapping[K, Callable[[], T]], expected: Mapping[K, float]) -> dict[K, T]:
        """Run functions by turns, and return their results by name.

        Args:
            work: functions by name, which call :meth:`passed` now and then.
            expected: processor seconds that each takes, if known, so that all of them end at about
                the same time.
        """
        usual = statistics.fmean(expected.values()) if expected else 1.0
        self._expected = {name: expected.get(name, usual) for name in work}
        self._used = dict.fromkeys(work, 0.0)
        self._turn = next(iter(work))

        def one(name: K) -> T:
            self._wait(name)
            try:
                return work[name]()
            finally:
                with self._condition:
                    del self._used[name]
                    self._next()

        with ThreadPoolExecutor(len(work)) as pool:
            futures = {name: pool.submit(one, name) for name in work}
            return {name: future.result() for name, future in futures.items()}

    def passed(self) -> float:
        """End this thread's turn if it was long enough; the thread furthest behind is next.

        Returns:
            seconds waited for the next turn.
        """
        used = time.thread_time() - self._began
        if used < SLICE or self._turn is None:
            return 0.0
        name, started = self._turn, time.perf_counter()
        with self._condition:
            self._used[name] += used / self._expected[name]
            self._next()
        self._wait(name)
        return time.perf_counter() - started

    def _next(self) -> None:
        self._turn = min(self._used, key=self._used.__getitem__, default=None)
        self._condition.notify_all()

    def _wait(self, name: Hashable) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == name)
        self._began = time.thread_time()


def by_processor_time(engines: int) -> None:
    """Adapt the plug-in's timers to engines of this process that take turns.

    A store's timer thread would commit in time that is not counted; instead, ``sync`` commits.
    Finished rollouts would be stored after fewer steps, since waiting for a turn counts as well;
    that interval is lengthened.
    """
    store.FLUSH_SECONDS = 600.0  # longer than any phase
    sync_engine.STORE_SECONDS = STORE_SECONDS * engines

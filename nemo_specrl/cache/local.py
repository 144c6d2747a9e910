"""The cache of a process: one store, with look-ups that never wait for a slow disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_specrl.cache.store import RolloutStore, StoreStats
from nemo_specrl.errors import in_one_line
from nemo_specrl.monitoring import names as metric
from nemo_specrl.rollout import Rollout

if TYPE_CHECKING:
    from nemo_specrl.config import CacheConfig

__all__ = ["WAITING", "LocalCache", "Threads", "store_metrics"]

OPEN_SECONDS = 60.0
"""The longest that a process waits for its store to open."""
CLOSE_SECONDS = 10.0
"""The longest that closing waits for the disk."""
STATS_SECONDS = 1.0
THREADS = 2
WAITING = 64
"""Calls that may wait for a thread; when the disk hangs, further ones are given up at once."""
logger = logging.getLogger(__name__)
T = TypeVar("T")


class Threads:
    """A few threads that a process can leave behind: it ends even if one of them hangs in a call.

    Args:
        name: of the threads.
        count: how many.
    """

    def __init__(self, name: str, count: int = THREADS) -> None:
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(WAITING)
        for _ in range(count):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # for the caller, who may have gone away
                future.set_exception(error)

    def run(self, call: Callable[[], T], timeout: float) -> T:
        """Return what ``call`` returns within ``timeout`` seconds, or raise what it raises.

        Raises:
            TimeoutError: it takes longer; it goes on if it has begun.
        """
        future: Future[T] = Future()
        try:
            self._calls.put_nowait((future, call))
        except queue.Full:
            raise TimeoutError("earlier calls have not come back") from None
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise


class LocalCache:
    """A ``HistoryCache`` on the store of this node.

    Args:
        store: the store, which this cache closes.
        threads: who reads.
    """

    def __init__(self, store: RolloutStore, threads: Threads | None = None) -> None:
        self.store = store
        self._threads = threads or Threads("specrl-cache")
        self._errors = 0
        self._logged = False

    @classmethod
    def open(cls, config: CacheConfig, vocabulary: str) -> LocalCache:
        """Open the store of a configuration with a folder.

        Raises:
            CacheError: it cannot be used.
            TimeoutError: the disk hangs.
        """
        threads = Threads("specrl-cache")
        store = threads.run(
            lambda: RolloutStore(
                config.dir or "",
                vocabulary=vocabulary,
                max_bytes=config.max_bytes_per_node,
                responses_per_prompt=config.responses_per_prompt,
            ),
            OPEN_SECONDS,
        )
        return cls(store, threads)

    def get(
        self,
        keys: Sequence[bytes],
        timeout: float | None = None,
        known: Collection[int] = frozenset(),
    ) -> dict[bytes, list[Rollout]]:
        """Return the responses to prompts, oldest first; what is late or fails is left out."""
        return self._tried(lambda: self.store.get(keys, known=known), {}, timeout)

    def put(self, rollouts: Sequence[Rollout]) -> int:
        """Keep responses, and return how many were kept; it may wait for the disk."""
        return self._tried(lambda: self.store.put(rollouts), 0)

    def take_drafts(
        self, wanted: Mapping[bytes, int], policy_version: int, timeout: float
    ) -> dict[bytes, list[Rollout]]:
        """Return drafts for prefix reuse (``RolloutStore.take_drafts_of``)."""
        return self._tried(lambda: self.store.take_drafts_of(wanted, policy_version), {}, timeout)

    def _tried(self, call: Callable[[], T], otherwise: T, timeout: float | None = None) -> T:
        """Return what a call returns, or ``otherwise`` if it fails or takes longer."""
        try:
            return call() if timeout is None else self._threads.run(call, timeout)
        except TimeoutError:
            self._errors += 1
        except Exception as error:  # a failure of the cache may only cost speed
            self._errors += 1
            if not self._logged:
                self._logged = True
                logger.warning(
                    "rollout cache: %s; rows are decoded without drafts. Further failures are "
                    "counted in %s",
                    in_one_line(error),
                    metric.CACHE_ERRORS,
                )
        return otherwise

    def stats(self) -> dict[str, float]:
        """Return metrics by name; only the count of errors if the store cannot be read."""
        found: StoreStats | None = self._tried(self.store.stats, None, STATS_SECONDS)
        errors = {metric.CACHE_ERRORS: float(self._errors)}
        return errors if found is None else errors | store_metrics([found])

    def close(self) -> None:
        """Let go of the store, without waiting for a disk that hangs."""
        self._tried(self.store.close, None, CLOSE_SECONDS)


def store_metrics(stores: Collection[StoreStats]) -> dict[str, float]:
    """Return metrics of stores by name: sums, but for the fullest disk."""
    if not stores:
        return {}
    return {
        metric.CACHE_PROMPTS: float(sum(store.prompts for store in stores)),
        metric.CACHE_RESPONSES: float(sum(store.responses for store in stores)),
        metric.CACHE_BYTES: float(sum(store.bytes_on_disk for store in stores)),
        metric.CACHE_MAX_BYTES: float(sum(store.max_bytes for store in stores)),
        metric.CACHE_EVICTED_PROMPTS: float(sum(store.evicted for store in stores)),
        metric.CACHE_DAMAGED_RECORDS: float(sum(store.damaged for store in stores)),
        metric.DISK_USED_FRACTION: max(store.disk_used_fraction for store in stores),
    }

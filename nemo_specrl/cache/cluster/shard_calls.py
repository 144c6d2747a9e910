"""Calls of a client to shards: waiting for answers, and shards that are not called for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray

from nemo_specrl.cache.cluster.membership import Routing
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import Rollout

__all__ = [
    "FAILED",
    "FAILURES_TO_OPEN",
    "Breaker",
    "Lookups",
    "Write",
    "given_up",
    "ready",
    "within",
]

FAILURES_TO_OPEN = 3
OPEN_SECONDS = 30.0
FAILED = object()
"""Takes the place of the answer of a shard that failed."""

Lookups = dict[Any, tuple[str, list[bytes]]]
"""Calls that look up, with the name of the shard and the keys."""

_Result = TypeVar("_Result")


@dataclass
class Breaker:
    """A circuit breaker: after several failures in a row a shard is not called for a while."""

    failures: int = 0
    open_until: float = 0.0

    @property
    def closed(self) -> bool:
        """Whether the shard may be called."""
        return time.monotonic() >= self.open_until

    def count(self, failed: bool) -> None:
        """Count an answer, or a failure."""
        self.failures = self.failures + 1 if failed else 0
        if self.failures >= FAILURES_TO_OPEN:
            self.failures, self.open_until = 0, time.monotonic() + OPEN_SECONDS


@dataclass
class Write:
    """Rollouts that have been sent, and the calls that have no answer yet.

    Args:
        rollouts: what was sent.
        routing: the routing by which it was sent.
        calls: each with the name of its shard.
        since: when it was sent, on the monotonic clock.
    """

    rollouts: list[Rollout]
    routing: Routing
    calls: dict[Any, str]
    since: float = field(default_factory=lambda: time.monotonic())


def given_up(writes: Collection[Write], seconds: float) -> tuple[list[Write], dict[str, Any]]:
    """Give up writes that have been under way for ``seconds`` or longer.

    Returns:
        The other writes, and for each shard an unanswered call among those given up.
    """
    until = time.monotonic() - seconds
    late = {node: c for write in writes if write.since <= until for c, node in write.calls.items()}
    return [write for write in writes if write.since > until], late


def ready(calls: Collection[Any], timeout: float, *, first: bool = False) -> set[Any]:
    """Return the calls that are answered within ``timeout`` seconds.

    Args:
        calls: calls to wait for.
        timeout: seconds.
        first: whether to return as soon as one is answered.
    """
    if not calls:
        return set()  # Ray does not accept an empty list
    count = 1 if first else len(calls)
    return set(ray.wait(list(calls), num_returns=count, timeout=max(0.0, timeout))[0])


def within(seconds: float, doing: str, call: Callable[[], _Result]) -> _Result:
    """Call a function that uses a file system which may hang, and give up waiting if it does.

    Args:
        seconds: how long to wait for it.
        doing: words for the error.
        call: runs in a thread of its own, which continues if it is late.

    Raises:
        StoreUnavailable: it is late.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # the caller gets it
            errors.append(error)

    thread = threading.Thread(target=run, name="file system", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not results:
        raise StoreUnavailable(
            f"cannot {doing}: its file system has not answered for {max(0.0, seconds):.0f} s"
        )
    return results[0]

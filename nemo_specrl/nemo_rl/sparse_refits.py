"""Sparse refits (``refit_transport: vllm_s3_sparse``, ``vllm_zmq_sparse``), as a worker sees them.

Changed weights do not arrive through a method of the worker. Threads of NeMo-RL's receiver take
them in, apply them part by part, and end the refit when the trainer asks for it
(models/generation/vllm/ vllm_sparse_refit.py). Both transports pass through the two methods that
are watched here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.nemo_rl.compat import KNOWN

__all__ = ["SPARSE_TRANSPORTS", "Refitting", "SparseRefits", "held_open"]

SPARSE_TRANSPORTS = ("vllm_s3_sparse", "vllm_zmq_sparse")
APPLY = "_submit_pending_sparse_payloads"
"""Method of the receiver that makes its thread apply the next payloads."""
FLUSH = "_flush_queued_sparse_payloads"
"""Method of the receiver that waits until all of them are applied, at the end of a refit. A flush
may find none: if no weight has changed, and at the worker's end."""

Refitting = Callable[[], contextlib.AbstractContextManager[None]]


class SparseRefits:
    """Enters a context before the first payload of a refit is applied, and leaves it at its flush.

    It is also left if a payload or the flush fails. The weights may then have changed in part, and
    NeMo-RL ends the run.

    Args:
        receiver: the worker's ``VllmSparseRefitReceiver``.
        refitting: makes the context. If entering it raises, the payloads are refused.

    Raises:
        IncompatibleVersion: the receiver lacks one of the two methods.
    """

    def __init__(self, receiver: Any, refitting: Refitting) -> None:
        for name in (APPLY, FLUSH):
            if not hasattr(receiver, name):
                raise IncompatibleVersion(
                    f"policy.generation.refit_transport: this NeMo-RL has no {name} where sparse "
                    f"refits arrive; this release of nemo_specrl works with {KNOWN}; set null"
                )
        self._apply, self._flush = getattr(receiver, APPLY), getattr(receiver, FLUSH)
        self._refitting = refitting
        self._refit: contextlib.ExitStack | None = None
        setattr(receiver, APPLY, self.apply)
        setattr(receiver, FLUSH, self.flush)

    def apply(self) -> None:
        """Stand in for ``APPLY``, called by one thread at a time, under the receiver's lock."""
        if self._refit is None:
            refit = contextlib.ExitStack()
            refit.enter_context(self._refitting())
            self._refit = refit
        self._apply()

    def flush(self) -> Any:
        """Stand in for ``FLUSH``; returns what it returns."""
        try:
            return self._flush()
        finally:
            refit, self._refit = self._refit, None
            if refit is not None:
                refit.close()


@contextlib.contextmanager
def held_open(
    refit: Callable[[Callable[[], Any]], Any], loop: asyncio.AbstractEventLoop
) -> Iterator[None]:
    """Make a coroutine hold an engine ready for new weights while this context is open.

    Use it in a thread without an event loop.

    Args:
        refit: makes the coroutine, given the update: what it awaits while the weights change.
        loop: the event loop of the engine, in another thread.

    Raises:
        Exception: what the coroutine raised, before the update or after it.
    """
    begun: Future[None] = Future()
    ended = asyncio.Event()

    async def update() -> None:
        begun.set_result(None)
        await ended.wait()

    refitted = asyncio.run_coroutine_threadsafe(refit(update), loop)
    wait([begun, refitted], return_when=FIRST_COMPLETED)
    if not begun.done():
        refitted.result()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        refitted.result()

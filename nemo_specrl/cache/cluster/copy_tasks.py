"""The copies that a coordinator makes shards take of one another, a chunk at a time.

Nothing here waits: :meth:`Transfers.advance` checks which calls have been answered and makes the
next ones. The data goes from shard to shard; only references pass through the coordinator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from nemo_specrl.cache.cluster.membership import CopyTask
from nemo_specrl.cache.partitions import key_range
from nemo_specrl.errors import in_one_line

__all__ = ["BACKGROUND", "FILES", "RETRY_SECONDS", "SILENCE_TIMEOUT", "Transfers"]

BACKGROUND = "background"
"""Concurrency group of shards for calls that must not queue behind those of clients."""
FILES = "files"
"""Concurrency group of shards for calls that read or write a shared file system, which may hang."""
SILENCE_TIMEOUT = 12.0
RETRY_SECONDS = 5.0
COPIES_AT_ONCE = 4

logger = logging.getLogger(__name__)


@dataclass
class _Transfer:
    """A copy under way.

    Args:
        call: the call that has no answer yet.
        since: when it was made.
        merging: whether it merges a chunk; otherwise it reads one.
    """

    call: Any
    since: float
    merging: bool = False


class Transfers:
    """The copies that are under way.

    Args:
        partitions: number of partitions.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._running: dict[CopyTask, _Transfer] = {}
        self._retry_at: dict[CopyTask, float] = {}

    @property
    def calls(self) -> list[Any]:
        """Calls that have no answer yet."""
        return [transfer.call for transfer in self._running.values()]

    def keep(self, copies: Collection[CopyTask]) -> None:
        """Drop all other copies; a chunk that is being merged does no harm."""
        self._running = {copy: self._running[copy] for copy in self._running.keys() & copies}
        self._retry_at = {copy: self._retry_at[copy] for copy in self._retry_at.keys() & copies}

    def advance(self, wanted: Collection[CopyTask], shards: Mapping[str, Any]) -> list[CopyTask]:
        """Start the copies that are wanted, some at a time, and continue those under way.

        A copy whose shard fails or does not answer starts again after ``RETRY_SECONDS``.

        Args:
            wanted: copies to be made.
            shards: actors by name. Copies between others are left for later.

        Returns:
            The copies that are complete now.
        """
        now = time.monotonic()
        for copy in sorted(wanted):
            if len(self._running) == COPIES_AT_ONCE:
                break
            waiting = copy in self._running or self._retry_at.get(copy, now) > now
            if not waiting and {copy.source, copy.target} <= shards.keys():
                start, _ = key_range(copy.partition, self._partitions)
                self._running[copy] = self._read(copy, start, shards)
        if not self._running:
            return []
        done = set(
            ray.wait(self.calls, num_returns=len(self._running), timeout=0, fetch_local=False)[0]
        )
        complete = []
        for copy, transfer in list(self._running.items()):
            try:
                if transfer.call in done:
                    following = self._follow(copy, transfer, shards)
                elif now - transfer.since > SILENCE_TIMEOUT:
                    raise TimeoutError(f"no answer in {SILENCE_TIMEOUT:g} s")
                else:
                    continue
            except Exception as error:  # from an actor, its store or its node
                logger.warning("rollout cache: copying %s: %s", copy, in_one_line(error))
                del self._running[copy]
                self._retry_at[copy] = now + RETRY_SECONDS
                continue
            if following is None:
                del self._running[copy]
                complete.append(copy)
            else:
                self._running[copy] = following
        return complete

    def _read(self, copy: CopyTask, start: bytes, shards: Mapping[str, Any]) -> _Transfer:
        _, stop = key_range(copy.partition, self._partitions)
        read = shards[copy.source].read_range.options(concurrency_group=BACKGROUND)
        return _Transfer(read.remote(start, stop), time.monotonic())

    def _follow(
        self, copy: CopyTask, transfer: _Transfer, shards: Mapping[str, Any]
    ) -> _Transfer | None:
        """Make the call that follows one that was answered; None if the copy is complete."""
        if transfer.merging:
            following = ray.get(transfer.call, timeout=SILENCE_TIMEOUT)
            return None if following is None else self._read(copy, following, shards)
        # The chunk was waited for, so that no thread of the target waits for it.
        _, stop = key_range(copy.partition, self._partitions)
        merge = shards[copy.target].merge_range.options(concurrency_group=BACKGROUND)
        return _Transfer(merge.remote(transfer.call, stop), time.monotonic(), merging=True)

"""Which sample index a row gets that comes alone.

Knows keys, sample indices and policy versions; nothing of stores, actors or engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from nemo_specrl.rollout import Finish, Rollout

__all__ = ["SampleClaims"]

CLAIM_SECONDS = 3600.0


class SampleClaims:
    """Sample indices for rows of a prompt that come one by one, from anywhere, in any order.

    Rows of a batch have their sample indices by position; rows of an asynchronous trainer come
    alone, and nobody knows how many there will be. A row gets the sample index that was served
    longest ago, of those that the present weights have not served and no other row is at; where
    there is none, a new one. So no draft is given to two rows, and a group of n keeps to n sample
    indices.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[bytes, int], float] = {}

    def claim(self, key: bytes, rollouts: Sequence[Rollout], policy_version: int) -> int:
        """A sample index for the next row of a prompt; it stays claimed until its rollout is there.

        Args:
            key: the prompt's.
            rollouts: the prompt's, newest first within a sample index.
            policy_version: of the weights that will serve the row.
        """
        now = time.monotonic()
        served: dict[int, int] = {}
        for rollout in rollouts:
            # What was interrupted has not been served; whoever takes its sample index goes on with
            # it.
            version = rollout.policy_version - (rollout.finish is Finish.PARTIAL)
            served[rollout.sample_index] = max(served.get(rollout.sample_index, -1), version)
        waiting = [
            sample_index
            for sample_index, version in sorted(served.items(), key=lambda item: (item[1], item[0]))
            if version < policy_version and not self._claimed((key, sample_index), now)
        ]
        if waiting:
            sample_index = waiting[0]
        else:
            sample_index = 0
            while sample_index in served or self._claimed((key, sample_index), now):
                sample_index += 1
        self._until[(key, sample_index)] = now + CLAIM_SECONDS
        return sample_index

    def hold(self, key: bytes, sample_index: int, seconds: float = CLAIM_SECONDS) -> None:
        """A sample index was given out elsewhere; it is claimed here too, for ``seconds``."""
        self._until[(key, sample_index)] = time.monotonic() + seconds

    def held(self, start: bytes, stop: bytes | None) -> list[tuple[bytes, int, float]]:
        """Prompt and sample index of each claim in a range of keys, and the seconds that it has
        left."""
        now = time.monotonic()
        return [
            (key, sample_index, until - now)
            for (key, sample_index), until in self._until.items()
            if until > now and key >= start and (stop is None or key < stop)
        ]

    def release(self, key: bytes, sample_index: int) -> None:
        """The row is done; a claim whose row never is runs out by itself."""
        self._until.pop((key, sample_index), None)

    def _claimed(self, row: tuple[bytes, int], now: float) -> bool:
        until = self._until.get(row)
        if until is not None and until <= now:
            del self._until[row]
            return False
        return until is not None

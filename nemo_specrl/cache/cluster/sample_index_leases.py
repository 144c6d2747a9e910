"""Sample indices for rows that are generated one at a time.

This module knows keys, sample indices and policy versions. It does not know stores, actors or
engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from nemo_specrl.rollout import Finish, Rollout

__all__ = ["CLAIM_SECONDS", "RENEW_SECONDS", "ROW_SECONDS", "SampleIndexLeases"]

CLAIM_SECONDS = 120.0
"""How long a claim holds that is not renewed: its client has died, or does not know of it."""
RENEW_SECONDS = 30.0
"""How often a client renews the claims of its rows."""
ROW_SECONDS = 3600.0
"""A row that has not ended by then is considered lost, and its claim is no longer renewed."""


class SampleIndexLeases:
    """Assigns sample indices to rows of a prompt that arrive one by one and in any order.

    Rows of a batch have their sample indices by position. Rows of an asynchronous trainer arrive
    alone, and how many there will be is unknown. Such a row gets the sample index that was served
    longest ago, among those that the current weights have not served and for which no other row is
    being generated; if there is none, a new one. In this way no draft is given to two rows, and a
    group of n rows keeps to n sample indices.
    """

    def __init__(self) -> None:
        self._until: dict[tuple[bytes, int], float] = {}

    def claim(
        self,
        key: bytes,
        rollouts: Sequence[Rollout],
        policy_version: int,
        incarnation: int = 0,
    ) -> int:
        """Assign a sample index to the next row of a prompt.

        It stays claimed until its rollout is stored or its row has failed (:meth:`release`), or for
        ``CLAIM_SECONDS`` after the client last said that the row is under way (:meth:`hold`).

        Args:
            key: the prompt's key.
            rollouts: the cached rollouts of the prompt.
            policy_version: version of the weights that will serve the row.
            incarnation: incarnation of the run. Rollouts of an older one were served earlier,
                whatever their policy version: versions go back when a run resumes from a
                checkpoint.
        """
        now = time.monotonic()
        served: dict[int, tuple[int, int]] = {}
        for rollout in rollouts:
            # An interrupted rollout has not been served: the row that gets its sample index
            # continues it.
            version = rollout.policy_version - (rollout.finish is Finish.PARTIAL)
            when = rollout.incarnation, version
            served[rollout.sample_index] = max(served.get(rollout.sample_index, when), when)
        waiting = [
            sample_index
            for sample_index, when in sorted(served.items(), key=lambda item: (item[1], item[0]))
            if when < (incarnation, policy_version) and not self._claimed((key, sample_index), now)
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
        """Claim a sample index, assigned by whichever shard, for ``seconds`` from now."""
        self._until[(key, sample_index)] = time.monotonic() + seconds

    def held(self, start: bytes, stop: bytes | None) -> list[tuple[bytes, int, float]]:
        """Return the claims on prompts in a range of keys.

        Args:
            start: first key of the range.
            stop: first key after it. None: the range has no end.

        Returns:
            Prompt key, sample index and the remaining seconds, for each claim.
        """
        now = time.monotonic()
        return [
            (key, sample_index, until - now)
            for (key, sample_index), until in self._until.items()
            if until > now and key >= start and (stop is None or key < stop)
        ]

    def release(self, key: bytes, sample_index: int) -> None:
        """Drop a claim, as its rollout is stored or its row has failed."""
        self._until.pop((key, sample_index), None)

    def _claimed(self, row: tuple[bytes, int], now: float) -> bool:
        until = self._until.get(row)
        if until is not None and until <= now:
            del self._until[row]
            return False
        return until is not None

"""The interfaces that an engine expects of the cache of rollouts that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from nemo_specrl.rollout import Claim, Rollout

__all__ = ["ClaimingCache", "Journal", "ResumedCache", "RolloutCache"]


class RolloutCache(Protocol):
    """The interface of a cache of rollouts, such as :class:`nemo_specrl.RolloutStore`."""

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Return rollouts by prompt key, the newest first within a sample index."""

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts; each replaces the previous one of its prompt and sample index."""


class ClaimingCache(Protocol):
    """A cache that assigns sample indices, such as
    :class:`nemo_specrl.cache.cluster.cluster_cache.ClusterCache`.
    """

    async def claim(self, key: bytes, policy_version: int) -> Claim | None:
        """Reserve a sample index for a row of a prompt.

        Returns:
            The sample index and the prompt's rollouts. Those of the whole group may come once for
            each policy version, and after that only those of the sample index. None if no sample
            index is available now, a failure that the cache has counted.
        """

    def release(self, key: bytes, sample_index: int) -> None:
        """Give back a sample index for which no rollout will be put."""

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts; each replaces the previous one of its prompt and sample index."""

    def flush(self) -> None:
        """Send the rollouts that were put, without waiting for them to arrive."""


@runtime_checkable
class ResumedCache(Protocol):
    """A cache that knows how often its run has been resumed, such as a cluster's."""

    incarnation: int
    resumed: bool


@runtime_checkable
class Journal(Protocol):
    """A cache with a journal: :class:`~nemo_specrl.trainer.replay_journal.JournaledStore`."""

    def take(
        self,
        rows: Sequence[tuple[bytes, int]],
        policy_version: int,
        fingerprint: int,
        enough: Callable[[Sequence[bool]], bool] = all,
    ) -> list[Rollout | None]:
        """Remove and return the journal's rollout of each row, or None.

        Args:
            rows: prompt key and sample index of each.
            policy_version: policy version of the step.
            fingerprint: fingerprint of the step's weights.
            enough: given one bool per row, True if it ended, says whether these rows are a whole
                step.
        """

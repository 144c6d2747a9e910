"""A client of a cluster's cache whose rows come one by one: it claims a sample index for each.

This module knows the methods of shards with which rows are claimed. Looking up batches and storing
rollouts is ``client``'s, choosing a sample index the shard's (``sample_index_leases``).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable

from nemo_specrl.cache.cluster.client import CacheClient
from nemo_specrl.cache.cluster.sample_index_leases import RENEW_SECONDS, ROW_SECONDS
from nemo_specrl.rollout import Rollout

__all__ = ["ClaimingClient"]


class ClaimingClient(CacheClient):
    """A :class:`CacheClient` of which asynchronous engines claim sample indices, too."""

    def _reset(self) -> None:
        super()._reset()
        self._claimed: dict[tuple[bytes, int], float] = {}  # rows under way, and since when
        self._renewing: asyncio.Task[None] | None = None
        self._claiming = 0  # claims without an answer

    async def claim(self, key: bytes, policy_version: int) -> tuple[int, list[Rollout]] | None:
        """Get a sample index for a row that comes alone, and its prompt's rollouts.

        All clients ask the same shard, so no sample index is given to two rows. The other shards of
        the partition are told, so that one of them can take over. The claim ends when a rollout of
        the sample index is put, or with :meth:`release`; until then this client renews it.

        Args:
            key: of the row's prompt.
            policy_version: of the weights that will serve the row.

        Returns:
            The sample index and the rollouts. None: the answer is late, or there is no shard.
        """
        self._claiming += 1
        try:
            return await self._ask(key, policy_version, self.seconds_for(self._claiming))
        finally:
            self._claiming -= 1

    async def _ask(
        self, key: bytes, policy_version: int, seconds: float
    ) -> tuple[int, list[Rollout]] | None:
        """Ask for a claim, which is late after so many seconds."""
        self._poll_coordinator()
        for _ in range(2):  # again where the shard says that another one is responsible
            node = next(iter(self._view.routing.read(key)), None)
            if node is None or not self._usable(node):
                self._request_view()
                return None
            shard, epoch = self._view.shards[node], self._view.routing.epoch
            call = shard.claim.remote(key, policy_version, epoch, self.incarnation)
            try:
                claimed, newer = await asyncio.wait_for(call, seconds)
            except Exception as error:  # a failure of the cache may only cost speed
                self._failed(node, error)
                return None
            self._succeeded(node)
            self._adopt(newer)
            if claimed is not None:
                sample_index, rollouts = claimed
                self._claimed[key, sample_index] = time.monotonic()
                self._tell_writers("hold", [(key, sample_index)])
                if self._renewing is None or self._renewing.done():
                    self._renewing = asyncio.get_running_loop().create_task(self._renew())
                return sample_index, rollouts
        return None

    def release(self, key: bytes, sample_index: int) -> None:
        """End the claim of a row of which no rollout will be put: it failed, or was given up."""
        if self._claimed.pop((key, sample_index), None) is not None:
            self._tell_writers("release", [(key, sample_index)])

    async def _renew(self) -> None:
        """Tell shards which rows are under way, as long as there are any."""
        while self._claimed:
            await asyncio.sleep(RENEW_SECONDS)
            since = time.monotonic() - ROW_SECONDS
            self._claimed = {row: at for row, at in self._claimed.items() if at > since}
            self._tell_writers("hold", list(self._claimed))

    def _tell_writers(self, method: str, rows: list[tuple[bytes, int]]) -> None:
        """Call a method of the shards that receive the rollouts of rows, without an answer."""
        by_node: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
        for row in rows:
            for node in self._view.routing.write(row[0]):
                if self._usable(node):
                    by_node[node].append(row)
        for node, some in by_node.items():
            getattr(self._view.shards[node], method).remote(some)

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Store rollouts as :meth:`CacheClient.put` does; the claims of their rows end."""
        rollouts = list(rollouts)
        for rollout in rollouts:
            self._claimed.pop((rollout.key, rollout.sample_index), None)
        super().put(rollouts)

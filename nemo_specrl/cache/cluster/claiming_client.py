"""A client of a cluster's cache for rows that arrive one by one: it claims a sample index for each.

This module knows the methods of shards by which rows are claimed. ``client`` looks up batches and
stores rollouts, and the shard chooses a sample index (``sample_index_leases``).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

from nemo_specrl.cache.cluster.client import CacheClient
from nemo_specrl.cache.cluster.sample_index_leases import RENEW_SECONDS, ROW_SECONDS
from nemo_specrl.cache.cluster.shard_calls import FAILED
from nemo_specrl.rollout import Claim, Rollout

__all__ = ["ClaimingClient"]


class ClaimingClient(CacheClient):
    """A :class:`CacheClient` from which asynchronous engines also claim sample indices."""

    def _reset(self) -> None:
        super()._reset()
        self._claimed: dict[tuple[bytes, int], float] = {}  # rows under way, and since when
        self._renewing: asyncio.Task[None] | None = None
        self._claiming = 0  # claims without an answer
        self._asked: set[bytes] = set()  # prompts whose groups have arrived, or are under way
        self._asked_at = -1  # the policy version

    async def claim(self, key: bytes, policy_version: int) -> Claim | None:
        """Get a sample index for a row that arrives alone, and its prompt's rollouts.

        All clients ask the same shard, so no sample index is given to two rows. The other shards of
        the partition are told, so that one of them can take over. The claim ends when a rollout of
        the sample index is put, or with :meth:`release`; until then this client renews it.

        The first row of a prompt under a policy version gets the rollouts of the whole group, and
        the others, which may arrive while its answer is under way, those of their own sample index
        only: otherwise the rollouts of a group of n rows would be sent n times.

        Args:
            key: key of the row's prompt.
            policy_version: policy version of the weights that will serve the row.

        Returns:
            The sample index and the rollouts. None if the answer is late, or there is no shard that
            can be asked now. Both count as failures.
        """
        if policy_version != self._asked_at:
            self._asked, self._asked_at = set(), policy_version
        whole = key not in self._asked
        self._asked.add(key)
        self._claiming += 1
        claim = None
        try:
            seconds = self.seconds_for(self._claiming)
            claim = await self._ask(key, policy_version, whole, seconds)
            if claim is not None and not claim.whole and key not in self._asked:
                claim = await self._with_group(key, claim, seconds)
            return claim
        finally:
            self._claiming -= 1
            if whole and claim is None:
                self._asked.discard(key)

    async def _ask(
        self, key: bytes, policy_version: int, whole: bool, seconds: float
    ) -> Claim | None:
        """Ask for a claim, with all of its prompt's rollouts or those of its sample index."""
        self._poll_coordinator()
        for _ in range(2):  # again if the shard says that another one is responsible
            node = next(iter(self._view.routing.read(key)), None)
            if node is None or not self._usable(node):
                break
            shard, epoch = self._view.shards[node], self._view.routing.epoch
            call = shard.claim.remote(key, policy_version, epoch, self.incarnation, whole)
            unused = functools.partial(self._give_back, shard, key)
            answer = await self._wait_for(node, call, seconds, unused)
            if answer is FAILED:
                return None
            claim, newer = answer
            self._adopt(newer)
            if claim is not None:
                self._hold(key, claim.sample_index)
                return cast(Claim, claim)
        self.failures += 1  # no shard was asked, but the row still gets no draft
        self._request_view()
        return None

    async def _with_group(self, key: bytes, claim: Claim, seconds: float) -> Claim:
        """Extend a claim by the whole group, which the row that asked for it did not get."""
        self._asked.add(key)
        found: Any = FAILED
        try:
            node = self._nearest(self._view.routing.read(key))
            if node is not None:
                call = self._view.shards[node].get.remote([key], self._view.routing.epoch)
                found = await self._wait_for(node, call, seconds, _ignore)
        except asyncio.CancelledError:  # no row learns of the claim
            self.release(key, claim.sample_index)
            raise
        finally:
            if found is FAILED:
                self._asked.discard(key)
        if found is FAILED:
            return claim
        rollouts, newer = found
        self._adopt(newer)
        group = rollouts.get(key, claim.rollouts)
        return Claim(claim.sample_index, group, [rollout.outline for rollout in group])

    async def _wait_for(
        self, node: str, call: Any, seconds: float, unused: Callable[[asyncio.Future[Any]], None]
    ) -> Any:
        """Wait for a shard's answer.

        Args:
            node: name of the shard.
            call: the call to wait for.
            seconds: after which the answer is late.
            unused: called with the answer if it arrives when no row waits for it any more.

        Returns:
            The answer, or ``FAILED``.
        """
        answer = asyncio.wrap_future(call.future())
        used = False
        try:
            # Do not use wait_for: from Python 3.12 on it regards an answer as late that came in
            # time while the event loop was busy, as it is in NeMo-RL when a long row ends.
            await asyncio.wait([answer], timeout=seconds)
            if not answer.done():
                self._failed(node, TimeoutError(f"no answer in {seconds:g} s"))
                return FAILED
            result = answer.result()
            used = True
        except Exception as error:  # a failure of the cache may only cost speed
            self._failed(node, error)
            return FAILED
        finally:
            if not used:
                answer.add_done_callback(unused)
        self._succeeded(node)
        return result

    def _give_back(self, shard: Any, key: bytes, answer: asyncio.Future[Any]) -> None:
        """Free the sample index of a claim for which no row waits any more."""
        if answer.cancelled() or answer.exception() is not None:
            return
        claim, newer = answer.result()
        self._adopt(newer)
        if claim is not None:  # no other shard was told about it
            shard.release.remote([(key, claim.sample_index)])

    def _hold(self, key: bytes, sample_index: int) -> None:
        """Tell the other shards about a claim, and renew it from now on."""
        self._claimed[key, sample_index] = time.monotonic()
        self._tell_writers("hold", [(key, sample_index)])
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    def release(self, key: bytes, sample_index: int) -> None:
        """End the claim of a row for which no rollout will be put: it failed, or was given up."""
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


def _ignore(answer: asyncio.Future[Any]) -> None:
    """Take an answer that is no longer awaited; asyncio would log it if it is an error."""
    if not answer.cancelled():
        answer.exception()

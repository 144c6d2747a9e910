"""A client of a cluster's cache, which looks rollouts up and stores them within deadlines.

Each partition is on several shards. A client writes to all of them and reads from the nearest one
that answers, within its deadline; a shard that keeps failing is not called for a while. Clients
learn where partitions are from the shards, whose answers carry a newer view if there is one, and
from the coordinator, which they ask when shards fail and inform about shards that they could not
write to.

This module imports Ray and knows the methods of shards and coordinator. It does not know nodes, or
how copies are made.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import ray

from nemo_specrl.cache.cluster.membership import ClusterView, missing_writes
from nemo_specrl.cache.cluster.shard_calls import FAILED, Breaker, Lookups, Write, given_up, ready
from nemo_specrl.cache.codec import encode_for_transfer
from nemo_specrl.errors import in_one_line
from nemo_specrl.rollout import Rollout, RolloutSummary

__all__ = ["POLL_SECONDS", "PUT_AT_ONCE", "SYNC_SECONDS", "CacheClient"]

LOOK_UP_SECONDS = 10.0
"""How long a look-up of many prompts may take, unless a single one is allowed longer."""
PUT_AT_ONCE = 64
SYNC_SECONDS = 30.0
POLL_SECONDS = 1.0
ANY_EPOCH = -1
"""Older than every routing: a shard merges what is put with it, since it may come late."""

logger = logging.getLogger(__name__)


class CacheClient:
    """An engine's access to the cache. It can be pickled and sent to any process.

    Args:
        view: where partitions are, and how to reach the shards.
        coordinator: the actor to ask for a newer view. None: there is none.
        deadline_s: time that a look-up may take for each of its prompts, seconds
            (:meth:`seconds_for`). It is answered without what is late.
        tokenizer_id: tokenizer of the stores.
        incarnation: incarnation of the run. Every rollout that is put is stored with it, so that it
            is newer than anything that an earlier run, or an earlier life of this one, left on
            disks.
        resumed: whether such an earlier life left anything.

    Attributes:
        failures: number of calls to shards that failed or were late, since they were last taken.
    """

    def __init__(
        self,
        view: ClusterView,
        coordinator: Any,
        *,
        deadline_s: float,
        tokenizer_id: str,
        incarnation: int,
        resumed: bool = False,
    ) -> None:
        self.deadline_s = deadline_s
        self.tokenizer_id = tokenizer_id
        self.incarnation = incarnation
        self.resumed = resumed
        self._view = view
        self._coordinator = coordinator
        self._logged = False
        self._reset()

    def _reset(self) -> None:
        self.failures = 0
        self._breakers = {node: Breaker() for node in self._view.shards}
        self._buffer: list[Rollout] = []
        self._writes: list[Write] = []
        self._unsynced: set[str] = set()
        self._missed: set[str] = set()  # shards that did not receive what they should have
        self._silent: dict[str, Any] = {}  # a write that a shard has not answered in time
        self._view_call: Any = None
        self._view_called_at = -POLL_SECONDS

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what has been sent: it stays with the client that sent it."""
        of_connection = ("deadline_s", "tokenizer_id", "incarnation", "resumed")
        names = (*of_connection, "_view", "_coordinator", "_logged")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def partitions(self) -> int:
        """Number of partitions into which the keys fall."""
        return len(self._view.routing.readers)

    def seconds_for(self, prompts: int) -> float:
        """Time after which the answer for this many prompts, requested together, is late.

        At the beginning of a step all engines ask at the same moment, each for the whole groups of
        its prompts, and a shard reads and sends them one after the other.
        """
        return min(prompts * self.deadline_s, max(self.deadline_s, LOOK_UP_SECONDS))

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Look prompts up by their keys.

        What this client has put is found, because a shard handles the calls of one client in order.

        Returns:
            The rollouts of each prompt, newest first within a sample index. Prompts without any,
            and those whose answer is late, are absent.
        """
        return self._look_up(keys, "get")

    def outlines(self, keys: Iterable[bytes]) -> dict[bytes, list[RolloutSummary]]:
        """Look prompts up like :meth:`get`, without their arrays."""
        return self._look_up(keys, "outlines")

    def _look_up(self, keys: Iterable[bytes], method: str) -> dict[bytes, Any]:
        """Collect what shards answer within the deadline; if one fails, ask another copy."""
        self.flush()
        wanted = dict.fromkeys(keys)
        seconds = self.seconds_for(len(wanted))
        until = time.monotonic() + seconds
        found: dict[bytes, Any] = {}
        failed: set[str] = set()
        calls = self._call_nearest(wanted, failed, method)
        while calls:
            again: list[bytes] = []
            done = ready(calls, max(0.0, until - time.monotonic()))
            for call, (node, asked) in calls.items():
                if call not in done:
                    call.future()  # takes the answer, which Ray would log if it is an error
                    self._failed(node, TimeoutError(f"no answer in {seconds:g} s"))
                    continue
                answer = self._result(node, call)
                if answer is FAILED:
                    failed.add(node)
                    again += asked
                    continue
                rollouts, newer = answer
                self._adopt(newer)
                found |= {key: rollouts[key] for key in asked if key in rollouts}
                if newer is not None:  # then the shard left out partitions of which it is no reader
                    again += [key for key in asked if node not in newer.routing.read(key)]
            late = time.monotonic() >= until
            calls = {} if late else self._call_nearest(again, failed, method)
        return found

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Store rollouts, in batches; ``flush``, ``deliver`` and ``sync`` send the rest."""
        for rollout in rollouts:
            self._buffer.append(rollout)
        if len(self._buffer) >= PUT_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send what was put, without waiting for answers."""
        self._send()
        self._report_missed()
        if len(self._writes) > PUT_AT_ONCE:
            self._collect_acks(0)
            self._give_up(SYNC_SECONDS)
            if len(self._writes) > PUT_AT_ONCE:  # a shard is slow, or no longer there
                self._request_view()

    def deliver(self) -> None:
        """Return when every shard that answers has what was put; within a second it is on disk.

        Shards that do not answer within ``SYNC_SECONDS`` are no readers from then on, if there are
        others.
        """
        self._send()
        self._wait_for_writes(on_disk=False)

    def sync(self) -> None:
        """Return when every shard that answers has on disk what was put (see :meth:`deliver`)."""
        self._send()
        self._wait_for_writes(on_disk=True)

    def _wait_for_writes(self, on_disk: bool) -> None:
        until = time.monotonic() + SYNC_SECONDS
        while self._writes or (on_disk and self._unsynced):
            if on_disk:
                for node in self._unsynced & self._view.shards.keys():
                    call = self._view.shards[node].sync.remote()
                    self._writes.append(Write([], self._view.routing, {call: node}))
                self._unsynced.clear()
            left = until - time.monotonic()
            self._collect_acks(max(0.0, min(POLL_SECONDS, left)))
            if self._writes and left <= 0:
                self._give_up(0.0)
                self._unsynced.clear()
            elif self._writes:
                self._request_view()
        self._report_missed(wait=True)

    def _give_up(self, seconds: float) -> None:
        """Count older writes as missed by the shards that have not answered them."""
        self._writes, late = given_up(self._writes, seconds)
        for node in late:
            self._failed(node, TimeoutError(f"not written in {SYNC_SECONDS:g} s"))
        self._missed |= late.keys()
        self._silent |= late

    def take_failures(self) -> int:
        """Return the number of failures since the last call."""
        failures, self.failures = self.failures, 0
        return failures

    def _usable(self, node: str) -> bool:
        return node in self._breakers and self._breakers[node].closed

    def _nearest(self, nodes: Iterable[str]) -> str | None:
        """Choose the shard to ask: this node's own if it has a copy, else the first usable one."""
        here = ray.get_runtime_context().get_node_id()
        nearest = sorted(nodes, key=lambda node: self._view.nodes.get(node) != here)
        return next(filter(self._usable, nearest), None)

    def _call_nearest(self, keys: Iterable[bytes], failed: Collection[str], method: str) -> Lookups:
        """Call a look-up method of the nearest shard of each key that has not failed."""
        by_readers: dict[tuple[str, ...], list[bytes]] = defaultdict(list)
        for key in keys:
            by_readers[self._view.routing.read(key)].append(key)
        by_node: dict[str, list[bytes]] = defaultdict(list)
        for readers, batch in by_readers.items():
            node = self._nearest(reader for reader in readers if reader not in failed)
            if node is None:
                self._request_view()  # by now there may be others
            else:
                by_node[node] += batch
        epoch = self._view.routing.epoch
        return {
            getattr(self._view.shards[node], method).remote(batch, epoch): (node, batch)
            for node, batch in by_node.items()
        }

    def _send(self) -> None:
        """Send what is buffered to all writers of its partitions.

        This includes shards that are too slow to be asked for rollouts now: a shard that has missed
        a write lacks something, and everything that it serves is copied to it again.
        """
        self._poll_coordinator()
        buffer, self._buffer = self._buffer, []
        # Encode only once, here: a third of the bytes, for each shard that receives them.
        rollouts: list[Rollout] = list(encode_for_transfer(buffer, self.incarnation))
        routing, shards = self._view.routing, self._view.shards
        # Writes to shards that have not answered for long would pile up.
        self._silent = {node: c for node, c in self._silent.items() if not ready([c], 0)}
        by_node: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            for node in routing.write(rollout.key):
                if node in self._silent:
                    self._missed.add(node)
                elif node in shards:
                    by_node[node].append(rollout)
        if by_node:
            calls = {shards[n].put.remote(batch, routing.epoch): n for n, batch in by_node.items()}
            self._writes.append(Write(rollouts, routing, calls))
            self._unsynced |= by_node.keys()
        elif rollouts:
            self._request_view()

    def _collect_acks(self, timeout: float) -> None:
        """Take the answers to writes that come within ``timeout`` seconds."""
        done = ready([call for write in self._writes for call in write.calls], timeout)
        for write in self._writes:
            for call in done & write.calls.keys():
                node = write.calls.pop(call)
                newer = self._result(node, call)
                if newer is FAILED:
                    self._missed.add(node)
                else:
                    self._adopt(newer)
        for write in self._writes:  # a shard that is gone will not answer
            write.calls = {call: n for call, n in write.calls.items() if n in self._view.shards}
        self._writes = [write for write in self._writes if write.calls]

    def _adopt(self, view: ClusterView | None) -> None:
        """Use a view if it is newer; nodes that it adds also get the writes that are under way."""
        if view is None or view.routing.epoch <= self._view.routing.epoch:
            return
        self._view = view
        self._breakers = {node: Breaker() for node in view.shards}  # the coordinator reaches them
        for write in self._writes:
            missing = missing_writes(write.rollouts, write.routing, view.routing)
            self._missed |= missing.keys() & self._silent.keys()
            for node in (missing.keys() & view.shards.keys()) - self._silent.keys():
                write.calls[view.shards[node].put.remote(missing[node], ANY_EPOCH)] = node
                self._unsynced.add(node)
            write.routing = view.routing

    def _request_view(self) -> None:
        """Ask the coordinator for its view, at most once in ``POLL_SECONDS``."""
        self._poll_coordinator()
        now = time.monotonic()
        if self._coordinator is not None and now - self._view_called_at >= POLL_SECONDS:
            known = self._view.routing.epoch
            self._view_call, self._view_called_at = self._coordinator.view.remote(known), now

    def _poll_coordinator(self) -> None:
        """Adopt the view that the coordinator was asked for, if it has come."""
        if self._view_call is not None and ready([self._view_call], 0):
            call, self._view_call = self._view_call, None
            try:
                self._adopt(ray.get(call))
            except Exception as error:  # the shards then refuse, and that is counted
                logger.debug("the cache's coordinator: %s", in_one_line(error))

    def _report_missed(self, wait: bool = False) -> None:
        """Tell the coordinator which shards this client could not write to."""
        missed = sorted(self._missed & self._view.shards.keys())
        self._missed.clear()
        if missed and self._coordinator is not None:
            call = self._coordinator.report_missed.remote(missed)
            if wait:
                self._view_call = call
                ready([call], SYNC_SECONDS)
                self._poll_coordinator()

    def _result(self, node: str, call: Any) -> Any:
        """Return a shard's answer, or ``FAILED``."""
        try:
            result = ray.get(call)
            self._succeeded(node)
            return result
        except Exception as error:  # a failure of the cache may only cost speed
            self._failed(node, error)
            return FAILED

    def _succeeded(self, node: str) -> None:
        if node in self._breakers:  # by a newer view it may be gone
            self._breakers[node].count(failed=False)

    def _failed(self, node: str, error: Exception) -> None:
        self.failures += 1
        if node in self._breakers:
            self._breakers[node].count(failed=True)
        self._request_view()
        if not self._logged:
            self._logged = True
            logger.warning(
                "rollout cache, %s on node %s: %s; rows are decoded plainly. Further failures are "
                "counted in spec_rl/cache_errors",
                node, self._view.nodes.get(node, "unknown"), in_one_line(error),
            )  # fmt: skip

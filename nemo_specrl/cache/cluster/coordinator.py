"""The coordinator: an actor that watches a cluster's nodes and keeps partitions replicated.

Several times a second it checks which nodes Ray has, starts a shard on each new node and on each
node whose shard has died, and sends every shard a heartbeat. What it finds goes into a
:class:`Membership`. The resulting views go out with the heartbeats, and shards copy partitions from
one another (:mod:`.copy_tasks`). Look-ups continue in the meantime.

A shard that does not answer for ``SILENCE_TIMEOUT`` is left out until it does; by then it refuses
look-ups by itself (:data:`.shard.LEASE_SECONDS`). The coordinator runs on the node of the process
that started it. If it dies, it is restarted, with new shards on the same disks; until then the
shards refuse look-ups, and the cache is cold.

This module imports Ray and knows shards and membership. It does not know clients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.copy_tasks import (
    BACKGROUND,
    FILES,
    RETRY_SECONDS,
    SILENCE_TIMEOUT,
    Transfers,
)
from nemo_specrl.cache.cluster.membership import ClusterView, CopyTask, Health, Membership
from nemo_specrl.cache.cluster.shard import Shard
from nemo_specrl.cache.cluster.shard_handle import LEAVE_OUT_SECONDS, ShardHandle, ShardInfo
from nemo_specrl.errors import ConfigError, StoreUnavailable, in_one_line

__all__ = ["START_SECONDS", "Coordinator", "Started"]

TICK_SECONDS = 0.25
PING_SECONDS = 1.0
START_SECONDS = 180.0
"""How long the start of a run waits for stores to open; what opens later joins later."""

logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """The result of starting a cache.

    Args:
        view: view of the shards that are there.
        incarnation: the largest one with which anything on their disks was put.
        remarks: lines for the user, such as why a node has no shard.
    """

    view: ClusterView
    incarnation: int
    remarks: list[str]


class Coordinator:
    """The actor. Its own thread runs :meth:`step`; the other methods are called by clients.

    Args:
        folder: folder of the first shard of each machine; further shards of a machine add a number
            to it.
        life: a number that is redrawn whenever the run starts or resumes; a node that comes back in
            the same life keeps what its disk has.
        keep: whether nodes that are there at the start keep what their disks have, whatever run it
            belongs to; otherwise they start empty.
        partitions: number of partitions.
        replicas: number of copies of each partition.
        options: options of :class:`RolloutStore`.
    """

    def __init__(
        self,
        folder: str,
        life: int,
        keep: bool,
        partitions: int,
        replicas: int,
        options: Mapping[str, Any],
    ) -> None:
        self._folder = Path(folder)
        self._life = life
        self._keep, self._warm = keep, not keep
        self._partitions = partitions
        self._options = dict(options)
        # The clock makes epochs grow even when a coordinator is restarted; clients report if it has
        # been set back (:meth:`view`).
        self._membership = Membership(partitions, replicas, epoch=time.time_ns() // 10**6)
        self._shards: dict[str, ShardHandle] = {}  # by Ray's id of the node
        self._retry_at: dict[str, float] = {}  # when to try again on a node
        self._at_start: set[str] = set()  # nodes that were there, with or without a shard
        self._failed: dict[str, str] = {}  # why a node has no shard, by the node's address and id
        self._layout: tuple[str, ...] = ()
        self._view = ClusterView(self._membership.routing, {}, {})
        self._transfers = Transfers(partitions)
        self._to_copy: set[CopyTask] = set()
        self._nodes_checked_at = self._advanced_at = -PING_SECONDS
        self._lock = threading.Lock()  # of membership, view and transfers
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._keep = self._warm = False
            self._run_in_background()

    def start(self) -> Started:
        """Start shards on all nodes that are there now, and keep them replicated from then on.

        A node whose folder cannot be used does not take part in the cache until it can.

        Raises:
            StoreUnavailable: no node has a folder that can be used.
        """
        remarks: list[str] = []
        if self._thread is None:
            self._update_nodes()
            self._at_start = set(self._shards)
            self._wait_for_shards()
            shards = self._present()
            late = [shard for shard in shards if shard.info is None]
            why = f"{self._folder} has not opened in {START_SECONDS:.0f} s"
            self._failed |= {shard.place: why for shard in late}
            if len(late) == len(shards):
                more = f" (and {len(self._failed) - 1} more nodes)" if len(self._failed) > 1 else ""
                why = next(iter(self._failed.values()), f"{self._folder}: there are no nodes")
                raise StoreUnavailable(why + more)
            remarks += [
                f"{node} is left out of the cache until this is resolved: {why}"
                for node, why in self._failed.items()
            ]
            remarks += [f"{s.place}: {line}" for s in shards if s.info for line in s.info.remarks]
            until = time.monotonic() + START_SECONDS
            while not self.started():
                if time.monotonic() > until:
                    raise StoreUnavailable(f"{self._folder}: no shard answers its coordinator")
                self.step()
                time.sleep(0.01)
            self._run_in_background()
        newest = max((s.info.incarnation for s in self._present() if s.info), default=0)
        return Started(self._view, newest, remarks)

    def _present(self) -> list[ShardHandle]:
        """The shards as they are now: the thread that polls them adds and drops some meanwhile."""
        return list(self._shards.values())

    def _wait_for_shards(self) -> None:
        """Wait until each shard has opened its store, or has failed to, or is late."""
        until = time.monotonic() + START_SECONDS
        while opening := [s.call for s in self._shards.values() if s.info is None]:
            if time.monotonic() > until:
                return
            ray.wait(opening, num_returns=1, timeout=PING_SECONDS)
            now = time.monotonic()
            for shard in self._shards.values():
                shard.heard_at = now  # nothing is sent to those that wait for the others
            self._poll_shards()

    def started(self) -> bool:
        """Whether all shards that are there know the current view, and answer look-ups by it."""
        epoch = self._view.routing.epoch
        members = [shard for shard in self._shards.values() if shard.member]
        known = all(shard.answers > 1 and shard.epoch == epoch for shard in members)
        return bool(members) and known and not self._membership.changed

    def view(self, known: int = 0) -> ClusterView:
        """Return the current view, with an epoch of at least ``known``, the caller's.

        The caller's is newer if this coordinator was restarted and the clock has been set back.
        """
        with self._lock:
            self._membership.outrun(known)
            self._plan_if_changed()
            return self._view

    def health(self) -> Health:
        """Return how far the copies are from complete."""
        with self._lock:
            return self._membership.health

    def report_missed(self, names: Collection[str]) -> ClusterView:
        """Note that shards missed a write to one of their partitions.

        In the returned view they are no readers, if there are others.
        """
        with self._lock:
            for shard in [s for s in self._present() if s.member and s.name in names]:
                self._membership.missed_write(shard.name)
                shard.note_missed_write(time.monotonic())
            self._plan_if_changed()
            return self._view

    def set_preferred_nodes(self, layout: Collection[str]) -> None:
        """Place the partitions on these nodes of Ray, and on others only if these are too few.

        Raises:
            ConfigError: one of them is not there.
        """
        here = {node["NodeID"] for node in _nodes()}
        if unknown := sorted(set(layout) - here):
            raise ConfigError(f"layout: {unknown} are no nodes of this Ray cluster")
        with self._lock:
            self._layout = tuple(layout)

    def close(self) -> None:
        """End all shards; their disks keep what they have."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(RETRY_SECONDS)
        closing = [shard.actor.close.remote() for shard in self._shards.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=RETRY_SECONDS)
        for shard in self._shards.values():
            ray.kill(shard.actor)

    def step(self) -> None:
        """Check nodes and shards, update the routing and send heartbeats. Never waits."""
        self._update_nodes()
        self._poll_shards()
        with self._lock:
            preferred = [self._shards[node] for node in self._layout if node in self._shards]
            self._membership.set_preferred_nodes([s.name for s in preferred if s.name])
            self._advance_membership()
        self._send_heartbeats()

    def _run_in_background(self) -> None:
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self.step()
            except Exception:  # whatever it is: without a coordinator the cache goes cold
                logger.exception("rollout cache: the coordinator continues after an error")
            with self._lock:
                copying = self._transfers.calls
            if copying:  # chunks follow one another without a pause
                ray.wait(copying, num_returns=1, timeout=TICK_SECONDS, fetch_local=False)
            else:
                self._closed.wait(TICK_SECONDS)

    def _update_nodes(self) -> None:
        """Start shards on new nodes, and drop those of nodes that are gone."""
        now = time.monotonic()
        if now - self._nodes_checked_at < PING_SECONDS:
            return
        self._nodes_checked_at = now
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        for gone in self._shards.keys() - nodes.keys():
            self._failed.pop(self._shards[gone].place, None)
            logger.warning("rollout cache: node %s is gone", gone)
            self._drop(self._shards[gone])
        for node, machine in nodes.items():
            if node not in self._shards and self._retry_at.get(node, 0.0) <= now:
                self._shards[node] = self._start_shard(node, machine)

    def _start_shard(self, node: str, machine: str) -> ShardHandle:
        taken = {shard.index for shard in self._shards.values() if shard.machine == machine}
        # A free number belonged to a shard that is gone; the new shard finds its disk again.
        index = min(set(range(len(taken) + 1)) - taken)
        name = f"{self._folder.name}-{index}" if index else self._folder.name
        first = self._thread is None or node in self._at_start
        remote: Any = ray.remote  # whose types do not know of concurrency groups
        actor = (
            remote(concurrency_groups={BACKGROUND: 4, FILES: 2}, num_cpus=0)(Shard)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(str(self._folder.with_name(name)), self._life, self._keep and first,
                    self._options, self._warm and first)
        )  # fmt: skip
        call = actor.describe.options(concurrency_group=BACKGROUND).remote(self._partitions)
        return ShardHandle(node, actor, machine, index, call, heard_at=time.monotonic())

    def _poll_shards(self) -> None:
        """Take the answers that have arrived, and leave out shards that were silent for long."""
        now = time.monotonic()
        calls = {shard.call: shard for shard in self._shards.values() if shard.call is not None}
        done = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []
        for call in done:
            shard = calls[call]
            shard.call = None
            try:
                answer = ray.get(call)
            except Exception as error:  # from the actor, its store or its node
                why, name = in_one_line(error), shard.place
                if self._failed.get(name) != why:  # it is tried again and again
                    logger.warning("rollout cache: shard of %s: %s", name, why)
                self._failed[name] = why
                self._drop(shard)
                self._retry_at[shard.node] = now + RETRY_SECONDS
                continue
            shard.heard_at = now
            if isinstance(answer, ShardInfo):
                self._join(shard, answer)
                continue
            store_id, shard.answers = answer
            shard.epoch = shard.sent_epoch
            if now < shard.left_out_until:
                continue
            if not (shard.member and shard.info and shard.info.store_id == store_id):
                self._leave(shard)
                describe = shard.actor.describe.options(concurrency_group=BACKGROUND)
                shard.call, shard.called_at = describe.remote(self._partitions), now
        for shard in self._shards.values():
            if shard.member and self._can_do_without(now) and shard.is_to_be_left_out(now):
                logger.warning(
                    "rollout cache: the shard of %s does not take what is written, as with a full "
                    "disk; it is left out for %.0f s",
                    shard.place, shard.left_out_until - now,
                )  # fmt: skip
                self._leave(shard)
            if shard.info is not None and now - shard.called_at > SILENCE_TIMEOUT:
                shard.call = None  # call again: an answer may have been lost with its connection
            if shard.member and now - shard.heard_at > SILENCE_TIMEOUT:
                logger.warning(
                    "rollout cache: the shard of node %s has not answered for %.0f s",
                    shard.node, now - shard.heard_at,
                )  # fmt: skip
                self._leave(shard)

    def _can_do_without(self, now: float) -> bool:
        """Whether most shards accept writes, so that one that does not can be left out.

        If many do not, it is more likely that a client cannot reach them.
        """
        members = [shard for shard in self._shards.values() if shard.member]
        sound = sum(now - shard.missed_at > LEAVE_OUT_SECONDS for shard in members)
        return 2 * sound > len(members)

    def _join(self, shard: ShardHandle, info: ShardInfo) -> None:
        self._failed.pop(shard.place, None)
        shard.info, shard.member = info, True
        with self._lock:
            self._membership.join(info.name, info.holds)

    def _leave(self, shard: ShardHandle) -> None:
        if shard.member:
            shard.member = False
            with self._lock:
                self._membership.leave(shard.name)

    def _drop(self, shard: ShardHandle) -> None:
        self._leave(shard)
        self._shards.pop(shard.node, None)
        # Clients' views hold handles to it, so it would live on and keep its folder locked.
        ray.kill(shard.actor)

    def _advance_membership(self) -> None:
        """Derive the next routing if it is due, and continue the copies."""
        membership = self._membership
        if not self._plan_if_changed():
            for copy in self._transfers.advance(self._to_copy, self._view.shards):
                self._to_copy.discard(copy)
                membership.copied(copy)
            now, epoch = time.monotonic(), membership.routing.epoch
            known = all(shard.epoch == epoch for shard in self._shards.values() if shard.member)
            # Copies of small partitions end many times a second; a routing goes to all shards.
            if known and now - self._advanced_at >= TICK_SECONDS:
                self._advanced_at = now
                self._to_copy = set(membership.acknowledged())
                membership.advance()
        self._update_view()

    def _plan_if_changed(self) -> bool:
        if not self._membership.changed:
            return False
        self._membership.plan()
        self._transfers.keep(self._membership.going_on)
        self._to_copy = set()
        self._update_view()
        return True

    def _update_view(self) -> None:
        members = [shard for shard in self._present() if shard.member]
        self._view = ClusterView(
            self._membership.routing,
            {shard.name: shard.actor for shard in members},
            {shard.name: shard.node for shard in members},
        )

    def _send_heartbeats(self) -> None:
        """Send every shard the view, and the number of its last answer."""
        now, view = time.monotonic(), self._view
        for shard in self._shards.values():
            news = shard.sent_epoch != view.routing.epoch or shard.answers < 2
            if shard.call is None and (news or now - shard.called_at >= PING_SECONDS):
                heartbeat = shard.actor.heartbeat.options(concurrency_group=BACKGROUND)
                shard.call = heartbeat.remote(view, shard.answers)
                shard.called_at, shard.sent_epoch = now, view.routing.epoch


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]

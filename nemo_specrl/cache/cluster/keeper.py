"""The one who keeps a cluster's cache whole: an actor that watches nodes and has shards copied.

A few times a second it looks which nodes Ray has, starts a shard on each new one and on each whose
shard has died, and asks every shard whether it is there. What it learns goes into a
:class:`Membership`; the views that come out of that go to the shards, and the copies are made by
them, one from the other, a piece at a time. Look-ups go on meanwhile, to where partitions lie.

A shard that does not answer for ``PATIENCE_SECONDS`` is left out until it does; by then it has
stopped answering look-ups by itself (:data:`.shard.LEASE_SECONDS`). The keeper runs on the node of
the process that started it. Where it dies it begins again, with new shards on the same disks; while
it is away the shards fall silent, and the cache is cold.

Knows Ray, shards and membership; nothing of clients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.membership import Copy, Health, Membership, View
from nemo_specrl.cache.cluster.shard import Hello, Shard
from nemo_specrl.cache.snapshot import key_range
from nemo_specrl.errors import ConfigError, StoreUnavailable

__all__ = ["BACKGROUND", "Keeper", "last_line"]

BACKGROUND = "background"
"""Calls of shards beside those of clients, which are done in order, have threads of their own."""
TICK_SECONDS = 0.25
PING_SECONDS = 1.0
PATIENCE_SECONDS = 12.0
RETRY_SECONDS = 5.0
START_SECONDS = 120.0
COPIES_AT_ONCE = 4

logger = logging.getLogger(__name__)


@dataclass
class _Known:
    """A shard that was started."""

    node: str
    actor: Any
    machine: str
    index: int  # among those of the machine
    asked: Any  # a call that is under way
    asked_at: float = 0.0
    heard_at: float = 0.0
    hello: Hello | None = None
    answers: int = 0
    epoch: int = -1  # the last that it said it knows
    asked_epoch: int = -1
    member: bool = False


class Keeper:
    """The actor. One thread does what is described above; methods come from others.

    Args:
        folder: of the first shard of each machine; others of the same machine have a number behind
            its name.
        run: names the run; a node that comes back to it goes on with its disk.
        keep: nodes that are there at the start go on with their disks whatever run they were of;
            else they start empty.
        partitions: into how many the keys fall.
        replicas: copies of each.
        options: of :class:`RolloutStore`.
    """

    def __init__(
        self,
        folder: str,
        run: str,
        keep: bool,
        partitions: int,
        replicas: int,
        options: Mapping[str, Any],
    ) -> None:
        self._folder = Path(folder)
        self._run_id = run
        self._keep = keep
        self._partitions = partitions
        self._options = dict(options)
        # Epochs go on growing when a keeper begins again.
        self._membership = Membership(partitions, replicas, epoch=time.time_ns() // 10**6)
        self._known: dict[str, _Known] = {}  # by Ray's id of the node
        self._retry: dict[str, float] = {}  # when to try again on a node
        self._layout: tuple[str, ...] = ()
        self._view = View(self._membership.routing, {}, {})
        self._plans = 0
        self._wanted: set[Copy] = set()  # of the present plan, begun
        self._copying: dict[Future[bool], tuple[int, Copy]] = {}
        self._watched_at = -PING_SECONDS
        self._pool = ThreadPoolExecutor(COPIES_AT_ONCE, "copies")
        self._lock = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._keep = False
            self._run_in_background()

    def start(self) -> View:
        """Shards on all nodes that are there now; does nothing when they run already.

        Raises:
            StoreUnavailable: a node's folder cannot be used.
        """
        if self._thread is None:
            self._watch()
            for known in self._known.values():
                try:
                    ray.get(known.asked, timeout=START_SECONDS)
                except ray.exceptions.RayError as error:
                    raise StoreUnavailable(f"{self._folder}: {last_line(error)}") from error
            while not self._ready():
                self._tick()
                time.sleep(0.01)
            self._keep = False
            self._run_in_background()
        return self._view

    def view(self) -> View:
        """The present one."""
        return self._view

    def health(self) -> Health:
        """How far the copies are from what they should be."""
        with self._lock:
            return self._membership.health

    def missed(self, names: Collection[str]) -> View:
        """Shards have not got what was written to others of their partitions.

        Returns:
            The view once they are no readers any more, where others are.
        """
        with self._lock:
            for name in names:
                self._membership.missed(name)
            self._lock.wait_for(lambda: not self._membership.changed, RETRY_SECONDS)
            return self._view

    def reshard(self, layout: Collection[str]) -> None:
        """Have these nodes, by their id in Ray, hold the partitions, as far as they suffice.

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
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        closing = [known.actor.close.remote() for known in self._known.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=RETRY_SECONDS)
        for known in self._known.values():
            ray.kill(known.actor)

    def _run_in_background(self) -> None:
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            try:
                self._tick()
            except Exception:  # whatever it is: without a keeper the cache falls silent
                logger.exception("rollout cache: the keeper goes on after")

    def _ready(self) -> bool:
        """Whether all that were started know the view and may answer by it."""
        return not self._membership.changed and all(
            known.member and known.answers > 1 and known.epoch == self._view.routing.epoch
            for known in self._known.values()
        )

    def _tick(self) -> None:
        self._watch()
        self._hear()
        with self._lock:
            first = [self._known[node] for node in self._layout if node in self._known]
            self._membership.prefer([known.hello.name for known in first if known.hello])
            self._go_on()
            self._lock.notify_all()
        self._tell()

    def _watch(self) -> None:
        """Nodes come and go."""
        now = time.monotonic()
        if now - self._watched_at < PING_SECONDS:
            return
        self._watched_at = now
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        for gone in self._known.keys() - nodes.keys():
            logger.warning("rollout cache: node %s is gone", gone)
            self._forget(self._known[gone])
        for node, machine in nodes.items():
            if node not in self._known and self._retry.get(node, 0.0) <= now:
                self._known[node] = self._started(node, machine)

    def _started(self, node: str, machine: str) -> _Known:
        taken = {known.index for known in self._known.values() if known.machine == machine}
        index = min(set(range(len(taken) + 1)) - taken)
        # Nodes of one machine share its disk. A number that is free is that of one that was there
        # before: so it finds its disk again.
        name = f"{self._folder.name}-{index}" if index else self._folder.name
        remote: Any = ray.remote  # whose types do not know of concurrency groups
        actor = (
            remote(concurrency_groups={BACKGROUND: 4}, num_cpus=0)(Shard)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote(str(self._folder.with_name(name)), self._run_id, self._keep, self._options)
        )
        asked = actor.hello.options(concurrency_group=BACKGROUND).remote(self._partitions)
        return _Known(node, actor, machine, index, asked, heard_at=time.monotonic())

    def _hear(self) -> None:
        """Take the answers that have come; whoever is silent for long is left out."""
        now = time.monotonic()
        asked = {known.asked: known for known in self._known.values() if known.asked is not None}
        done = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for ref in done:
            known = asked[ref]
            known.asked = None
            try:
                answer = ray.get(ref)
            except Exception as error:  # of the actor, its store or its node
                logger.warning("rollout cache: shard of node %s: %s", known.node, last_line(error))
                self._forget(known)
                self._retry[known.node] = now + RETRY_SECONDS
                continue
            known.heard_at = now
            if isinstance(answer, Hello):
                known.hello = answer
                self._join(known)
                continue
            life, known.answers = answer
            known.epoch = known.asked_epoch
            assert known.hello is not None
            if known.hello.life != life or not known.member:
                self._leave(known)
                known.asked = known.actor.hello.options(concurrency_group=BACKGROUND).remote(
                    self._partitions
                )
                known.asked_at = now
        for known in self._known.values():
            if known.hello is not None and now - known.asked_at > PATIENCE_SECONDS:
                known.asked = None  # asked again: an answer may have been lost with its connection
            if known.member and now - known.heard_at > PATIENCE_SECONDS:
                logger.warning(
                    "rollout cache: the shard of node %s has not answered for %.0f s",
                    known.node, now - known.heard_at,
                )  # fmt: skip
                self._leave(known)

    def _join(self, known: _Known) -> None:
        assert known.hello is not None
        known.member = True
        with self._lock:
            self._membership.join(known.hello.name, known.hello.holds)

    def _leave(self, known: _Known) -> None:
        if known.member and known.hello is not None:
            known.member = False
            with self._lock:
                self._membership.leave(known.hello.name)

    def _forget(self, known: _Known) -> None:
        self._leave(known)
        self._known.pop(known.node, None)

    def _go_on(self) -> None:
        """The next routing, or the next copies: each in its time."""
        self._collect()
        membership = self._membership
        if membership.changed:
            membership.plan()
            self._plans += 1
            self._wanted = set()
        elif all(k.epoch == membership.routing.epoch for k in self._known.values() if k.member):
            copies = set(membership.told())
            for copy in sorted(copies - self._wanted):
                self._wanted.add(copy)
                future = self._pool.submit(self._copy, copy, self._plans)
                self._copying[future] = (self._plans, copy)
            membership.settle()
        members = [known for known in self._known.values() if known.member and known.hello]
        self._view = View(
            membership.routing,
            {known.hello.name: known.actor for known in members if known.hello},
            {known.hello.name: known.node for known in members if known.hello},
        )

    def _collect(self) -> None:
        for future in [future for future in self._copying if future.done()]:
            plan, copy = self._copying.pop(future)
            if plan == self._plans:
                self._wanted.discard(copy)  # one that failed is begun again
                if future.result():
                    self._membership.copied(copy)

    def _copy(self, copy: Copy, plan: int) -> bool:
        """Have the target get all that the source has of a partition; in a thread of its own."""
        try:
            for _ in self._pieces(copy):
                if self._closed.is_set() or plan != self._plans:
                    return False
        except Exception as error:
            logger.warning("rollout cache: copying %s: %s", copy, last_line(error))
            self._closed.wait(RETRY_SECONDS)
            return False
        return True

    def _pieces(self, copy: Copy) -> Iterator[None]:
        shards = self._view.shards
        source, target = shards[copy.source], shards[copy.target]
        start, stop = key_range(copy.partition, self._partitions)
        following: bytes | None = start
        while following is not None:
            piece = source.piece.options(concurrency_group=BACKGROUND).remote(following, stop)
            # Only the reference passes through here. It is waited for, so that the target's other
            # calls do not queue behind it.
            if not ray.wait([piece], timeout=PATIENCE_SECONDS, fetch_local=False)[0]:
                raise TimeoutError(f"no answer in {PATIENCE_SECONDS:g} s")
            taken = target.take.options(concurrency_group=BACKGROUND).remote(piece, stop)
            following = ray.get(taken, timeout=PATIENCE_SECONDS)
            yield

    def _tell(self) -> None:
        """Let every shard know the view, and that it was heard."""
        now, view = time.monotonic(), self._view
        for known in self._known.values():
            news = known.asked_epoch != view.routing.epoch or known.answers < 2
            if known.asked is None and (news or now - known.asked_at >= PING_SECONDS):
                known.asked = known.actor.see.options(concurrency_group=BACKGROUND).remote(
                    view, known.answers
                )
                known.asked_at, known.asked_epoch = now, view.routing.epoch


def last_line(error: BaseException) -> str:
    """What went wrong, without what Ray puts around it."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]

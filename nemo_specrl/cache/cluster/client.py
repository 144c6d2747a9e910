"""The rollout cache of a Ray cluster, as one process uses it: look-ups and puts with deadlines.

There is no coordinator. A thread asks Ray every few seconds which shards there are, and makes that
of its own node if it is missing; each process computes a prompt's owners from their addresses
(:func:`.placement.ranking`). Where processes disagree for some seconds, a look-up misses. This
node's own store is used directly, without Ray.

A look-up asks the nearest owner, then the other ones, then the nodes that may have owned the prompt
before nodes came or went. Those are the next ones in the ranking, so that no process has to
remember how the cluster was: engines that start on other nodes find what was kept where they ran
earlier. What is found goes to the owners that lacked it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_specrl.cache.cluster.placement import ranking
from nemo_specrl.cache.cluster.shard import (
    NAMESPACE,
    WRITES,
    find_shards,
    make_shard,
)
from nemo_specrl.cache.codec import encode
from nemo_specrl.cache.local import LocalCache
from nemo_specrl.config import CacheConfig
from nemo_specrl.errors import in_one_line
from nemo_specrl.monitoring import names as metric
from nemo_specrl.rollout import Rollout

__all__ = ["REFRESH_SECONDS", "in_cluster", "join_cluster", "open_cluster_cache"]

REFRESH_SECONDS = 5.0
"""How often a process asks Ray which shards there are."""
PING_SECONDS = 5.0
MAKE_AGAIN_SECONDS = 30.0
"""How long a process waits before it makes its node's shard once more."""
LOOKUP_SECONDS = 30.0
"""The longest that a look-up takes. For an engine, one that is late comes with the prompt's next
request."""
GET_SECONDS = 1.0
"""For an answer that is there; it is not if its memory has been lost since."""
KEY_SECONDS = 0.01
"""What a prompt's responses may take beyond ``deadline_ms`` before other owners are asked."""
PUT_SECONDS = 10.0
PUT_BYTES_PER_SECOND = 10e6
LATE_TO_LEAVE_OUT = 3
LEFT_OUT_SECONDS = 30.0
"""A shard that was late so many times in a row is not called for so long."""
FORMER_OWNERS = 6
"""Nodes after the owners that are asked as well: where the number of nodes doubles at once, one of
a prompt's earlier owners is among the first eight with a probability of 99.6 %."""
FRUITLESS, SAMPLED = 256, 16
"""After so many prompts of which no former owner had anything, one look-up in ``SAMPLED`` asks
them, until one has."""
HEALED_AT_ONCE = 256
"""Prompts that may wait to be given to owners that lack them."""

logger = logging.getLogger(__name__)

_Calls = dict[Any, tuple[str, list[Any]]]
"""Calls without an answer yet, with the address of the node and what was sent."""


def in_cluster() -> bool:
    """Whether this process is a Ray worker or a child of one, or has initialized Ray.

    Ray is not imported.
    """
    ray = sys.modules.get("ray")
    return "RAY_RAYLET_PID" in os.environ or bool(ray and ray.is_initialized())


def join_cluster() -> str:
    """Connect this process to Ray's cluster, unless it is connected.

    A child of a Ray worker, such as the engine core of vLLM's ``AsyncLLM``, connects to the raylet
    of that worker, whose command line has the addresses. Called from another thread than the main
    one, Ray leaves the process's signals alone.

    Returns:
        The address of this node.
    """
    import ray

    if not ray.is_initialized():
        raylet = os.environ.get("RAY_RAYLET_PID")
        command = Path(f"/proc/{raylet}/cmdline").read_text() if raylet else ""
        options = dict(part.partition("=")[::2] for part in command.split("\0"))
        log = logging.getLogger("ray._private.worker")
        level = log.level
        log.setLevel(logging.ERROR)  # it would warn that it leaves SIGTERM alone
        try:
            ray.init(
                address=options.get("--gcs-address", "auto"),
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address=options.get("--node_ip_address"),
            )
        finally:
            log.setLevel(level)
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def open_cluster_cache(
    config: CacheConfig, vocabulary: str, counts: Mapping[str, float] | None = None
) -> ClusterCache | None:
    """Open the cache of this process's Ray cluster.

    The cluster is joined in the background; until then this node's own store is all there is.

    Args:
        config: the ``cache`` block.
        vocabulary: hash of the vocabulary.
        counts: what this process counts.

    Returns:
        The cache. None: the block names no folder.
    """
    return None if config.dir is None else ClusterCache(config, vocabulary, counts)


@dataclass
class _Node:
    """A node with a shard, as this process knows it."""

    shard: Any  # None: this process's own store alone
    late: int = 0  # calls in a row
    left_out_until: float = 0.0
    gone: bool = False

    @property
    def usable(self) -> bool:
        return not self.gone and time.monotonic() >= self.left_out_until

    def count(self, late: bool) -> None:
        self.late = self.late + 1 if late else 0
        if self.late >= LATE_TO_LEAVE_OUT:
            self.left_out_until = time.monotonic() + LEFT_OUT_SECONDS


class ClusterCache:
    """A ``HistoryCache`` on the shards of a Ray cluster; nothing that it does raises.

    Args:
        config: the ``cache`` block, with a folder.
        vocabulary: hash of the vocabulary.
        counts: what this process counts; its node's shard is told, for the driver.

    Attributes:
        late: calls to shards that were not answered in time.
        failed: calls to shards that failed.
        healed: prompts that were given to owners that lacked them.
    """

    def __init__(
        self, config: CacheConfig, vocabulary: str, counts: Mapping[str, float] | None = None
    ) -> None:
        assert config.dir is not None
        self._counts = counts
        self.late = self.failed = self.healed = 0
        self._config = config
        self._vocabulary = vocabulary
        self._logged: set[str] = set()
        self._local: LocalCache | None = None
        try:
            self._local = LocalCache.open(config, vocabulary)
        except Exception as error:  # other nodes may have stores that can be used
            self._log("this node keeps nothing", error)
        # This node's address, once it is known, and the nodes with a shard. Replaced as a whole.
        self._view = "", self._alone("")
        self._make_after = 0.0
        self._lookups = self._fruitless = 0
        self._to_heal: deque[tuple[str, list[Rollout]]] = deque(maxlen=HEALED_AT_ONCE)
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="specrl-shards", daemon=True)
        self._thread.start()

    @property
    def nodes(self) -> list[str]:
        """Addresses of the nodes with a shard, as far as this process knows."""
        return sorted(node for node, known in self._view[1].items() if known.shard is not None)

    # --- what engines call ------------------------------------------------------------------------

    def get(
        self,
        keys: Sequence[bytes],
        timeout: float | None = None,
        known: Collection[int] = frozenset(),
    ) -> dict[bytes, list[Rollout]]:
        """Return the responses to prompts, oldest first, as far as they come in time.

        Args:
            keys: keys of prompts.
            timeout: seconds; None: ``LOOKUP_SECONDS``.
            known: identities of responses that come without tokens where this node is an owner;
                what others have may be given to owners that lack it.
        """
        until = time.monotonic() + (LOOKUP_SECONDS if timeout is None else timeout)
        own, nodes = self._view
        orders = {key: self._order(key, own, nodes) for key in keys}
        found: dict[bytes, list[Rollout]] = {}
        lacking: dict[bytes, set[str]] = defaultdict(set)
        calls: _Calls = {}

        def add(node: str, batch: list[bytes], answer: Mapping[bytes, list[Rollout]]) -> None:
            for key in batch:
                if key in answer:
                    found.setdefault(key, answer[key])
                else:
                    lacking[key].add(node)

        self._lookups += 1
        deep = self._fruitless < FRUITLESS or self._lookups % SAMPLED == 0
        for wave in range(3 if deep else 2):
            by_node: dict[str, list[bytes]] = defaultdict(list)
            more = False
            for key, order in orders.items():
                if key not in found:
                    for node in order[wave]:
                        by_node[node].append(key)
                    more |= any(order[wave + 1 :])
            now = time.monotonic()
            if not by_node or now >= until:
                continue
            limit = until
            if more:  # the others are asked soon, also where a look-up may take long
                patience = self._config.deadline_ms / 1000
                patience += KEY_SECONDS * max(map(len, by_node.values()))
                limit = now + min((until - now) / 2, patience)
            here = by_node.pop(own, []) if self._local else []
            asked = self._call(by_node, nodes, lambda shard, batch: shard.get.remote(batch))
            calls |= asked
            if here and self._local:
                skipped = frozenset() if wave else known
                add(own, here, self._local.get(here, limit - now, skipped))
            for node, batch, answer in self._answers(calls, nodes, limit, asked):
                add(node, batch, answer)
        self._give_up(calls, nodes)

        for key, (nearest, others, former) in orders.items():
            owners = {*nearest, *others}
            if key in found:
                self._to_heal.extend((node, found[key]) for node in owners & lacking[key])
                if owners <= lacking[key]:
                    self._fruitless = 0
            elif deep and former:
                self._fruitless += 1
        if self._to_heal:
            self._wake.set()
        return found

    def put(self, rollouts: Sequence[Rollout]) -> int:
        """Keep responses with the owners of their prompts.

        It waits ``PUT_SECONDS`` at most, and longer where there are many bytes.

        Returns:
            How many were kept by one owner or more.
        """
        own, nodes = self._view
        by_node: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            for node in self._ranked(rollout.key, nodes)[: self._config.replicas]:
                by_node[node].append(rollout)
        size = sum(8 * len(rollout) for rollout in rollouts)
        until = time.monotonic() + PUT_SECONDS + size / PUT_BYTES_PER_SECOND
        here = by_node.pop(own, []) if self._local else []
        calls = self._call(
            by_node,
            nodes,
            lambda shard, batch: shard.put.options(concurrency_group=WRITES).remote(batch),
        )
        kept: set[int] = set()
        if here and self._local and self._local.put(here):
            kept.update(map(id, here))
        for _, batch, count in self._answers(calls, nodes, until):
            if count:
                kept.update(map(id, batch))
        self._give_up(calls, nodes)
        return len(kept)

    def take_drafts(
        self, wanted: Mapping[bytes, int], policy_version: int, timeout: float
    ) -> dict[bytes, list[Rollout]]:
        """Return drafts for prefix reuse, each of which no other call gets for this version.

        The first owner hands them out; another node does only where that one is gone or has nothing
        of the prompt. What is late is left out.

        Args:
            wanted: number of rows by key.
            policy_version: the version for which they are drafts.
            timeout: seconds.
        """
        until = time.monotonic() + timeout
        own, nodes = self._view
        if self._local and nodes.keys() <= {own}:
            return self._local.take_drafts(wanted, policy_version, timeout)
        found: dict[bytes, list[Rollout]] = {}
        left = {key: self._ranked(key, nodes) for key in wanted}
        for place in range(self._config.replicas + FORMER_OWNERS):
            by_node: dict[str, list[bytes]] = defaultdict(list)
            for key, order in left.items():
                if place < len(order):
                    by_node[order[place]].append(key)
            calls = self._call(
                by_node,
                nodes,
                lambda shard, batch: shard.take_drafts.remote(
                    {key: wanted[key] for key in batch}, policy_version
                ),
            )
            for _, _, answer in self._answers(calls, nodes, until):
                found |= answer
            late = {key for _, batch in calls.values() for key in batch}
            self._give_up(calls, nodes)
            # Another node would hand out what a late one has handed out to others.
            left = {k: order for k, order in left.items() if k not in found and k not in late}
        return {key: drafts for key, drafts in found.items() if drafts}

    def stats(self) -> dict[str, float]:
        """Return this process's counts, and what this node's store has, by name of the metric."""
        stats = self._local.stats() if self._local else {}
        errors = self.late + self.failed + stats.get(metric.CACHE_ERRORS, 0)
        return stats | {metric.CACHE_ERRORS: errors, metric.CACHE_NODES: float(len(self.nodes))}

    def close(self) -> None:
        """Let go of the shards, which others may use, and of this node's store."""
        self._closed = True
        self._wake.set()
        self._thread.join(PING_SECONDS)
        if self._local:
            self._local.close()

    # --- owners -----------------------------------------------------------------------------------

    def _alone(self, own: str) -> dict[str, _Node]:
        return {own: _Node(None)} if self._local else {}

    def _ranked(self, key: bytes, nodes: Mapping[str, _Node]) -> list[str]:
        return [node for node in ranking(key, nodes) if nodes[node].usable]

    def _order(self, key: bytes, own: str, nodes: Mapping[str, _Node]) -> tuple[list[str], ...]:
        """Whom to ask for a prompt: the nearest owner, then the others, then former owners."""
        ranked, replicas = self._ranked(key, nodes), self._config.replicas
        owners = sorted(ranked[:replicas], key=lambda node: node != own)
        return owners[:1], owners[1:], ranked[replicas : replicas + FORMER_OWNERS]

    # --- calls ------------------------------------------------------------------------------------

    def _call(
        self,
        by_node: Mapping[str, list[Any]],
        nodes: Mapping[str, _Node],
        submit: Callable[[Any, list[Any]], Any],
    ) -> _Calls:
        calls: _Calls = {}
        for node, batch in by_node.items():
            try:
                calls[submit(nodes[node].shard, batch)] = node, batch
            except Exception as error:  # Ray is no longer connected, or its memory is full
                self._fail(nodes[node], error)
        return calls

    def _answers(
        self,
        calls: _Calls,
        nodes: Mapping[str, _Node],
        until: float,
        awaited: Collection[Any] | None = None,
    ) -> Iterator[tuple[str, list[Any], Any]]:
        """Take calls out as they are answered; yield node, what was sent, and the answer.

        Args:
            calls: the calls, of which those without an answer until then remain.
            nodes: the nodes.
            until: when to stop waiting, on the monotonic clock.
            awaited: those for which it waits. None: all.
        """
        import ray

        awaited = set(calls if awaited is None else awaited)
        while awaited & calls.keys():
            try:
                left = max(0.0, until - time.monotonic())
                done, _ = ray.wait(list(calls), num_returns=1, timeout=left)
            except Exception as error:  # Ray is no longer connected
                self._log("Ray", error)
                return
            if not done:
                return
            for call in done:
                node, batch = calls.pop(call)
                try:
                    answer = ray.get(call, timeout=GET_SECONDS)
                except Exception as error:  # the shard's, its store's or Ray's
                    self._fail(nodes[node], error)
                else:
                    nodes[node].count(late=False)
                    yield node, batch, answer

    def _fail(self, node: _Node, error: Exception) -> None:
        import ray

        self.failed += 1
        node.count(late=True)
        if isinstance(error, ray.exceptions.RayActorError):
            node.gone = True
            self._wake.set()  # there may be another one by now
        self._log("a shard", error)

    def _give_up(self, calls: _Calls, nodes: Mapping[str, _Node]) -> None:
        for call, (node, _) in calls.items():
            self.late += 1
            nodes[node].count(late=True)
            self._log("a shard", TimeoutError(f"{node} has not answered in time"))
            with contextlib.suppress(Exception):
                call.future()  # takes the answer, which Ray would log if it is an error

    def _log(self, what: str, error: Exception) -> None:
        level = logging.DEBUG if what in self._logged else logging.WARNING
        self._logged.add(what)
        logger.log(
            level,
            "rollout cache: %s: %s; rows are decoded without what it has. Further failures "
            "are counted in %s",
            what,
            in_one_line(error),
            metric.CACHE_ERRORS,
        )

    # --- in the background ------------------------------------------------------------------------

    def _watch(self) -> None:
        refreshed_at = -REFRESH_SECONDS
        while not self._closed:
            self._wake.clear()
            due = time.monotonic() - refreshed_at >= REFRESH_SECONDS
            try:
                if due or any(node.gone for node in self._view[1].values()):
                    refreshed_at = time.monotonic()
                    self._refresh()
                self._heal()
            except Exception as error:  # of Ray, or of this node's store
                self._log("Ray", error)
            self._wake.wait(max(0.0, refreshed_at + REFRESH_SECONDS - time.monotonic()))

    def _refresh(self) -> None:
        """Learn which shards there are, keep them from ending, and make this node's own."""
        own, before = self._view
        own = own or join_cluster()
        import ray

        nodes = {name: node for name, node in before.items() if node.shard and not node.gone}
        handles = {name: node.shard for name, node in nodes.items()}
        found = find_shards(self._config, self._vocabulary, handles)
        now = time.monotonic()
        if self._local and own not in found and now >= self._make_after:
            self._make_after = now + MAKE_AGAIN_SECONDS
            found[own] = make_shard(self._config, self._vocabulary, own)
        nodes = {name: node for name, node in nodes.items() if name in found}
        # A shard takes seconds to start, and is called only once it has answered. Of the others,
        # each process keeps its own node's and one more from ending.
        awake = {own, *random.sample(sorted(nodes), min(1, len(nodes)))} & nodes.keys()
        wanted = found.keys() - nodes.keys() | awake
        told = {own: dict(self._counts)} if self._counts else {}
        pings = {found[name].ping.remote(str(os.getpid()), told.get(name)): name for name in wanted}
        if pings:
            answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=PING_SECONDS)
            for call in answered:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(call)
                    nodes.setdefault(pings[call], _Node(found[pings[call]]))
        nodes = nodes or self._alone(own)
        if nodes.keys() != before.keys():
            self._fruitless = 0
        self._view = own, nodes

    def _heal(self) -> None:
        """Give what was found to the owners that lacked it, as older than what they have now."""
        _, nodes = self._view
        by_node: dict[str, list[tuple[bytes, list[bytes]]]] = defaultdict(list)
        while self._to_heal:
            node, rollouts = self._to_heal.popleft()
            if node in nodes:
                records = [encode(rollout) for rollout in reversed(rollouts)]
                by_node[node].append((rollouts[0].key, records))
        self.healed += sum(map(len, by_node.values()))
        calls = self._call(
            by_node,
            nodes,
            lambda shard, groups: shard.add_older.options(concurrency_group=WRITES).remote(groups),
        )
        for _ in self._answers(calls, nodes, time.monotonic() + PUT_SECONDS):
            pass
        self._give_up(calls, nodes)

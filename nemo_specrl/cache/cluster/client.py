"""A client of a cluster's cache: looks rollouts up, keeps them, and never stands in the way.

Partitions lie on several shards each. A client writes to all of them and reads from the nearest
that answers, within its deadline; a shard that keeps failing is left alone for a while. Where
partitions lie it learns from the shards, whose answers bring a newer view where there is one, and
from the keeper, whom it asks where shards fail and tells which of them it could not write to.

Knows Ray, shards by their methods, and views; nothing of nodes, or of how copies are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import ray

from nemo_specrl.cache.cluster.keeper import last_line
from nemo_specrl.cache.cluster.membership import Routing, View, owed
from nemo_specrl.cache.codec import packed
from nemo_specrl.rollout import Outline, Rollout

__all__ = ["ASK_SECONDS", "CALL_SECONDS", "FAILED", "CacheClient", "ready"]

PUT_AT_ONCE = 64
PREFETCHED_PROMPTS = 1024
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 30.0
SYNC_SECONDS = 30.0
ASK_SECONDS = 1.0
CALL_SECONDS = 60.0
LATE = -1  # epoch of what is sent to someone for whom it was not meant at first
FAILED = object()
"""Of a shard, instead of an answer."""

logger = logging.getLogger(__name__)


@dataclass
class _Breaker:
    """Whether a shard is asked; after some failures in a row it is left alone for a while."""

    failures: int = 0
    open_until: float = 0.0

    @property
    def closed(self) -> bool:
        return time.monotonic() >= self.open_until

    def count(self, failed: bool) -> None:
        self.failures = self.failures + 1 if failed else 0
        if self.failures >= FAILURES_TO_OPEN:
            self.failures, self.open_until = 0, time.monotonic() + OPEN_SECONDS


@dataclass
class _Sent:
    """Rollouts on their way to the nodes that a routing names."""

    rollouts: list[Rollout]
    routing: Routing
    refs: dict[Any, str]  # calls that have no answer yet, and whom they are to


class CacheClient:
    """What an engine has of the cache; can be sent to any process.

    Args:
        view: where partitions lie, and how shards are reached.
        keeper: the actor to ask for a newer one; None: there is none.
        deadline_s: a look-up that takes longer is answered without what is late, seconds.
        tokenizer_id: of the stores.

    Attributes:
        failures: calls of shards that failed or came too late, since they were last taken.
    """

    def __init__(self, view: View, keeper: Any, *, deadline_s: float, tokenizer_id: str) -> None:
        self.deadline_s = deadline_s
        self.tokenizer_id = tokenizer_id
        self._view = view
        self._keeper = keeper
        self._logged = False
        self._begin()

    def _begin(self) -> None:
        self.failures = 0
        self._breakers = {node: _Breaker() for node in self._view.shards}
        self._buffer: list[Rollout] = []
        self._sent: list[_Sent] = []
        self._unsynced: set[str] = set()
        self._missed: set[str] = set()  # nodes that have not got what they should
        self._prefetched: dict[bytes, tuple[str, Any]] = {}  # prompt to node and call
        self._asked: Any = None
        self._asked_at = -ASK_SECONDS

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts with nothing on its way; what is, stays with the one that sent it."""
        names = ("deadline_s", "tokenizer_id", "_view", "_keeper", "_logged")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def partitions(self) -> int:
        """Into how many the keys fall."""
        return len(self._view.routing.readers)

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Rollouts by prompt key, newest first within a sample index; what is late is absent.

        What this client has put is found: a shard does what one client asks in the order asked.
        """
        self._send()
        wanted = list(dict.fromkeys(keys))
        asked = self._take_prefetched(wanted)
        early = {key for _, some in asked.values() for key in some}
        asked |= self._ask([key for key in wanted if key not in early], set())
        return self._answers(asked, "get")

    def outlines(self, keys: Iterable[bytes]) -> dict[bytes, list[Outline]]:
        """As :meth:`get`, of each rollout what says whether and how long a draft it is."""
        self._send()
        return self._answers(self._ask(dict.fromkeys(keys), set(), "outlines"), "outlines")

    def _answers(self, asked: dict[Any, tuple[str, list[bytes]]], method: str) -> dict[bytes, Any]:
        """What shards answer within the deadline; another copy is asked where one fails."""
        until = time.monotonic() + self.deadline_s
        found: dict[bytes, Any] = {}
        failed: set[str] = set()
        while asked:
            again: list[bytes] = []
            done = ready(asked, max(0.0, until - time.monotonic()))
            for ref, (node, some) in asked.items():
                if ref not in done:
                    ref.future()  # taken: else Ray logs an error that comes yet as unhandled
                    self._failed(node, TimeoutError(f"no answer in {self.deadline_s:g} s"))
                    continue
                answer = self._result(node, ref)
                if answer is FAILED:
                    failed.add(node)
                    again += some
                    continue
                rollouts, news = answer
                self._learn(news)
                found |= {key: rollouts[key] for key in some if key in rollouts}
                if news is not None:  # then it was asked only for what it reads by that
                    again += [key for key in some if node not in news.routing.read(key)]
            late = time.monotonic() >= until
            asked = {} if late else self._ask(again, failed, method)
        return found

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Have the rollouts of the next batch's prompts brought here; waits for nothing.

        The next :meth:`get` of a prompt takes what came, once; it is what the cache had when this
        was called, or what this client has put since. Prompts of an earlier call that were not
        taken are dropped, as are those beyond the first ``PREFETCHED_PROMPTS``.
        """
        self._send()
        some = list(dict.fromkeys(keys))[:PREFETCHED_PROMPTS]
        asked = self._ask(some, set())
        self._prefetched = {key: (node, ref) for ref, (node, some) in asked.items() for key in some}

    async def claim(self, key: bytes, policy_version: int) -> tuple[int, list[Rollout]] | None:
        """A sample index for a row that comes alone, and its prompt's rollouts; None when that is
        late.

        All clients ask the same shard, so that no sample index is given to two rows. The others
        are told, so that one of them can take its place.
        """
        self._hear()
        for _ in range(2):  # the second time where the first one says that it is another
            node = next(iter(self._view.routing.read(key)), None)
            if node is None or not self._usable(node):
                self._ask_keeper()
                return None
            epoch = self._view.routing.epoch
            ref = self._view.shards[node].claim.remote(key, policy_version, epoch)
            try:
                claimed, news = await asyncio.wait_for(ref, self.deadline_s)
            except Exception as error:  # the cache can only cost speed
                self._failed(node, error)
                return None
            self._breakers[node].count(failed=False)
            self._learn(news)
            if claimed is not None:
                sample_index, rollouts = claimed
                for other in self._view.routing.write(key):
                    if other != node:
                        self._view.shards[other].hold.remote(key, sample_index)
                return sample_index, rollouts
        return None

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts: sent on in batches, and at the latest with ``flush`` or ``sync``."""
        for rollout in rollouts:
            self._buffer.append(rollout)
            self._prefetched.pop(rollout.key, None)
        if len(self._buffer) >= PUT_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send on what was put, and wait for nothing."""
        self._send()
        if len(self._sent) > PUT_AT_ONCE:
            self._settle(0)

    def deliver(self) -> None:
        """Return when every shard that answers has what was put; on disk it is within a second.

        Shards that do not answer, or not within ``SYNC_SECONDS``, are no readers then where others
        are.
        """
        self._send()
        self._finish(on_disk=False)

    def sync(self) -> None:
        """As :meth:`deliver`, and what was put would survive SIGKILL."""
        self._send()
        self._finish(on_disk=True)

    def _finish(self, on_disk: bool) -> None:
        until = time.monotonic() + SYNC_SECONDS
        while self._sent or (on_disk and self._unsynced):
            if on_disk:
                for node in self._unsynced & self._view.shards.keys():
                    call = self._view.shards[node].sync.remote()
                    self._sent.append(_Sent([], self._view.routing, {call: node}))
                self._unsynced.clear()
            left = until - time.monotonic()
            self._settle(max(0.0, min(ASK_SECONDS, left)))
            late = {node for sent in self._sent for node in sent.refs.values()}
            if late and left <= 0:
                for node in late:
                    self._failed(node, TimeoutError(f"not written in {SYNC_SECONDS:g} s"))
                    self._missed.add(node)
                self._sent = []
                self._unsynced.clear()
            elif late:
                self._ask_keeper()
        self._report(wait=True)

    def take_failures(self) -> int:
        """The number of failures since this was last asked."""
        failures, self.failures = self.failures, 0
        return failures

    def _usable(self, node: str) -> bool:
        return node in self._breakers and self._breakers[node].closed

    def _nearest(self, nodes: Iterable[str]) -> str | None:
        """The shard to ask: this node's own where it has a copy, else the first that answers."""
        here = ray.get_runtime_context().get_node_id()
        for node in sorted(nodes, key=lambda node: self._view.nodes.get(node) != here):
            if self._usable(node):
                return node
        return None

    def _ask(
        self, keys: Iterable[bytes], failed: Collection[str], method: str = "get"
    ) -> dict[Any, tuple[str, list[bytes]]]:
        """Look-ups of the nearest shards: call to node and keys."""
        by_nodes: dict[tuple[str, ...], list[bytes]] = defaultdict(list)
        for key in keys:
            by_nodes[self._view.routing.read(key)].append(key)
        by_node: dict[str, list[bytes]] = defaultdict(list)
        for nodes, some in by_nodes.items():
            node = self._nearest(node for node in nodes if node not in failed)
            if node is None:
                self._ask_keeper()  # there may be others by now
            else:
                by_node[node] += some
        epoch = self._view.routing.epoch
        return {
            getattr(self._view.shards[node], method).remote(some, epoch): (node, some)
            for node, some in by_node.items()
        }

    def _take_prefetched(self, keys: Iterable[bytes]) -> dict[Any, tuple[str, list[bytes]]]:
        taken: dict[Any, tuple[str, list[bytes]]] = {}
        for key in keys:
            if key in self._prefetched:
                node, ref = self._prefetched.pop(key)
                taken.setdefault(ref, (node, []))[1].append(key)
        return taken

    def _send(self) -> None:
        self._hear()
        self._buffer = list(packed(self._buffer))  # a third of the bytes, for each that gets them
        routing, shards = self._view.routing, self._view.shards
        by_node: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in self._buffer:
            for node in routing.write(rollout.key):
                if self._usable(node):
                    by_node[node].append(rollout)
                else:
                    self._missed.add(node)
        if by_node:
            refs = {shards[n].put.remote(some, routing.epoch): n for n, some in by_node.items()}
            self._sent.append(_Sent(self._buffer, routing, refs))
            self._unsynced |= by_node.keys()
        if self._buffer and not by_node:
            self._ask_keeper()
        self._buffer = []
        self._report()

    def _settle(self, timeout: float) -> None:
        """Take the answers to what was sent, as far as they come in time; the rest stays sent."""
        done = ready([ref for sent in self._sent for ref in sent.refs], timeout)
        for sent in self._sent:
            for ref in done & sent.refs.keys():
                node = sent.refs.pop(ref)
                news = self._result(node, ref)
                if news is FAILED:
                    self._missed.add(node)
                else:
                    self._learn(news)
        for sent in self._sent:  # who is gone will not answer
            sent.refs = {ref: n for ref, n in sent.refs.items() if n in self._view.shards}
        self._sent = [sent for sent in self._sent if sent.refs]

    def _learn(self, view: View | None) -> None:
        """Go by a newer view; whoever gets a partition by it gets what is on its way there, too."""
        if view is None or view.routing.epoch <= self._view.routing.epoch:
            return
        self._view = view
        self._breakers = {node: _Breaker() for node in view.shards}  # it says that they are there
        for sent in self._sent:
            for node, some in owed(sent.rollouts, sent.routing, view.routing).items():
                sent.refs[view.shards[node].put.remote(some, LATE)] = node
                self._unsynced.add(node)
            sent.routing = view.routing

    def _ask_keeper(self) -> None:
        """Ask for the present view; :meth:`_hear` takes the answer."""
        self._hear()
        now = time.monotonic()
        if self._keeper is not None and now - self._asked_at >= ASK_SECONDS:
            self._asked, self._asked_at = self._keeper.view.remote(), now

    def _hear(self) -> None:
        if self._asked is not None and ready([self._asked], 0):
            asked, self._asked = self._asked, None
            try:
                self._learn(ray.get(asked))
            except Exception as error:  # without a keeper the shards fall silent, and that counts
                logger.debug("the cache's keeper: %s", last_line(error))

    def _report(self, wait: bool = False) -> None:
        """Tell the keeper whom this client could not write to."""
        missed = sorted(self._missed & self._view.shards.keys())
        self._missed.clear()
        if missed and self._keeper is not None:
            call = self._keeper.missed.remote(missed)
            if wait:
                self._asked = call
                ready([call], SYNC_SECONDS)
                self._hear()

    def _result(self, node: str, ref: Any) -> Any:
        """What a shard answered, or ``FAILED``."""
        try:
            result = ray.get(ref)
        except Exception as error:  # the cache can only cost speed
            self._failed(node, error)
            return FAILED
        if node in self._breakers:
            self._breakers[node].count(failed=False)
        return result

    def _failed(self, node: str, error: Exception) -> None:
        self.failures += 1
        if node in self._breakers:
            self._breakers[node].count(failed=True)
        self._ask_keeper()
        if not self._logged:
            self._logged = True
            logger.warning(
                "rollout cache, %s on node %s: %s; rows are decoded plainly. Further failures are "
                "counted in spec_rl/cache_errors",
                node,
                self._view.nodes.get(node, "unknown"),
                last_line(error),
            )


def ready(refs: Collection[Any], timeout: float) -> set[Any]:
    """Of calls, those that have an answer within ``timeout`` seconds."""
    if not refs:
        return set()  # which Ray does not take
    return set(ray.wait(list(refs), num_returns=len(refs), timeout=timeout)[0])

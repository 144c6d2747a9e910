"""The rollout cache of a Ray cluster, as a training driver uses it.

Each node has a shard (:mod:`.shard`), which owns the store on the node's disk. The partitions of
the prompts are placed on ``replicas`` shards each (:mod:`.placement`). The :mod:`.coordinator`
makes them be copied and moved as nodes come and go. Clients look rollouts up and store them
(:mod:`.client`), and claim sample indices for rows that arrive one by one
(:mod:`.claiming_client`).

What is guaranteed:

- A look-up neither raises an error nor takes longer than the deadline. Rollouts that are late,
  lost or out of reach count as absent.
- No call waits forever: a snapshot or its restoration takes five minutes at most, whatever hangs.
- What was put before a ``sync`` is lost only if all its copies are. The same holds for what was put
  before a ``deliver``, one second later.
- A look-up that begins after a ``sync`` or ``deliver`` returns nothing older than what was put
  before it, as long as a copy of that exists and has not been evicted.

What is not guaranteed:

- The last point, if the writing client could not reach a node from which others read: for the
  second that it takes to inform them or, if the node is also cut off from the coordinator, until
  its lease ends (:data:`.shard.LEASE_SECONDS`). The same holds if Ray declares a node dead whose
  processes live on.
- That a prompt is found if all of its copies are lost.
- That the newest rollout is found right after a restart of the whole job, before the disks have
  been compared.

Rollouts carry the incarnation of the run that put them: the wall clock of the driver's node when it
started or resumed, or one more than any on its disks and in its checkpoint, if that is larger. A
resumed run's policy versions go back to those of its checkpoint; because of the incarnation, what
it puts is newer than what its disks have from the lost steps.

This module imports Ray. It knows neither engines nor NeMo-RL.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import ray

from nemo_specrl.cache.cluster.claiming_client import ClaimingClient
from nemo_specrl.cache.cluster.client import POLL_SECONDS
from nemo_specrl.cache.cluster.copy_tasks import FILES
from nemo_specrl.cache.cluster.membership import Health
from nemo_specrl.cache.cluster.shard_calls import FAILED, ready, within
from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.cache.snapshot import Manifest, PartitionFile, read_manifest, write_manifest
from nemo_specrl.errors import StoreUnavailable, in_one_line

__all__ = ["CALL_SECONDS", "ClusterCache"]

CALL_SECONDS = 60.0
STATS_SECONDS = 10.0
"""How long a step's metrics wait for shards, and for the coordinator."""
SNAPSHOT_SECONDS = 300.0
"""The longest time for which the cache holds up a checkpoint."""
WRITE_SECONDS = 120.0
"""How long a shard may take for some partitions; after that, another one with a copy is asked."""
MANIFEST_SECONDS = 10.0
"""Time for the manifest if a shard has used up all of the snapshot's."""
RESTORE_SECONDS = 300.0
VIEW_SECONDS = 5.0
"""How long a snapshot or its restoration waits to learn where partitions are now."""
PARTITIONS_AT_ONCE = 4

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """Partitions that a shard is writing, and since when."""

    node: str
    partitions: list[int]
    since: float


class ClusterCache(ClaimingClient):
    """The cache of a cluster: a client, and the operations that concern all shards."""

    _health: Health | None = None  # the last known
    _health_call: Any = None  # a call without an answer yet

    def stats(self, within_s: float = STATS_SECONDS) -> dict[str, StoreStats]:
        """Return the statistics of the shards, by the name of the shard.

        A shard that has not answered within ``within_s`` seconds counts as failed. Until it
        answers, it is not waited for again, and its last answer is used. A store may still have
        prompts of partitions that have moved to other shards.
        """
        asked = {
            node: shard.stats.remote()
            for node, shard in self._view.shards.items()
            if self._usable(node) and node not in self._stats_calls
        }
        ready(list(asked.values()), within_s)
        self._stats_calls |= asked
        done = ready(list(self._stats_calls.values()), 0)
        for node, call in list(self._stats_calls.items()):
            if call in done:
                del self._stats_calls[node]
                if (value := self._result(node, call)) is not FAILED:
                    self._stats[node] = value
            elif node in asked:
                self._failed(node, TimeoutError("no statistics in time"))
        return {node: self._stats[node] for node in self._view.shards if node in self._stats}

    def health(self, within_s: float = STATS_SECONDS) -> Health:
        """Return how many nodes there are, and how many copies are missing or being made.

        A coordinator that has not answered within ``within_s`` seconds is not waited for again
        until it does, and its last answer is used.

        Raises:
            StoreUnavailable: the coordinator has never answered, or no longer exists.
        """
        if self._health_call is None:
            self._health_call = self._coordinator.health.remote()
            ready([self._health_call], within_s)
        if ready([self._health_call], 0):
            call, self._health_call = self._health_call, None
            self._health = self._answer(call, within_s)
        if self._health is None:
            raise StoreUnavailable("the cache's coordinator does not answer")
        return self._health

    def set_preferred_nodes(self, layout: Collection[str]) -> None:
        """Place the partitions on these nodes; they move in the background, and serve in the
        meantime.

        Call it when the engines are placed on other nodes. Only what must move does.

        Args:
            layout: Ray's ids of the nodes with engines. Other nodes hold partitions only if these
                are fewer than ``replicas``. Empty: all nodes are equal, as at the start.

        Raises:
            ConfigError: one of them is not a node of the Ray cluster.
            StoreUnavailable: the coordinator does not answer.
        """
        self._call_coordinator("set_preferred_nodes", sorted(layout))

    def snapshot(self, folder: Path, policy_version: int) -> Manifest:
        """Write the whole cache next to a checkpoint's weights.

        Args:
            folder: folder on a file system that every node sees.
            policy_version: policy version of those weights.

        It takes ``SNAPSHOT_SECONDS`` at most. A partition that no shard has written by then, or
        could write, is left out, with a warning; so are those on a shard that hangs in an earlier
        snapshot.

        Raises:
            StoreUnavailable: nothing could be written. In that case there is no manifest.
        """
        until = time.monotonic() + SNAPSHOT_SECONDS
        self.sync()
        within(
            until - time.monotonic(), f"write the snapshot {folder}",
            lambda: folder.mkdir(parents=True, exist_ok=True),
        )  # fmt: skip
        self._learn_view()
        files, lost = self._write_partitions(folder, until)
        why = next(iter(lost.values()), "")
        if lost and not files:
            raise StoreUnavailable(f"cannot write the snapshot {folder}: {why}")
        files.sort(key=lambda file: file.partition)
        manifest = Manifest(self.tokenizer_id, policy_version, self.partitions, tuple(files))
        within(
            max(MANIFEST_SECONDS, until - time.monotonic()), f"write the snapshot {folder}",
            lambda: write_manifest(folder, manifest),
        )  # fmt: skip
        if lost:
            logger.warning(
                "rollout cache: %d of %d partitions are not in %s (%s); a run that resumes from it "
                "begins without what only they have",
                len(lost), self.partitions, folder, why,
            )  # fmt: skip
        return manifest

    def _write_partitions(
        self, folder: Path, until: float
    ) -> tuple[list[PartitionFile], dict[int, str]]:
        """Make shards write the partitions of a snapshot, each a few at a time.

        Args:
            folder: folder of the snapshot.
            until: when to give up what is not written yet.

        Returns:
            The files, and the reason for each partition that no shard could write.
        """
        files: list[PartitionFile] = []
        lost: dict[int, str] = {}
        failed = self._still_hanging()
        calls: dict[Any, _Part] = {}
        left = list(range(self.partitions))
        while left or calls:
            shares, left = self._shares(left, {part.node for part in calls.values()}, failed, lost)
            for node, share in shares.items():
                write = self._view.shards[node].write_snapshot.options(concurrency_group=FILES)
                epoch = self._view.routing.epoch
                call = write.remote(str(folder), share, self.partitions, epoch)
                calls[call] = _Part(node, share, time.monotonic())
            done = ready(calls, POLL_SECONDS, first=True)
            self._request_view()  # which no longer has shards that are gone or stopped
            now = time.monotonic()
            for call, part in list(calls.items()):
                node = part.node
                if call in done:
                    try:
                        written, newer = ray.get(call)
                        files += written
                        self._adopt(newer)
                        if newer is not None:  # then the shard left out what others have
                            readers = newer.routing.readers
                            left += [p for p in part.partitions if node not in readers[p]]
                    except Exception as error:  # from the actor, its store or the file system
                        failed[node] = in_one_line(error)
                        left += part.partitions
                elif now > until or now - part.since > WRITE_SECONDS:
                    waited = min(now - part.since, WRITE_SECONDS)
                    failed[node] = f"shard {node} has not written its part in {waited:.0f} s"
                    self._hanging[node] = call
                    left += part.partitions
                elif node in self._view.shards:
                    continue
                else:
                    left += part.partitions
                del calls[call]
            if now > until:
                late = next(iter(failed.values()), f"not written in {SNAPSHOT_SECONDS:.0f} s")
                lost |= dict.fromkeys(left, late)
                left = []
        return files, lost

    def _still_hanging(self) -> dict[str, str]:
        """Return the shards that hang in an earlier snapshot, each with words that say so."""
        for node, call in list(self._hanging.items()):
            if ready([call], 0):
                del self._hanging[node]
        return {n: f"shard {n} still hangs in an earlier checkpoint" for n in self._hanging}

    def _learn_view(self) -> None:
        """Adopt the coordinator's view, if it answers: a client without look-ups has an old one.

        With an old view, a snapshot would ask shards from which the partitions have moved away.
        """
        if self._coordinator is not None:
            self._view_call = self._coordinator.view.remote(self._view.routing.epoch)
            ready([self._view_call], VIEW_SECONDS)
            self._poll_coordinator()

    def _shares(
        self, partitions: list[int], busy: set[str], failed: dict[str, str], lost: dict[int, str]
    ) -> tuple[dict[str, list[int]], list[int]]:
        """Choose who writes which partitions next.

        Args:
            partitions: partitions still to be written.
            busy: shards that are writing.
            failed: shards that cannot write, and why.
            lost: partitions that no shard can write are added, with the reason.

        Returns:
            Partitions by shard, and those that must wait.
        """
        shares: dict[str, list[int]] = defaultdict(list)
        waiting = []
        for partition in partitions:
            readers = self._view.routing.readers[partition]
            nodes = [n for n in readers if n in self._view.shards and n not in failed]
            free = [n for n in nodes if n not in busy and len(shares[n]) < PARTITIONS_AT_ONCE]
            if free:
                shares[self._nearest(free) or free[0]].append(partition)
            elif nodes:
                waiting.append(partition)
            else:
                lost[partition] = next((failed[n] for n in readers if n in failed), "no shard")
        return {node: share for node, share in shares.items() if share}, waiting

    def restore(self, folder: Path) -> tuple[Manifest, list[str]]:
        """Merge a snapshot into the cache; newer rollouts in the shards are kept.

        Args:
            folder: folder of the snapshot, on a file system that every node sees.

        Call it before copies of this client are made: the run's incarnation becomes larger than
        any in the snapshot.

        Returns:
            Its manifest, and a line for each damaged partition, which is left out, and each shard
            that could not read its part within ``RESTORE_SECONDS``.

        Raises:
            StoreUnavailable: there is no snapshot, or its manifest is damaged.
            ForeignStore: it belongs to another tokenizer or another release.
        """
        until = time.monotonic() + RESTORE_SECONDS
        self.sync()
        manifest = within(
            until - time.monotonic(), f"read the snapshot {folder}",
            lambda: read_manifest(folder, self.tokenizer_id),
        )  # fmt: skip
        self._learn_view()
        # With another number of partitions, any file may have prompts of any shard.
        same = manifest.partitions == self.partitions
        calls = {}
        for node, shard in self._view.shards.items():
            mine = {p for p, nodes in enumerate(self._view.routing.writers) if node in nodes}
            files = [f for f in manifest.files if not same or f.partition in mine]
            read = shard.read_snapshot.options(concurrency_group=FILES)
            calls[read.remote(str(folder), files, mine, self.partitions)] = node
        lines: set[str] = set()
        done = ready(calls, until - time.monotonic())
        for call, node in calls.items():
            if call not in done:
                lines.add(f"shard {node} has not read its part of {folder} in time")
                continue
            try:
                damaged, incarnation = ray.get(call)
            except Exception as error:  # from the actor, its store or the file system
                lines.add(f"shard {node} has not read its part of {folder}: {in_one_line(error)}")
                continue
            lines.update(damaged)
            if incarnation > self.incarnation:  # the clock has been set back since
                self.incarnation = incarnation + 1
        return manifest, sorted(lines)

    def close(self) -> None:
        """Send what is buffered, close the stores and end the actors."""
        self.sync()
        try:
            self._call_coordinator("close")
        finally:
            ray.kill(self._coordinator)

    def _reset(self) -> None:
        super()._reset()
        self._hanging: dict[str, Any] = {}  # calls to shards that hang on a disk
        self._stats: dict[str, StoreStats] = {}  # the last known of each shard
        self._stats_calls: dict[str, Any] = {}  # without an answer yet

    def _call_coordinator(self, method: str, *args: Any) -> Any:
        return self._answer(getattr(self._coordinator, method).remote(*args), CALL_SECONDS)

    def _answer(self, call: Any, within_s: float) -> Any:
        """Return the coordinator's answer, or raise the cache error that it encountered."""
        try:
            return ray.get(call, timeout=within_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise StoreUnavailable(f"the cache's coordinator: {in_one_line(error)}") from error

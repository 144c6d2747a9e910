"""One node's part of a cluster's cache: its store, and the ranges of it that are copied.

A shard answers look-ups only for partitions of which the current view says that it has everything,
and only while it hears from the coordinator. A shard that was cut off or stopped may lack what was
written in the meantime; it refuses look-ups until the coordinator has brought it up to date. It
accepts writes at any time.

This module knows stores and views. ``coordinator`` turns it into Ray actors.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_specrl.cache.cluster.membership import ClusterView
from nemo_specrl.cache.cluster.sample_index_leases import SampleIndexLeases
from nemo_specrl.cache.cluster.shard_handle import ShardInfo
from nemo_specrl.cache.cluster.shard_identity import Identity, read_identity, write_identity
from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.cache.partitions import key_range, partition_of
from nemo_specrl.cache.recency import merge_newest, recency
from nemo_specrl.cache.run_folders import begin_empty, remarks, remove_unused
from nemo_specrl.cache.snapshot import PartitionFile, read_files, write_partition
from nemo_specrl.cache.storage.lock import patiently
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.cache.store import RolloutStore
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import Claim, Rollout, RolloutSummary

__all__ = ["LEASE_SECONDS", "Chunk", "Shard"]

LEASE_SECONDS = 10.0
"""How long a shard answers look-ups after its last exchange with the coordinator, which waits
longer before it gives up a shard."""
CHUNK_TOKENS = 2**19
"""A chunk of a copy ends with the prompt that reaches this many tokens: about 4 MiB."""

logger = logging.getLogger(__name__)


class Chunk(NamedTuple):
    """Part of a shard's contents in a range of keys.

    Args:
        rollouts: newest first within a sample index.
        claims: prompt, sample index and remaining seconds of rows that are being generated.
        start: first key of the chunk.
        stop: first key after it, where the next chunk starts. None: this is the last one.
    """

    rollouts: list[Rollout]
    claims: list[tuple[bytes, int, float]]
    start: bytes
    stop: bytes | None


class Shard:
    """The store of a node. Methods may be called from several threads.

    Clients call with the ``epoch`` of the routing by which they chose this shard. They get the
    current view back if it is newer.

    Args:
        folder: folder on the node's own disk.
        life: life of the run: a number that is redrawn at each start and resumption.
        keep: whether to keep what the folder holds even if it is of another life; otherwise it is
            emptied.
        options: options of :class:`RolloutStore`.
        warm: whether an emptied store begins with the warm start next to it (:mod:`..run_folders`).
        clock: monotonic seconds.

    Raises:
        StoreUnavailable: the folder cannot be used, or another process keeps it open.
        ForeignStore: its contents belong to another tokenizer or a newer release.
    """

    def __init__(
        self,
        folder: str,
        life: int,
        keep: bool,
        options: Mapping[str, Any],
        warm: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        path = self._folder = Path(folder)
        self.claims = SampleIndexLeases()
        tokenizer_id = str(options["tokenizer_id"])
        with as_cache_errors("open the rollout store", path):
            lines = remove_unused(path)
            known = read_identity(path)
            if not keep and known.life != life:
                lines += patiently(lambda: begin_empty(path, tokenizer_id, warm=warm))
            self.store = patiently(lambda: RolloutStore(path, **options))
            self._identity = Identity(known.name, life, known.incarnation)
            write_identity(path, self._identity)
        lines += remarks(path, int(options["max_bytes"]))
        for line in lines:
            logger.warning("rollout cache: %s", line)
        self.name, self._remarks = known.name, tuple(lines)
        self.view: ClusterView | None = None
        self._groups = int(options.get("groups_per_prompt", 1))
        self._clock = clock
        self._writing = threading.Lock()  # so that no copy undoes a put
        self._view_lock = threading.Lock()
        self._opened = uuid.uuid4().hex
        self._described = self.store.restarts  # those that the coordinator knows of
        self._answers = 0
        self._answered_at = self._confirmed_at = -math.inf

    @property
    def _store_id(self) -> str:
        return f"{self._opened}-{self.store.restarts}"

    def describe(self, partitions: int) -> ShardInfo:
        """Return the shard's name and of which of this many partitions it has something.

        Raises:
            StoreUnavailable: reading failed.
        """
        # This comes before any read: if the store starts empty in between, the next heartbeat says
        # so.
        store_id, self._described = self._store_id, self.store.restarts
        self._confirmed_at = -math.inf  # until a view has come in which it may be no reader
        holds = tuple(
            partition
            for partition in range(partitions)
            if next(self.store.keys(*key_range(partition, partitions)), None) is not None
        )
        return ShardInfo(self.name, store_id, holds, self._identity.incarnation, self._remarks)

    def heartbeat(self, view: ClusterView, last_answer: int) -> tuple[str, int]:
        """Learn the current view, and that the coordinator has received an earlier answer.

        The lease on which look-ups are answered begins when the shard gave that answer: the call
        that confirms it may have been under way for long.

        Args:
            view: the current one.
            last_answer: number of the last answer that the coordinator has received; 0 before the
                first.

        Returns:
            The store's id (:class:`ShardInfo`), and the number of this answer.
        """
        with self._view_lock:
            if self.view is None or self.view.routing.epoch < view.routing.epoch:
                self.view = view
            if last_answer and last_answer == self._answers:
                self._confirmed_at = self._answered_at
            self._answers += 1
            self._answered_at = self._clock()
            return self._store_id, self._answers

    def outlines(
        self, keys: list[bytes], epoch: int
    ) -> tuple[dict[bytes, list[RolloutSummary]], ClusterView | None]:
        """Look prompts up like :meth:`get`, but without the arrays: a thousandth of the bytes."""
        found, newer = self.get(keys, epoch)
        outlines = {key: [rollout.outline for rollout in group] for key, group in found.items()}
        return outlines, newer

    def get(
        self, keys: list[bytes], epoch: int
    ) -> tuple[dict[bytes, list[Rollout]], ClusterView | None]:
        """Look prompts up by their keys.

        Returns:
            The rollouts of each prompt, and a newer view. Prompts for which this shard is no reader
            by that view are left out.

        Raises:
            StoreUnavailable: reading failed, or the coordinator has not been heard from for too
                long, or does not know yet that the store has started empty.
        """
        self._check_lease()
        newer = self._newer_view(epoch)
        if newer is not None:  # otherwise the caller knows as much as this shard, or more
            keys = [key for key in keys if self.name in newer.routing.read(key)]
        try:
            return self.store.get(keys), newer
        except StoreUnavailable:  # for example, a failing disk: the coordinator asks again
            self._opened = uuid.uuid4().hex
            raise

    def put(self, rollouts: list[Rollout], epoch: int) -> ClusterView | None:
        """Store rollouts and release the claims on their sample indices.

        Rollouts that were sent by an old routing may arrive after newer ones of the same sample
        indices; the newer ones are then kept.

        Returns:
            A newer view, if there is one; the caller then sends the rollouts to the nodes that it
            adds.

        Raises:
            StoreUnavailable: writing failed.
        """
        with self._writing:
            for rollout in rollouts:
                self.claims.release(rollout.key, rollout.sample_index)
            self._note_incarnation(rollouts)
            if self._newer_view(epoch) is None:
                self.store.put(rollouts)
            else:
                self._merge_prompts(rollouts)
            return self._newer_view(epoch)

    def claim(
        self, key: bytes, policy_version: int, epoch: int, incarnation: int, whole: bool = True
    ) -> tuple[Claim | None, ClusterView | None]:
        """Assign a sample index to a row that arrives alone (:meth:`SampleIndexLeases.claim`).

        Returns:
            The sample index with its rollouts, or with the ``whole`` group's, and a newer view.
            The former is None if, by that view, another shard assigns the prompt's sample indices.

        Raises:
            StoreUnavailable: reading failed, or the coordinator has not been heard from for too
                long.
        """
        self._check_lease()
        newer = self._newer_view(epoch)
        if newer is not None and newer.routing.read(key)[0] != self.name:
            return None, newer
        rollouts = self.store.get([key]).get(key, [])
        with self._writing:
            index = self.claims.claim(key, rollouts, policy_version, incarnation)
        group = [rollout.outline for rollout in rollouts]
        if not whole:
            rollouts = [rollout for rollout in rollouts if rollout.sample_index == index]
        return Claim(index, rollouts, group), self._newer_view(epoch)

    def hold(self, rows: list[tuple[bytes, int]]) -> None:
        """Note that rows are under way whose sample indices this or another shard assigned."""
        with self._writing:
            for key, sample_index in rows:
                self.claims.hold(key, sample_index)

    def release(self, rows: list[tuple[bytes, int]]) -> None:
        """Note that rows have failed or were given up, so that others may have their indices."""
        with self._writing:
            for key, sample_index in rows:
                self.claims.release(key, sample_index)

    def sync(self) -> None:
        """Return when everything put so far is on disk (:meth:`RolloutStore.sync`)."""
        self.store.sync()

    def stats(self) -> StoreStats:
        """Return what the store holds and has done."""
        return self.store.stats()

    def read_range(self, start: bytes, stop: bytes | None) -> Chunk:
        """Read the first chunk of the keys from ``start`` to below ``stop``, with whole prompts.

        Raises:
            StoreUnavailable: reading failed, or the store has started empty and the coordinator
                does not know yet: it would mistake what is left for everything that there was.
        """
        with self._writing:
            claims = self.claims.held(start, stop)
        rollouts: list[Rollout] = []
        size = 0
        for rollout in self.store.scan(start, stop):
            if size >= CHUNK_TOKENS and rollout.key != rollouts[-1].key:
                return Chunk(rollouts, claims, start, rollouts[-1].key + b"\0")
            rollouts.append(rollout)
            size += len(rollout) + 64
        self._check_contents()
        return Chunk(rollouts, claims, start, None)

    def merge_range(self, chunk: Chunk, stop: bytes | None) -> bytes | None:
        """Merge a chunk of another shard, of a range up to ``stop``; newer rollouts here are kept.

        Returns:
            Where the next chunk starts. None: this was the last one, and all of it is on disk.

        Raises:
            StoreUnavailable: reading or writing failed.
        """
        with self._writing:
            for key, sample_index, seconds in chunk.claims:
                self.claims.hold(key, sample_index, seconds)
            self._merge(chunk.rollouts, self.store.scan(chunk.start, chunk.stop or stop))
            if chunk.stop is None:
                self.store.sync()
        return chunk.stop

    def write_snapshot(
        self, folder: str, partitions: list[int], of: int, epoch: int
    ) -> tuple[list[PartitionFile], ClusterView | None]:
        """Write some of the ``of`` partitions of a snapshot; empty ones get no file.

        Returns:
            The files, and a newer view. Partitions of which this shard is no reader by that view
            are left out: it may lack what was put since they moved away.

        Raises:
            StoreUnavailable: reading the store or writing the folder failed, or the store has
                started empty, as for :meth:`read_range`.
        """
        newer = self._newer_view(epoch)
        if newer is not None:
            partitions = [p for p in partitions if self.name in newer.routing.readers[p]]
        files = [
            write_partition(Path(folder), partition, self.store.by_use(*key_range(partition, of)))
            for partition in partitions
        ]
        self._check_contents()
        return [file for file in files if file is not None], newer

    def read_snapshot(
        self, folder: str, files: list[PartitionFile], mine: set[int], of: int
    ) -> tuple[list[str], int]:
        """Merge files of a snapshot; newer rollouts in the store are kept.

        Args:
            folder: folder of the snapshot.
            files: files to read; the snapshot may have another number of partitions.
            mine: partitions that this shard holds, out of ``of``.
            of: number of partitions.

        Returns:
            A line for each damaged file, which is left out, and the largest incarnation with which
            anything in the store was put.

        Raises:
            StoreUnavailable: writing the store failed.
        """

        def merge(rollouts: Iterator[Rollout]) -> None:
            held = [rollout for rollout in rollouts if partition_of(rollout.key, of) in mine]
            with self._writing:
                self._merge_prompts(held)

        damaged = read_files(Path(folder), files, merge)
        self.store.sync()
        return damaged, self._identity.incarnation

    def close(self) -> None:
        """Commit what is buffered and release the folder."""
        self.store.close()

    def _check_lease(self) -> None:
        if self._clock() - self._confirmed_at > LEASE_SECONDS:
            raise StoreUnavailable(
                f"shard {self.name}: no contact with its coordinator for {LEASE_SECONDS:g} s"
            )
        self._check_contents()

    def _check_contents(self) -> None:
        if self.store.restarts != self._described:
            raise StoreUnavailable(f"shard {self.name}: its damaged store has started empty")

    def _note_incarnation(self, rollouts: Iterable[Rollout]) -> None:
        """Record the largest incarnation in the folder before anything with it is stored."""
        newest = max((rollout.incarnation for rollout in rollouts), default=0)
        if newest > self._identity.incarnation:
            identity = self._identity._replace(incarnation=newest)
            with as_cache_errors("write", self._folder):
                write_identity(self._folder, identity)
            self._identity = identity

    def _newer_view(self, epoch: int) -> ClusterView | None:
        view = self.view
        return view if view is not None and view.routing.epoch > epoch else None

    def _merge_prompts(self, rollouts: list[Rollout]) -> None:
        here = self.store.get({rollout.key for rollout in rollouts})
        self._merge(rollouts, (r for group in here.values() for r in group))

    def _merge(self, rollouts: Iterable[Rollout], here: Iterable[Rollout]) -> None:
        """Put what is newer than what is here, keeping the order within each sample index."""
        present: dict[tuple[bytes, int], list[Rollout]] = defaultdict(list)
        for rollout in here:
            present[rollout.key, rollout.sample_index].append(rollout)
        incoming: dict[tuple[bytes, int], list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            incoming[rollout.key, rollout.sample_index].append(rollout)
        self._note_incarnation(r for group in incoming.values() for r in group)
        for row, group in incoming.items():
            kept = merge_newest(group, present[row], self._groups)
            current = list(dict.fromkeys(map(recency, present[row])))
            if list(map(recency, kept)) != current[: self._groups]:
                self.store.put(reversed(kept))  # to a store, what is put last is the newest

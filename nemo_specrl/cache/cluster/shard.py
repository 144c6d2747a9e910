"""One node's part of a cluster's cache: its store, what others copy from it and into it.

A shard answers look-ups only for partitions of which its view says that it has all, and only while
it hears from the keeper: one that was cut off, or stopped, may lack what was written meanwhile and
says so, until the keeper has brought it up to date. What it is given is kept at any time.

Knows stores and views; nothing of Ray, whose actors :mod:`.keeper` makes of it.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_specrl.cache.cluster.claims import SampleClaims
from nemo_specrl.cache.cluster.membership import View, recency
from nemo_specrl.cache.snapshot import (
    PartitionFile,
    key_range,
    partition_of,
    read_partition,
    write_partition,
)
from nemo_specrl.cache.store import RolloutStore, StoreStats
from nemo_specrl.errors import CacheError, StoreInUse, StoreUnavailable
from nemo_specrl.rollout import Outline, Rollout

__all__ = ["LEASE_SECONDS", "Hello", "Piece", "Shard"]

LEASE_SECONDS = 10.0
"""So long a shard answers after the keeper has heard from it; the keeper waits for longer."""
LOCK_SECONDS = 20.0
PIECE_TOKENS = 2**19
"""A piece of a copy ends with the prompt that reaches it: some 4 MiB."""
NAME_FILE = "shard"  # in the folder: its name and the run


class Hello(NamedTuple):
    """What a shard says of itself.

    Args:
        name: the same for as long as its folder is there.
        life: another one each time that its store begins.
        holds: partitions of which there is something in its store.
    """

    name: str
    life: str
    holds: tuple[int, ...]


class Piece(NamedTuple):
    """Some of what a shard has of a range of keys.

    Args:
        rollouts: newest first within a sample index.
        claims: prompt and sample index of rows that are under way, and for how long yet, seconds.
        start: first key of it.
        stop: the first key behind it, where the next piece starts; None: there is none.
    """

    rollouts: list[Rollout]
    claims: list[tuple[bytes, int, float]]
    start: bytes
    stop: bytes | None


class Shard:
    """The store of a node. Methods may be called from several threads.

    Args:
        folder: on the node's own disk.
        run: names the run that it is of.
        keep: go on with what is in the folder even if it is of another run; else it is emptied.
        options: of :class:`RolloutStore`.
        clock: seconds, that never go back.

    Raises:
        StoreUnavailable: the folder cannot be used, or another process holds it for long.
        ForeignStore: what is in it is of another tokenizer or of a newer release.
    """

    def __init__(
        self,
        folder: str,
        run: str,
        keep: bool,
        options: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        path = Path(folder)
        self.claims = SampleClaims()
        self.store = _open(path, options)
        self.name, of = _name(path / NAME_FILE)
        if not keep and of != run and len(self.store):
            self.store.close()
            for file in path.glob("*.mdb"):
                file.unlink()
            self.store = _open(path, options)
        _write_name(path / NAME_FILE, self.name, run)
        self.view: View | None = None
        self._groups = int(options.get("groups_per_prompt", 1))
        self._clock = clock
        self._writing = threading.Lock()  # so that no copy undoes a put
        self._seeing = threading.Lock()
        self._life = uuid.uuid4().hex
        self._answers = 0
        self._answered = self._heard = -math.inf

    def hello(self, partitions: int) -> Hello:
        """Who this is, and what it has."""
        holds = []
        for partition in range(partitions):
            if next(self.store.scan(*key_range(partition, partitions)), None) is not None:
                holds.append(partition)
        return Hello(self.name, self._life, tuple(holds))

    def see(self, view: View, heard: int) -> tuple[str, int]:
        """Learn the present view, and that the keeper has heard this shard.

        Args:
            view: that holds.
            heard: the number of the last answer that the keeper has got, 0 before the first.

        Returns:
            The life of the store, and the number of this answer.
        """
        with self._seeing:
            if self.view is None or self.view.routing.epoch < view.routing.epoch:
                self.view = view
            if heard and heard == self._answers:
                self._heard = self._answered  # when it answered: this call may be an old one
            self._answers += 1
            self._answered = self._clock()
            return self._life, self._answers

    def outlines(
        self, keys: list[bytes], epoch: int
    ) -> tuple[dict[bytes, list[Outline]], View | None]:
        """As :meth:`get`, without the arrays: a thousandth of the bytes to send."""
        found, news = self.get(keys, epoch)
        return {key: [rollout.outline for rollout in group] for key, group in found.items()}, news

    def get(self, keys: list[bytes], epoch: int) -> tuple[dict[bytes, list[Rollout]], View | None]:
        """As :meth:`RolloutStore.get`; of prompts that it does not read by news, nothing.

        Args:
            keys: of prompts.
            epoch: of the caller's routing.

        Returns:
            What was found, and the view where it is newer than the caller's.

        Raises:
            StoreUnavailable: reading failed, or the keeper has not been heard for long.
        """
        self._check_heard()
        news = self._news(epoch)
        if news is not None:  # else the caller knows as much as this shard, or more
            keys = [key for key in keys if self.name in news.routing.read(key)]
        try:
            return self.store.get(keys), news
        except StoreUnavailable:  # maybe it goes on empty: then it has to be filled again
            self._life = uuid.uuid4().hex
            raise

    def put(self, rollouts: list[Rollout], epoch: int) -> View | None:
        """As :meth:`RolloutStore.put`; the sample indices are free again.

        What was put by an old routing may come late, behind newer rollouts of its sample indices:
        then those stay.

        Returns:
            The view where it is newer than the caller's, who then knows whom else to tell.

        Raises:
            StoreUnavailable: writing failed.
        """
        with self._writing:
            for rollout in rollouts:
                self.claims.release(rollout.key, rollout.sample_index)
            if self._news(epoch) is None:
                self.store.put(rollouts)
            else:
                self._merge_prompts(rollouts)
            return self._news(epoch)

    def claim(
        self, key: bytes, policy_version: int, epoch: int
    ) -> tuple[tuple[int, list[Rollout]] | None, View | None]:
        """A sample index for a row that comes alone (:class:`SampleClaims`), and the prompt's
        rollouts.

        None in the place of both where, by news, another shard gives out the sample indices of
        this prompt.

        Raises:
            StoreUnavailable: reading failed, or the keeper has not been heard for long.
        """
        self._check_heard()
        news = self._news(epoch)
        if news is not None and news.routing.read(key)[0] != self.name:
            return None, news
        rollouts = self.store.get([key]).get(key, [])
        with self._writing:
            return (self.claims.claim(key, rollouts, policy_version), rollouts), self._news(epoch)

    def hold(self, key: bytes, sample_index: int) -> None:
        """Another shard has given out a sample index; known here, it is not given out again."""
        with self._writing:
            self.claims.hold(key, sample_index)

    def sync(self) -> None:
        """As :meth:`RolloutStore.sync`."""
        self.store.sync()

    def stats(self) -> StoreStats:
        """As :meth:`RolloutStore.stats`."""
        return self.store.stats()

    def piece(self, start: bytes, stop: bytes | None) -> Piece:
        """The first of what is here of a range of keys, bounded in size; all of its prompts whole.

        Raises:
            StoreUnavailable: reading failed.
        """
        with self._writing:
            claims = self.claims.held(start, stop)
        rollouts: list[Rollout] = []
        size = 0
        for rollout in self.store.scan(start, stop):
            if size >= PIECE_TOKENS and rollout.key != rollouts[-1].key:
                return Piece(rollouts, claims, start, rollouts[-1].key + b"\0")
            rollouts.append(rollout)
            size += len(rollout) + 64
        return Piece(rollouts, claims, start, None)

    def take(self, piece: Piece, stop: bytes | None) -> bytes | None:
        """Merge a piece of another shard's; where there is something newer here, that stays.

        Args:
            piece: of a range of keys.
            stop: end of that range, where the piece is its last.

        Returns:
            Where the next piece starts; None: this was the last, and all of it is on disk.

        Raises:
            StoreUnavailable: reading or writing failed.
        """
        with self._writing:
            for key, sample_index, seconds in piece.claims:
                self.claims.hold(key, sample_index, seconds)
            self._merge(piece.rollouts, self.store.scan(piece.start, piece.stop or stop))
            if piece.stop is None:
                self.store.sync()
        return piece.stop

    def write(self, folder: str, partitions: list[int], of: int) -> list[PartitionFile]:
        """Write some partitions of a snapshot; those without rollouts get no file."""
        files = []
        for partition in partitions:
            rollouts = self.store.scan(*key_range(partition, of))
            first = next(rollouts, None)
            if first is not None:
                files.append(write_partition(Path(folder), partition, _chain(first, rollouts)))
        return files

    def read(self, folder: str, files: list[PartitionFile], mine: set[int], of: int) -> list[str]:
        """Take over files of a snapshot, where the store has nothing newer.

        Args:
            folder: of the snapshot.
            files: in it; their partitions may be others than those of today.
            mine: partitions that this shard holds, out of ``of``.
            of: number of partitions.

        Returns:
            A line for each partition that is damaged, which is left out.
        """
        damaged = []
        for file in files:
            try:
                rollouts = [
                    rollout
                    for rollout in read_partition(Path(folder), file)
                    if partition_of(rollout.key, of) in mine
                ]
                with self._writing:
                    self._merge_prompts(rollouts)
            except CacheError as error:
                damaged.append(str(error))
        self.store.sync()
        return damaged

    def close(self) -> None:
        """Commit what is buffered and give the folder free."""
        self.store.close()

    def _check_heard(self) -> None:
        if self._clock() - self._heard > LEASE_SECONDS:
            raise StoreUnavailable(f"shard {self.name}: its keeper has not been heard for long")

    def _news(self, epoch: int) -> View | None:
        view = self.view
        return view if view is not None and view.routing.epoch > epoch else None

    def _merge_prompts(self, rollouts: list[Rollout]) -> None:
        here = self.store.get({rollout.key for rollout in rollouts})
        self._merge(rollouts, (r for group in here.values() for r in group))

    def _merge(self, rollouts: Iterable[Rollout], here: Iterable[Rollout]) -> None:
        """Put what is newer than what is here, and keep the order of age within each sample
        index."""
        groups: dict[tuple[bytes, int], list[Rollout]] = defaultdict(list)
        for rollout in here:
            groups[rollout.key, rollout.sample_index].append(rollout)
        new: dict[tuple[bytes, int], dict[tuple[int, int], Rollout]] = defaultdict(dict)
        for rollout in rollouts:
            new[rollout.key, rollout.sample_index][recency(rollout)] = rollout
        for place, by_recency in new.items():
            old = {recency(rollout): rollout for rollout in groups[place]}
            by_recency |= old
            newest = sorted(by_recency, reverse=True)[: self._groups]
            if newest != list(old)[: self._groups]:
                # What is put last is the newest of a store.
                self.store.put(by_recency[when] for when in reversed(newest))


def _open(path: Path, options: Mapping[str, Any]) -> RolloutStore:
    """The store; the actor of a run that was killed may hold its folder for some seconds yet."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return RolloutStore(path, **options)
        except StoreInUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def _name(file: Path) -> tuple[str, str]:
    """The name of a folder, which goes with the disk that it is on, and whose run it was of."""
    if file.exists():
        name, _, run = file.read_text().strip().partition(" ")
        if name:
            return name, run
    return f"shard-{uuid.uuid4().hex[:12]}", ""


def _write_name(file: Path, name: str, run: str) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(f"{name} {run}\n")
    temporary.replace(file)


def _chain(first: Rollout, rest: Iterable[Rollout]) -> Iterable[Rollout]:
    yield first
    yield from rest

"""One node's rollout store: a disk cache with a hard size cap and eviction by use.

``storage`` lays out rollouts in SQLite, and ``codec`` turns them into bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from nemo_specrl.cache import snapshot as snapshots
from nemo_specrl.cache.codec import encode_all
from nemo_specrl.cache.metrics import MEMORY, StoreStats, disk_used_fraction, file_system
from nemo_specrl.cache.recency import oldest_first
from nemo_specrl.cache.record_reader import Decoder
from nemo_specrl.cache.storage.database import is_damage
from nemo_specrl.cache.storage.lock import FolderLock
from nemo_specrl.cache.storage.recovery import move_aside, open_tables, remove_files
from nemo_specrl.cache.storage.schema import db_key, newest_keys
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.cache.storage.tables import Tables
from nemo_specrl.cache.storage.write_buffer import WriteBuffer
from nemo_specrl.errors import CacheError, ConfigError, InvalidRollout, StoreUnavailable
from nemo_specrl.rollout import KEY_BYTES, Rollout

__all__ = ["FLUSH_SECONDS", "MIN_BYTES", "RolloutStore"]

MIN_BYTES = 2**20
FLUSH_SECONDS = 0.5  # leaves a commit the same time again, within the promised second
ENCODED_AT_ONCE = 64  # rollouts: more leave the processor's caches, fewer wait for numpy's calls
KEYS_AT_ONCE = 64

logger = logging.getLogger(__name__)


class RolloutStore:
    """The rollouts of one node, on its disk, found by the key of their prompt.

    Puts are buffered for up to 16 MiB or half a second and then committed with fsync, by a timer's
    thread if no call does: a crash loses at most the last second. The least recently used prompts
    make room for new ones, each as a whole. Methods may be called from several threads; one runs at
    a time. A context manager, or call ``close`` at the end.

    A store that is damaged is moved aside, to ``<path>.damaged-<n>``, with a logged warning, and an
    empty one replaces it; a call that meets the damage after opening raises StoreUnavailable, once.

    Args:
        path: folder of the store, created if missing; only one process may have it open.
        max_bytes: hard cap on the folder's contents, bytes, at least 1 MiB.
        tokenizer_id: any string that names the tokenizer; a store of another one is refused.
        groups_per_prompt: number of rollouts kept for each sample index of a prompt, newest first.
        exact_logprobs: whether to keep every bit of log-probs, at twice their size.

    Attributes:
        restarts: how often it has started with empty tables since it was created, for any reason.

    Raises:
        ConfigError: ``max_bytes`` or ``groups_per_prompt`` is too small.
        StoreInUse: a process has the store open.
        StoreUnavailable: the folder cannot be written, is full, or is not a store.
        ForeignStore: the store belongs to another tokenizer or a newer release.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int,
        tokenizer_id: str,
        groups_per_prompt: int = 1,
        exact_logprobs: bool = False,
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"max_bytes must be at least {MIN_BYTES} (1 MiB), got {max_bytes}")
        if groups_per_prompt < 1:
            raise ConfigError(f"groups_per_prompt must be at least 1, got {groups_per_prompt}")
        self._path = Path(os.path.realpath(path))
        self._max_bytes, self._tokenizer_id = max_bytes, tokenizer_id
        self._groups, self._exact = groups_per_prompt, exact_logprobs
        self._mutex, self._pid = threading.RLock(), os.getpid()
        self._timer: threading.Timer | None = None
        self._flush_failed = False
        self._failed = False  # the disk: the file is reopened before it is used again
        self._lookups = self._hits = self._dropped_records = self.restarts = 0
        self._decoder = Decoder(self._path, groups_per_prompt)
        self._lock = FolderLock(self._path)
        self._buffer = WriteBuffer()
        try:
            with as_cache_errors("open the rollout store", self._path):
                self._tables = self._open_tables()
        except BaseException:
            self._lock.close()
            raise
        self._in_memory = file_system(self._path)[1] in MEMORY
        self._lock.clean = True
        self._closed = False

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Put rollouts into the store; a later one of the same prompt and sample index is newer.

        What is put is found by ``get`` at once and is durable after ``sync``, or on its own within
        a second.

        Raises:
            StoreUnavailable: writing failed. What is buffered stays so, to be tried again; rollouts
                that the call had not reached are not stored.
        """
        iterator = iter(rollouts)
        with self._guard("write to"):
            while some := list(itertools.islice(iterator, ENCODED_AT_ONCE)):
                clocks = range(self._tables.clock + 1, self._tables.clock + 1 + len(some))
                self._tables.clock += len(some)
                names = [
                    db_key(r.key, r.sample_index, t) for r, t in zip(some, clocks, strict=True)
                ]
                records = encode_all(some, names, exact=self._exact)
                for rollout, clock, name, record in zip(some, clocks, names, records, strict=True):
                    self._add(rollout.key, clock, name, record)

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Look up the rollouts of prompts, by sample index and newest first within one.

        Args:
            keys: keys of prompts, 16 bytes each.

        Returns:
            Key to rollouts, without the keys that are not there.

        Raises:
            InvalidRollout: a key is not 16 bytes.
            StoreUnavailable: reading failed.
        """
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            if len(key) != KEY_BYTES:
                raise InvalidRollout(f"key must be {KEY_BYTES} bytes, got {key!r}")
        with self._guard("read"):
            found = self._decoder.decoded(
                (key, self._tables.records(key) | self._buffer.records.get(key, {}))
                for key in wanted
            )
            self._buffer.touched |= {key: self._tables.tick() for key in found}
            self._lookups += len(wanted)
            self._hits += len(found)
            self._tables.lookups += len(wanted)
            self._tables.hits += len(found)
        return found

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[Rollout]:
        """Iterate over the rollouts of the prompts in a range of keys, in the order of ``get``.

        What is put in the meantime may be among them. Other calls run in between, and no prompt
        counts as used.

        Args:
            start: first key, or any shorter beginning of it; ``b""`` is below all.
            stop: keys from here on are left out; None: none are.

        Raises:
            StoreUnavailable: reading failed.
        """
        return self._read(self.keys(start, stop))

    def keys(self, start: bytes, stop: bytes | None = None) -> Iterator[bytes]:
        """Iterate over the keys of the prompts that :meth:`scan` reads."""
        self.sync()
        while True:
            with self._guard("read"):
                keys = self._tables.keys(start, stop, KEYS_AT_ONCE)
            yield from keys
            if len(keys) < KEYS_AT_ONCE:
                return
            start = keys[-1] + b"\0"

    def _read(self, keys: Iterable[bytes]) -> Iterator[Rollout]:
        """Read prompts one at a time: other calls wait meanwhile, and the rest may be unwanted."""
        for key in keys:
            with self._guard("read"):
                found = self._decoder.decoded([(key, self._tables.records(key))])
            yield from found.get(key, ())

    def sync(self) -> None:
        """Commit everything put so far, so that it survives SIGKILL and a power loss.

        Raises:
            StoreUnavailable: writing failed.
        """
        with self._guard("write to"):
            self._flush()

    def by_use(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[Rollout]:
        """Iterate like :meth:`scan`, but over the least recently used prompts first.

        A store into which they are put in this order evicts like this one.
        """
        self.sync()
        with self._guard("read"):
            keys = self._tables.keys_by_use(start, stop)
        yield from self._read(keys)

    def snapshot(self, folder: str | os.PathLike[str], policy_version: int = 0) -> None:
        """Write all rollouts into a folder, as a snapshot of one partition.

        Args:
            folder: folder of the snapshot, created if it does not exist.
            policy_version: policy version of the weights next to it.

        Raises:
            StoreUnavailable: the store cannot be read or the folder cannot be written.
        """
        file = snapshots.write_partition(Path(folder), 0, self.by_use())
        files = (file,) if file else ()
        manifest = snapshots.Manifest(self._tokenizer_id, policy_version, 1, files)
        snapshots.write_manifest(Path(folder), manifest)

    def restore(self, folder: str | os.PathLike[str]) -> tuple[snapshots.Manifest, list[str]]:
        """Replace all rollouts by those of a snapshot, of one process or of a cluster.

        Returns:
            Its manifest, and a line for each damaged file, which is left out.

        Raises:
            StoreUnavailable: there is no snapshot, or its manifest is damaged; or writing failed.
            ForeignStore: it belongs to another tokenizer or another release.
        """
        manifest = snapshots.read_manifest(folder, self._tokenizer_id)
        self.clear()
        damaged = snapshots.read_files(
            Path(folder), manifest.files, lambda rollouts: self.put(oldest_first(rollouts))
        )
        self.sync()
        return manifest, damaged

    def clear(self) -> None:
        """Delete every rollout; the counts continue.

        Raises:
            StoreUnavailable: the folder cannot be written.
        """
        with self._guard("empty"):
            self._buffer.clear()
            self._decoder.corrupt.clear()
            self._restart()

    def stats(self) -> StoreStats:
        """Count the contents, including buffered puts, and what was done since the store was
        opened.

        Raises:
            StoreUnavailable: reading failed.
        """
        with self._guard("read"):
            prompts, rollouts = self._tables.prompts, self._tables.count
            for key, records in self._buffer.records.items():
                on_disk = self._tables.names(key)
                prompts += not on_disk
                rollouts += len(newest_keys(on_disk | set(records), self._groups)) - len(on_disk)
            return StoreStats(
                prompts=prompts,
                rollouts=rollouts,
                bytes_used=self._tables.used(),
                max_bytes=self._max_bytes,
                lookups=self._lookups,
                hits=self._hits,
                corrupt_records=self._decoder.damaged,
                dropped_records=self._dropped_records,
                evicted_prompts=self._tables.evicted,
                disk_used_fraction=disk_used_fraction(self._path),
                in_memory=self._in_memory,
            )

    def close(self) -> None:
        """Commit what is buffered and release the folder; a second call does nothing.

        Raises:
            StoreUnavailable: writing failed; the store is closed all the same.
        """
        if os.getpid() != self._pid:
            return  # a forked child must not unlock its parent's folder, nor wait for its threads
        with self._mutex:
            if self._closed:
                return
            try:
                self.sync()
            finally:
                self._closed = True
                if self._timer is not None:
                    self._timer.cancel()
                self._tables.close()
                self._lock.close()

    def __len__(self) -> int:
        return self.stats().rollouts

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Admit one caller at a time, in the process that opened the store; raise CacheErrors."""
        if os.getpid() != self._pid:  # asked first: a thread of the parent may hold the mutex
            raise StoreUnavailable(
                f"the rollout store {self._path} was opened before a fork, by pid {self._pid}; "
                "open it in the process that uses it"
            )
        with self._mutex:
            if self._closed:
                raise StoreUnavailable(f"the rollout store {self._path} is closed")
            with as_cache_errors(f"{doing} the rollout store", self._path):
                if self._failed:
                    self._reopen()
                try:
                    yield
                except sqlite3.Error as error:
                    if not is_damage(error):
                        self._failed = True
                        raise
                    self._restart(error)
                    raise StoreUnavailable(
                        f"the rollout store {self._path} was damaged ({error}); it starts empty"
                    ) from error

    def _open_tables(self) -> Tables:
        return open_tables(self._path, self._max_bytes, self._tokenizer_id, self._lock)

    def _reopen(self) -> None:
        """Reopen the file after the disk has failed; what is buffered stays so."""
        old = self._tables
        old.close()
        self._tables = self._open_tables()
        self.restarts += self._tables.created
        self._carry_over(old)
        self._failed = False

    def _restart(self, damage: Exception | None = None) -> None:
        """Continue with empty tables; the old ones are moved aside, or deleted if not damaged."""
        self.restarts += 1
        old = self._tables
        old.close()
        try:
            if damage is None:
                remove_files(self._path)
            else:
                move_aside(self._path, damage)
            self._tables = self._open_tables()
            self._carry_over(old)
        except BaseException:
            self._closed = True
            self._lock.close()
            raise

    def _carry_over(self, old: Tables) -> None:
        for name in ("clock", "evicted", "lookups", "hits"):
            setattr(self._tables, name, getattr(old, name))

    def _add(self, key: bytes, clock: int, name: bytes, record: bytes) -> None:
        """Put a record into the buffer, which is committed when it is full, or has waited."""
        size = self._tables.size_of(record)
        if size > self._tables.record_limit:
            self._dropped_records += 1
            return
        if self._buffer.records and self._buffer.bytes + size > self._tables.batch_bytes:
            self._flush()
        self._buffer.add(key, clock, name, record, size)
        if self._timer is None:
            self._flush_later()

    def _flush_later(self) -> None:
        # The timer keeps a store that was dropped without close() alive until its puts are
        # committed. It is not a daemon, so a process that exits normally waits for it.
        self._timer = threading.Timer(FLUSH_SECONDS, self._flush_now)
        self._timer.start()

    def _flush_now(self) -> None:
        """Commit the buffer, in the timer's thread; what fails stays, to be tried again."""
        with self._mutex:
            self._timer = None  # whatever fails below, the next put starts another
            try:
                with self._guard("write to"):
                    self._flush()
                    self._flush_failed = False
            except CacheError as error:
                if not (self._closed or self._flush_failed):
                    logger.warning("%s; tried again until it works", error)
                self._flush_failed = True
                more = self._buffer.records and not self._closed
                if more and threading.main_thread().is_alive():
                    self._flush_later()

    def _flush(self) -> None:
        self._buffer.commit(self._tables, self._decoder.corrupt, self._groups)

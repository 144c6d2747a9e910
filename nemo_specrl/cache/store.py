"""One node's rollout store: responses by prompt in one SQLite file under a hard size cap.

Any number of processes use the file at once (SQLite's write-ahead log). ``database`` opens it,
``codec`` turns responses into bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import sqlite3
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_specrl.cache import snapshot as snapshots
from nemo_specrl.cache.codec import decode, encode, is_sound, without_tokens
from nemo_specrl.cache.database import (
    BUSY_SECONDS,
    DATA_FILE,
    as_cache_errors,
    is_damage,
    move_aside,
    number,
    opened,
)
from nemo_specrl.errors import ConfigError, CorruptRecord, StoreUnavailable
from nemo_specrl.rollout import Rollout

__all__ = ["RolloutStore", "StoreStats"]

_MIB = 2**20
_LOG_BYTES = 64 * _MIB
"""The most bytes of the write-ahead log."""
_MARGIN = 24
"""Pages kept free for SQLite's own needs."""
_GROUPS = 16
"""Prompts that are read in one go where a whole store is read."""
_USES = 4096
"""Uses of prompts that are remembered until they are written with the next put."""
SUSPICIONS = 3
"""Failures that look like damage after which a file is moved aside."""
logger = logging.getLogger(__name__)

Row = tuple[Rollout, bytes]
"""A response and its record."""


@dataclass(frozen=True)
class StoreStats:
    """What is in a store, and what this process has done since it opened the store."""

    prompts: int
    responses: int
    bytes_on_disk: int
    """Bytes of its files, and of one that was moved aside."""
    max_bytes: int
    evicted: int
    """Prompts removed to make room."""
    dropped: int
    """Responses that cannot fit."""
    damaged: int
    """Records that were damaged, and left out."""
    restarts: int
    """Damaged files that were moved aside while the store was in use."""
    disk_used_fraction: float
    """Used share of the store's disk, by all its users, as ``df`` reports it."""


class RolloutStore:
    """Responses to prompts on one node's disk, for all processes of the node at once.

    A prompt keeps its newest responses; the least recently used prompts are evicted where room is
    needed. All methods may be called from several threads.

    Args:
        folder: folder of the cache, on the node's own disk; the store is in ``folder/vocabulary``.
        vocabulary: identity of the tokenizer's vocabulary (``rollout.vocabulary_hash``).
        max_bytes: hard cap of the store's files, bytes; at least 1 MiB.
        responses_per_prompt: the newest responses that are kept for each prompt.

    Raises:
        StoreUnavailable: the folder cannot be used: not writable, full, without locks or shared
            memory, or shared by machines.
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        vocabulary: str,
        max_bytes: int = 64 * 2**30,
        responses_per_prompt: int = 64,
    ) -> None:
        if not re.fullmatch(r"[\w-]{1,64}", vocabulary):
            raise ConfigError(f"vocabulary must be a hash, got {vocabulary!r}")
        if max_bytes < _MIB or responses_per_prompt < 1:
            raise ConfigError(
                f"max_bytes must be at least {_MIB} and responses_per_prompt at least 1, got "
                f"{max_bytes} and {responses_per_prompt}"
            )
        self.path = Path(folder).absolute() / vocabulary
        self.vocabulary = vocabulary
        self.max_bytes = max_bytes
        self.responses_per_prompt = responses_per_prompt
        self._file = self.path / DATA_FILE
        self._log = Path(f"{self._file}-wal")
        self._log_bytes = min(max_bytes // 4, _LOG_BYTES)
        self._lock = threading.Lock()  # of what follows
        self._idle: list[sqlite3.Connection] = []
        self._inode = 0
        self._closed = False
        self._used: dict[bytes, None] = {}  # prompts by use, latest last, not yet written
        self._broken: list[tuple[int, int]] = []  # number and identity of damaged records
        self._evicted = self._dropped = self._damaged = self._restarts = self._suspicions = 0
        self._writing = threading.Lock()
        self._give_back(*self._connect())
        _stores.add(self)

    # --- reading ----------------------------------------------------------------------------------

    def get(
        self, keys: Iterable[bytes], most: int | None = None, known: Collection[int] = frozenset()
    ) -> dict[bytes, list[Rollout]]:
        """Return the responses to prompts, oldest first.

        Args:
            keys: keys of prompts; those without responses are left out of the answer.
            most: the newest ones that are wanted. None: all.
            known: identities of responses of which no tokens are wanted.

        Raises:
            StoreUnavailable: the file cannot be read, or was damaged and has been moved aside.
        """
        names = list(dict.fromkeys(keys))
        with self._connection("read") as database:
            records = self._records(database, names, most, known)
        found = {key: self._decoded(key, rows, known) for key, rows in records.items()}
        found = {key: responses for key, responses in found.items() if responses}
        with self._lock:
            for key in found:
                self._used.pop(key, None)
                self._used[key] = None
            while len(self._used) > _USES:
                del self._used[next(iter(self._used))]
        return found

    def _records(
        self,
        database: sqlite3.Connection,
        keys: Iterable[bytes],
        most: int | None = None,
        known: Collection[int] = frozenset(),
    ) -> dict[bytes, list[tuple[int, int, bytes]]]:
        """Return numbers, identities and records of prompts' responses, newest first; the records
        of known ones are not read.
        """
        skipped = json.dumps(list(known))
        limit = min(self.responses_per_prompt if most is None else most, self.responses_per_prompt)
        return {
            key: database.execute(
                "SELECT number, identity, CASE WHEN identity NOT IN (SELECT value FROM "
                "json_each(?)) THEN record END FROM rollouts WHERE key = ? "
                "ORDER BY number DESC LIMIT ?",
                (skipped, key, limit),
            ).fetchall()
            for key in keys
        }

    def _decoded(
        self,
        key: bytes,
        rows: list[tuple[int, int, bytes]],
        known: Collection[int] = frozenset(),
    ) -> list[Rollout]:
        """Decode records, the last one first; those that are damaged are counted and noted."""
        responses = []
        for row, identity, record in reversed(rows):
            if identity in known:
                responses.append(without_tokens(key, identity))
                continue
            try:
                responses.append(decode(key, record))
            except CorruptRecord as error:
                with self._lock:
                    self._damaged += 1
                    self._broken.append((row, identity))
                    first = self._damaged == 1
                if first:
                    logger.warning(
                        "rollout store %s: %s; it is left out, as will be others", self.path, error
                    )
        return responses

    def scan(self, prompts: int | None = None) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the most recently used prompts and their sound records, both the latest first.

        Nothing counts as used. Each group of prompts is read by itself, so that other processes can
        go on writing.
        """
        with self._connection("read") as database:
            query = "SELECT key FROM prompts ORDER BY use DESC LIMIT ?"
            limit = -1 if prompts is None else prompts
            keys = [key for (key,) in database.execute(query, (limit,))]
        for start in range(0, len(keys), _GROUPS):
            with self._connection("read") as database:
                found = self._records(database, keys[start : start + _GROUPS])
            for key, rows in found.items():
                sound = [record for _, _, record in rows if is_sound(key, record)]
                if sound:
                    yield key, sound

    # --- writing ----------------------------------------------------------------------------------

    def put(self, rollouts: Sequence[Rollout]) -> int:
        """Keep responses; one of the same prompt and identity is replaced.

        When it returns, they survive the end of the process; :meth:`sync` makes them survive that
        of the machine. More than an eighth of the log's bytes takes several transactions.

        Returns:
            How many were kept; a response that can never fit is dropped and counted.

        Raises:
            StoreUnavailable: the file cannot be written, or was damaged and has been moved aside.
        """
        return self._add([(rollout, encode(rollout)) for rollout in rollouts])

    def take_drafts(self, key: bytes, policy_version: int, rows: int) -> list[Rollout]:
        """Return drafts for rows of one prompt (:meth:`take_drafts_of`)."""
        return self.take_drafts_of({key: rows}, policy_version).get(key, [])

    def take_drafts_of(
        self, wanted: Mapping[bytes, int], policy_version: int
    ) -> dict[bytes, list[Rollout]]:
        """Return responses with log-probs as drafts for prefix reuse, a different one for each row.

        They are the responses of the newest policy version that is not ``policy_version``, oldest
        first. What one call has got, no other call of any process gets for this version.

        Args:
            wanted: how many drafts each prompt needs, at most.
            policy_version: version of the policy that is to verify them.

        Returns:
            Drafts by prompt, none where no more are left; prompts that the store does not have are
            left out.

        Raises:
            StoreUnavailable: as :meth:`put`.
        """
        found: dict[bytes, list[tuple[int, int, bytes]]] = {}
        keys = list(wanted)
        for start in range(0, len(keys), self._rows):
            with self._transaction() as database:
                for key in keys[start : start + self._rows]:
                    drafts = _drafts(database, key, policy_version, wanted[key])
                    if drafts is not None:
                        found[key] = drafts
        return {key: self._decoded(key, rows[::-1]) for key, rows in found.items()}

    def sync(self) -> None:
        """Flush to disk what was put; afterwards it survives the end of the machine.

        Raises:
            StoreUnavailable: the disk does not take it.
        """
        with as_cache_errors("write the rollout store", self.path):
            try:
                descriptor = os.open(self._log, os.O_RDONLY)
            except FileNotFoundError:  # all is in the file, which is flushed before the log goes
                return
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def snapshot(self, file: Path, prompts: int | None = None) -> int:
        """Write a copy for a checkpoint, which replaces ``file`` when it is complete.

        Args:
            file: the copy; its folder is made.
            prompts: the most recently used prompts that go into it, as many as the training data
                has, so that those that do not come any more are left out. None: all.

        Returns:
            Number of responses in it.

        Raises:
            StoreUnavailable: the store cannot be read, or the file cannot be written.
        """
        return snapshots.write(file, self.vocabulary, self.scan(prompts))

    def restore(self, file: Path) -> int:
        """Add what a snapshot has, as older than all that is there, while there is room.

        Returns:
            Number of responses that were added; a part that is damaged is left out, with a warning.

        Raises:
            StoreUnavailable: the file is missing or no snapshot, or the store cannot be written.
            ForeignStore: it is of another vocabulary.
        """
        with snapshots.opened(file, self.vocabulary) as groups:
            return self.add_older(groups)

    def add_older(self, groups: Iterable[tuple[bytes, list[bytes]]]) -> int:
        """Add prompts and their records, both the latest first, as older than all that is there.

        Nothing is evicted for them: it ends where there is no more room.

        Returns:
            Number of responses that were added.
        """
        added = 0
        rows = (
            (decode(key, record), record)
            for key, records in groups
            for record in records
            if is_sound(key, record)
        )
        while part := list(itertools.islice(rows, self._rows)):
            try:
                added += self._add(part, older=True)
            except _NoRoom:
                break
        return added

    def stats(self) -> StoreStats:
        """Return what is in the store, and what this process has done.

        Raises:
            StoreUnavailable: as :meth:`get`.
        """
        with self._connection("read") as database:
            counts = dict(database.execute("SELECT name, value FROM meta WHERE value >= 0"))
            size = sum(file.stat().st_size for file in self.path.glob(f"{DATA_FILE}*"))
            disk = shutil.disk_usage(self.path)
        with self._lock:
            return StoreStats(
                prompts=max(0, counts.get(b"prompts", 0)),
                responses=max(0, counts.get(b"responses", 0)),
                bytes_on_disk=size,
                max_bytes=self.max_bytes,
                evicted=self._evicted,
                dropped=self._dropped,
                damaged=self._damaged,
                restarts=self._restarts,
                disk_used_fraction=disk.used / max(1, disk.used + disk.free),
            )

    def close(self) -> None:
        """Let go of the file; calls that come later fail. Nothing that was put is lost."""
        with contextlib.suppress(StoreUnavailable):
            if self._used and not self._closed:
                self._add([])  # writes the uses
        with self._lock:
            self._closed = True
        self._let_go()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- transactions -----------------------------------------------------------------------------

    def _add(self, rows: Sequence[Row], older: bool = False) -> int:
        """Write responses, and return how many were kept."""
        parts: list[list[Row]] = [[]]
        size = 0
        for rollout, record in rows:
            if len(record) > self._part_bytes:
                self._dropped += 1
                continue
            if len(parts[-1]) == self._rows or size + len(record) > self._part_bytes:
                parts.append([])
                size = 0
            parts[-1].append((rollout, record))
            size += len(record)
        kept = 0
        for part in parts:
            with self._transaction() as database:
                kept += self._write(database, part, older)
        return kept

    def _write(self, database: sqlite3.Connection, rows: Sequence[Row], older: bool) -> int:
        groups: dict[bytes, dict[int, Row]] = {}
        for rollout, record in rows:
            group = groups.setdefault(rollout.key, {})
            group.pop(rollout.identity, None)
            group[rollout.identity] = rollout, record
        self._touch(database, [] if older else groups)
        with self._lock:
            obsolete, self._broken = self._broken[: self._rows], self._broken[self._rows :]
        added: list[Row] = []
        freed = 0
        for key, group in groups.items():
            there = database.execute(
                "SELECT number, identity, bytes FROM rollouts WHERE key = ? ORDER BY number", (key,)
            ).fetchall()
            if older:
                known = {identity for _, identity, _ in there}
                room = max(0, self.responses_per_prompt - len(there))
                added += [row for name, row in group.items() if name not in known][:room]
                continue
            new = list(group.values())[-self.responses_per_prompt :]
            stay = [row for row in there if row[1] not in group]
            gone = [row for row in there if row[1] in group]
            surplus = max(0, len(stay) + len(new) - self.responses_per_prompt)
            gone += stay[: min(surplus, 2 * len(new))]  # where fewer are to be kept than before
            obsolete += [row[:2] for row in gone]
            freed += sum(row[2] for row in gone)
            added += new
        needed = sum(self._size_of(len(record)) for _, record in added)
        self._make_room(database, needed - freed, evict=not older)
        end = "min" if older else "max"
        start = number(database, f"SELECT {end}(number) FROM rollouts")
        use = number(database, f"SELECT {end}(use) FROM prompts")
        step = -1 if older else 1
        with contextlib.closing(database.cursor()) as cursor:
            cursor.executemany("DELETE FROM rollouts WHERE number = ? AND identity IS ?", obsolete)
            responses = -cursor.rowcount if obsolete else 0
            cursor.executemany(
                "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        start + step * i,
                        r.key,
                        r.identity,
                        r.policy_version,
                        r.logprobs is not None,
                        len(record),
                        record,
                    )
                    for i, (r, record) in enumerate(added, 1)
                ],
            )
            responses += len(added)
            keys = dict.fromkeys(rollout.key for rollout, _ in added)
            cursor.executemany(
                "INSERT OR IGNORE INTO prompts VALUES (?, ?, NULL, NULL)",
                [(key, use + step * i) for i, key in enumerate(keys, 1)],
            )
            prompts = cursor.rowcount if keys else 0
        _count(database, prompts, responses)
        return len(added)

    def _touch(self, database: sqlite3.Connection, keys: Iterable[bytes]) -> None:
        """Make prompts the most recently used ones, after those that were looked up."""
        with self._lock:
            used = list(itertools.islice(self._used, self._rows))
            for key in used:
                del self._used[key]
        use = number(database, "SELECT max(use) FROM prompts")
        database.executemany(
            "UPDATE prompts SET use = ? WHERE key = ?",
            [(use + i, key) for i, key in enumerate(dict.fromkeys([*used, *keys]), 1)],
        )

    def _size_of(self, length: int) -> int:
        """Return the bytes of pages that a record of so many bytes takes, approximately."""
        full, rest = divmod(length, self._page_size)
        return full * self._page_size + min(self._page_size, rest + rest // 4 + 160)

    def _make_room(self, database: sqlite3.Connection, needed: int, evict: bool) -> None:
        """Evict the least recently used prompts until so many bytes are free.

        Raises:
            _NoRoom: there is no room, and nothing may be evicted.
            sqlite3.DatabaseError: the tables contradict each other.
        """
        prompts = rows = 0
        while True:
            pages = number(database, "PRAGMA page_count")
            used = (pages - number(database, "PRAGMA freelist_count")) * self._page_size
            if used + needed <= (self._pages - _MARGIN) * self._page_size:
                break
            if not evict:
                raise _NoRoom
            found = database.execute("SELECT key FROM prompts ORDER BY use LIMIT 1").fetchone()
            if found is None:
                raise sqlite3.DatabaseError("records without a prompt take all the room")
            gone = database.execute(
                "DELETE FROM rollouts WHERE number IN "
                "(SELECT number FROM rollouts WHERE key = ? LIMIT ?)",
                (*found, self._rows),
            ).rowcount
            rows += gone
            if gone < self._rows:  # that was all of the prompt
                if database.execute("DELETE FROM prompts WHERE key = ?", found).rowcount != 1:
                    raise sqlite3.DatabaseError("uses of prompts are out of order")
                prompts += 1
            if rows > self._rows:  # so that the log stays small; others may write meanwhile
                _count(database, -prompts, -rows)
                self._evicted += prompts
                prompts = rows = 0
                database.execute("COMMIT")
                self._begin(database)
        _count(database, -prompts, -rows)
        self._evicted += prompts

    def _begin(self, database: sqlite3.Connection) -> None:
        """Begin to write, with room in the log: where it is half full, it goes into the file."""
        until = time.monotonic() + BUSY_SECONDS
        while time.monotonic() < until:
            database.execute("BEGIN IMMEDIATE")
            if self._log.stat().st_size <= self._log_bytes // 2:
                return
            database.execute("ROLLBACK")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        raise StoreUnavailable(
            f"cannot write the rollout store {self.path}: a process has been reading it for long"
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, self._connection("write") as database:
            self._begin(database)
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                raise

    # --- connections ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self, doing: str) -> Iterator[sqlite3.Connection]:
        """Lend a connection. A file in which it finds damage again is moved aside."""
        with as_cache_errors(f"{doing} the rollout store", self.path):
            database, inode = self._take()
            try:
                yield database
            except sqlite3.Error as error:
                if is_damage(error):
                    self._suspect(inode, error)
                raise
            finally:
                self._give_back(database, inode)

    def _suspect(self, inode: int, error: sqlite3.Error) -> None:
        """Count damage. SQLite takes some errors of a disk for it, so it must come again."""
        with self._lock:
            self._suspicions += 1
            again = self._suspicions >= SUSPICIONS
        if again:
            move_aside(self._file, inode, str(error))

    def _inode_now(self) -> int:
        try:
            return self._file.stat().st_ino
        except FileNotFoundError:
            return 0

    def _take(self) -> tuple[sqlite3.Connection, int]:
        inode = self._inode_now()
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"the rollout store {self.path} is closed")
            if inode == self._inode and self._idle:
                return self._idle.pop(), inode
        return self._connect()

    def _connect(self) -> tuple[sqlite3.Connection, int]:
        database, inode = opened(self._file, self.vocabulary, self.max_bytes)
        self._page_size = number(database, "PRAGMA page_size")
        room = self.max_bytes - self._log_bytes - self._log_bytes // 64 - 2**16  # for its index
        self._pages = room // self._page_size
        self._part_bytes = self._log_bytes // 8
        self._rows = max(1, self._log_bytes // self._page_size // 64)
        database.execute(f"PRAGMA max_page_count = {self._pages}").fetchall()
        with self._lock:
            if self._inode not in (0, inode):  # by this or another process
                self._restarts += 1
                self._suspicions = 0
                self._idle.clear()
            self._inode = inode
        return database, inode

    def _give_back(self, database: sqlite3.Connection, inode: int) -> None:
        now = self._inode_now()
        with self._lock:
            if inode == now == self._inode:
                if self._closed or database.in_transaction:  # what a disk did not let undo
                    database.close()
                else:
                    self._idle.append(database)

    def _let_go(self) -> None:
        now = self._inode_now()
        with self._lock:
            if now == self._inode:
                for database in self._idle:
                    database.close()
            self._idle.clear()


class _NoRoom(Exception):
    """The store is full, and nothing is to be evicted."""


def _count(database: sqlite3.Connection, prompts: int, responses: int) -> None:
    database.executemany(
        "UPDATE meta SET value = value + ? WHERE name = ?",
        [(prompts, "prompts"), (responses, "responses")],
    )


def _drafts(
    database: sqlite3.Connection, key: bytes, policy_version: int, rows: int
) -> list[tuple[int, int, bytes]] | None:
    """Choose and mark the drafts of a prompt: numbers, identities and records, oldest first. None:
    the prompt is not there.
    """
    handed = database.execute(
        "SELECT draft_version, draft FROM prompts WHERE key = ?", (key,)
    ).fetchone()
    if handed is None:
        return None
    newest = database.execute(
        "SELECT version FROM rollouts WHERE key = ? AND version != ? AND scored "
        "ORDER BY number DESC LIMIT 1",
        (key, policy_version),
    ).fetchone()
    if newest is None:
        return []
    last = handed[1] if handed[0] == policy_version else -(2**63)
    found = database.execute(
        "SELECT number, identity, record FROM rollouts "
        "WHERE key = ? AND version = ? AND scored AND number > ? ORDER BY number LIMIT ?",
        (key, *newest, last, rows),
    ).fetchall()
    if found:
        database.execute(
            "UPDATE prompts SET draft_version = ?, draft = ? WHERE key = ?",
            (policy_version, found[-1][0], key),
        )
    return found


_stores: weakref.WeakSet[RolloutStore] = weakref.WeakSet()


def _before_fork() -> None:
    """A connection must not be used on both sides of a fork, so all that are idle are closed."""
    for store in list(_stores):
        store._let_go()


def _after_fork() -> None:
    for store in list(_stores):
        store._lock, store._writing = threading.Lock(), threading.Lock()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)

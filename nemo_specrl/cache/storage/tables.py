"""The tables of a store in SQLite, and the transactions that read and write them.

What is in them is in ``schema``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_specrl.cache.storage.database import (
    LARGEST_BLOB,
    check_size,
    connect,
    number,
    row,
)
from nemo_specrl.cache.storage.schema import (
    DATA_FILE,
    FORMAT,
    JOURNAL_FILE,
    SCHEMA,
    clock_of,
    has_tables,
    identity_and_state,
    named,
    newest_keys,
    other_format,
    packed_identity,
    packed_state,
)
from nemo_specrl.errors import ForeignStore, StoreInUse
from nemo_specrl.files import FILE_MODE, sync_folder
from nemo_specrl.rollout import KEY_BYTES

__all__ = ["PAGE_CACHE_KIB", "Tables", "page_size_under"]

PAGE_CACHE_KIB = 8192
_KIB, _MIB = 2**10, 2**20
_AT_ONCE = 16  # rows: what they dirty fits into the journal of the smallest store
_END = b"\xff" * (KEY_BYTES + 1)  # after all keys
_MARGIN = 8  # pages: more than a prompt's records can need in the trees above them


def page_size_under(max_bytes: int) -> int:
    """Return the page size of a new file under a cap.

    Large pages are fastest for records of some kilobytes and more; in a small file, each half-full
    page counts.
    """
    return 16 * _KIB if max_bytes >= 64 * _MIB else 4 * _KIB


class Tables:
    """A database with the tables of a store, open for one process.

    A transaction keeps what it overwrites in SQLite's rollback journal, which is next to the file
    and counts against the cap. What was freed before a transaction began does not go into the
    journal when it is overwritten. Therefore all records are written before any is deleted, and
    each transaction makes room for the next one at its end.

    Args:
        folder: folder of the database, which is created if it does not exist.
        max_bytes: file and journal never take more, unless the file already does: then
            ``oversized`` is true.
        tokenizer_id: tokenizer of a new store, and expected of an old one.
        locks: whether to lock the file against other programs; a store's folder is locked in any
            case.

    Raises:
        ForeignStore: it has another tokenizer, or another release's format.
        StoreInUse: another program has the database open.
        StoreUnavailable: the database is not a store.
        sqlite3.Error: it is damaged (``is_damage``), or the system has failed.
    """

    def __init__(
        self, folder: Path, max_bytes: int, tokenizer_id: str, *, locks: bool = True
    ) -> None:
        self._file, self._journal = folder / DATA_FILE, folder / JOURNAL_FILE
        # SQLite's files get the mode of the first.
        os.close(os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
        self._database = connect(self._file, "mode=rw" if locks else "mode=rw&nolock=1")
        self.close = weakref.finalize(self, _let_go, self._database, os.getpid())
        """Release the file."""
        try:
            self._open(max_bytes, tokenizer_id)
        except BaseException as error:
            self.close()
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            raise StoreInUse(
                f"{self._file} is open in another program; close it there, or name another folder",
                pid=None,
            ) from None

    def _open(self, max_bytes: int, tokenizer_id: str) -> None:
        share = max_bytes // 8
        self._journal_limit = min(share // 2, 16 * _MIB)
        """Size of the journal at which a transaction is committed before it continues."""
        for setting in (
            f"page_size = {page_size_under(max_bytes)}",
            "locking_mode = EXCLUSIVE",
            f"journal_size_limit = {self._journal_limit // 2}",
            "synchronous = FULL",
            "secure_delete = OFF",
            "temp_store = MEMORY",
            f"cache_size = -{PAGE_CACHE_KIB}",
            "cache_spill = OFF",  # nothing is written, and the file does not grow, before a commit
        ):
            self._database.execute(f"PRAGMA {setting}").fetchall()
        if row(self._database, "PRAGMA journal_mode = PERSIST") != (b"persist",):
            raise sqlite3.DatabaseError("its journal is of another kind")
        check_size(self._database, self._file)
        self.created = not has_tables(self._database, self._file)
        """Whether there were no tables, so that these are empty."""
        if self.created:
            self._create(tokenizer_id)
        self._database.execute("BEGIN EXCLUSIVE")  # a lock that is kept until the file is closed
        self._database.execute("COMMIT")
        identity, state = identity_and_state(self._database)
        self._check_identity(identity, tokenizer_id)
        self.clock, self.count, self.prompts, self.lookups, self.hits = state
        self.evicted = 0
        if self._journal.exists() and self._journal.stat().st_size > self._journal_limit:
            os.truncate(self._journal, 0)  # from a larger cap, and from no open transaction
        self.page_size = number(self._database, "page_size")
        pages = (max_bytes - 2 * self._journal_limit) // self.page_size
        self.oversized = number(self._database, "page_count") > pages
        self._pages = number(self._database, f"max_page_count = {pages}")
        self.batch_bytes = max(1, min(16 * _MIB // self.page_size, pages // 16)) * self.page_size
        """Bytes of records that are written at once; the same amount is kept free."""
        self.budget = pages * self.page_size - self.batch_bytes - _MARGIN * self.page_size
        """Bytes in use up to which nothing is evicted."""
        self.record_limit = min(LARGEST_BLOB - _KIB, (pages - 2 * _MARGIN) * self.page_size)
        """Bytes that a record may take: it and the tables' own pages fit into the file."""

    def _create(self, tokenizer_id: str) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        for statement in (f"PRAGMA user_version = {FORMAT}", *SCHEMA):
            self._database.execute(statement)
        values = ("identity", packed_identity(tokenizer_id)), ("state", packed_state(*[0] * 5))
        self._database.executemany("INSERT INTO meta VALUES (?, ?)", values)
        self._database.execute("COMMIT")
        sync_folder(self._file.parent)

    def _check_identity(self, identity: Mapping[str, Any], tokenizer_id: str) -> None:
        folder, made = self._file.parent, identity["format"]
        if made != FORMAT:
            raise other_format(folder, int(made))
        if identity["tokenizer"] != tokenizer_id:
            raise ForeignStore(
                f"the rollout store {folder} is of tokenizer {identity['tokenizer']!r}, not of "
                f"{tokenizer_id!r}; name another folder, or delete that one"
            )

    def tick(self) -> int:
        """Advance the clock, and return its time."""
        self.clock += 1
        return self.clock

    def size_of(self, record: bytes) -> int:
        """Return approximately how many bytes of pages a record takes."""
        full, rest = divmod(len(record), self.page_size)
        # A small rest shares a page with others; its key is in two trees.
        return full * self.page_size + min(self.page_size, rest + rest // 4 + 128)

    def used(self) -> int:
        """Return the bytes of the pages in use; free pages of the file are not counted."""
        pages = number(self._database, "page_count") - number(self._database, "freelist_count")
        return pages * self.page_size

    def records(self, key: bytes) -> dict[bytes, bytes]:
        """Return the records of a prompt, by db key."""
        rows = self._database.execute(
            "SELECT ?1, sample_index, clock, record FROM rollouts WHERE prompt = ?1", (key,)
        )
        return dict(named(rows))

    def names(self, key: bytes) -> set[bytes]:
        """Return the db keys of a prompt's records."""
        rows = self._database.execute(
            "SELECT ?1, sample_index, clock, NULL FROM rollouts WHERE prompt = ?1", (key,)
        )
        return {name for name, _ in named(rows)}

    def keys(self, start: bytes, stop: bytes | None, at_most: int) -> list[bytes]:
        """Return keys of prompts from ``start`` on, in order, below ``stop`` if it is given.

        Raises:
            sqlite3.DatabaseError: a page has its keys in the wrong order, so a search for the next
                one would not end.
        """
        end = _END if stop is None else stop
        found = [
            key
            for (key,) in self._database.execute(
                "SELECT key FROM prompts WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
                (start, end, at_most),
            )
        ]
        for before, key in zip([start, *found], found, strict=False):
            if not isinstance(key, bytes) or len(key) != KEY_BYTES or not before <= key < end:
                raise sqlite3.DatabaseError("keys of prompts are out of order")
        return found

    def keys_by_use(self, start: bytes, stop: bytes | None) -> list[bytes]:
        """Return all prompt keys in the range of :meth:`keys`, least recently used first."""
        rows = self._database.execute(
            "SELECT key FROM prompts WHERE key >= ? AND key < ? ORDER BY last_use",
            (start, _END if stop is None else stop),
        )
        return [key for (key,) in rows]

    def write(
        self,
        touched: Mapping[bytes, int],
        records: Mapping[bytes, Mapping[bytes, bytes]],
        unwanted: Collection[bytes],
        groups: int,
    ) -> None:
        """Write durably: uses of prompts and records, with the newest ``groups`` of each sample
        index kept, and the least recently used prompts evicted.

        It takes more than one transaction only if a journal would become too large; if it fails, it
        can be repeated.

        Args:
            touched: prompt key to the clock of its last use, even for prompts that are not there.
            records: prompt key to db key to record.
            unwanted: db keys of records to delete.
            groups: at least 1.
        """
        needed = sum(self.size_of(r) for named_ in records.values() for r in named_.values())
        changed = dict.fromkeys([*records, *(name[:KEY_BYTES] for name in unwanted)])
        with self._transaction():
            uses = [(clock, key) for key, clock in touched.items()]
            for i in range(0, len(uses), _AT_ONCE):
                self._database.executemany(
                    "UPDATE prompts SET last_use = ? WHERE key = ?", uses[i : i + _AT_ONCE]
                )
                self._bound_journal()
            if self.used() + needed > self._limit():
                self._evict(self._limit() - needed)
                self._commit()  # so that what is freed need not go into the journal
            obsolete: list[bytes] = []
            for key in changed:
                obsolete += self._insert(
                    key, touched.get(key, self.clock), records.get(key, {}), unwanted, groups
                )
                self._bound_journal()
            for i in range(0, len(obsolete), _AT_ONCE):
                clocks = [(clock_of(name),) for name in obsolete[i : i + _AT_ONCE]]
                gone = self._database.executemany("DELETE FROM rollouts WHERE clock = ?", clocks)
                self.count -= gone.rowcount
                self._bound_journal()
            # What was just written is kept; if it takes more by itself, it is evicted when
            # necessary.
            if records:
                self._evict(self.budget, before=min(touched[key] for key in records))

    def _limit(self) -> int:
        return (self._pages - _MARGIN) * self.page_size

    def _insert(
        self,
        key: bytes,
        clock: int,
        new: Mapping[bytes, bytes],
        unwanted: Collection[bytes],
        groups: int,
    ) -> list[bytes]:
        """Add records of a prompt, and return the db keys of those that must go in exchange."""
        needed = sum(map(self.size_of, new.values()))
        if self.used() + needed > self._limit():
            self._evict(self._limit() - needed)
        there = self.names(key)
        kept = set(newest_keys((there | set(new)) - set(unwanted), groups))
        added = sorted(kept - there)
        rows = [
            (clock_of(name), key, int.from_bytes(name[KEY_BYTES : KEY_BYTES + 2], "big"), new[name])
            for name in added
        ]
        self._database.executemany("INSERT INTO rollouts VALUES (?, ?, ?, ?)", rows)
        self.count += len(added)
        if kept and not there:
            self._database.execute("INSERT INTO prompts VALUES (?, ?)", (key, clock))
            self.prompts += 1
        elif there and not kept:
            self._delete_prompt(key)
            return []
        return sorted(there - kept)

    def _deleted(self, table: str, column: str, value: bytes) -> int:
        """Delete rows, and return how many."""
        return self._database.execute(f"DELETE FROM {table} WHERE {column} = ?", (value,)).rowcount

    def _delete_prompt(self, key: bytes) -> None:
        if self._deleted("prompts", "key", key) != 1:
            raise sqlite3.DatabaseError("uses of prompts are out of order")
        self.count -= self._deleted("rollouts", "prompt", key)
        self.prompts -= 1

    def evict_down_to(self, target: int) -> None:
        """Evict the least recently used prompts until ``target`` bytes are in use."""
        with self._transaction():
            self._evict(target)

    def _evict(self, target: int, before: int | None = None) -> None:
        """Evict the least recently used prompts, in an open transaction.

        Args:
            target: bytes in use at the end.
            before: clock of the first use of those that stay.

        Raises:
            sqlite3.DatabaseError: a page has its keys in the wrong order, so a prompt that was
                found cannot be deleted; or no prompt is left, but there is still no room.
        """
        while self.used() > target:
            oldest = self._database.execute(
                "SELECT last_use, key FROM prompts ORDER BY last_use LIMIT 1"
            ).fetchone()
            if oldest is None:
                if before is None:
                    raise sqlite3.DatabaseError("records without a prompt take all the room")
                return
            last_use, key = oldest
            if not isinstance(last_use, int):
                raise sqlite3.DatabaseError("a use of a prompt has no time")
            if before is not None and last_use >= before:
                return
            self._delete_prompt(key)
            self.evicted += 1
            self._bound_journal()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write durably; if the block raises, everything since the last commit is undone."""
        self._database.execute("BEGIN IMMEDIATE")
        self._committed = self.count, self.prompts, self.evicted
        try:
            yield
            self._write_state()
            self._database.execute("COMMIT")
        except BaseException:
            self.count, self.prompts, self.evicted = self._committed
            if self._database.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
            raise

    def _bound_journal(self) -> None:
        """Commit if the journal has become large, and continue in a new transaction."""
        try:
            size = os.stat(self._journal).st_size
        except FileNotFoundError:
            return
        if size > self._journal_limit:
            self._commit()

    def _commit(self) -> None:
        self._write_state()
        self._database.execute("COMMIT")
        self._committed = self.count, self.prompts, self.evicted
        self._database.execute("BEGIN IMMEDIATE")

    def _write_state(self) -> None:
        counts = max(0, self.count), max(0, self.prompts)  # if rows are damaged
        state = packed_state(self.clock, *counts, self.lookups, self.hits)
        self._database.execute("UPDATE meta SET value = ? WHERE name = 'state'", (state,))

    def copy_compact(self, target: Path, page_size: int) -> None:
        """Write a copy without free pages into an empty file."""
        self._database.execute(f"PRAGMA page_size = {page_size}")
        self._database.execute("VACUUM INTO ?", (str(target),))


def _let_go(database: sqlite3.Connection, pid: int) -> None:
    if os.getpid() == pid:
        database.close()
    else:  # In a forked child, closing it would delete the journal of the parent's transaction.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))

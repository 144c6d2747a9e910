"""The tables of a store in LMDB, and the transactions that read and write them.

What is in them is in ``schema``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb

from nemo_specrl.cache.storage.lock import FolderLock
from nemo_specrl.cache.storage.schema import (
    AFTER_PROMPT,
    CLOCK,
    DATA_FILE,
    FORMAT,
    HEAD,
    PIECE,
    newest_keys,
    packed_identity,
    packed_state,
    unpacked_identity,
    unpacked_state,
)
from nemo_specrl.errors import ForeignStore, StoreUnavailable
from nemo_specrl.files import FILE_MODE, sync_folder
from nemo_specrl.rollout import KEY_BYTES

__all__ = ["Reader", "Tables"]

_PAGE_HEADER = 16
_NODE_HEADER = 8
_MIB = 2**20


class Tables:
    """An LMDB file with the tables of a store, open for one process.

    Args:
        folder: of the file ``data.mdb``, which is made if it is not there.
        map_size: the file never grows beyond it, bytes. LMDB raises it to the size of a file that
            is larger already: then ``oversized`` is true.
        tokenizer_id: of a new store, and expected of an old one.
        lock: of the folder; it notes which prompt's pages are in use.

    Raises:
        ForeignStore: of another tokenizer, or of another release's format.
        StoreUnavailable: an LMDB file that is no store.
        lmdb.Error: one of ``DAMAGE``, or a failure of the system.
    """

    def __init__(self, folder: Path, map_size: int, tokenizer_id: str, lock: FolderLock) -> None:
        self._file = folder / DATA_FILE
        self._lock = lock
        self.record_access = lock.record_access
        with lock.accessing():
            self._open(folder, map_size, tokenizer_id)
        pages = map_size // self.page_size
        # Copy-on-write and the pages freed last, which LMDB does not reuse yet, need free pages.
        headroom = min(pages // 6, (32 * _MIB + map_size // 32) // self.page_size)
        self.budget = (pages - headroom) * self.page_size
        """Bytes in use up to which nothing is evicted."""
        self.batch_pages = max(1, min(16 * _MIB // self.page_size, pages // 64))
        """Pages of records that a transaction may write without needing more than the headroom."""
        self.touch_batch = max(self.batch_pages, min(4096, pages // 128))
        """Uses that it may record, likewise."""
        self.record_limit = self.budget - 8 * self.page_size
        """Bytes that a record may take: it and the tables' own pages fit into the budget."""

    def _open(self, folder: Path, map_size: int, tokenizer_id: str) -> None:
        try:
            self.env = lmdb.open(str(folder), map_size, max_dbs=3, lock=False, mode=FILE_MODE)
        except lmdb.VersionMismatchError:
            raise ForeignStore(
                f"{self._file} was written by a newer LMDB; upgrade it, or name another folder"
            ) from None
        try:
            self.page_size = self.env.stat()["psize"]
            size = self._file.stat().st_size
            if size < self._end():
                # LMDB would read beyond the end through its memory map, and the process would die.
                raise lmdb.CorruptedError(f"cut off at {size} of {self._end()} bytes")
            self.oversized = size > map_size
            new = self.env.stat()["entries"] == 0
            with self.env.begin(write=True) as txn:
                try:
                    self.meta, self.rollouts, self.uses = (
                        self.env.open_db(name, txn=txn, create=new)
                        for name in (b"meta", b"rollouts", b"uses")
                    )
                except (lmdb.NotFoundError, lmdb.IncompatibleError):
                    raise StoreUnavailable(
                        f"{self._file} is an LMDB file but no rollout store; name another folder"
                    ) from None
                if new:
                    txn.put(b"identity", packed_identity(tokenizer_id), db=self.meta)
                    txn.put(b"state", packed_state(0, 0, 0, 0), db=self.meta)
                self._check_identity(txn.get(b"identity", b"", db=self.meta), tokenizer_id)
                state = unpacked_state(txn.get(b"state", b"", db=self.meta))
                self.clock: int
                self.count: int
                self.lookups: int
                self.hits: int
                self.clock, self.count, self.lookups, self.hits = state
                self.evicted = 0
            if new:
                sync_folder(folder)
        except BaseException:
            self.env.close()
            raise

    def _check_identity(self, identity: bytes, tokenizer_id: str) -> None:
        stored = unpacked_identity(identity)
        folder = self._file.parent
        if stored["format"] != FORMAT:
            newer = stored["format"] > FORMAT
            raise ForeignStore(
                f"the rollout store {folder} was written by {'a newer' if newer else 'an older'} "
                f"release (format {stored['format']}, this one reads {FORMAT}); "
                f"{'upgrade nemo_specrl, ' if newer else ''}name another folder, or delete that one"
            )
        if stored["tokenizer"] != tokenizer_id:
            raise ForeignStore(
                f"the rollout store {folder} is of tokenizer {stored['tokenizer']!r}, not of "
                f"{tokenizer_id!r}; name another folder, or delete that one"
            )

    def _end(self) -> int:
        return (self.env.info()["last_pgno"] + 1) * self.page_size

    def tick(self) -> int:
        """Advance the clock, and return its time."""
        self.clock += 1
        return self.clock

    def size_of(self, record: bytes) -> tuple[int, int]:
        """Return the bytes of pages that a record takes, about, and how many it dirties."""
        full, rest = divmod(len(record), self.page_size - _PAGE_HEADER)
        # A small rest shares a page, half full on average, with others.
        return full * self.page_size + min(self.page_size, 2 * (rest + 64)), full + 1

    def failed(self) -> bool:
        """Return whether LMDB refuses every transaction from now on."""
        try:
            with self.env.begin():
                return False
        except lmdb.Error:
            return True

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """Read what was committed last."""
        with (
            self._lock.accessing(),
            self.env.begin(db=self.rollouts, buffers=True) as txn,
            txn.cursor() as cursor,
        ):
            yield Reader(self, txn, cursor)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer]:
        """Write in one durable transaction; if the block raises, nothing has happened.

        Raises:
            lmdb.CorruptedError: LMDB has freed other pages than it should have.
        """
        with (
            self._lock.accessing(),
            self.env.begin(db=self.rollouts, write=True, buffers=True) as txn,
        ):
            with txn.cursor() as cursor:
                writer = Writer(self, txn, cursor)
                yield writer
                writer.verify()
            state = packed_state(self.clock, writer.count, self.lookups, self.hits)
            txn.put(b"state", state, db=self.meta)
        self._lock.committed()
        self.count = writer.count
        self.evicted += writer.evicted
        # A last page that a transaction took and freed again may not have been written; without it
        # the file would look cut off.
        if self._file.stat().st_size < self._end():
            os.truncate(self._file, self._end())

    def evict_down_to(self, target: int) -> None:
        """Evict the longest-unused prompts until ``target`` bytes are in use.

        Unlike :meth:`Writer.evict_down_to`, it takes as many transactions as it needs.
        """
        done = False
        while not done:
            with self.writing() as writer:
                done = writer.evict_down_to(target, at_most=self.batch_pages)


class Reader:
    """Reads the tables in one transaction."""

    def __init__(
        self, tables: Tables, txn: lmdb.Transaction[Any], cursor: lmdb.Cursor[Any]
    ) -> None:
        self._tables = tables
        self._txn = txn
        self._cursor = cursor  # of the rollouts

    def prompts(self) -> int:
        """Return the number of prompts."""
        return self._txn.stat(self._tables.uses)["entries"]

    def used(self) -> int:
        """Return the bytes of the pages in use; free pages of the file are not counted."""
        pages = 2 + 1  # LMDB's two meta pages and the root of its main table
        for table in (self._tables.meta, self._tables.rollouts, self._tables.uses):
            stat = self._txn.stat(table)
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * self._tables.page_size

    def records(self, key: bytes) -> dict[bytes, bytes]:
        """Return the records of a prompt, by db key."""
        self._tables.record_access(key)
        pieces: dict[bytes, list[memoryview]] = {}
        if self._cursor.set_range(key):
            record = b""
            values: list[memoryview] = []
            for place, value in self._cursor:  # pages of the file, which are copied once, below
                name = bytes(place)
                if not name.startswith(key):
                    break
                if record and name.startswith(record):
                    values.append(value)
                elif len(name) > KEY_BYTES:
                    record, values = name[: -PIECE.size], [value]
                    pieces[record] = values
        return {name: b"".join(values) for name, values in pieces.items()}

    def keys(self, start: bytes, stop: bytes | None, at_most: int) -> list[bytes]:
        """Return keys of prompts from ``start`` on, in order, below ``stop`` where it is given.

        Raises:
            lmdb.CorruptedError: a page has its keys in another order, so that the search would not
                end.
        """
        self._tables.record_access(start)
        found: list[bytes] = []
        last = b""
        more = self._cursor.set_range(start)
        while more and len(found) < at_most:
            name = bytes(self._cursor.key()[:KEY_BYTES])
            if name <= last:
                raise lmdb.CorruptedError("keys of prompts are out of order")
            last = name
            if stop is not None and name >= stop:
                break
            if name >= start:
                found.append(name)
            more = self._cursor.set_range(name + AFTER_PROMPT)
        return found

    def _names(self, key: bytes) -> dict[bytes, int]:
        """Return the keys of everything that belongs to a prompt, and the sizes of the values."""
        names = {}
        if self._cursor.set_range(key):
            for place, value in self._cursor:
                name = bytes(place)
                if not name.startswith(key):
                    break
                names[name] = len(value)
        return names


class Writer(Reader):
    """Changes the tables in one write transaction."""

    def __init__(
        self, tables: Tables, txn: lmdb.Transaction[Any], cursor: lmdb.Cursor[Any]
    ) -> None:
        super().__init__(tables, txn, cursor)
        self.count = tables.count
        self.evicted = 0
        self._large = self._overflow_pages()
        # LMDB gives a value a page of its own if its node is larger than that.
        self._node_limit = ((tables.page_size - _PAGE_HEADER) // 2 & -2) - 2

    def _overflow_pages(self) -> int:
        return self._txn.stat(self._tables.rollouts)["overflow_pages"]

    def _is_large(self, name: bytes, size: int) -> bool:
        return _NODE_HEADER + len(name) + size > self._node_limit

    def _delete(self, names: Mapping[bytes, int]) -> None:
        for name, size in names.items():
            if self._txn.delete(name):
                self._large -= self._is_large(name, size)

    def verify(self) -> None:
        """Check that one page was taken or freed for each large value that came or went.

        LMDB frees as many as a page's header says, and pages in use among them if that is damaged.

        Raises:
            lmdb.CorruptedError: it was not so.
        """
        if self._overflow_pages() != self._large:
            raise lmdb.CorruptedError("the header of a value's page is wrong")

    def touch(self, key: bytes, clock: int) -> None:
        """Record a use of a prompt, if it is there."""
        self._tables.record_access(key)
        last_use, count = self._head(key)
        if count:
            self._set_head(key, last_use, clock, count)

    def _head(self, key: bytes) -> tuple[int | None, int]:
        """Return last use and number of rollouts of a prompt; None and 0 if it is not there."""
        head = self._txn.get(key)
        if head is None:
            return None, 0
        if len(head) != HEAD.size:
            raise lmdb.CorruptedError(f"prompt {key.hex()} has a head of {len(head)} bytes")
        last_use, count = HEAD.unpack(head)
        return last_use, count

    def _set_head(self, key: bytes, last_use: int | None, clock: int, count: int) -> None:
        if last_use is not None:
            self._txn.delete(CLOCK.pack(last_use), db=self._tables.uses)
        if count:
            self._txn.put(CLOCK.pack(clock), key, db=self._tables.uses)
            self._txn.put(key, HEAD.pack(clock, count))
        else:
            self._txn.delete(key)

    def evict_down_to(self, target: int, at_most: int | None = None) -> bool:
        """Evict the longest-unused prompts until ``target`` bytes are in use.

        Returns:
            False if it stopped short of that after ``at_most`` prompts.

        Raises:
            lmdb.CorruptedError: a page has its keys in another order, so that the prompt that was
                found cannot be deleted.
        """
        stop = None if at_most is None else self.evicted + at_most
        while self.used() > target:
            if self.evicted == stop:
                return False
            with self._txn.cursor(self._tables.uses) as cursor:
                if not cursor.first():
                    break
                clock, key = map(bytes, cursor.item())
            self._tables.record_access(key)
            if not self._txn.delete(clock, db=self._tables.uses):
                raise lmdb.CorruptedError("uses of prompts are out of order")
            self.count = max(0, self.count - self._head(key)[1])
            self._delete(self._names(key))
            self.evicted += 1
        return True

    def update(
        self,
        key: bytes,
        clock: int,
        new: Mapping[bytes, bytes],
        unwanted: Collection[bytes],
        groups: int,
    ) -> None:
        """Add records of a prompt, and keep the newest ``groups`` of each sample index.

        Args:
            key: of the prompt.
            clock: of the prompt's last use.
            new: db key to record.
            unwanted: db keys to delete.
            groups: at least 1.
        """
        self._tables.record_access(key)
        last_use, old_count = self._head(key)
        pieces: dict[bytes, dict[bytes, int]] = {}
        for name, length in self._names(key).items():
            if len(name) > KEY_BYTES:
                pieces.setdefault(name[: -PIECE.size], {})[name] = length
        kept = set(newest_keys({*pieces, *new} - set(unwanted), groups))
        for record_key, names in pieces.items():
            if record_key not in kept:
                self._delete(names)
        size = self._tables.page_size - _PAGE_HEADER
        added = [
            (record_key + PIECE.pack(i // size), record[i : i + size])
            for record_key, record in new.items()
            if record_key in kept
            for i in range(0, len(record), size)
        ]
        self._cursor.putmulti(added)
        self._large += sum(self._is_large(name, len(piece)) for name, piece in added)
        self._set_head(key, last_use, clock, len(kept))
        self.count = max(0, self.count + len(kept) - old_count)

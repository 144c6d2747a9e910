"""The tables of a store in LMDB, and what one write transaction can do to them.

Integers are big-endian, so that they sort::

    meta       identity -> JSON {format, tokenizer}, xxh3-64 of it
               state -> u64 clock, u64 rollouts, u64 prompts ever asked for, u64 of them found,
                        xxh3-64 of it
    rollouts   prompt key -> u64 last use, u32 rollouts
               db key, u32 piece -> a piece of the record of that db key
    uses       u64 clock -> prompt key, longest unused first

A db key is a prompt key, u16 sample index and the complement of the u64 clock, so that records
sort by sample index and newest first. A record is cut into pieces of one page each: whatever page
is free will do, and the file cannot fragment. The clock ticks at every put and at every use of a
prompt.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from nemo_specrl.cache.files import FILE_MODE, sync_folder
from nemo_specrl.cache.lock import FolderLock
from nemo_specrl.cache.pages import PageFile
from nemo_specrl.errors import ForeignStore, StoreUnavailable
from nemo_specrl.rollout import KEY_BYTES

__all__ = [
    "DAMAGE",
    "DATA_FILE",
    "FORMAT",
    "TABLES",
    "Contents",
    "Reader",
    "Tables",
    "Writer",
    "db_key",
    "reading_file",
    "visible",
]

FORMAT = 3
DATA_FILE = "data.mdb"
TABLES = frozenset({b"meta", b"rollouts", b"uses"})
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.BadValsizeError,
    lmdb.BadDbiError,
    lmdb.IncompatibleError,
    lmdb.InvalidParameterError,
    lmdb.KeyExistsError,
    lmdb.MapResizedError,
    lmdb.NotFoundError,
    lmdb.TxnFullError,
)
"""What LMDB raises where the bytes of a file make no sense. None comes of a failing disk."""

_DB_KEY = struct.Struct(f">{KEY_BYTES}sHQ")
_PIECE = struct.Struct(">I")
_CLOCK = struct.Struct(">Q")
_HEAD = struct.Struct(">QI")
_STATE = struct.Struct(">QQQQ")
_PAGE_HEADER = 16
_NODE_HEADER = 8
_SAMPLE_END = KEY_BYTES + 2
_MIB = 2**20

_BEHIND = b"\xff" * (_DB_KEY.size - KEY_BYTES + _PIECE.size + 1)
"""A prompt key and this sort behind all that belongs to the prompt."""


def db_key(key: bytes, sample_index: int, clock: int) -> bytes:
    """Return the key under which a rollout that was put at a time of the clock is stored."""
    return _DB_KEY.pack(key, sample_index, 2**64 - 1 - clock)


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
        self.mark = lock.mark
        with lock.busy():
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
                    identity = json.dumps({"format": FORMAT, "tokenizer": tokenizer_id}).encode()
                    checksum = xxhash.xxh3_64_digest(identity)
                    txn.put(b"identity", identity + checksum, db=self.meta)
                    txn.put(b"state", _packed_state(0, 0, 0, 0), db=self.meta)
                self._check_identity(txn.get(b"identity", b"", db=self.meta), tokenizer_id)
                state = _state(txn.get(b"state", b"", db=self.meta))
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
        stored = _identity(identity)
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
            self._lock.busy(),
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
        with self._lock.busy(), self.env.begin(db=self.rollouts, write=True, buffers=True) as txn:
            with txn.cursor() as cursor:
                writer = Writer(self, txn, cursor)
                yield writer
                writer.verify()
            state = _packed_state(self.clock, writer.count, self.lookups, self.hits)
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


def _identity(value: bytes) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(_unsealed("identity", value))
    return identity


def _state(value: bytes) -> tuple[int, ...]:
    """Return clock, rollouts, look-ups and hits."""
    return _STATE.unpack(_unsealed("state", value))


def _packed_state(*numbers: int) -> bytes:
    packed = _STATE.pack(*numbers)
    return packed + xxhash.xxh3_64_digest(packed)


def _unsealed(what: str, value: bytes) -> bytes:
    content, checksum = value[:-8], value[-8:]
    if xxhash.xxh3_64_digest(content) != checksum:
        raise lmdb.CorruptedError(f"no {what}")
    return content


@dataclass(frozen=True)
class Contents:
    """The contents of a file of tables that is read without being changed.

    Args:
        format: of the tables; records can be read where it is this release's.
        tokenizer_id: of the tokens.
        lookups: prompts ever asked for.
        hits: of them found.
        records: db key and record of each rollout, in the order of the keys.
    """

    format: int
    tokenizer_id: str
    lookups: int
    hits: int
    records: Iterator[tuple[bytes, bytes]]


@contextlib.contextmanager
def reading_file(file: Path) -> Iterator[Contents]:
    """Read the tables in a file: a store's, or a copy.

    LMDB has no part in it, so that a damaged file raises an error instead of ending the process,
    and so does one to which a process writes meanwhile.

    Raises:
        lmdb.CorruptedError: it is damaged, or no file of LMDB.
        StoreUnavailable: it is no rollout store.
    """
    with PageFile(file) as pages:
        if not pages.known:
            raise StoreUnavailable(
                f"{file} is empty, or of another LMDB or another kind of machine than this one"
            )
        tables = pages.tables()
        if len(tables.keys() & TABLES) < 2:
            raise StoreUnavailable(f"{file} is an LMDB file but no rollout store")
        if tables.keys() != TABLES:
            raise lmdb.CorruptedError(f"its tables are {sorted(tables)}")
        meta = dict(pages.items(tables[b"meta"]))
        identity = _identity(meta.get(b"identity", b""))
        lookups = hits = 0
        if identity["format"] == FORMAT:
            lookups, hits = _state(meta.get(b"state", b""))[2:]
        records = _joined(pages.items(tables[b"rollouts"]))
        yield Contents(identity["format"], identity["tokenizer"], lookups, hits, records)


def _joined(pieces: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    records = (piece for piece in pieces if len(piece[0]) > KEY_BYTES)
    for name, some in itertools.groupby(records, lambda piece: piece[0][: -_PIECE.size]):
        yield name, b"".join(value for _, value in some)


class Reader:
    """The tables in one transaction."""

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
        self._tables.mark(key)
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
                    record, values = name[: -_PIECE.size], [value]
                    pieces[record] = values
        return {name: b"".join(values) for name, values in pieces.items()}

    def keys(self, start: bytes, stop: bytes | None, at_most: int) -> list[bytes]:
        """Return keys of prompts from ``start`` on, in order, below ``stop`` where it is given."""
        self._tables.mark(start)
        found: list[bytes] = []
        more = self._cursor.set_range(start)
        while more and len(found) < at_most:
            name = bytes(self._cursor.key()[:KEY_BYTES])
            if stop is not None and name >= stop:
                break
            if name >= start:
                found.append(name)
            more = self._cursor.set_range(name + _BEHIND)
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
    """What can be done to the tables in one write transaction."""

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
        self._tables.mark(key)
        last_use, count = self._head(key)
        if count:
            self._set_head(key, last_use, clock, count)

    def _head(self, key: bytes) -> tuple[int | None, int]:
        """Return last use and number of rollouts of a prompt; None and 0 if it is not there."""
        head = self._txn.get(key)
        if head is None:
            return None, 0
        if len(head) != _HEAD.size:
            raise lmdb.CorruptedError(f"prompt {key.hex()} has a head of {len(head)} bytes")
        last_use, count = _HEAD.unpack(head)
        return last_use, count

    def _set_head(self, key: bytes, last_use: int | None, clock: int, count: int) -> None:
        if last_use is not None:
            self._txn.delete(_CLOCK.pack(last_use), db=self._tables.uses)
        if count:
            self._txn.put(_CLOCK.pack(clock), key, db=self._tables.uses)
            self._txn.put(key, _HEAD.pack(clock, count))
        else:
            self._txn.delete(key)

    def evict_down_to(self, target: int, at_most: int | None = None) -> bool:
        """Evict the longest-unused prompts until ``target`` bytes are in use.

        Returns:
            False if it stopped short of that after ``at_most`` prompts.
        """
        stop = None if at_most is None else self.evicted + at_most
        while self.used() > target:
            if self.evicted == stop:
                return False
            with self._txn.cursor(self._tables.uses) as cursor:
                if not cursor.first():
                    break
                clock, key = map(bytes, cursor.item())
            self._tables.mark(key)
            self._txn.delete(clock, db=self._tables.uses)
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
        self._tables.mark(key)
        last_use, old_count = self._head(key)
        pieces: dict[bytes, dict[bytes, int]] = {}
        for name, length in self._names(key).items():
            if len(name) > KEY_BYTES:
                pieces.setdefault(name[: -_PIECE.size], {})[name] = length
        kept = set(visible({*pieces, *new} - set(unwanted), groups))
        for record_key, names in pieces.items():
            if record_key not in kept:
                self._delete(names)
        size = self._tables.page_size - _PAGE_HEADER
        added = [
            (record_key + _PIECE.pack(i // size), record[i : i + size])
            for record_key, record in new.items()
            if record_key in kept
            for i in range(0, len(record), size)
        ]
        self._cursor.putmulti(added)
        self._large += sum(self._is_large(name, len(piece)) for name, piece in added)
        self._set_head(key, last_use, clock, len(kept))
        self.count = max(0, self.count + len(kept) - old_count)


def visible(db_keys: Collection[bytes], groups: int) -> list[bytes]:
    """Return, of db keys, the newest ``groups`` of each prompt and sample index, sorted."""
    kept: list[bytes] = []
    sample_index, count = b"", 0
    for name in sorted(db_keys):
        if not (sample_index and name.startswith(sample_index)):
            sample_index, count = name[:_SAMPLE_END], 0
        if count < groups:
            kept.append(name)
            count += 1
    return kept

"""The layout of a store's tables: their names, keys and values, and how a file of them is read.

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
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from nemo_specrl.cache.storage.lmdb_check import PageFile
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import KEY_BYTES

__all__ = [
    "AFTER_PROMPT",
    "CLOCK",
    "DAMAGE",
    "DATA_FILE",
    "FORMAT",
    "HEAD",
    "PIECE",
    "TABLES",
    "db_key",
    "is_of_store",
    "newest_keys",
    "packed_identity",
    "packed_state",
    "reading_file",
    "unpacked_identity",
    "unpacked_state",
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
"""Errors that LMDB raises where a file is damaged. None of them comes of a failing disk."""

_DB_KEY = struct.Struct(f">{KEY_BYTES}sHQ")
PIECE = struct.Struct(">I")
CLOCK = struct.Struct(">Q")
HEAD = struct.Struct(">QI")
_STATE = struct.Struct(">QQQQ")
_SAMPLE_END = KEY_BYTES + 2

AFTER_PROMPT = b"\xff" * (_DB_KEY.size - KEY_BYTES + PIECE.size + 1)
"""Sorts, behind a prompt's key, after everything that belongs to the prompt."""


def db_key(key: bytes, sample_index: int, clock: int) -> bytes:
    """Return the key under which a rollout that was put at a time of the clock is stored."""
    return _DB_KEY.pack(key, sample_index, 2**64 - 1 - clock)


def unpacked_identity(value: bytes) -> dict[str, Any]:
    """Return format and tokenizer.

    Raises:
        lmdb.CorruptedError: the checksum does not match.
    """
    identity: dict[str, Any] = json.loads(_unsealed("identity", value))
    return identity


def packed_identity(tokenizer_id: str) -> bytes:
    """Encode format and tokenizer."""
    packed = json.dumps({"format": FORMAT, "tokenizer": tokenizer_id}).encode()
    return packed + xxhash.xxh3_64_digest(packed)


def unpacked_state(value: bytes) -> tuple[int, ...]:
    """Return clock, rollouts, look-ups and hits.

    Raises:
        lmdb.CorruptedError: the checksum does not match.
    """
    return _STATE.unpack(_unsealed("state", value))


def packed_state(*numbers: int) -> bytes:
    """Encode clock, rollouts, look-ups and hits."""
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


def is_of_store(pages: PageFile, tables: Collection[bytes]) -> bool:
    """Whether a file with these tables is a store's, perhaps a damaged one.

    One of the names may be what is damaged, or the page that leads to them.
    """
    return len(TABLES.intersection(tables)) >= 2 or pages.had_tables(TABLES)


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
        if not is_of_store(pages, tables):
            raise StoreUnavailable(f"{file} is an LMDB file but no rollout store")
        if tables.keys() != TABLES:
            raise lmdb.CorruptedError(f"its tables are {sorted(tables)}")
        meta = dict(pages.items(tables[b"meta"]))
        identity = unpacked_identity(meta.get(b"identity", b""))
        lookups = hits = 0
        if identity["format"] == FORMAT:
            lookups, hits = unpacked_state(meta.get(b"state", b""))[2:]
        records = _joined(pages.items(tables[b"rollouts"]))
        yield Contents(identity["format"], identity["tokenizer"], lookups, hits, records)


def _joined(pieces: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    records = (piece for piece in pieces if len(piece[0]) > KEY_BYTES)
    for name, some in itertools.groupby(records, lambda piece: piece[0][: -PIECE.size]):
        yield name, b"".join(value for _, value in some)


def newest_keys(db_keys: Collection[bytes], groups: int) -> list[bytes]:
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

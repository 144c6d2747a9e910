"""The layout of a store's database: its tables, and the names and values in them.

::

    meta       identity -> JSON {format, tokenizer}, xxh3-64 of it
               state -> u64 clock, u64 rollouts, u64 prompts, u64 prompts ever asked for, u64 of
                        them found, xxh3-64 of it
    prompts    prompt key -> last use
    rollouts   clock of the put -> prompt key, sample index, record

The clock ticks at every put and at every use of a prompt. A record is checked under its db key: a
prompt key, u16 sample index and the complement of the u64 clock, big-endian, so that db keys sort
by sample index and newest first.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from nemo_specrl.cache.storage.database import number, row
from nemo_specrl.errors import ForeignStore, StoreUnavailable
from nemo_specrl.rollout import KEY_BYTES

__all__ = [
    "DATA_FILE",
    "FORMAT",
    "JOURNAL_FILE",
    "SCHEMA",
    "clock_of",
    "db_key",
    "has_tables",
    "identity_and_state",
    "named",
    "newest_keys",
    "other_format",
    "packed_identity",
    "packed_state",
]

FORMAT = 4
DATA_FILE = "rollouts.sqlite"
JOURNAL_FILE = f"{DATA_FILE}-journal"
SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE prompts (key BLOB PRIMARY KEY, last_use INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX prompts_by_use ON prompts (last_use)",
    "CREATE TABLE rollouts (clock INTEGER PRIMARY KEY, prompt BLOB NOT NULL, "
    "sample_index INTEGER NOT NULL, record BLOB NOT NULL)",
    "CREATE INDEX rollouts_by_prompt ON rollouts (prompt, sample_index)",
)
_TABLES = frozenset({b"meta", b"prompts", b"rollouts"})
_DESCRIBED = sorted(repr((text.split()[2].encode(), text.encode())) for text in SCHEMA)
_DB_KEY = struct.Struct(f">{KEY_BYTES}sHQ")
_STATE = struct.Struct(">QQQQQ")
_END_OF_TIME = 2**62  # end of the clock, which must fit into an SQLite integer
_SAMPLE_END = KEY_BYTES + 2


def has_tables(database: sqlite3.Connection, file: Path) -> bool:
    """Whether a database has the tables of a store; False if it has none at all.

    A database with other tables, or with triggers or views, which could do anything, is refused.

    Raises:
        StoreUnavailable: it has tables of another kind.
        ForeignStore: it has tables of a newer release.
        sqlite3.DatabaseError: the description of its tables is damaged.
    """
    found = database.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
    if not found:
        if file.stat().st_size:
            raise sqlite3.DatabaseError("its tables are missing")
        return False
    if sorted(map(repr, found)) == _DESCRIBED:
        return True
    names = {name for name, _ in found}
    if len(_TABLES & names) < 2:
        raise StoreUnavailable(f"{file} is a SQLite file but no rollout store; name another folder")
    if (made := number(database, "user_version")) > FORMAT:
        raise other_format(file.parent, made)
    raise sqlite3.DatabaseError("its tables are not those of a store")


def other_format(folder: Path, made: int) -> ForeignStore:
    """Return the error for a store of another release's format."""
    newer = made > FORMAT
    return ForeignStore(
        f"the rollout store {folder} was written by {'a newer' if newer else 'an older'} "
        f"release (format {made}, this one reads {FORMAT}); "
        f"{'upgrade nemo_specrl, ' if newer else ''}name another folder, or delete that one"
    )


def db_key(key: bytes, sample_index: int, clock: int) -> bytes:
    """Return the key under which a rollout that was put at a time of the clock is stored."""
    return _DB_KEY.pack(key, sample_index, 2**64 - 1 - clock)


def clock_of(name: bytes) -> int:
    """Return the clock in a db key."""
    clock: int = _DB_KEY.unpack(name)[2]
    return 2**64 - 1 - clock


def named(rows: Iterable[tuple[Any, Any, Any, Any]]) -> Iterator[tuple[bytes, bytes]]:
    """Turn rows of key, sample index, clock and record into db keys and records.

    Raises:
        sqlite3.DatabaseError: the values in a row are of other types.
    """
    for key, sample_index, clock, record in rows:
        try:
            name = db_key(key, sample_index, clock)
        except (struct.error, TypeError):
            raise sqlite3.DatabaseError("a rollout's key is invalid") from None
        yield name, record if isinstance(record, bytes) else b""  # whose checksum is wrong


def packed_identity(tokenizer_id: str) -> bytes:
    """Encode format and tokenizer."""
    packed = json.dumps({"format": FORMAT, "tokenizer": tokenizer_id}).encode()
    return packed + xxhash.xxh3_64_digest(packed)


def packed_state(*numbers: int) -> bytes:
    """Encode clock, rollouts, prompts, look-ups and hits."""
    packed = _STATE.pack(*numbers)
    return packed + xxhash.xxh3_64_digest(packed)


def identity_and_state(database: sqlite3.Connection) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return format and tokenizer, and what :func:`packed_state` packed.

    For a format other than this release's, the state is empty.

    Raises:
        sqlite3.DatabaseError: a checksum does not match, or what it covers has the wrong type.
    """
    sealed = _unsealed(database, "identity")
    try:
        described: dict[str, Any] = json.loads(sealed)
        if described["format"] != FORMAT:
            return described, ()
        state = _STATE.unpack(_unsealed(database, "state"))
        if described["tokenizer"] is None or max(state) >= _END_OF_TIME:
            raise ValueError
    except (ValueError, KeyError, TypeError, struct.error):
        raise sqlite3.DatabaseError("its identity or state is invalid") from None
    return described, state


def _unsealed(database: sqlite3.Connection, name: str) -> bytes:
    (value,) = row(database, "SELECT value FROM meta WHERE name = ?", name)
    value = value if isinstance(value, bytes) else b""
    if xxhash.xxh3_64_digest(value[:-8]) != value[-8:]:
        raise sqlite3.DatabaseError(f"no {name}")
    return value[:-8]


def newest_keys(db_keys: Collection[bytes], groups: int) -> list[bytes]:
    """Return the newest ``groups`` db keys of each prompt and sample index, sorted."""
    kept: list[bytes] = []
    sample_index, count = b"", 0
    for name in sorted(db_keys):
        if not (sample_index and name.startswith(sample_index)):
            sample_index, count = name[:_SAMPLE_END], 0
        if count < groups:
            kept.append(name)
            count += 1
    return kept

"""Opens and checks a SQLite database that may be damaged or untrusted."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

__all__ = [
    "LARGEST_BLOB",
    "check_size",
    "check_structure",
    "connect",
    "is_damage",
    "number",
    "row",
]

LARGEST_BLOB = 2**29
"""The most bytes that a row may have; a row that claims to have more is damaged."""
BUSY_SECONDS = 1.0
_OF_THE_SYSTEM = frozenset(
    {
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL),
        *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_NOLFS),
    }
)
"""Primary result codes that a disk or another process causes; all others mean a damaged file."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error means that the file is damaged.

    Errors that this package raises in SQLite's name have no result code, and mean damage.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return not isinstance(error, sqlite3.ProgrammingError)
    return code & 0xFF not in _OF_THE_SYSTEM


def connect(file: Path, options: str) -> sqlite3.Connection:
    """Open a database that may be damaged or untrusted; without a memory map, which could end the
    process, and with every check that SQLite has.

    Args:
        file: file of the database.
        options: options of SQLite's URI for it.
    """
    database = sqlite3.connect(
        f"{file.absolute().as_uri()}?{options}",
        timeout=BUSY_SECONDS,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    database.text_factory = bytes  # a damaged text may not be UTF-8
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_BLOB)
    for setting in ("mmap_size = 0", "cell_size_check = ON", "trusted_schema = OFF"):
        database.execute(f"PRAGMA {setting}").fetchall()
    return database


def row(database: sqlite3.Connection, query: str, *values: Any) -> tuple[Any, ...]:
    """Return the one row that a query yields.

    Raises:
        sqlite3.DatabaseError: there is none.
    """
    found: tuple[Any, ...] | None = database.execute(query, values).fetchone()
    if found is None:
        raise sqlite3.DatabaseError(f"no {values[0] if values else 'row'}")
    return found


def number(database: sqlite3.Connection, setting: str) -> int:
    """Return a setting of a database that is a number, such as ``page_count``."""
    return int(row(database, f"PRAGMA {setting}")[0])


def check_size(database: sqlite3.Connection, file: Path) -> None:
    """Check that a file has all its pages; SQLite would read missing bytes as zeros.

    Raises:
        sqlite3.DatabaseError: it is cut off.
    """
    expected = number(database, "page_count") * number(database, "page_size")
    size = file.stat().st_size  # afterwards: what a crash left is undone by now
    if size < expected:
        raise sqlite3.DatabaseError(f"cut off at {size} of {expected} bytes")


def check_structure(database: sqlite3.Connection, *, indices: bool = False) -> None:
    """Read all pages of a database, and check that they fit together.

    Args:
        database: database to check.
        indices: also check that the indices agree with the tables, which takes longer.

    Raises:
        sqlite3.DatabaseError: they do not.
    """
    check = "integrity_check" if indices else "quick_check"
    (found,) = row(database, f"PRAGMA {check}(1)")
    if found != b"ok":
        line = found.decode(errors="replace").splitlines()[-1]
        raise sqlite3.DatabaseError(line)

"""The SQLite file of a store: how it is opened, checked, and moved aside where it is damaged.

A folder ``<cache>/<vocabulary hash>`` holds ``rollouts.sqlite``, SQLite's files beside it, and an
empty ``rollouts.lock``, which is locked while a process opens, makes or moves the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_specrl.errors import CacheError, StoreUnavailable
from nemo_specrl.files import FILE_MODE, FOLDER_MODE, sync_folder

__all__ = [
    "BUSY_SECONDS",
    "DATA_FILE",
    "FORMAT",
    "as_cache_errors",
    "connect",
    "file_system",
    "is_damage",
    "move_aside",
    "number",
    "opened",
]

FORMAT = 5
DATA_FILE = "rollouts.sqlite"
BUSY_SECONDS = 10.0
"""How long a process waits for another one's transaction."""
LARGEST_RECORD = 2**28
"""Bytes that SQLite may read for one row; one that claims more is damaged."""
SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE prompts (key BLOB PRIMARY KEY, use INTEGER NOT NULL, draft_version INTEGER, "
    "draft INTEGER) WITHOUT ROWID",
    "CREATE INDEX prompts_by_use ON prompts (use)",
    "CREATE TABLE rollouts (number INTEGER PRIMARY KEY, key BLOB NOT NULL, identity INTEGER, "
    "version INTEGER, scored INTEGER, bytes INTEGER, record BLOB)",
    "CREATE INDEX rollouts_by_prompt ON rollouts (key, number, identity, version, scored, bytes)",
)
"""``use`` and ``number`` count uses of prompts and puts of responses; no clock is kept. ``draft``
is the number of the last response handed out as a draft for the policy version
``draft_version``."""

_SHARED = re.compile(
    r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|9p|afs|panfs|pvfs|wekafs|fuse\.(sshfs|gluster|ceph|juice)"
)
"""File systems of several machines: SQLite's shared memory does not reach over them."""
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_DAMAGE |= {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG}
"""Primary result codes that mean a damaged file; all others come of a disk or another process."""
_SMALL = 16 * 2**20
logger = logging.getLogger(__name__)


def is_damage(error: BaseException) -> bool:
    """Whether an error means that the file is damaged. What this package raises as a
    ``sqlite3.DatabaseError`` has no result code, and means it.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.ProgrammingError)
    return code & 0xFF in _DAMAGE


@contextlib.contextmanager
def as_cache_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn failures of the system or SQLite into StoreUnavailable: ``cannot DOING PATH: why``."""
    try:
        yield
    except CacheError:
        raise
    except (sqlite3.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise StoreUnavailable(f"cannot {doing} {path}: {why or error}") from error


def connect(file: Path, mode: str = "mode=rw") -> sqlite3.Connection:
    """Open a database that may be damaged: without a memory map, in which an error of the disk
    would end the process, and with every check that SQLite has.
    """
    database = sqlite3.connect(
        f"{file.absolute().as_uri()}?{mode}",
        timeout=BUSY_SECONDS,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    database.text_factory = bytes  # a damaged text may not be UTF-8
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_RECORD)
    for setting in (
        *("mmap_size = 0", "cell_size_check = ON", "trusted_schema = OFF", "secure_delete = OFF"),
        *("synchronous = NORMAL", "wal_autocheckpoint = 0", "temp_store = MEMORY"),
    ):
        database.execute(f"PRAGMA {setting}").fetchall()
    return database


def number(database: sqlite3.Connection, query: str, *values: Any) -> int:
    """Return the one whole number that a query yields; 0 for NULL.

    Raises:
        sqlite3.DatabaseError: it yields none.
    """
    found = database.execute(query, values).fetchone()
    if found is None or not isinstance(found[0] or 0, int):
        raise sqlite3.DatabaseError("a number is missing")
    return found[0] or 0


def opened(file: Path, vocabulary: str, max_bytes: int) -> tuple[sqlite3.Connection, int]:
    """Open a store's file, and make it where there is none. A damaged one, one of another format or
    of another vocabulary is moved beside, with a warning.

    Returns:
        The connection, and the file's inode.

    Raises:
        StoreUnavailable: the folder cannot be used; in one line.
    """
    with as_cache_errors("use the rollout store", file.parent):
        file.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        mount, kind = file_system(file.parent)
        if _SHARED.match(kind):
            raise StoreUnavailable(
                f"cannot use the rollout store {file.parent}: {mount} is shared by machines "
                f"({kind}); name a folder on the node's own disk"
            )
        with _locked(file):
            database = _usable(file, vocabulary, max_bytes) or _made(file, vocabulary, max_bytes)
            # It is closed by name or not at all, since to close it takes the disk: not when the
            # process ends, which must not hang; nor after the file has been moved, since SQLite
            # would delete the log of the file that has taken its place.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))
            return database, file.stat().st_ino


def _usable(file: Path, vocabulary: str, max_bytes: int) -> sqlite3.Connection | None:
    """Open a file that is there. None: there is none, or it could not be used, and is gone."""
    if not file.exists() or not file.stat().st_size:
        return None
    database = None
    try:
        database = connect(file)
        problem = _problem(database, vocabulary)
        if not problem and not (file.stat().st_size > max_bytes and _alone(database)):
            return database
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        problem = f"damaged-: {error}"
    if database is not None:
        database.close()
    if problem:
        _move(file, problem)
    else:
        file.unlink()
        logger.warning("rollout store %s: larger than max_bytes, %d; begun anew", file, max_bytes)
    return None


def _alone(database: sqlite3.Connection) -> bool:
    """Whether nobody else uses a file, which then has no log any more. Others may have a larger
    cap; beside them, a file that is too large does not grow.
    """
    database.execute("PRAGMA busy_timeout = 0")
    try:
        return bool(database.execute("PRAGMA journal_mode = DELETE").fetchone() == (b"delete",))
    except sqlite3.OperationalError:
        return False
    finally:
        database.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_SECONDS)}")


def _problem(database: sqlite3.Connection, vocabulary: str) -> str:
    """Say why a file cannot be used, with the ending of its new name first; empty: it can."""
    tables = database.execute(
        "SELECT sql FROM sqlite_master WHERE sql NOT NULL AND name NOT GLOB 'sqlite_*'"
    ).fetchall()
    made = number(database, "PRAGMA user_version")
    if not tables and not made and number(database, "PRAGMA page_count") <= 1:
        return "unfinished-: whoever began it died"
    if tables and made != FORMAT:
        return f"format-{made}-: it has format {made}, this release reads {FORMAT}"
    if sorted(sql for (sql,) in tables) != sorted(sql.encode() for sql in SCHEMA):
        return "damaged-: its tables are not those of a store"
    there = database.execute("SELECT value FROM meta WHERE name = 'vocabulary'").fetchone()
    if there is None:
        return "damaged-: its vocabulary is missing"
    if there[0] != vocabulary.encode():
        return f"foreign-: it is of the vocabulary {there[0]!r}"
    return ""


def _made(file: Path, vocabulary: str, max_bytes: int) -> sqlite3.Connection:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, FILE_MODE))
    database = connect(file)
    database.execute(f"PRAGMA page_size = {1024 if max_bytes < _SMALL else 8192}")
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    if database.execute("PRAGMA journal_mode = WAL").fetchone() != (b"wal",):
        database.close()
        raise StoreUnavailable(
            f"cannot use the rollout store {file.parent}: no shared memory on its file system"
        )
    database.execute("BEGIN IMMEDIATE")
    for statement in (f"PRAGMA user_version = {FORMAT}", *SCHEMA):
        database.execute(statement)
    database.executemany(
        "INSERT INTO meta VALUES (?, ?)",
        [("vocabulary", vocabulary), ("prompts", 0), ("responses", 0)],
    )
    database.execute("COMMIT")
    sync_folder(file.parent)
    return database


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other processes from opening, making or moving a store's file meanwhile."""
    descriptor = os.open(file.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def move_aside(file: Path, inode: int, problem: str) -> None:
    """Move a file that was found to be damaged while it was in use, unless another process has
    done so.
    """
    with as_cache_errors("move the damaged rollout store", file.parent), _locked(file):
        if file.exists() and file.stat().st_ino == inode:
            _move(file, f"damaged-: {problem}")


def _move(file: Path, problem: str) -> None:
    """Move a store's files beside; of those with the same ending, only the newest stays."""
    ending, _, why = problem.partition(": ")
    there = [
        (int(path.name.rpartition("-")[2]), path)
        for path in file.parent.glob(f"{file.name}.{ending}*")
        if path.name.rpartition("-")[2].isdecimal()
    ]
    target = f"{file}.{ending}{max((n for n, _ in there), default=0) + 1}"
    for _, path in there:
        for part in ("", "-wal", "-shm"):
            path.with_name(path.name + part).unlink(missing_ok=True)
    for part in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{file}{part}", f"{target}{part}")
    logger.warning("rollout store %s: %s; moved to %s, a new one is begun", file, why, target)


def file_system(path: Path) -> tuple[str, str]:
    """Return mount point and type of the file system that a path is on; empty: not known."""
    device = path.stat().st_dev
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            fields = before.split()
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[4], after.split()[0]
    return "", ""

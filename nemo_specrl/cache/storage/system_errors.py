"""Failures of the system and of SQLite as one of the package's own errors, in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from nemo_specrl.errors import CacheError, StoreUnavailable

__all__ = ["as_cache_errors"]


_PLAIN = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,  # or its own cap, below which stores stay
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}


@contextlib.contextmanager
def as_cache_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn failures of the system or SQLite into StoreUnavailable: ``cannot DOING PATH: why``."""
    try:
        yield
    except CacheError:
        raise
    except (sqlite3.Error, OSError) as error:
        why = _why(error)
        if isinstance(error, PermissionError):
            why = f"{why}; {_owned(path)}: name a folder of your own"
        raise StoreUnavailable(f"cannot {doing} {path}: {why}") from error


def _why(error: sqlite3.Error | OSError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return str(error)
    plain = _PLAIN.get(code & 0xFF)
    return f"{os.strerror(plain) if plain else error} ({error.sqlite_errorname})"


def _owned(path: Path) -> str:
    """Say who owns a path, or the nearest existing folder: on shared nodes, whoever came first."""
    place = next((p for p in (path, *path.parents) if os.access(p, os.F_OK)), path)
    owner = "another user"
    with contextlib.suppress(OSError):
        uid = place.stat().st_uid
        try:
            owner = pwd.getpwuid(uid).pw_name
        except KeyError:
            owner = f"user {uid}"
    return f"{place} belongs to {owner}"

"""Failures of the operating system and of LMDB as one of the package's own errors, in one line."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import lmdb

from nemo_specrl.errors import CacheError, StoreUnavailable

__all__ = ["as_cache_errors"]


@contextlib.contextmanager
def as_cache_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn failures of the system or of LMDB into StoreUnavailable: ``cannot DOING PATH: why``."""
    try:
        yield
    except CacheError:
        raise
    except (lmdb.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        if isinstance(error, PermissionError):
            why = f"{why}; {_owned(path)}: name a folder of your own"
        raise StoreUnavailable(f"cannot {doing} {path}: {why}") from error


def _owned(path: Path) -> str:
    """Say whose a path is, or the nearest folder that is there: on shared nodes, who came first."""
    place = next((p for p in (path, *path.parents) if os.access(p, os.F_OK)), path)
    owner = "another user"
    with contextlib.suppress(OSError):
        uid = place.stat().st_uid
        try:
            owner = pwd.getpwuid(uid).pw_name
        except KeyError:
            owner = f"user {uid}"
    return f"{place} belongs to {owner}"

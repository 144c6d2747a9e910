"""What the cache needs of the file system: atomic replacement, digests, clear errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import lmdb
import xxhash

from nemo_specrl.errors import CacheError, StoreUnavailable

__all__ = ["as_cache_errors", "digest", "replacing", "sync_folder"]

_BLOCK = 2**20


@contextlib.contextmanager
def as_cache_errors(doing: str, path: Path) -> Iterator[None]:
    """Failures of the system or of LMDB, as StoreUnavailable: ``cannot <doing> <path>: why``."""
    try:
        yield
    except CacheError:
        raise
    except (lmdb.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StoreUnavailable(f"cannot {doing} {path}: {why}") from error


@contextlib.contextmanager
def replacing(file: Path, temporary: Path, *, sync_name: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``file`` when all of it is on disk, or not at all.

    Args:
        file: to be there at the end.
        temporary: name of the new file until then, in the same folder.
        sync_name: make sure of its name, too; else whoever writes the folder's last file does.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "w+b") as new:
            yield new
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if sync_name:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, and its own as well if its parent can be read."""
    _sync(folder)
    with contextlib.suppress(PermissionError):
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(file: BinaryIO, size: int, copy_to: BinaryIO | None = None) -> bytes:
    """xxh3-64 of the first ``size`` bytes of a file, which are copied on the way if asked for."""
    file.seek(0)
    hasher = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(_BLOCK, size)))  # one: new memory costs more than a read
    while size > 0 and (count := file.readinto(buffer[:size])):  # type: ignore[attr-defined]
        size -= count
        hasher.update(buffer[:count])
        if copy_to is not None:
            copy_to.write(buffer[:count])
    return hasher.digest()

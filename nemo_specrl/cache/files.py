"""The file system for the cache: atomic replacement, digests, clear errors, private files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import lmdb
import xxhash

from nemo_specrl.errors import CacheError, StoreUnavailable

__all__ = ["FILE_MODE", "FOLDER_MODE", "as_cache_errors", "digest", "replacing", "sync_folder"]

FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""Of all that has prompts or rollouts in it: they are for their owner alone."""
_BLOCK = 2**20


@contextlib.contextmanager
def as_cache_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn failures of the system or of LMDB into StoreUnavailable: ``cannot DOING PATH: why``."""
    try:
        yield
    except CacheError:
        raise
    except (lmdb.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StoreUnavailable(f"cannot {doing} {path}: {why}") from error


@contextlib.contextmanager
def replacing(file: Path, temporary: Path, *, sync_name: bool = True) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``file`` when all of it is on disk, or not at all.

    The file, and its folder if it has to be made, are readable for their owner alone.

    Args:
        file: to be there at the end.
        temporary: name of the new file until then, in the same folder.
        sync_name: make sure of its name, too; else whoever writes the folder's last file does.
    """
    file.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    try:
        with open(temporary, "w+b", opener=_private) as new:
            os.fchmod(new.fileno(), FILE_MODE)  # it may be there, of a process that died
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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, and its own as well if its parent can be read."""
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
    """Return the xxh3-64 of the first ``size`` bytes of a file, which may be copied on the way."""
    file.seek(0)
    hasher = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(_BLOCK, size)))  # one: new memory costs more than a read
    while size > 0 and (count := file.readinto(buffer[:size])):  # type: ignore[attr-defined]
        size -= count
        hasher.update(buffer[:count])
        if copy_to is not None:
            copy_to.write(buffer[:count])
    return hasher.digest()

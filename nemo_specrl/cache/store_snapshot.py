"""Snapshots of a whole store: one file with a copy of its database and a checksum behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from nemo_specrl.cache.storage.lock import FolderLock
from nemo_specrl.cache.storage.recovery import TEMPORARY_FILE
from nemo_specrl.cache.storage.schema import DATA_FILE, JOURNAL_FILE
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.cache.storage.tables import Tables
from nemo_specrl.errors import ForeignStore, StoreUnavailable
from nemo_specrl.files import digest, replacing

__all__ = ["check_copy", "restore_copy", "write_copy"]

_LMDB_MAGIC = b"SPECSNP1"
_MAGIC = b"SPECSNP2"  # ends a copy, with the xxh3-64 of all before
_TRAILER_BYTES = len(_MAGIC) + 8


def write_copy(tables: Tables, target: Path) -> None:
    """Write what is committed to a file, which replaces one that is there by an atomic rename."""
    temporary = target.with_suffix(".tmp")
    with replacing(target, temporary) as file:
        tables.copy(temporary)
        size = os.fstat(file.fileno()).st_size
        trailer = _MAGIC + digest(file, size)
        file.seek(size)
        file.write(trailer)


def restore_copy(source: Path, target: Path) -> None:
    """Make the folder ``target`` a store with the tables of a copy.

    Until they are complete and on disk, the store that is there stays.

    Raises:
        ForeignStore: it is of a release that kept the store in LMDB.
        StoreUnavailable: there is no copy, it is damaged, or ``target`` cannot be written or is in
            use.
    """
    with as_cache_errors("read the snapshot", source):
        copy = open(source, "rb")  # noqa: SIM115
    with copy, as_cache_errors(f"restore {source} to", target):
        lock = FolderLock(target)
        try:
            with replacing(target / DATA_FILE, target / TEMPORARY_FILE) as file:
                _check(copy, source, copy_to=file)
                # One that a crash has left is of the file that is replaced. If this process dies
                # before it is, what that crash was in the middle of can be damaged: a cold start.
                (target / JOURNAL_FILE).unlink(missing_ok=True)
            lock.clean = True
        finally:
            lock.release()


def check_copy(source: Path) -> int:
    """Check a copy from end to end, and return the bytes of its tables.

    Raises:
        StoreUnavailable: there is none, or it is damaged.
    """
    with as_cache_errors("read the snapshot", source), open(source, "rb") as copy:
        return _check(copy, source)


def _check(copy: BinaryIO, source: Path, copy_to: BinaryIO | None = None) -> int:
    size = max(0, os.fstat(copy.fileno()).st_size - _TRAILER_BYTES)
    copy.seek(size)
    trailer = copy.read(_TRAILER_BYTES)
    if trailer.startswith(_LMDB_MAGIC):
        raise ForeignStore(
            f"the snapshot {source} is of an older release, which kept rollouts in LMDB; use the "
            "release that wrote it"
        )
    if trailer != _MAGIC + digest(copy, size, copy_to=copy_to):
        raise StoreUnavailable(f"the snapshot {source} is damaged; restore another")
    return size

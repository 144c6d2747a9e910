"""The folder of a store: its tables, what else is in it, and what to do when it is damaged."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import lmdb

from nemo_specrl.cache.storage.lmdb_check import PageFile
from nemo_specrl.cache.storage.lmdb_tables import Tables
from nemo_specrl.cache.storage.lock import FolderLock
from nemo_specrl.cache.storage.schema import DATA_FILE, TABLES, is_of_store
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.files import FOLDER_MODE, replacing, sync_folder

__all__ = ["TEMPORARY_FILE", "check_file", "check_pages", "move_aside", "open_tables"]

TEMPORARY_FILE = DATA_FILE + ".tmp"
CHECK_SECONDS = 0.3
CHECK_SECONDS_AFTER_CRASH = 3.0  # when a process has died while it read or wrote pages
_MIB = 2**20

_log = logging.getLogger(__name__)


def open_tables(folder: Path, max_bytes: int, tokenizer_id: str, lock: FolderLock) -> Tables:
    """Open the tables in a locked folder, under a cap that holds for all files in it together.

    Raises:
        ForeignStore, StoreUnavailable, lmdb.Error: see ``Tables``; or other files leave no room.
    """
    data, temporary = folder / DATA_FILE, folder / TEMPORARY_FILE
    temporary.unlink(missing_ok=True)
    others = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and f != data)
    map_size = (max_bytes - others) // mmap.PAGESIZE * mmap.PAGESIZE
    if map_size < _MIB // 2:
        raise StoreUnavailable(
            f"other files in {folder} take {others} of max_bytes = {max_bytes}; "
            "name a folder of its own for the rollout store"
        )
    tables = Tables(folder, map_size, tokenizer_id, lock)
    if not tables.oversized:
        return tables
    # The cap is lower than it was. LMDB files do not shrink, so a smaller one takes its place.
    try:
        tables.env.set_mapsize(tables.env.info()["map_size"] + 64 * _MIB)
        tables.evict_down_to(tables.budget)
        with replacing(data, temporary) as file:
            tables.env.copyfd(file.fileno(), compact=True)
    finally:
        tables.env.close()
    smaller = Tables(folder, map_size, tokenizer_id, lock)
    smaller.evicted = tables.evicted
    return smaller


def check_pages(folder: Path, lock: FolderLock) -> None:
    """Check the pages of a store before LMDB believes them, for a fraction of a second.

    LMDB ends the process on some damaged pages. What there is no time for is checked when it is
    read, by the checksums of records, or becomes the mark of a process that dies of it: the next
    one begins at that prompt, and takes longer.

    Args:
        folder: of the tables.
        lock: of the folder.

    Raises:
        StoreUnavailable: it is an LMDB file of something else.
        lmdb.CorruptedError: a page is damaged, or two processes in a row have died of it.
    """
    if lock.repeated_crash and (folder / DATA_FILE).exists():
        raise lmdb.CorruptedError("two processes that used it ended at the same prompt")
    check_file(
        folder, lock.last_mark, CHECK_SECONDS_AFTER_CRASH if lock.died_busy else CHECK_SECONDS
    )


def check_file(folder: Path, mark: bytes = b"", seconds: float = CHECK_SECONDS) -> None:
    """Check the pages of a store, as :func:`check_pages` does, whoever used it before.

    Args:
        folder: of the tables. No other process writes to them.
        mark: the prompt that is checked first.
        seconds: time for it.

    Raises:
        StoreUnavailable, lmdb.CorruptedError: see :func:`check_pages`.
    """
    data = folder / DATA_FILE
    if not data.exists():
        return
    with PageFile(data) as pages:
        if pages.known:
            found = set(pages.tables())
            if found and not is_of_store(pages, found):
                raise StoreUnavailable(
                    f"{data} is an LMDB file but no rollout store; name another folder"
                )
            if found and found != TABLES:
                raise lmdb.CorruptedError(f"its tables are {sorted(found)}")
            pages.check("rollouts", mark, seconds=seconds)


def move_aside(folder: Path, why: Exception) -> None:
    """Move a damaged file to ``<folder>.damaged-<n>``, and say so in the log.

    Raises:
        OSError: it can be neither moved nor deleted.
    """
    n = 1
    while (target := folder.with_name(f"{folder.name}.damaged-{n}")).exists():
        n += 1
    data = folder / DATA_FILE
    try:
        target.mkdir(mode=FOLDER_MODE)
        os.replace(data, target / DATA_FILE)
        sync_folder(target)
        fate = f"moved to {target}"
    except OSError:  # such as a folder that is a mount point of its own
        data.unlink(missing_ok=True)
        fate = "deleted"
    _log.warning("rollout store %s is damaged (%s): %s; going on empty", folder, why, fate)

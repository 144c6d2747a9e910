"""The folder of a store: its tables, its other contents, and what to do when it is damaged."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
from pathlib import Path

from nemo_specrl.cache.storage.database import check_structure, connect, is_damage, number
from nemo_specrl.cache.storage.lock import FolderLock
from nemo_specrl.cache.storage.schema import DATA_FILE, JOURNAL_FILE
from nemo_specrl.cache.storage.tables import Tables, page_size_under
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.files import FOLDER_MODE, replacing, sync_folder

__all__ = [
    "TEMPORARY_FILE",
    "copy_database",
    "move_aside",
    "open_tables",
    "remove_files",
    "roll_back",
]

TEMPORARY_FILE = DATA_FILE + ".tmp"
CHECK_SECONDS = 0.5
_MIB = 2**20
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")

logger = logging.getLogger(__name__)


def open_tables(folder: Path, max_bytes: int, tokenizer_id: str, lock: FolderLock) -> Tables:
    """Open the tables in a locked folder, under a cap for all files in it together.

    Damaged tables are moved aside, with a warning, and empty ones replace them.

    Raises:
        ForeignStore, StoreUnavailable: see ``Tables``; or other files leave no room.
        sqlite3.Error: the system has failed.
    """
    try:
        if not lock.clean:
            _check_after_crash(folder)
        return _open(folder, max_bytes, tokenizer_id, lock)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        move_aside(folder, error)
        return _open(folder, max_bytes, tokenizer_id, lock)


def _open(folder: Path, max_bytes: int, tokenizer_id: str, lock: FolderLock) -> Tables:
    (folder / TEMPORARY_FILE).unlink(missing_ok=True)
    own = {folder / DATA_FILE, folder / JOURNAL_FILE}
    others = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and f not in own)
    room = max_bytes - others
    if room < _MIB // 2:
        raise StoreUnavailable(
            f"other files in {folder} take {others} of max_bytes = {max_bytes}; "
            "name a folder of its own for the rollout store"
        )
    tables = Tables(folder, room, tokenizer_id, locks=lock.has_locks)
    for share in (1.0, 0.75, 0.5, 0.25):
        if not tables.oversized:
            break
        # The cap is lower than it was. The file does not shrink, so a smaller one takes its place.
        with contextlib.closing(tables):
            tables.evict_down_to(int(share * tables.budget))
            with replacing(folder / DATA_FILE, folder / TEMPORARY_FILE):
                tables.copy_compact(folder / TEMPORARY_FILE, page_size_under(room))
        evicted = tables.evicted
        tables = Tables(folder, room, tokenizer_id, locks=lock.has_locks)
        tables.evicted = evicted
    return tables


def _check_after_crash(folder: Path) -> None:
    """Check the pages of a store whose last process died, for a fraction of a second.

    The rest is checked when it is read.

    Args:
        folder: folder of the store, which is locked.

    Raises:
        sqlite3.Error: a page is damaged; or the system has failed.
    """
    file = folder / DATA_FILE
    if not file.exists():
        return
    with contextlib.closing(connect(file, "mode=rw&nolock=1")) as database:
        timer = threading.Timer(CHECK_SECONDS, database.interrupt)
        timer.start()
        try:
            check_structure(database)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
        finally:
            timer.cancel()
            timer.join()


def roll_back(folder: Path) -> None:
    """Undo what the last process had not committed when it died, as the next one does.

    Raises:
        StoreInUse: a process has the store open.
        sqlite3.Error: it is damaged, or the system has failed.
    """
    try:
        with open(folder / JOURNAL_FILE, "rb") as journal:
            if journal.read(len(_JOURNAL_MAGIC)) != _JOURNAL_MAGIC:
                return
    except FileNotFoundError:
        return
    with (
        contextlib.closing(FolderLock(folder)),
        contextlib.closing(connect(folder / DATA_FILE, "mode=rw&nolock=1")) as database,
    ):
        number(database, "schema_version")


def remove_files(folder: Path) -> None:
    """Delete a store's files. The journal goes last: without its database it means nothing."""
    for name in (DATA_FILE, JOURNAL_FILE):
        (folder / name).unlink(missing_ok=True)


def move_aside(folder: Path, why: Exception) -> None:
    """Move damaged files to ``<folder>.damaged-<n>``, and say so in the log.

    Raises:
        OSError: they can be neither moved nor deleted.
    """
    try:
        target = _new_folder(folder)
        for name in (DATA_FILE, JOURNAL_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.replace(folder / name, target / name)
        sync_folder(target)
        fate = f"moved to {target}"
    except OSError:  # such as a folder that is a mount point of its own
        remove_files(folder)
        fate = "deleted"
    logger.warning(
        "rollout store %s is damaged (%s): %s; continuing with an empty store", folder, why, fate
    )


def copy_database(source: Path, folder: Path) -> None:
    """Make the database of a locked folder a copy of one to which no process writes.

    The existing database is kept until the copy is complete and on disk.

    Raises:
        OSError: the source cannot be read, or the folder cannot be written.
    """
    with open(source, "rb") as old, replacing(folder / DATA_FILE, folder / TEMPORARY_FILE) as new:
        shutil.copyfileobj(old, new, 2**24)
        # A journal that a crash left belongs to the database that is replaced. If this process dies
        # before that, the old database may be damaged, and the next start is cold.
        (folder / JOURNAL_FILE).unlink(missing_ok=True)


def _new_folder(folder: Path) -> Path:
    n = 1
    while (target := folder.with_name(f"{folder.name}.damaged-{n}")).exists():
        n += 1
    target.mkdir(mode=FOLDER_MODE)
    return target

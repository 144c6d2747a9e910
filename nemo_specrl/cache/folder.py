"""The folder of a store: who holds it, what else is in it, and what to do when it is damaged."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import lmdb

from nemo_specrl.cache.files import as_cache_errors, replacing, sync_folder
from nemo_specrl.cache.tables import DATA_FILE, Tables
from nemo_specrl.errors import StoreUnavailable

__all__ = ["TEMPORARY_FILE", "FolderLock", "move_aside", "open_tables", "probe"]

TEMPORARY_FILE = DATA_FILE + ".tmp"
_MIB = 2**20

# Whatever it raises is left to be found, and told apart, by the one who opens the tables next.
_WALK = """
import collections, lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=3)
with env.begin() as txn:
    for name in (b"meta", b"rollouts", b"uses"):
        with txn.cursor(env.open_db(name, txn=txn, create=False)) as cursor:
            collections.deque(cursor.iternext(keys=True, values=False), maxlen=0)
"""

_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)

_log = logging.getLogger(__name__)


class FolderLock:
    """A folder, made if it is not there, and held by this process until ``release``.

    The file ``lock`` in it says who holds it; so it does after a process has died that held it.

    Raises:
        StoreUnavailable: the folder cannot be made or written, or is held, by whom the message
            says.
    """

    def __init__(self, folder: Path) -> None:
        with as_cache_errors("open the rollout store", folder):
            if folder.exists() and not folder.is_dir():
                raise StoreUnavailable(
                    f"cannot open the rollout store {folder}: it is a file; name a folder"
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / "lock", "a+b", buffering=0)  # noqa: SIM115
            try:
                self._hold(folder)
            except BaseException:
                self._file.close()
                raise

    def _hold(self, folder: Path) -> None:
        self._file.seek(0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = self._file.read(32).decode("ascii", "replace").strip() or "unknown"
            whose = "this process" if pid == str(os.getpid()) else "another process"
            raise StoreUnavailable(
                f"the rollout store {folder} is open in {whose}, pid {pid}; "
                "close it there, or name another folder"
            ) from None
        self.clean = not self._file.read(32)
        """Whether the last holder released the folder, and did not die with it."""
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n".encode())
        os.fsync(self._file.fileno())

    def release(self) -> None:
        """Gives the folder free; a second call does nothing."""
        if self._file.closed:
            return
        if self.clean:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
        # Explicitly, because a forked child that inherited the file would keep it locked.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def open_tables(folder: Path, max_bytes: int, tokenizer_id: str) -> Tables:
    """The tables in a locked folder, under a cap that holds for all files in it together.

    Raises:
        ForeignStore, StoreUnavailable, lmdb.Error: as ``Tables``; or other files leave no room.
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
    tables = Tables(folder, map_size, tokenizer_id)
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
    smaller = Tables(folder, map_size, tokenizer_id)
    smaller.evicted = tables.evicted
    return smaller


def probe(folder: Path) -> None:
    """Walks the tables in a process of its own, because LMDB aborts on some damaged pages.

    Only worth it after a process died that had the tables open: what killed it may be in there.

    Raises:
        lmdb.CorruptedError: the process crashed.
    """
    command = [sys.executable, "-c", _WALK, str(folder)]
    with contextlib.suppress(OSError):  # no process to be had: then go without
        walk = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if -walk.returncode in _CRASHES:
            raise lmdb.CorruptedError(f"reading it ends a process with signal {-walk.returncode}")


def move_aside(folder: Path, why: Exception) -> None:
    """Moves a damaged file to ``<folder>.damaged-<n>``, and says so in the log.

    Raises:
        OSError: it can be neither moved nor deleted.
    """
    n = 1
    while (target := folder.with_name(f"{folder.name}.damaged-{n}")).exists():
        n += 1
    data = folder / DATA_FILE
    try:
        target.mkdir()
        os.replace(data, target / DATA_FILE)
        sync_folder(target)
        fate = f"moved to {target}"
    except OSError:  # such as a folder that is a mount point of its own
        data.unlink(missing_ok=True)
        fate = "deleted"
    _log.warning("rollout store %s is damaged (%s): %s; going on empty", folder, why, fate)

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
from nemo_specrl.rollout import KEY_BYTES

__all__ = ["TEMPORARY_FILE", "FolderLock", "move_aside", "open_tables", "probe"]

TEMPORARY_FILE = DATA_FILE + ".tmp"
_MIB = 2**20
_MARK_AT = 32  # behind the pid

# Whatever it raises is left to be found, and told apart, by the one who opens the tables next.
_WALK = """
import itertools, sys, time
sys.path.append(sys.argv[4])
import lmdb
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=3)
until = time.monotonic() + float(sys.argv[3])
starts = {b"meta": [b""], b"uses": [b""], b"rollouts": [bytes.fromhex(sys.argv[2]), b""]}
with env.begin() as txn:
    for name in starts:
        with txn.cursor(env.open_db(name, txn=txn, create=False)) as cursor:
            for start in starts[name]:
                more = cursor.set_range(start)
                keys = cursor.iternext(keys=True, values=False)
                while more and time.monotonic() < until:
                    more = len(list(itertools.islice(keys, 512))) == 512
                    if name == b"uses":
                        break  # eviction begins there; the rest would take the time of the others
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
            # Not opened for appending: a mark has its place.
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
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
            pid = self._file.read(_MARK_AT).decode("ascii", "replace").strip("\0\n") or "unknown"
            whose = "this process" if pid == str(os.getpid()) else "another process"
            raise StoreUnavailable(
                f"the rollout store {folder} is open in {whose}, pid {pid}; "
                "close it there, or name another folder"
            ) from None
        before = self._file.read(_MARK_AT + KEY_BYTES)
        self.clean = not before
        """Whether the last holder released the folder, and did not die with it."""
        self.last_mark = before[_MARK_AT:]
        """What the last holder marked last, if it died."""
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(f"{os.getpid()}\n".encode().ljust(_MARK_AT + KEY_BYTES, b"\0"))
        os.fsync(self._file.fileno())

    def mark(self, key: bytes) -> None:
        """Notes which prompt's pages are looked at, for the next holder should this one die of it.

        It outlives the process, not the machine: no more is needed, since a damaged page kills
        processes.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._file.fileno(), key, _MARK_AT)

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


def probe(folder: Path, mark: bytes = b"", *, seconds: float = 0.3) -> None:
    """Walks the tables in a process of its own, because LMDB aborts on some damaged pages.

    Only worth it after a process died that had the tables open: what killed it may be in there. It
    begins at the prompt that the dead process was at, and ends after a fraction of a second however
    large the store is: what it has not come to is checked when it is read, by its checksum, or
    becomes the mark of a process that dies of it.

    Args:
        folder: of the tables.
        mark: :attr:`FolderLock.last_mark`.
        seconds: after which it ends.

    Raises:
        lmdb.CorruptedError: the process crashed.
    """
    package = str(Path(lmdb.__file__).parents[1])
    arguments = [str(folder), mark.hex(), str(seconds), package]
    # Without site packages but this one: they take longer to find than the tables to open.
    command = [sys.executable, "-I", "-S", "-c", _WALK, *arguments]
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

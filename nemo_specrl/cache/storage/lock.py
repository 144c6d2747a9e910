"""The lock of a store's folder, which also tells whether its last holder died while holding it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xxhash

from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.errors import StoreInUse, StoreUnavailable
from nemo_specrl.files import FILE_MODE, FOLDER_MODE

__all__ = ["LOCK_FILE", "FolderLock", "holder", "patiently"]

LOCK_FILE = "lock"
LOCK_SECONDS = 20.0
_PID_BYTES = 32
_TRIES, _TRY_AGAIN_SECONDS = 5, 0.02  # ``holder`` has the lock for an instant
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of file systems without locks, such as Lustre mounted without ``-o flock``."""

_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """A folder that this process holds until ``close``; created if it does not exist.

    The file ``lock`` in it names the holder.

    Attributes:
        clean: whether the last holder released the folder, and did not die while holding it.

    Raises:
        StoreInUse: another process, or this one, holds the folder.
        StoreUnavailable: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        with as_cache_errors("open the rollout store", folder):
            if folder.exists() and not folder.is_dir():
                raise StoreUnavailable(
                    f"cannot open the rollout store {folder}: it is a file; name a folder"
                )
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(folder / LOCK_FILE, flags, FILE_MODE)
            self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115
            self._stand_in: int | None = None
            try:
                self._hold(folder)
            except BaseException:
                self._forget()
                raise
        _held.add(self)

    def _hold(self, folder: Path) -> None:
        for tries in range(_TRIES):
            try:
                self._stand_in = _locked(self._file.fileno(), folder, fcntl.LOCK_EX)
                break
            except BlockingIOError:
                if tries + 1 < _TRIES:
                    time.sleep(_TRY_AGAIN_SECONDS)
                    continue
                pid = _pid(os.pread(self._file.fileno(), _PID_BYTES, 0))
                whose = "this process" if pid == os.getpid() else "another process"
                raise StoreInUse(
                    f"the rollout store {folder} is open in {whose}, pid {pid or 'unknown'}; "
                    "close it there, or name another folder",
                    pid=pid,
                ) from None
        self.clean = not os.pread(self._file.fileno(), 1, 0)
        self._file.truncate(0)
        os.pwrite(self._file.fileno(), f"{os.getpid()}\n".encode(), 0)
        os.fsync(self._file.fileno())

    @property
    def has_locks(self) -> bool:
        """Whether the folder's file system has locks."""
        return self._stand_in is None

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        if self._file.closed:
            return
        if self.clean:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
        # Explicitly: a child that was forked outside Python may have the file, too.
        fcntl.flock(self._file if self._stand_in is None else self._stand_in, fcntl.LOCK_UN)
        self._forget()

    def _forget(self) -> None:
        self._file.close()
        if self._stand_in is not None:
            os.close(self._stand_in)
            self._stand_in = None


def _forget_in_child() -> None:
    # A lock belongs to the open file, which a forked child shares: if the child outlived a parent
    # that was killed, it would keep the folder locked.
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_forget_in_child)


def holder(folder: Path) -> tuple[bool, int | None]:
    """Whether a process has a folder's lock, and its pid if known."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False, None
    try:
        stand_in = _locked(descriptor, folder, fcntl.LOCK_SH)
        if stand_in is not None:
            os.close(stand_in)
    except BlockingIOError:
        return True, _pid(os.pread(descriptor, _PID_BYTES, 0))
    finally:
        os.close(descriptor)
    return False, None


def _locked(descriptor: int, folder: Path, how: int) -> int | None:
    """Lock a folder's lock file, without waiting for another holder.

    If its file system has no locks, a file in this machine's folder for temporary files is locked
    instead. That separates the processes of this machine, but not those of others, as a warning
    says.

    Returns:
        The descriptor of the file that is locked instead; None: the file itself is.

    Raises:
        BlockingIOError: there is another holder.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        why = error.strerror
    place = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(folder)))
    file = Path(tempfile.gettempdir(), f"nemo_specrl-{os.getuid()}-{place}.lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    stand_in = os.open(file, flags, FILE_MODE)
    try:
        fcntl.flock(stand_in, how | fcntl.LOCK_NB)
    except BaseException:
        os.close(stand_in)
        raise
    logger.warning(
        "the file system of %s has no locks (flock: %s): %s keeps the processes of this machine "
        "apart; let no other machine use the folder, or name one on a local disk",
        folder, why, file,
    )  # fmt: skip
    return stand_in


def _pid(line: bytes) -> int | None:
    number = line.strip(b"\0\n")
    return int(number) if number.isdigit() else None


def patiently(call: Callable[[], _Result]) -> _Result:
    """Call what opens a folder; the actor of a killed run may still hold it for some seconds.

    Raises:
        StoreInUse: it is still held after ``LOCK_SECONDS``.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return call()
        except StoreInUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)

"""The file system: atomic replacement, private files, step folders."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["FILE_MODE", "FOLDER_MODE", "replacing", "step_folders", "sync", "sync_folder"]

FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""Modes of files and folders that hold prompts or rollouts: only their owner may read them."""
_NO_SYNC_OF_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO}
"""Errors of file systems that flush files but not folders, such as some network and FUSE ones."""

_without_sync: set[int] = set()
"""Devices for which it has been logged that they do not flush folders."""
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def replacing(
    file: Path, temporary: Path, *, sync_name: bool = True, private: bool = True
) -> Iterator[BinaryIO]:
    """Replace a file atomically: the new content is on disk in full, or the old one is kept.

    For example::

        with replacing(path, path.with_suffix(".tmp")) as new:
            new.write(content)

    Args:
        file: the file to be replaced or created.
        temporary: name of the new file while it is written, in the same folder.
        sync_name: flush the folder as well; without it, the caller does so after its last file.
        private: make the file, and its folder if that is created, readable only for their owner, as
            everything that holds prompts or rollouts must be.
    """
    file.parent.mkdir(mode=FOLDER_MODE if private else 0o777, parents=True, exist_ok=True)
    try:
        with open(temporary, "w+b", opener=_private if private else None) as new:
            if private:  # the opener sets no mode if a process that died left the file
                os.fchmod(new.fileno(), FILE_MODE)
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
    """Flush the names in a folder to disk, and the folder's own name if its parent can be read."""
    sync(folder)
    with contextlib.suppress(PermissionError):
        sync(folder.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk.

    If a file system flushes files but not folders, this is logged once: after a power loss, a
    rename may be undone there.

    Raises:
        OSError: it cannot be opened, or its data did not reach the disk.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        found = os.fstat(descriptor)
        if not stat.S_ISDIR(found.st_mode) or error.errno not in _NO_SYNC_OF_FOLDERS:
            raise
        if found.st_dev not in _without_sync:
            _without_sync.add(found.st_dev)
            logger.warning(
                "the file system of %s does not flush folders (fsync: %s): a loss of power may "
                "undo the last renames there; a crash of the process does not",
                path,
                error.strerror,
            )
    finally:
        os.close(descriptor)


def step_folders(folder: Path) -> list[Path]:
    """List the complete checkpoints ``step_N`` in a folder, oldest first."""
    found = [
        (int(path.name.removeprefix("step_")), path)
        for path in folder.glob("step_*")
        if re.fullmatch(r"step_[0-9]{1,18}", path.name)
    ]
    return [path for _, path in sorted(found)]

"""The folder of a run's store: where it is, how it is filled at the start, and when it is removed.

Under ``spec_rl.cache.dir`` each run has its own folder, so that no run drafts from another's
rollouts by accident: their policy versions are counted in another run. What a run should begin with
is put into ``warm_start`` next to these folders (``nemo-specrl cache import``).

Nothing is removed without a line that says what and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from nemo_specrl.cache.inspection import open_source
from nemo_specrl.cache.metrics import MEMORY, file_system
from nemo_specrl.cache.snapshot import Manifest
from nemo_specrl.cache.storage.lock import LOCK_FILE, FolderLock
from nemo_specrl.cache.storage.recovery import TEMPORARY_FILE, copy_database
from nemo_specrl.cache.storage.schema import DATA_FILE, JOURNAL_FILE
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import CacheError

__all__ = [
    "UNUSED_DAYS",
    "WARM_START",
    "begin_empty",
    "prepare",
    "remarks",
    "remove_unused",
    "restore_checkpoint",
    "run_folder",
]

WARM_START = "warm_start"
UNUSED_DAYS = 30
"""A run whose folder has not been used for this long is considered gone."""
_RUN = re.compile(r"[0-9a-f]{16}(-\d+)?(\.damaged-\d+)?")
_GIB = 2**30

logger = logging.getLogger(__name__)


def run_folder(cache_dir: Path, checkpoint_dir: Path) -> Path:
    """Return the folder of a run under ``spec_rl.cache.dir``: a different one for each checkpoint
    folder.

    Args:
        cache_dir: folder on the node's own disk; runs may share it.
        checkpoint_dir: checkpoint folder of the run.
    """
    return cache_dir / hashlib.sha256(str(checkpoint_dir.absolute()).encode()).hexdigest()[:16]


def prepare(folder: Path, tokenizer_id: str, max_bytes: int, *, fresh: bool) -> None:
    """Prepare the folder of a store that belongs to one process of a run, and log what is done.

    Args:
        folder: folder of the store.
        tokenizer_id: tokenizer of the run.
        max_bytes: cap of the store.
        fresh: whether the run begins, with the warm start next to the folder if there is one.
            Otherwise it resumes: the store begins empty, since the checkpoint has its contents at
            that time.

    Raises:
        StoreInUse: another process has the store open.
        StoreUnavailable: the folder cannot be used.
    """
    lines, emptied = remove_unused(folder), begin_empty(folder, tokenizer_id, warm=fresh)
    if fresh:
        lines += emptied
    for line in lines + remarks(folder, max_bytes):
        logger.warning("rollout cache: %s", line)


def restore_checkpoint(
    restore: Callable[[Path], tuple[Manifest, list[str]]], checkpoint: Path, otherwise: str
) -> int:
    """Restore the cache that a checkpoint has; what cannot be read is logged, and costs only speed.

    Args:
        restore: method of the run's cache.
        checkpoint: checkpoint from which the run resumes.
        otherwise: what happens if the checkpoint's cache cannot be read.

    Returns:
        The policy version of the checkpoint, or 0 if its cache cannot be read.
    """
    try:
        manifest, damaged = restore(checkpoint / CACHE_FOLDER)
    except CacheError as error:
        logger.warning("rollout cache: %s; %s", error, otherwise)
        return 0
    for line in damaged:
        logger.warning("rollout cache: %s; this part starts cold", line)
    return manifest.policy_version


def begin_empty(folder: Path, tokenizer_id: str, *, warm: bool) -> list[str]:
    """Turn the folder of a store into that of a run which begins.

    Args:
        folder: folder of the store.
        tokenizer_id: tokenizer of the run.
        warm: whether to begin with a copy of the warm start next to the folder, if there is one.

    Returns:
        A line for each thing that was removed, copied or left out.

    Raises:
        StoreInUse: another process has the store open.
        StoreUnavailable: the folder cannot be used.
    """
    lines = []
    with contextlib.closing(FolderLock(folder)) as lock:
        with as_cache_errors("empty the rollout store", folder):
            for file in (folder / name for name in (DATA_FILE, TEMPORARY_FILE)):
                if not file.is_file():
                    continue
                size = file.stat().st_size
                file.unlink()
                lines.append(
                    f"removed {file}, {size / _GIB:.2f} GiB of an earlier run's rollouts: this run "
                    "starts from the beginning and not from a checkpoint"
                )
            (folder / JOURNAL_FILE).unlink(missing_ok=True)
        if warm:
            lines += _copy_warm_start(folder, tokenizer_id)
        lock.clean = True
    return lines


def _copy_warm_start(folder: Path, tokenizer_id: str) -> list[str]:
    source = folder.parent / WARM_START
    if not (source / DATA_FILE).is_file():
        return []
    try:
        with open_source(source) as found:
            if found.tokenizer_id != tokenizer_id:
                return [
                    f"{source} is of tokenizer {found.tokenizer_id!r}, not of {tokenizer_id!r}: "
                    "the run begins without it"
                ]
            with as_cache_errors("copy the warm start to", folder):
                copy_database(source / DATA_FILE, folder)
    except CacheError as error:
        (folder / DATA_FILE).unlink(missing_ok=True)
        return [f"{error}: the run begins without it"]
    return [f"begins with the rollouts of {source}, {found.bytes / _GIB:.2f} GiB"]


def remove_unused(folder: Path) -> list[str]:
    """Remove what runs left next to a run's folder and nothing has used for UNUSED_DAYS.

    Only folders with the name and the files of a run's store are removed, and none that a process
    has open. Nothing is removed if ``folder`` itself is not one of several runs' folders.

    Args:
        folder: folder of this run, which is kept.

    Returns:
        A line for each folder that was removed.
    """
    if not _RUN.fullmatch(folder.name):
        return []
    lines = []
    before = time.time() - UNUSED_DAYS * 86400
    with contextlib.suppress(OSError):  # a folder that cannot be read is left as it is
        for other in sorted(folder.parent.iterdir()):
            if other == folder or not _RUN.fullmatch(other.name):
                continue
            with contextlib.suppress(OSError, CacheError):  # in use, or another user's
                if _last_used(other) < before and _remove(other):
                    lines.append(f"removed {other}: no run has used it for {UNUSED_DAYS} days")
    return lines


def _last_used(folder: Path) -> float:
    files = [folder / name for name in (LOCK_FILE, DATA_FILE)]
    return max((f.stat().st_mtime for f in files if f.is_file()), default=float("inf"))


def _remove(folder: Path) -> bool:
    if folder.is_symlink():
        return False
    with contextlib.closing(FolderLock(folder)):
        shutil.rmtree(folder)
    return True


def remarks(folder: Path, max_bytes: int) -> list[str]:
    """Return remarks on what is unwise about the place of a store.

    Args:
        folder: folder of the store, which exists.
        max_bytes: cap of the store.
    """
    lines = []
    mount, kind = file_system(folder)
    if kind in MEMORY:
        lines.append(
            f"{folder} is in memory ({mount} is a {kind}): up to {max_bytes / _GIB:.1f} GiB of the "
            "node's memory are taken, and a reboot loses them; name a folder on a disk in "
            "spec_rl.cache.dir, or lower cache.max_bytes_per_node"
        )
    with contextlib.suppress(OSError):
        total = shutil.disk_usage(folder).total
        if total < max_bytes:
            lines.append(
                f"cache.max_bytes_per_node is {max_bytes / _GIB:.1f} GiB, and the file system of "
                f"{folder} has {total / _GIB:.1f} GiB in all"
            )
    return lines

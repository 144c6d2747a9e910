"""Read-only access to rollouts on disk: stores, snapshots and exports.

Nothing is repaired, moved aside or counted as used here; stores do that when they are opened. Only
a transaction in the middle of which a process died is rolled back, since SQLite would otherwise
read nothing.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nemo_specrl.cache.codec import decode
from nemo_specrl.cache.export import EXPORTS, read_export
from nemo_specrl.cache.snapshot import MANIFEST, read_manifest, read_partition
from nemo_specrl.cache.storage.database import check_size, check_structure, connect
from nemo_specrl.cache.storage.lock import holder
from nemo_specrl.cache.storage.recovery import roll_back
from nemo_specrl.cache.storage.schema import (
    DATA_FILE,
    FORMAT,
    has_tables,
    identity_and_state,
    named,
)
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import CacheError, ConfigError, ForeignStore, StoreInUse, StoreUnavailable
from nemo_specrl.rollout import Finish, Rollout

__all__ = ["open_source", "summary"]


@dataclass
class Source:
    """Rollouts on disk, open to be read once.

    Args:
        kind: ``store``, ``snapshot`` or ``export``.
        tokenizer_id: tokenizer of the tokens.
        bytes: size of the files.
        rollouts: each rollout, newest first within a sample index, or the error in its place.
        policy_version: policy version of the weights next to it, if recorded.
        partitions: number of partitions of a snapshot, and how many of them have rollouts.
        lookups: number of prompts that a store was ever asked for.
        hits: how many of them it found.
    """

    kind: str
    tokenizer_id: str
    bytes: int
    rollouts: Iterator[Rollout | CacheError]
    policy_version: int | None = None
    partitions: str = "-"
    lookups: int = 0
    hits: int = 0


@contextlib.contextmanager
def open_source(path: Path, *, check: bool = False) -> Iterator[Source]:
    """Open what is at a path; for a checkpoint's folder, the ``rollout_cache`` in it.

    Args:
        path: a folder.
        check: whether to check all pages of a store first.

    Raises:
        ConfigError: there is nothing of the kind.
        StoreUnavailable: it cannot be read, is damaged as a whole, or is open in a process.
        ForeignStore: it has another release's format.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such folder")
    if (path / CACHE_FOLDER).is_dir():
        path = path / CACHE_FOLDER
    with as_cache_errors("read", path):
        if (path / DATA_FILE).is_file():
            with _at_rest(path), _tables(path / DATA_FILE, check) as source:
                yield source
        elif (path / MANIFEST).is_file():
            yield _snapshot(path)
        elif next(path.glob(EXPORTS), None) is not None:
            tokenizer_id, rollouts = read_export(path)
            size = sum(file.stat().st_size for file in path.glob(EXPORTS))
            yield Source("export", tokenizer_id, size, rollouts)
        else:
            raise ConfigError(
                f"{path}: neither a rollout store ({DATA_FILE}), nor a snapshot "
                f"({MANIFEST}), nor an export ({EXPORTS})"
            )


@contextlib.contextmanager
def _at_rest(folder: Path) -> Iterator[None]:
    """Read a store to which no process writes, without preventing one from opening it.

    Raises:
        StoreInUse: a process has it open, or has changed it in the meantime; what was read is
            invalid.
    """
    data = folder / DATA_FILE
    held, pid = holder(folder)
    if held:
        raise StoreInUse(
            f"the rollout store {folder} is open in process {pid or 'unknown'}; look at a "
            "checkpoint's rollout_cache, or wait until it ends",
            pid=pid,
        )
    roll_back(folder)
    before = data.stat()
    error: CacheError | sqlite3.Error | None = None
    try:
        yield
    except (CacheError, sqlite3.Error) as caught:
        error = caught
    after = data.stat() if data.exists() else None
    if after is None or (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
        raise StoreInUse(
            f"the rollout store {folder} was opened by a process while it was read; look at a "
            "checkpoint's rollout_cache, or wait until it ends",
            pid=holder(folder)[1],
        )
    if error is not None:
        raise error


@contextlib.contextmanager
def _tables(file: Path, check: bool) -> Iterator[Source]:
    with contextlib.closing(connect(file, "mode=ro&nolock=1")) as database:
        check_size(database, file)
        if not has_tables(database, file):
            raise StoreUnavailable(f"{file} is empty")
        if check:
            check_structure(database, indices=True)
        identity, state = identity_and_state(database)
        if identity["format"] != FORMAT:
            raise ForeignStore(
                f"{file} has format {identity['format']}, this release reads {FORMAT}; use the "
                "release that wrote it"
            )
        lookups, hits = state[3:]
        rows = database.execute(
            "SELECT prompt, sample_index, clock, record FROM rollouts "
            "ORDER BY prompt, sample_index, clock DESC"
        )

        def rollouts() -> Iterator[Rollout | CacheError]:
            try:
                for name, record in named(rows):
                    try:
                        yield decode(name, record)
                    except CacheError as error:
                        yield error
            except sqlite3.Error as error:
                yield StoreUnavailable(f"{file}: {error}")

        yield Source(
            "store",
            identity["tokenizer"],
            file.stat().st_size,
            rollouts(),
            lookups=lookups,
            hits=hits,
        )


def _snapshot(folder: Path) -> Source:
    manifest = read_manifest(folder)

    def rollouts() -> Iterator[Rollout | CacheError]:
        for file in manifest.files:
            try:
                yield from read_partition(folder, file)
            except CacheError as error:
                yield error

    return Source(
        "snapshot",
        manifest.tokenizer_id,
        sum(file.bytes for file in manifest.files),
        rollouts(),
        policy_version=manifest.policy_version,
        partitions=f"{manifest.partitions}, {len(manifest.files)} of them with rollouts",
    )


@dataclass
class Summary:
    """Counts of the contents of a source. Ages are policy versions, up to the newest one there."""

    prompts: int = 0
    rollouts: int = 0
    tokens: int = 0
    damaged: int = 0
    longest: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    token_versions: Counter[int] = field(default_factory=Counter)

    @property
    def mean_age(self) -> float:
        """Mean age of a rollout since it was last judged."""
        return self._mean_age(self.versions)

    @property
    def mean_token_age(self) -> float:
        """Mean age of a token since it was sampled."""
        return self._mean_age(self.token_versions)

    def _mean_age(self, versions: Counter[int]) -> float:
        total = sum(versions.values())
        newest = max(self.versions, default=0)
        return sum((newest - v) * n for v, n in versions.items()) / max(1, total)


def summary(source: Source) -> Summary:
    """Read a source to its end, and count what is in it."""
    import numpy as np

    found = Summary()
    key = b""
    for rollout in source.rollouts:
        if isinstance(rollout, CacheError):
            found.damaged += 1
            continue
        if rollout.key != key:
            key = rollout.key
            found.prompts += 1
        found.rollouts += 1
        found.tokens += len(rollout)
        found.longest = max(found.longest, len(rollout))
        found.finishes[Finish(rollout.finish).name] += 1
        found.versions[rollout.policy_version] += 1
        for version, count in zip(
            *np.unique(rollout.birth_versions, return_counts=True), strict=True
        ):
            found.token_versions[int(version)] += int(count)
    return found

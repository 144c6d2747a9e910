"""What is in stores, in copies of them in checkpoints, and in exports: read, checked, counted.

A store may be in use: it is read in small pieces, and nothing in it counts as used.

An export is a file of JSON lines. The first one is ``{"format": EXPORT, "vocabulary": ...}``, each
other one a response: ``key`` and ``identity`` (hexadecimal), ``tokens``, ``finish`` (``STOP`` and
so on), ``policy_version``, and ``logprobs`` where they are known. Prompts come in the order of
their last use and responses in that of their age, the latest first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nemo_specrl.cache import snapshot as snapshots
from nemo_specrl.cache.codec import decode, encode
from nemo_specrl.cache.database import DATA_FILE, FORMAT, as_cache_errors, connect, number
from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import CacheError, ConfigError, ForeignStore, StoreUnavailable
from nemo_specrl.files import replacing
from nemo_specrl.rollout import Finish, Rollout

__all__ = ["Source", "open_source", "sources", "summary", "write_export"]

EXPORT = "nemo_specrl rollouts 5"


@dataclass
class Source:
    """Responses on disk, open to be read once.

    Args:
        kind: ``store``, ``snapshot`` or ``export``.
        vocabulary: identity of the vocabulary of their tokens.
        size: of the files, bytes.
        rollouts: each response, or the error in its place, in the order of an export.
    """

    kind: str
    vocabulary: str
    size: int
    rollouts: Iterator[Rollout | CacheError]

    def groups(self, damaged: list[CacheError]) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield prompts and their records, as ``RolloutStore.add_older`` takes them."""
        for key, group in itertools.groupby(self.sound(damaged), lambda rollout: rollout.key):
            yield key, [encode(rollout) for rollout in group]

    def sound(self, damaged: list[CacheError]) -> Iterator[Rollout]:
        """Yield the responses; errors in place of damaged ones are collected."""
        for rollout in self.rollouts:
            if isinstance(rollout, CacheError):
                damaged.append(rollout)
            else:
                yield rollout


def sources(path: Path) -> list[Path]:
    """Return what there is to be read at a path: the stores of a cache's folder, one for each
    vocabulary; a store's own folder; a checkpoint's ``rollout_cache``; or a file.

    Raises:
        ConfigError: there is nothing of the kind.
    """
    with as_cache_errors("read", path):
        if path.is_dir():
            if (path / CACHE_FOLDER).is_dir():
                path = path / CACHE_FOLDER
            if (path / DATA_FILE).is_file() or _snapshots(path):
                return [path]
            found = sorted(file.parent for file in path.glob(f"*/{DATA_FILE}"))
            if found:
                return found
        elif path.is_file():
            return [path.parent if path.name == DATA_FILE else path]
    raise ConfigError(f"{path}: neither a rollout store, nor a checkpoint with one, nor an export")


def _snapshots(folder: Path) -> list[Path]:
    """Return the copies of shards in a checkpoint's folder."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return [file for file in files if _begins(file, snapshots.MAGIC)]


def _begins(file: Path, magic: bytes) -> bool:
    with file.open("rb") as opened_file:
        return opened_file.read(len(magic)) == magic


@contextlib.contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open one of :func:`sources`, or a path that has only one.

    Raises:
        ConfigError: there is nothing, or more than one.
        StoreUnavailable: it cannot be read, or is damaged as a whole.
        ForeignStore: it has another format.
    """
    found = sources(path)
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"{path} has stores of several vocabularies; name one of {names}")
    (path,) = found
    with as_cache_errors("read", path):
        if path.is_dir() and (path / DATA_FILE).is_file():
            file = path / DATA_FILE
            # Where nothing can be written, nobody else writes either.
            writable = os.access(file, os.W_OK) and os.access(path, os.W_OK)
            mode = "mode=rw" if writable else "mode=ro&immutable=1"
            with contextlib.closing(connect(file, mode)) as database:
                yield _store(path, database)
            return
        files = _snapshots(path) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        if _begins(files[0], snapshots.MAGIC):
            vocabulary = snapshots.vocabulary_of(files[0])
            yield Source("snapshot", vocabulary, size, _of_snapshots(files))
        else:
            with path.open(encoding="utf-8") as lines:
                yield Source("export", _exported(path, lines), size, _of_export(path, lines))


def _store(path: Path, database: sqlite3.Connection) -> Source:
    made = number(database, "PRAGMA user_version")
    if made != FORMAT:
        raise ForeignStore(f"{path / DATA_FILE} has format {made}, this release reads {FORMAT}")
    there = database.execute("SELECT value FROM meta WHERE name = 'vocabulary'").fetchone()
    if there is None:
        raise sqlite3.DatabaseError("its vocabulary is missing")
    size = sum(file.stat().st_size for file in (path / DATA_FILE, *path.glob(f"{DATA_FILE}-wal")))

    def rollouts() -> Iterator[Rollout | CacheError]:
        try:
            keys = database.execute("SELECT key FROM prompts ORDER BY use DESC").fetchall()
            for (key,) in keys:
                records = database.execute(
                    "SELECT record FROM rollouts WHERE key = ? ORDER BY number DESC", (key,)
                ).fetchall()
                yield from (_decoded(key, record) for (record,) in records)
        except sqlite3.Error as error:
            yield StoreUnavailable(f"{path}: {error}")

    return Source("store", there[0].decode(), size, rollouts())


def _decoded(key: bytes, record: bytes) -> Rollout | CacheError:
    try:
        return decode(key, record)
    except CacheError as error:
        return error


def _of_snapshots(files: list[Path]) -> Iterator[Rollout | CacheError]:
    for file in files:
        try:
            for key, records in snapshots.read(file):
                yield from (_decoded(key, record) for record in records)
        except CacheError as error:
            yield error


def _exported(path: Path, lines: Iterable[str]) -> str:
    """Read the first line of an export, and return its vocabulary."""
    try:
        head = json.loads(next(iter(lines), ""))
        if head["format"] == EXPORT:
            return str(head["vocabulary"])
    except (ValueError, KeyError, TypeError, RecursionError):  # UnicodeDecodeError is a ValueError
        pass
    raise ForeignStore(f"{path} is no export or snapshot that this release reads")


def _of_export(path: Path, lines: Iterable[str]) -> Iterator[Rollout | CacheError]:
    for count, line in enumerate(lines, 2):
        try:
            made = json.loads(line)
            yield Rollout(
                bytes.fromhex(made["key"]),
                made["tokens"],
                Finish[made["finish"]],
                made["policy_version"],
                made.get("logprobs"),
                int(made["identity"], 16),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            yield StoreUnavailable(f"{path}: line {count} is no response: {error!r:.200}")


def write_export(file: Path, vocabulary: str, rollouts: Iterable[Rollout]) -> int:
    """Write responses as JSON lines, and return their number.

    Raises:
        StoreUnavailable: the file exists, or cannot be written.
    """
    if file.exists():
        raise StoreUnavailable(f"{file} exists; name a new file")
    count = 0
    with (
        as_cache_errors("write the export", file),
        replacing(file, file.with_name(f"{file.name}.tmp")) as new,
    ):
        new.write(json.dumps({"format": EXPORT, "vocabulary": vocabulary}).encode() + b"\n")
        for rollout in rollouts:
            line = {
                "key": rollout.key.hex(),
                "identity": f"{rollout.identity:x}",
                "finish": rollout.finish.name,
                "policy_version": rollout.policy_version,
                "tokens": rollout.tokens.tolist(),
            }
            if rollout.logprobs is not None:
                line["logprobs"] = rollout.logprobs.tolist()
            new.write(json.dumps(line).encode() + b"\n")
            count += 1
    return count


@dataclass
class Summary:
    """Counts of what is in a source."""

    prompts: int = 0
    responses: int = 0
    tokens: int = 0
    longest: int = 0
    scored: int = 0
    """Responses with log-probs."""
    finishes: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    damaged: list[CacheError] = field(default_factory=list)


def summary(source: Source) -> Summary:
    """Read a source to its end, and count what is in it."""
    found = Summary()
    for _, group in itertools.groupby(source.sound(found.damaged), lambda rollout: rollout.key):
        found.prompts += 1
        for rollout in group:
            found.responses += 1
            found.tokens += len(rollout)
            found.longest = max(found.longest, len(rollout))
            found.scored += rollout.logprobs is not None
            found.finishes[rollout.finish.name] += 1
            found.versions[rollout.policy_version] += 1
    return found

"""A cache in a checkpoint: a file for each partition, and a manifest that lists them.

::

    manifest.json                 format, tokenizer, policy version, number of partitions, and for
                                  each file its bytes, rollouts and xxh3-64
    partition-00017.rollouts      records, one after the other: u32 size, db key, record

A cluster's shards divide the partitions among themselves. A store that belongs to one process is a
single partition. Partitions are independent of nodes, so a snapshot can be restored on any number
of them, and by one process as well. All files are plain and written once, so any shared file system
will do. The manifest is written last, and files that it does not list are ignored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from nemo_specrl.cache.codec import decode, encode_all
from nemo_specrl.cache.storage.schema import DATA_FILE, db_key
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.errors import CacheError, ForeignStore, StoreUnavailable
from nemo_specrl.files import replacing
from nemo_specrl.rollout import KEY_BYTES, Rollout

__all__ = [
    "MANIFEST",
    "Manifest",
    "PartitionFile",
    "read_files",
    "read_manifest",
    "read_partition",
    "write_manifest",
    "write_partition",
]

FORMAT = 2
MANIFEST = "manifest.json"
WRITTEN_AT_ONCE = 64  # rollouts
_HEAD = struct.Struct(f"<I{KEY_BYTES + 10}s")


@dataclass(frozen=True)
class PartitionFile:
    """A file of a snapshot, as the manifest describes it: size in bytes, rollouts, checksum."""

    partition: int
    bytes: int
    rollouts: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """The description of a snapshot.

    Args:
        tokenizer_id: identity of the tokenizer of the tokens.
        policy_version: policy version of the weights next to it.
        partitions: number of partitions into which the keys fall.
        files: files of the partitions that have rollouts.
    """

    tokenizer_id: str
    policy_version: int
    partitions: int
    files: tuple[PartitionFile, ...]


def write_partition(
    folder: Path, partition: int, rollouts: Iterable[Rollout]
) -> PartitionFile | None:
    """Write the file of a partition, either completely or not at all.

    Args:
        folder: folder of the snapshot; created if it does not exist.
        partition: its index.
        rollouts: newest first within a sample index, as stores return them.

    Returns:
        The file; None if there are no rollouts, in which case no file is written.

    Raises:
        StoreUnavailable: the folder cannot be written.
    """
    path = _file(folder, partition)
    count, size, hasher = 0, 0, xxhash.xxh3_64()
    iterator = iter(rollouts)
    some = list(itertools.islice(iterator, WRITTEN_AT_ONCE))
    if not some:
        return None
    with (
        as_cache_errors("write the snapshot", path),
        # Writing the manifest flushes the folder. Temporary names are unique, because a shard that
        # was given up while it wrote must not write into the file of the shard that replaced it.
        replacing(path, path.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp"), sync_name=False) as file,
    ):
        while some:
            names = [db_key(rollout.key, rollout.sample_index, 0) for rollout in some]
            parts: list[bytes] = []
            for name, record in zip(names, encode_all(some, names), strict=True):
                parts += (_HEAD.pack(len(record), name), record)
            piece = b"".join(parts)
            file.write(piece)
            hasher.update(piece)
            count, size = count + len(some), size + len(piece)
            some = list(itertools.islice(iterator, WRITTEN_AT_ONCE))
    return PartitionFile(partition, size, count, hasher.hexdigest())


def read_partition(folder: Path, expected: PartitionFile) -> Iterator[Rollout]:
    """Read the rollouts of a partition, in the order in which they were written.

    The whole file is checked before the first rollout is yielded.

    Raises:
        StoreUnavailable: the file is missing, cannot be read, or is not the one that the manifest
            names.
    """
    path = _file(folder, expected.partition)
    with as_cache_errors("read the snapshot", path), open(path, "rb") as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
        if (file.tell(), checksum) != (expected.bytes, expected.xxh3):
            raise StoreUnavailable(f"{path}: damaged, its checksum is not that of the manifest")
        file.seek(0)
        while head := file.read(_HEAD.size):
            size, name = _HEAD.unpack(head)
            yield decode(name, file.read(size))


def read_files(
    folder: Path, files: Iterable[PartitionFile], take: Callable[[Iterator[Rollout]], None]
) -> list[str]:
    """Pass on the rollouts of a snapshot's files, one file after the other.

    Args:
        folder: folder of the snapshot.
        files: files to read.
        take: called with the rollouts of each file.

    Returns:
        A line for each file that is damaged, or whose rollouts could not be taken.
    """
    problems = []
    for file in files:
        try:
            take(read_partition(folder, file))
        except CacheError as error:
            problems.append(str(error))
    return problems


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which turns the partition files into a snapshot.

    Raises:
        StoreUnavailable: the folder cannot be written.
    """
    path = folder / MANIFEST
    with (
        as_cache_errors("write the snapshot", path),
        replacing(path, path.with_suffix(".tmp")) as file,
    ):
        file.write(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1).encode())


def read_manifest(folder: str | os.PathLike[str], tokenizer_id: str | None = None) -> Manifest:
    """Read the manifest of a snapshot.

    Args:
        folder: folder of the snapshot.
        tokenizer_id: the tokenizer that it must have; None: any.

    Raises:
        StoreUnavailable: there is none, or it is damaged.
        ForeignStore: it has another release's format, or another tokenizer.
    """
    path = Path(folder) / MANIFEST
    with as_cache_errors("read the snapshot", path):
        if not path.exists() and path.with_name(DATA_FILE).exists():
            raise ForeignStore(
                f"{folder} has the cache as an older release wrote it ({DATA_FILE}), this one "
                f"reads {MANIFEST}"
            )
        text = path.read_bytes()
    try:
        values = json.loads(text)
        found = values.pop("format")
        if found != FORMAT:
            raise ForeignStore(
                f"{path} has format {found}, this release reads {FORMAT}; start cold, or read it "
                "with the release that wrote it"
            )
        files = tuple(PartitionFile(**file) for file in values.pop("files"))
        manifest = Manifest(**values, files=files)
    except CacheError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreUnavailable(f"{path}: damaged ({type(error).__name__})") from None
    if tokenizer_id not in (None, manifest.tokenizer_id):
        raise ForeignStore(
            f"{folder} is of tokenizer {manifest.tokenizer_id!r}, not of {tokenizer_id!r}"
        )
    return manifest


def _file(folder: Path, partition: int) -> Path:
    return folder / f"partition-{partition:05d}.rollouts"

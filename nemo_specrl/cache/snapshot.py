"""A cluster's cache in a checkpoint: a file for each partition, and a manifest that lists them.

::

    manifest.json                 format, tokenizer, policy version, number of partitions, and of
                                  each file its bytes, rollouts and xxh3-64
    partition-00017.rollouts      records, one behind the other: u32 size, db key, record

Partitions are independent of nodes, so that a snapshot can be restored on any number of them. All
files are plain and written once, so that any shared file system will do. The manifest is written
last, and files that it does not list are ignored.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from nemo_specrl.cache.codec import decode, encode_all
from nemo_specrl.cache.storage.schema import db_key
from nemo_specrl.cache.storage.system_errors import as_cache_errors
from nemo_specrl.errors import CacheError, ForeignStore, StoreUnavailable
from nemo_specrl.files import replacing
from nemo_specrl.rollout import KEY_BYTES, Rollout

__all__ = [
    "MANIFEST",
    "Manifest",
    "PartitionFile",
    "read_manifest",
    "read_partition",
    "write_manifest",
    "write_partition",
]

FORMAT = 2
MANIFEST = "manifest.json"
WRITTEN_AT_ONCE = 64  # rollouts
_SIZE = struct.Struct("<I")
_NAME_BYTES = KEY_BYTES + 10


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
        tokenizer_id: identity of the tokenizer that the tokens are of.
        policy_version: of the weights beside which it lies.
        partitions: into how many the keys fall.
        files: of the partitions that have rollouts.
    """

    tokenizer_id: str
    policy_version: int
    partitions: int
    files: tuple[PartitionFile, ...]


def write_partition(
    folder: Path, partition: int, rollouts: Iterable[Rollout]
) -> PartitionFile | None:
    """Write the file of a partition; complete or not there at all.

    Args:
        folder: of the snapshot; made if it is not there.
        partition: its index.
        rollouts: newest first within a sample index, as stores give them.

    Returns:
        The file; None: there are no rollouts, and no file is written.

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
                parts += (_SIZE.pack(len(record)), name, record)
            piece = b"".join(parts)
            file.write(piece)
            hasher.update(piece)
            count, size = count + len(some), size + len(piece)
            some = list(itertools.islice(iterator, WRITTEN_AT_ONCE))
    return PartitionFile(partition, size, count, hasher.hexdigest())


def read_partition(folder: Path, expected: PartitionFile) -> Iterator[Rollout]:
    """Read the rollouts of a partition, in the order in which they were written.

    The whole file is checked before the first is given out.

    Raises:
        StoreUnavailable: the file is missing, cannot be read, or is not the one that the manifest
            names.
    """
    path = _file(folder, expected.partition)
    with as_cache_errors("read the snapshot", path):
        data = path.read_bytes()
        if len(data) != expected.bytes or xxhash.xxh3_64_hexdigest(data) != expected.xxh3:
            raise StoreUnavailable(f"{path}: damaged, its checksum is not that of the manifest")
        position = 0
        while position < len(data):
            (size,) = _SIZE.unpack_from(data, position)
            position += _SIZE.size
            name = data[position : position + _NAME_BYTES]
            position += _NAME_BYTES
            yield decode(name, data[position : position + size])
            position += size


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the files of partitions a snapshot.

    Raises:
        StoreUnavailable: the folder cannot be written.
    """
    path = folder / MANIFEST
    with (
        as_cache_errors("write the snapshot", path),
        replacing(path, path.with_suffix(".tmp")) as file,
    ):
        file.write(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1).encode())


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a snapshot.

    Raises:
        StoreUnavailable: there is none, or it is damaged.
        ForeignStore: it is of another release's format.
    """
    path = Path(folder) / MANIFEST
    with as_cache_errors("read the snapshot", path):
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
        return Manifest(**values, files=files)
    except CacheError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreUnavailable(f"{path}: damaged ({type(error).__name__})") from None


def _file(folder: Path, partition: int) -> Path:
    return folder / f"partition-{partition:05d}.rollouts"

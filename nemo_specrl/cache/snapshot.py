"""Copies of stores in checkpoints: one file each.

::

    MAGIC, u32 length, JSON {"vocabulary": ...}
    a prompt     key of 16 bytes, u32 count; its records, newest first: u32 length, bytes
    the end      16 zero bytes, u32 0, xxh3-64 of everything above

Prompts come in the order of their last use, the latest first. Each record has a checksum of its
own, so that what is sound in a damaged file can be used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from nemo_specrl.cache.database import as_cache_errors
from nemo_specrl.errors import CorruptRecord, ForeignStore, StoreUnavailable
from nemo_specrl.files import replacing
from nemo_specrl.rollout import KEY_BYTES

__all__ = ["MAGIC", "opened", "read", "vocabulary_of", "write"]

MAGIC = b"nemo_specrl rollouts 5\n"
_U32 = struct.Struct("<I")
_LARGEST = 2**28
"""Bytes of a record; one that claims more is damaged."""
logger = logging.getLogger(__name__)

Groups = Iterable[tuple[bytes, list[bytes]]]


def write(file: Path, vocabulary: str, groups: Groups) -> int:
    """Write prompts and their records, and return the number of records.

    Raises:
        StoreUnavailable: the file cannot be written.
    """
    count = 0
    with (
        as_cache_errors("write the snapshot", file),
        replacing(file, file.with_name(f"{file.name}.tmp")) as new,
    ):
        hasher = xxhash.xxh3_64()
        head = json.dumps({"vocabulary": vocabulary}).encode()

        def add(data: bytes) -> None:
            hasher.update(data)
            new.write(data)

        add(MAGIC + _U32.pack(len(head)) + head)
        for key, records in groups:
            count += len(records)
            parts = [part for record in records for part in (_U32.pack(len(record)), record)]
            add(b"".join([key, _U32.pack(len(records)), *parts]))
        add(bytes(KEY_BYTES) + _U32.pack(0))
        new.write(hasher.digest())
    return count


@contextlib.contextmanager
def opened(file: Path, vocabulary: str) -> Iterator[Groups]:
    """Open a snapshot of a vocabulary: its prompts and records, with a warning where it is damaged.

    Raises:
        StoreUnavailable: it is missing or no snapshot.
        ForeignStore: it is of another vocabulary.
    """
    theirs = vocabulary_of(file)
    if theirs != vocabulary:
        raise ForeignStore(f"{file} is of the vocabulary {theirs}, not of {vocabulary}")

    def groups() -> Iterator[tuple[bytes, list[bytes]]]:
        try:
            yield from read(file)
        except CorruptRecord as error:
            logger.warning("%s; what is whole in it is used", error)

    with as_cache_errors("read the snapshot", file):
        yield groups()


def vocabulary_of(file: Path) -> str:
    """Return the vocabulary of a snapshot.

    Raises:
        StoreUnavailable: it is missing or no snapshot of this format.
    """
    with as_cache_errors("read the snapshot", file), file.open("rb") as opened_file:
        return _head(file, opened_file)[0]


def _head(file: Path, opened_file: BinaryIO) -> tuple[str, bytes]:
    """Return the vocabulary, and all bytes of the head."""
    head = opened_file.read(len(MAGIC) + _U32.size)
    try:
        if not head.startswith(MAGIC):
            raise ValueError
        rest = opened_file.read(min(_U32.unpack_from(head, len(MAGIC))[0], 2**16))
        return str(json.loads(rest)["vocabulary"]), head + rest
    except (ValueError, KeyError, TypeError, struct.error):
        raise StoreUnavailable(f"{file} is no snapshot that this release reads") from None


def read(file: Path) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the prompts of a snapshot and their records, in its order.

    Raises:
        StoreUnavailable: it is missing or no snapshot.
        CorruptRecord: after all that could be read: it is cut off, or its checksum is wrong.
    """
    with file.open("rb") as opened_file:
        hasher = xxhash.xxh3_64(_head(file, opened_file)[1])

        def take(size: int) -> bytes:
            data = opened_file.read(size)
            if len(data) != size:
                raise CorruptRecord(f"the snapshot {file} is cut off")
            hasher.update(data)
            return data

        while True:
            key = take(KEY_BYTES)
            (count,) = _U32.unpack(take(_U32.size))
            if not count:
                break
            records = []
            for _ in range(count):
                (size,) = _U32.unpack(take(_U32.size))
                if size > _LARGEST:
                    raise CorruptRecord(f"the snapshot {file} is damaged: a record of {size} bytes")
                records.append(take(size))
            yield key, records
        if opened_file.read() != hasher.digest():
            raise CorruptRecord(f"the snapshot {file} is damaged: wrong checksum")

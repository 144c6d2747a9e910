"""The identity of a shard's folder: its name, who used it last, and its newest incarnation.

The name belongs to the disk. A shard that comes back with its disk keeps its name, and with it the
same partitions.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import NamedTuple

import xxhash

__all__ = ["IDENTITY_FILE", "Identity", "read_identity", "write_identity"]

IDENTITY_FILE = "shard"

logger = logging.getLogger(__name__)


class Identity(NamedTuple):
    """The contents of a folder's identity file.

    Args:
        name: name of the shard.
        life: life of the run that last used the folder, a number that is redrawn at each start and
            resumption of a run; 0: not known.
        incarnation: the largest one with which anything in the store was put; 0: not known.
    """

    name: str
    life: int
    incarnation: int = 0


def read_identity(folder: Path) -> Identity:
    """Read the identity of a folder; return a new one if there is none, or if it is damaged.

    Args:
        folder: folder of a shard.

    Raises:
        OSError: the file cannot be read.
    """
    file = folder / IDENTITY_FILE
    if file.exists():
        identity = _parse(file.read_bytes())
        if identity is not None:
            return identity
        logger.warning(
            "rollout cache: %s is damaged; the shard gets a new name and goes by its store", file
        )
    return Identity(f"shard-{uuid.uuid4().hex[:12]}", 0)


def write_identity(folder: Path, identity: Identity) -> None:
    """Write the identity of a folder, by an atomic rename.

    Args:
        folder: folder of a shard.
        identity: identity to write.

    Raises:
        OSError: the file cannot be written.
    """
    text = f"{identity.name} {identity.life} {identity.incarnation}".encode()
    temporary = folder / f"{IDENTITY_FILE}.tmp"
    temporary.write_bytes(text + b" " + _checksum(text) + b"\n")
    temporary.replace(folder / IDENTITY_FILE)


def _parse(line: bytes) -> Identity | None:
    text, _, checksum = line.removesuffix(b"\n").rpartition(b" ")
    if not text or checksum != _checksum(text):
        return None
    name, life, incarnation = text.decode().split(" ")
    return Identity(name, int(life), int(incarnation))


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()

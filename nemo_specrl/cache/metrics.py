"""What a store counts, and the metrics of one store or of all stores of a cluster."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nemo_specrl.monitoring import names as metric

__all__ = ["MEMORY", "StoreStats", "disk_used_fraction", "file_system", "store_metrics"]

MEMORY = frozenset({"tmpfs", "ramfs"})
"""Types of in-memory file systems."""


@dataclass(frozen=True)
class StoreStats:
    """The contents of a store, and counts of what it has done since it was opened."""

    prompts: int
    rollouts: int
    bytes_used: int
    """Bytes of pages in use; the file may be larger, by pages that are free."""
    max_bytes: int
    lookups: int
    """Number of prompts asked for."""
    hits: int
    """Number of prompts found."""
    corrupt_records: int
    dropped_records: int
    """Number of rollouts for which no eviction could make room."""
    evicted_prompts: int
    disk_used_fraction: float
    """Used share of the store's disk, by all its users, as ``df`` reports it."""
    in_memory: bool = False
    """Whether it is on a tmpfs or ramfs instead of a disk, so that its bytes are the node's
    memory."""


def disk_used_fraction(path: Path) -> float:
    """Return the used share of a folder's disk, relative to what an ordinary user can use of it."""
    usage = shutil.disk_usage(path)
    return usage.used / max(1, usage.used + usage.free)


def file_system(path: Path) -> tuple[str, str]:
    """Return mount point and type of the file system that a path is on; empty: not known."""
    place = os.path.realpath(path)
    found = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in mounts:
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(found[0]):  # the last one hides those before it
            found = mount, after.split()[0]
    return found


def store_metrics(stores: Collection[StoreStats]) -> dict[str, float]:
    """Return scalars by metric name; none without stores.

    They are sums over the stores, except for the fullest disk. A cluster's counts cover all copies.
    """
    if not stores:
        return {}
    return {
        metric.CACHE_PROMPTS: float(sum(store.prompts for store in stores)),
        metric.CACHE_ROLLOUTS: float(sum(store.rollouts for store in stores)),
        metric.CACHE_BYTES: float(sum(store.bytes_used for store in stores)),
        metric.CACHE_MEMORY_BYTES: float(sum(s.bytes_used for s in stores if s.in_memory)),
        metric.CACHE_MAX_BYTES: float(sum(store.max_bytes for store in stores)),
        metric.CACHE_HIT_FRACTION: sum(store.hits for store in stores)
        / max(1, sum(store.lookups for store in stores)),
        metric.CACHE_EVICTED_PROMPTS: float(sum(store.evicted_prompts for store in stores)),
        metric.CORRUPT_RECORDS: float(sum(store.corrupt_records for store in stores)),
        metric.DISK_USED_FRACTION: max(store.disk_used_fraction for store in stores),
    }

"""What a store counts, and the metrics of one store or of all stores of a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["StoreStats", "disk_used_fraction", "store_metrics"]


@dataclass(frozen=True)
class StoreStats:
    """Contents of a store, and counts of what it has done since it was opened."""

    prompts: int
    rollouts: int
    bytes_used: int
    """Bytes of pages in use; the file may be larger, by pages that are free."""
    max_bytes: int
    lookups: int
    """Prompts asked for."""
    hits: int
    """Prompts found."""
    corrupt_records: int
    dropped_records: int
    """Rollouts that no eviction could make room for."""
    evicted_prompts: int
    disk_used_fraction: float
    """Of the disk that the store is on, by whomever it is used; as ``df`` says it."""


def disk_used_fraction(path: Path) -> float:
    """Used share of the disk that a folder is on, of what an ordinary user can use of it."""
    usage = shutil.disk_usage(path)
    return usage.used / max(1, usage.used + usage.free)


def store_metrics(stores: Collection[StoreStats]) -> dict[str, float]:
    """Scalars by metric name; none without stores.

    Sums over the stores, but for the fullest disk. A cluster's counts are of all copies.
    """
    if not stores:
        return {}
    return {
        "spec_rl/cache_prompts": float(sum(store.prompts for store in stores)),
        "spec_rl/cache_rollouts": float(sum(store.rollouts for store in stores)),
        "spec_rl/cache_bytes": float(sum(store.bytes_used for store in stores)),
        "spec_rl/cache_max_bytes": float(sum(store.max_bytes for store in stores)),
        "spec_rl/cache_hit_fraction": sum(store.hits for store in stores)
        / max(1, sum(store.lookups for store in stores)),
        "spec_rl/cache_evicted_prompts": float(sum(store.evicted_prompts for store in stores)),
        "spec_rl/corrupt_records": float(sum(store.corrupt_records for store in stores)),
        "spec_rl/disk_used_fraction": max(store.disk_used_fraction for store in stores),
    }

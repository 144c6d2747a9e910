"""Counts, in every process of a test job, how often prompts are hashed and the cache is asked.

Each call appends a line to the file that ``NEMO_SPECRL_TEST_COUNTS`` names; without the variable
nothing is counted.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from nemo_specrl import rollout
from nemo_specrl.cache.cluster.claiming_client import ClaimingClient

COUNTS = "NEMO_SPECRL_TEST_COUNTS"


def note(kind: str, **values: Any) -> None:
    """Append a line about a call, or about where the job is, in one write."""
    with Path(os.environ[COUNTS]).open("a") as file:
        file.write(json.dumps({"kind": kind, "pid": os.getpid(), **values}) + "\n")


def install() -> None:
    """Count the calls of this process from now on."""
    if COUNTS not in os.environ:
        return

    def digest(*args: Any, **kwargs: Any) -> bytes:
        note("hash")
        return xxhash.xxh3_128_digest(*args, **kwargs)

    rollout.xxhash = SimpleNamespace(xxh3_128_digest=digest)  # which prompt_key alone calls
    for name in ("get", "outlines", "claim"):
        setattr(ClaimingClient, name, _counted(name, getattr(ClaimingClient, name)))


def _counted(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return original(*args, **kwargs)

    return counted

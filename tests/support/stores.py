"""The stores that tests open, their contents, and processes of their own that use them."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import nemo_specrl
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.database import DATA_FILE
from nemo_specrl.rollout import prompt_key

MIB = 2**20
VOCABULARY = "0123456789abcdef" * 2
PREAMBLE = f"""
import itertools, os, sys
import numpy as np
from nemo_specrl.cache import RolloutStore
from nemo_specrl.errors import CacheError
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import MIB, contents, open_store
VOCABULARY = "{VOCABULARY}"
"""
"""The first lines of a script of :func:`run_python`."""


def open_store(path, max_bytes=16 * MIB, vocabulary=VOCABULARY, **options):
    return RolloutStore(path, max_bytes=max_bytes, vocabulary=vocabulary, **options)


def data_file(path, vocabulary=VOCABULARY):
    """The file of the store in a cache's folder."""
    return Path(path) / vocabulary / DATA_FILE


def contents(store, prompts):
    """The responses that a store has to prompts, by number; oldest first."""
    found = store.get([prompt_key([p]) for p in prompts])
    return {p: found[prompt_key([p])] for p in prompts if prompt_key([p]) in found}


def bytes_on_disk(folder):
    """Bytes of all files below a folder; some may come and go meanwhile."""
    total = 0
    for file in Path(folder).rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@contextlib.contextmanager
def changing(path):
    """The database of a store, to be changed as another program would."""
    with contextlib.closing(sqlite3.connect(data_file(path), isolation_level=None)) as database:
        yield database


def moved_aside(path, vocabulary=VOCABULARY):
    """Names of the files of stores that were moved aside."""
    names = (file.name for file in (Path(path) / vocabulary).glob(f"{DATA_FILE}.*"))
    return sorted(name for name in names if not name.endswith(("-wal", "-shm")))


def run_python(script, *args, before=(), **options):
    """A Python process of its own that can import the package; ``before`` it, who starts it."""
    root = str(Path(nemo_specrl.__file__).parents[1])
    return subprocess.Popen(
        [*before, sys.executable, "-c", script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": root},
        text=True,
        **options,
    )


def assert_one_line(error, *parts):
    assert "\n" not in str(error) and all(str(part) in str(error) for part in parts), str(error)

"""The stores that tests open, their contents, and processes of their own that use them."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import nemo_specrl
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.snapshot import read_manifest
from nemo_specrl.cache.storage.schema import DATA_FILE
from nemo_specrl.rollout import prompt_key

MIB = 2**20
PREAMBLE = """
import itertools, sys
import numpy as np
from nemo_specrl.cache import RolloutStore
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
"""
"""The first lines of a script of :func:`run_python`."""


def open_store(path, max_bytes=16 * MIB, tokenizer_id="tok", **options):
    return RolloutStore(path, max_bytes=max_bytes, tokenizer_id=tokenizer_id, **options)


def contents(store, prompts):
    """The rollouts that a store has of prompts, by number."""
    found = store.get([prompt_key([p]) for p in prompts])
    return {p: found[prompt_key([p])] for p in prompts if prompt_key([p]) in found}


def bytes_on_disk(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*"))


@contextlib.contextmanager
def changing(folder):
    """The database of a store that is not open, to be changed."""
    with contextlib.closing(sqlite3.connect(folder / DATA_FILE, isolation_level=None)) as database:
        yield database


def damaged_folders(path):
    return sorted(Path(path).parent.glob(f"{Path(path).name}.damaged-*"))


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


def snapshot_of(tmp_path, rollouts, max_bytes=16 * MIB):
    with open_store(tmp_path / "source", max_bytes) as store:
        store.put(rollouts)
        store.snapshot(tmp_path / "snapshot")
    return tmp_path / "snapshot"


def restore(snapshot, path, max_bytes=16 * MIB):
    """Make ``path`` a store with the rollouts of a snapshot; returns what is said of damage."""
    tokenizer_id = read_manifest(snapshot).tokenizer_id
    with open_store(path, max_bytes, tokenizer_id) as store:
        return store.restore(snapshot)[1]

"""The folder of a rollout store: who may open it, and disks that are full."""

import contextlib
import json
import os
import pickle
import sqlite3
import subprocess
from pathlib import Path

import pytest
import xxhash

from nemo_specrl.cache.export import write_export
from nemo_specrl.cache.run_folders import begin_empty
from nemo_specrl.errors import ForeignStore, StoreInUse
from nemo_specrl.errors import StoreUnavailable as Unavailable
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    assert_one_line,
    changing,
    contents,
    damaged_folders,
    open_store,
    restore,
    run_python,
)


def test_another_tokenizer_is_refused_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a"
    with open_store(path, tokenizer_id="qwen3") as store:
        store.put([rollout(1)])
    with pytest.raises(ForeignStore) as caught:
        open_store(path, tokenizer_id="llama")
    for part in ("'qwen3'", "'llama'", str(path), "delete"):
        assert part in str(caught.value)
    with open_store(path, tokenizer_id="qwen3") as store:
        assert contents(store, [1]) == {1: [rollout(1)]}


@pytest.mark.parametrize(("made", "whose"), [(3, "an older"), (5, "a newer")])
def test_the_format_of_another_release_is_refused(tmp_path, made, whose):
    path = tmp_path / "a"
    open_store(path).close()
    identity = json.dumps({"format": made, "anything": "else"}).encode()
    value = identity + xxhash.xxh3_64_digest(identity)
    with changing(path) as database:
        database.execute("UPDATE meta SET value = ? WHERE name = 'identity'", (value,))
    with pytest.raises(ForeignStore, match=rf"{whose} release \(format {made}"):
        open_store(path)


def test_a_newer_release_may_have_other_tables(tmp_path):
    path = tmp_path / "a"
    open_store(path).close()
    with changing(path) as database:
        database.execute("ALTER TABLE rollouts ADD COLUMN more")
        database.execute("PRAGMA user_version = 5")
    with pytest.raises(ForeignStore, match=r"a newer release \(format 5"):
        open_store(path)
    assert not damaged_folders(path)


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    with changing(path) as database:
        database.execute("CREATE TABLE meta (of_somebody, other)")
    before = (path / "rollouts.sqlite").read_bytes()
    with pytest.raises(Unavailable, match="no rollout store"):
        open_store(path)
    assert (path / "rollouts.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER UPDATE ON meta BEGIN DELETE FROM rollouts; END",
        "CREATE VIEW v AS SELECT 1",
        "DROP INDEX rollouts_by_prompt",
    ],
)
def test_a_database_that_would_do_something_else_is_not_used(tmp_path, statement):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put([rollout(1)])
    with changing(path) as database:
        database.execute(statement)
    with open_store(path) as store:
        assert contents(store, [1]) == {}
    assert len(damaged_folders(path)) == 1


def test_another_program_can_look_at_a_store_and_not_at_one_in_use(tmp_path):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p) for p in range(5))
        store.sync()
        with (
            pytest.raises(sqlite3.OperationalError, match="locked"),
            contextlib.closing(sqlite3.connect(path / "rollouts.sqlite", timeout=0)) as database,
        ):
            database.execute("SELECT count(*) FROM rollouts")
    with contextlib.closing(sqlite3.connect(path / "rollouts.sqlite")) as database:
        with pytest.raises(StoreInUse, match="open in another program"), database:
            database.execute("BEGIN IMMEDIATE")
            open_store(path)
        assert database.execute(
            "SELECT count(*), sum(length(record)) > 0 FROM rollouts"
        ).fetchone() == (5, 1)


def test_a_store_is_open_once_in_a_process(tmp_path):
    with open_store(tmp_path / "a"):
        (tmp_path / "link").symlink_to(tmp_path / "a")
        for path in (tmp_path / "a", tmp_path / "link"):
            with pytest.raises(Unavailable, match=f"in this process, pid {os.getpid()}"):
                open_store(path)
    open_store(tmp_path / "a").close()


def test_a_store_is_open_in_one_process(tmp_path):
    script = """
import sys
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.codec import STEP
store = RolloutStore(sys.argv[1], max_bytes=2**20, tokenizer_id="tok")
print("open", flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with run_python(script, tmp_path / "a", stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(Unavailable, match=f"in another process, pid {process.pid};"):
            open_store(tmp_path / "a")
        with pytest.raises(Unavailable, match=f"pid {process.pid}"):
            begin_empty(tmp_path / "a", "tok", warm=False)
        process.stdin.close()
    open_store(tmp_path / "a").close()


def test_a_forked_child_cannot_use_or_unlock_the_store_of_its_parent(tmp_path):
    with open_store(tmp_path / "a") as store:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Unavailable):
                store.put([rollout(1)])
                os._exit(1)
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(Unavailable, match="pid"):
            open_store(tmp_path / "a")
        store.put([rollout(2)])


def test_a_closed_store_says_so(tmp_path):
    store = open_store(tmp_path / "a")
    store.put([rollout(1)])
    store.close()
    store.close()
    for call in (
        lambda: store.put([]),
        lambda: store.get([]),
        store.sync,
        store.stats,
        lambda: len(store),
        lambda: store.snapshot(tmp_path / "b"),
    ):
        with pytest.raises(Unavailable, match="closed"):
            call()


def test_folders_that_cannot_be_are_refused_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    for path, reason in (
        (file, "it is a file"),
        (file / "below", "Not a directory"),
        (Path("/proc/nemo_specrl"), "cannot open"),
    ):
        with pytest.raises(Unavailable) as caught:
            open_store(path)
        assert_one_line(caught.value, path, reason)
    assert file.read_text() == "not a folder"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system is not permitted here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_at_creation(small_disk):
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(2 * MIB))
    with pytest.raises(Unavailable) as caught:
        open_store(small_disk / "a")
    assert_one_line(caught.value, small_disk / "a", "No space left")


def test_a_disk_that_fills_up_later_costs_no_reads_and_no_data(small_disk):
    filler = small_disk / "filler"
    with open_store(small_disk / "a") as store:
        store.put([rollout(1, n=9000)])
        store.sync()
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2 * MIB))
        store.put([rollout(2, n=9000)])
        with pytest.raises(Unavailable) as caught:
            store.sync()
        assert_one_line(caught.value, small_disk / "a", "No space left")
        with pytest.raises(Unavailable):
            store.put(rollout(p, n=9000) for p in range(10, 100))
        with pytest.raises(Unavailable):
            store.snapshot(small_disk / "snapshot")
        both = {1: [rollout(1, n=9000)], 2: [rollout(2, n=9000)]}
        assert contents(store, [1, 2]) == both
        filler.unlink()
        store.sync()
        assert contents(store, [1, 2]) == both
    with open_store(small_disk / "a") as store:
        assert contents(store, [1, 2]) == both


def test_what_holds_rollouts_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        store = JournaledStore(
            *(tmp_path / "store", tmp_path / "journal"),
            **{"run": "a", "max_bytes": 4 * MIB, "tokenizer_id": "tok"},
        )
        store.put([rollout(1)])
        store.sync()
        store.snapshot(tmp_path / "step_1" / "rollout_cache", 1)
        store.close()
        restore(tmp_path / "step_1" / "rollout_cache", tmp_path / "restored")
        write_export(tmp_path / "export", [rollout(1)], "tok")
        (tmp_path / "store" / "rollouts.sqlite").write_bytes(b"damaged" * 1000)
        open_store(tmp_path / "store").close()
    finally:
        os.umask(before)
    folders = (
        "store",
        "journal/0",
        "journal/1",
        "step_1/rollout_cache",
        "restored",
        "export",
    )
    for folder in (*folders, "store.damaged-1"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700, folder
        files = [f for f in (tmp_path / folder).iterdir() if f.is_file()]
        assert files
        for found in files:
            assert found.stat().st_mode & 0o777 == 0o600, found


def test_a_store_in_use_says_by_whom_in_another_process_too(tmp_path):
    with open_store(tmp_path / "a"), pytest.raises(StoreInUse) as caught:
        open_store(tmp_path / "a")
    sent = pickle.loads(pickle.dumps(caught.value))  # as Ray sends it
    assert (str(sent), sent.pid) == (str(caught.value), os.getpid())

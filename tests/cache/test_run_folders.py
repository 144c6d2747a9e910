"""The folders of runs under ``spec_rl.cache.dir``: how they begin, and which are removed."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from nemo_specrl.cache.metrics import file_system, store_metrics
from nemo_specrl.cache.run_folders import (
    UNUSED_DAYS,
    WARM_START,
    begin_empty,
    prepare,
    remarks,
    remove_unused,
    run_folder,
)
from nemo_specrl.errors import StoreInUse
from tests.support.rollouts import rollout
from tests.support.stores import MIB, contents, open_store


def test_each_run_has_a_folder_of_its_own_and_finds_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = run_folder(tmp_path, tmp_path / "results" / "one")
    assert one.parent == tmp_path
    assert one == run_folder(tmp_path, tmp_path.relative_to(tmp_path) / "results" / "one")
    assert one != run_folder(tmp_path, tmp_path / "results" / "two")


def test_a_run_that_begins_begins_empty_and_says_what_it_removed(tmp_path, caplog):
    folder = run_folder(tmp_path, tmp_path / "run")
    prepare(folder, "tok", MIB, fresh=True)
    assert caplog.messages == []
    with open_store(folder, max_bytes=MIB) as store:
        store.put([rollout(1)])
    with open_store(folder, max_bytes=MIB) as store:
        with pytest.raises(StoreInUse):
            begin_empty(folder, "tok", warm=True)
        assert contents(store, [1]) == {1: [rollout(1)]}
    assert caplog.messages == []
    prepare(folder, "tok", MIB, fresh=True)
    [line] = caplog.messages
    assert f"removed {folder / 'rollouts.sqlite'}" in line and "starts from the beginning" in line
    with open_store(folder, tokenizer_id="another", max_bytes=MIB) as store:
        assert contents(store, [1]) == {}


def test_a_warm_start_is_copied_and_is_there_for_the_next_run(tmp_path):
    with open_store(tmp_path / WARM_START) as store:
        store.put([rollout(p) for p in range(5)])
    before = (tmp_path / WARM_START / "rollouts.sqlite").read_bytes()
    for name in ("one", "two"):
        folder = run_folder(tmp_path, tmp_path / name)
        [line] = begin_empty(folder, "tok", warm=True)
        assert line.startswith(f"begins with the rollouts of {tmp_path / WARM_START}, 0.0")
        with open_store(folder) as store:
            assert contents(store, range(6)) == {p: [rollout(p)] for p in range(5)}
            store.put([rollout(0, version=3)])
    assert (tmp_path / WARM_START / "rollouts.sqlite").read_bytes() == before
    with open_store(run_folder(tmp_path, tmp_path / "one"), max_bytes=MIB) as store:
        assert len(contents(store, range(6))) == 5  # a lower cap


def test_a_warm_start_that_cannot_be_used_is_left_out_and_named(tmp_path):
    with open_store(tmp_path / WARM_START) as store:
        store.put([rollout(1)])
        folder = run_folder(tmp_path, tmp_path / "run")
        [line] = begin_empty(folder, "tok", warm=True)
        assert f"is open in process {os.getpid()}" in line and "begins without it" in line
    [line] = begin_empty(folder, "llama", warm=True)
    assert "is of tokenizer 'tok', not of 'llama': the run begins without it" in line
    data = tmp_path / WARM_START / "rollouts.sqlite"
    data.write_bytes(b"\xa5" * 50_000)
    [line] = begin_empty(folder, "tok", warm=True)
    assert str(data.parent) in line and "begins without it" in line
    with open_store(folder) as store:
        assert contents(store, [1]) == {}


def test_what_nobody_has_used_for_long_is_removed_and_nothing_else(tmp_path):
    old = time.time() - (UNUSED_DAYS + 1) * 86400

    def made(name, at, tokenizer_id="tok"):
        open_store(tmp_path / name, tokenizer_id=tokenizer_id).close()
        for file in (tmp_path / name).iterdir():
            os.utime(file, (at, at))
        return tmp_path / name

    own = made("0" * 16, old)
    gone = made("a" * 16, old), made("b" * 16 + "-1", old, "another")
    damaged = tmp_path / ("a" * 16 + ".damaged-1")
    damaged.mkdir()
    (damaged / "rollouts.sqlite").write_bytes(b"")
    os.utime(damaged / "rollouts.sqlite", (old, old))
    recent, used = made("c" * 16, time.time()), made("d" * 16, old)
    others = made(WARM_START, old), made("results", old)
    (tmp_path / ("e" * 16)).mkdir()  # with no store in it
    (tmp_path / ("f" * 16)).symlink_to(others[1])
    with open_store(used):
        os.utime(used / "lock", (old, old))
        os.utime(used / "rollouts.sqlite", (old, old))
        lines = remove_unused(own)
    assert lines == [
        f"removed {folder}: no run has used it for {UNUSED_DAYS} days"
        for folder in sorted([*gone, damaged])
    ]
    kept = [own, recent, used, *others, tmp_path / ("e" * 16), tmp_path / ("f" * 16)]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert remove_unused(tmp_path / "rollout_cache") == []  # of a run that has it to itself


def test_a_store_in_memory_is_noticed(tmp_path):
    shared = Path("/dev/shm")
    if not shared.is_mount():
        pytest.skip(f"{shared} is no file system of its own here")
    in_memory, too_small = remarks(shared, 2**60)
    assert in_memory.startswith("/dev/shm is in memory (/dev/shm is a tmpfs): up to ")
    assert too_small.startswith("cache.max_bytes_per_node is 1073741824.0 GiB, and the file system")
    assert remarks(Path("/proc"), 0) == []
    with tempfile.TemporaryDirectory(dir=shared) as folder, open_store(folder) as store:
        store.put([rollout(1)])
        metrics = store_metrics([store.stats()])
    assert metrics["spec_rl/cache_memory_bytes"] == metrics["spec_rl/cache_bytes"] > 0
    with open_store(tmp_path / "on a disk") as store:
        assert store.stats().in_memory is (file_system(tmp_path)[1] == "tmpfs")

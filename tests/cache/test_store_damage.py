"""A rollout store whose records, or whole file, are damaged."""

import logging
import os
import random
import struct
import subprocess

import lmdb
import pytest

from nemo_specrl.cache import RolloutStore
from nemo_specrl.errors import CacheError
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    contents,
    damaged_folders,
    open_store,
    run_python,
    snapshot_of,
)


def raw(path):
    """The store's file as LMDB sees it, and its table of rollouts."""
    env = lmdb.open(str(path), map_size=16 * MIB, max_dbs=3, lock=False)
    return env, env.open_db(b"rollouts")


def test_a_corrupt_record_is_skipped_counted_logged_once_and_deleted(tmp_path, caplog):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(1, sample_index=sample_index) for sample_index in range(3))
        store.put([rollout(2)])
    env, table = raw(path)
    with env, env.begin(write=True) as txn:
        for prompt, sample_index in ((1, b"\0\1"), (2, b"\0\0")):
            with txn.cursor(table) as cursor:
                cursor.set_range(prompt_key([prompt]) + sample_index)
                name, value = cursor.item()
            txn.put(name, value[:9] + bytes([value[9] ^ 1]) + value[10:], db=table)
    with caplog.at_level(logging.WARNING), open_store(path) as store:
        for _ in range(2):
            assert contents(store, [1, 2]) == {
                1: [rollout(1, sample_index=0), rollout(1, sample_index=2)]
            }
            assert store.stats().corrupt_records == 2
        assert len([r for r in caplog.records if "checksum" in r.getMessage()]) == 1
        store.sync()
        stats = store.stats()
        assert (stats.prompts, stats.rollouts) == (1, 2)
        store.put([rollout(2, 7), rollout(1, 7, sample_index=1)])
        store.sync()
        assert contents(store, [2]) == {2: [rollout(2, 7)]}
    with open_store(path) as store:
        assert len(store) == 4
        assert len(contents(store, [1])[1]) == 3
        assert store.stats().corrupt_records == 0


def test_the_older_rollout_serves_where_the_newest_is_corrupt(tmp_path):
    path = tmp_path / "a"
    with open_store(path, groups_per_prompt=2) as store:
        store.put([rollout(1, 0), rollout(1, 1)])
    env, table = raw(path)
    with env, env.begin(write=True) as txn:
        with txn.cursor(table) as cursor:
            cursor.set_range(prompt_key([1]) + b"\0")
            name = cursor.key()
        txn.put(name, b"", db=table)
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1, 0)]}
        store.sync()
        assert contents(store, [1]) == {1: [rollout(1, 0)]}


def cut(size):
    return lambda data: data[: int(size * len(data)) if isinstance(size, float) else size]


DAMAGES = {
    "1 byte": cut(1),
    "100 bytes": cut(100),
    "within the first page": cut(4095),
    "one page": cut(4096),
    "within the second page": cut(8191),
    "two pages": cut(8192),
    "three pages": cut(12288),
    "a third": cut(0.33),
    "all but the last page": cut(-4096),
    "all but the last byte": cut(-1),
    "garbage": lambda data: random.Random(0).randbytes(len(data)),
    "garbage after the first page": lambda data: data[:4096] + b"\xa5" * (len(data) - 4096),
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"this is no database\n" * 1000,
    "no identity": lambda data: data.replace(b'{"format"', b'{"farmot"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_moved_aside_and_the_store_is_cold(tmp_path, caplog, damage):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, n=500) for p in range(50))
    data = damage((path / "data.mdb").read_bytes())
    (path / "data.mdb").write_bytes(data)
    (tmp_path / "a.damaged-1").mkdir()
    with caplog.at_level(logging.WARNING), open_store(path) as store:
        assert contents(store, range(50)) == {}
        assert len(store) == 0
        store.put([rollout(1)])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(tmp_path / "a.damaged-2") in caplog.text
    assert (tmp_path / "a.damaged-2" / "data.mdb").read_bytes() == data
    with open_store(path) as store:
        assert contents(store, range(50)) == {1: [rollout(1)]}


def test_an_empty_file_is_a_new_store(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "data.mdb").touch()
    with open_store(path) as store:
        store.put([rollout(1)])
    assert not damaged_folders(path)


def test_damage_found_later_raises_once_and_the_store_goes_on_cold(tmp_path, caplog):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, n=2000) for p in range(50))
        store.sync()
        # Page headers say what a page is; LMDB notices when it comes upon one that is not.
        data = bytearray((path / "data.mdb").read_bytes())
        for start in range(8192, len(data), 4096):
            data[start : start + 16] = b"\xa5" * 16
        with open(path / "data.mdb", "r+b") as file:
            file.write(data)
        with pytest.raises(CacheError, match="damaged"):
            contents(store, range(50))
        assert contents(store, range(50)) == {}
        store.put([rollout(1)])
        store.sync()
        assert contents(store, range(50)) == {1: [rollout(1)]}
    assert len(damaged_folders(path)) == 1
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1)]}


def test_damage_that_kills_a_process_kills_the_next_one_no_more(tmp_path):
    if struct.calcsize("P") != 8 or os.sysconf("SC_PAGE_SIZE") != 4096:
        pytest.skip(
            "the page to be damaged is looked for as 64-bit LMDB with 4 KiB pages writes it"
        )
    path = tmp_path / "a"
    RolloutStore.restore(
        snapshot_of(tmp_path, [rollout(p, n=2000) for p in range(200)]), path
    )  # which has no stale pages
    data = bytearray((path / "data.mdb").read_bytes())
    keys = sorted(prompt_key([p]) for p in range(200))
    leaf = next(
        page
        for page in range(2, len(data) // 4096)
        if data[page * 4096 + 10] == 2 and data.find(keys[100], page * 4096, page * 4096 + 4096) > 0
    )
    data[leaf * 4096 : leaf * 4096 + 4096] = bytes(4096)
    (path / "data.mdb").write_bytes(data)
    reader = "import sys, lmdb; e = lmdb.open(sys.argv[1], max_dbs=3, lock=False)\n" + (
        "with e.begin(e.open_db(b'rollouts')) as t: list(t.cursor())"
    )
    with run_python(reader, path, stderr=subprocess.DEVNULL) as process:
        if process.wait() >= 0:
            pytest.skip("this LMDB reads on where a page is blank")
    (path / "lock").write_text("1\n")  # as a process leaves it that died
    with open_store(path) as store:
        assert contents(store, range(200)) == {}
        store.put([rollout(1)])
    assert len(damaged_folders(path)) == 1

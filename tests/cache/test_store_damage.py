"""A rollout store whose records, or whole file, are damaged."""

import contextlib
import logging
import random
import resource

import pytest

from nemo_specrl.cache.storage.tables import PAGE_CACHE_KIB
from nemo_specrl.errors import CacheError
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    changing,
    contents,
    damaged_folders,
    open_store,
)


def test_a_corrupt_record_is_skipped_counted_logged_once_and_deleted(tmp_path, caplog):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(1, sample_index=sample_index) for sample_index in range(3))
        store.put([rollout(2)])
    with changing(path) as database:
        for place in ((prompt_key([1]), 1), (prompt_key([2]), 0)):
            at = " FROM rollouts WHERE prompt = ? AND sample_index = ?"
            ((value,),) = database.execute(f"SELECT record{at}", place)
            value = value[:9] + bytes([value[9] ^ 1]) + value[10:]
            database.execute(f"UPDATE rollouts SET record = ?{at[14:]}", (value, *place))
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
    with changing(path) as database:
        newest = "SELECT max(clock) FROM rollouts"
        database.execute(f"UPDATE rollouts SET record = x'' WHERE clock = ({newest})")
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1, 0)]}
        store.sync()
        assert contents(store, [1]) == {1: [rollout(1, 0)]}


def test_a_scan_reads_no_further_than_it_is_followed(tmp_path):
    """What it reads, it finds damaged, and counts."""
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, sample_index=s) for p in range(20) for s in range(2))
        keys = list(store.keys(b""))
        assert keys == sorted(prompt_key([p]) for p in range(20))
        oldest = [r.key for r in store.by_use()][:2]
    with changing(path) as database:
        sound = keys[:2] + oldest
        marks = ", ".join("?" * len(sound))
        database.execute(f"UPDATE rollouts SET record = x'' WHERE prompt NOT IN ({marks})", sound)
    with open_store(path) as store:
        scan, by_use = store.scan(b""), store.by_use()
        assert [next(scan).key for _ in range(4)] == [key for key in keys[:2] for _ in range(2)]
        assert [next(by_use).key for _ in range(2)] == oldest
        assert list(store.keys(b"")) == keys
        assert store.stats().corrupt_records == 0
        list(scan)
        assert store.stats().corrupt_records >= 32


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
    data = damage((path / "rollouts.sqlite").read_bytes())
    (path / "rollouts.sqlite").write_bytes(data)
    (tmp_path / "a.damaged-1").mkdir()
    with caplog.at_level(logging.WARNING), open_store(path) as store:
        assert contents(store, range(50)) == {}
        assert len(store) == 0
        store.put([rollout(1)])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(tmp_path / "a.damaged-2") in caplog.text
    assert (tmp_path / "a.damaged-2" / "rollouts.sqlite").read_bytes() == data
    with open_store(path) as store:
        assert contents(store, range(50)) == {1: [rollout(1)]}


def test_an_empty_file_is_a_new_store(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "rollouts.sqlite").touch()
    with open_store(path) as store:
        store.put([rollout(1)])
    assert not damaged_folders(path)


def test_damage_found_later_raises_once_and_the_store_goes_on_cold(tmp_path, caplog):
    path = tmp_path / "a"
    with open_store(path) as store:  # of more than the pages that SQLite keeps in memory
        store.put(rollout(p, n=2000) for p in range(1000))
        store.sync()
        # Page headers say what a page is; SQLite notices when it comes upon one that is not.
        data = bytearray((path / "rollouts.sqlite").read_bytes())
        assert len(data) > 1.2 * 1024 * PAGE_CACHE_KIB
        for start in range(8192, len(data), 4096):
            data[start : start + 16] = b"\xa5" * 16
        with open(path / "rollouts.sqlite", "r+b") as file:
            file.write(data)
        with pytest.raises(CacheError, match="damaged"):
            contents(store, range(1000))
        assert contents(store, range(1000)) == {}
        assert store.restarts == 1
        store.put([rollout(1)])
        store.sync()
        assert contents(store, range(50)) == {1: [rollout(1)]}
    assert len(damaged_folders(path)) == 1
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1)]}


def test_damage_found_when_the_file_is_opened_anew_counts_as_a_restart(tmp_path):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put([rollout(1)])
        store.sync()
        contents(store, [1])  # a use, which the next commit is to write
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(CacheError):
                store.sync()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.restarts == 0
        (path / "rollouts.sqlite").write_bytes(b"this is no database\n" * 1000)
        assert contents(store, [1]) == {}
        assert store.restarts == 1 and len(damaged_folders(path)) == 1
        store.clear()
        assert store.restarts == 2


@pytest.mark.parametrize("died", [False, True])
def test_the_pages_are_checked_after_a_crash(tmp_path, died):
    """What is damaged lies where nothing is looked up; after a crash it is found all the same."""
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, n=2000) for p in range(200))
    data = bytearray((path / "rollouts.sqlite").read_bytes())
    begun = data.index(rollout(150, n=2000).tokens.astype("<u2").tobytes()[1000:1100])
    following = (begun // 4096 + 1) * 4096  # a page of the same record
    data[following : following + 4] = bytes(4)  # where it goes on
    (path / "rollouts.sqlite").write_bytes(data)
    (path / "lock").write_text("1\n" if died else "")  # as a process leaves it
    with open_store(path) as store:
        assert len(contents(store, range(3))) == (0 if died else 3)
        store.put([rollout(1, 1)])
    assert len(damaged_folders(path)) == died


@pytest.mark.parametrize("column", ["prompt", "sample_index", "clock"])
def test_a_row_under_another_key_is_never_served(tmp_path, column):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, sample_index=p) for p in range(20))
    new = {"sample_index": "19 - sample_index", "clock": "clock + 1000"}.get(column)
    with changing(path) as database:
        if column == "prompt":
            new = "(SELECT key FROM prompts WHERE key <> prompt ORDER BY key LIMIT 1)"
        database.execute(f"UPDATE rollouts SET {column} = {new}")
    with open_store(path) as store:
        for _ in range(2):
            with contextlib.suppress(CacheError):
                assert contents(store, range(20)) == {}
        with contextlib.suppress(CacheError):
            store.put([rollout(1)])
            store.sync()
        assert contents(store, range(20)) == {1: [rollout(1)]}

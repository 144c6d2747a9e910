"""What a store keeps, finds and hands out."""

import contextlib
import logging
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from nemo_specrl.cache.database import DATA_FILE, FORMAT
from nemo_specrl.errors import ConfigError, StoreUnavailable
from nemo_specrl.rollout import Finish, prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    PREAMBLE,
    VOCABULARY,
    changing,
    contents,
    data_file,
    moved_aside,
    open_store,
    run_python,
)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as opened:
        yield opened


def test_what_is_put_is_found_oldest_first(store):
    first = [rollout(p, index=i) for i in range(3) for p in range(4)]
    later = [rollout(p, 1, finish=Finish.PARTIAL, scored=False) for p in range(3)]
    assert store.put(first) == 12 and store.put(later) == 3
    found = contents(store, range(6))
    for p in range(4):
        assert found[p] == [r for r in [*first, *later] if r.key == prompt_key([p])]
    assert sorted(found) == [0, 1, 2, 3]
    assert store.get([prompt_key([1])], most=2) == {prompt_key([1]): found[1][-2:]}
    assert store.get([]) == {} and store.put([]) == 0
    known = {r.identity for r in found[1][:2]} | {found[0][0].identity, 2**63 - 1}
    one = store.get([prompt_key([1])], known=known)[prompt_key([1])]
    assert [r.identity for r in one] == [r.identity for r in found[1]]
    assert [len(r) for r in one[:2]] == [0, 0] and one[2:] == found[1][2:]
    stats = store.stats()
    assert (stats.prompts, stats.responses, stats.evicted, stats.damaged) == (4, 15, 0, 0)
    assert 0 < stats.bytes_on_disk <= stats.max_bytes == 16 * MIB


def test_a_response_of_the_same_identity_is_replaced(store):
    first, second = rollout(1), rollout(1, index=1)
    store.put([first, second])
    grown = rollout(1, 3, n=50, identity=first.identity)
    other = rollout(2, identity=first.identity)
    store.put([grown, other])
    assert contents(store, [1, 2]) == {1: [second, grown], 2: [other]}
    again = rollout(1, 4, n=60, identity=first.identity)
    store.put([rollout(1, 4, n=70, identity=first.identity), again])  # in one put, the last one
    assert contents(store, [1]) == {1: [second, again]}
    assert store.stats().responses == 3


def test_the_newest_responses_of_a_prompt_are_kept(tmp_path):
    with open_store(tmp_path, responses_per_prompt=3) as store:
        all_of_them = [rollout(1, v, i) for v in range(4) for i in range(2)]
        for start in range(0, 8, 2):
            store.put(all_of_them[start : start + 2])
            assert contents(store, [1])[1] == all_of_them[max(0, start - 1) : start + 2]
        many = [rollout(1, 9, i) for i in range(8)]
        assert store.put(many) == 3
        assert contents(store, [1])[1] == many[-3:]
        assert store.stats().responses == 3
    with open_store(tmp_path, responses_per_prompt=2) as store:
        assert contents(store, [1])[1] == many[-2:]


def test_all_is_there_when_it_is_opened_again(tmp_path):
    with open_store(tmp_path) as store:
        store.put([rollout(p) for p in range(9)])
    with open_store(tmp_path) as store:
        assert contents(store, range(9)) == {p: [rollout(p)] for p in range(9)}
        assert store.stats().responses == 9


def test_many_stores_of_one_file_see_each_others_puts(tmp_path):
    stores = [open_store(tmp_path) for _ in range(3)]
    for version, store in enumerate(stores):
        store.put([rollout(1, version)])
        for other in stores:
            assert len(contents(other, [1])[1]) == version + 1
    script = f"""{PREAMBLE}
with open_store(sys.argv[1]) as store:
    assert len(contents(store, [1])[1]) == 3
    store.put([rollout(1, 9)])
"""
    with run_python(script, tmp_path) as process:
        assert process.wait() == 0
    assert contents(stores[0], [1])[1][-1] == rollout(1, 9)
    for store in stores:
        store.close()
        store.close()
        with pytest.raises(StoreUnavailable, match="is closed"):
            store.get([prompt_key([1])])
        with pytest.raises(StoreUnavailable, match="is closed"):
            store.put([rollout(1)])


def test_threads_read_and_write_at_once(store):
    failures = []

    def work(number):
        try:
            for i in range(40):
                store.put([rollout(number, i)])
                assert contents(store, [number])[number][-1] == rollout(number, i)
                assert len(contents(store, range(4)).get(number)) == i + 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.stats().responses == 160


def test_drafts_are_each_given_once_for_a_version(tmp_path):
    old = [rollout(1, 4, i) for i in range(2)]
    last = [rollout(1, 5, i, finish=Finish(1 + i % 4)) for i in range(5)]
    key = prompt_key([1])
    with open_store(tmp_path) as store, open_store(tmp_path) as other:
        store.put([*old, *last, rollout(1, 5, 9, scored=False), rollout(2, 5, scored=False)])
        store.put([rollout(1, 6)])  # a sibling of this step
        assert store.take_drafts(key, 6, 2) == last[:2]
        assert other.take_drafts(key, 6, 2) == last[2:4]
        assert store.take_drafts(key, 6, 2) == last[4:]
        assert store.take_drafts(key, 6, 2) == []
        assert store.take_drafts(key, 7, 2) == [rollout(1, 6)]
        late = rollout(1, 6, 1)
        other.put([late])
        assert store.take_drafts_of({key: 8, prompt_key([2]): 8, prompt_key([3]): 8}, 7) == {
            key: [late],
            prompt_key([2]): [],
        }
        assert store.take_drafts(key, 5, 9) == [rollout(1, 6), late]  # of the newest put


def test_drafts_taken_by_processes_at_once_are_all_different(tmp_path):
    with open_store(tmp_path) as store:
        store.put([rollout(1, 0, i) for i in range(60)])
    script = f"""{PREAMBLE}
with open_store(sys.argv[1]) as store:
    for _ in range(30):
        print(*(r.identity for r in store.take_drafts(prompt_key([1]), 1, 1)))
"""
    processes = [run_python(script, tmp_path, stdout=-1) for _ in range(3)]
    taken = " ".join(process.communicate()[0] for process in processes).split()
    assert sorted(taken) == sorted(str(rollout(1, 0, i).identity) for i in range(60))


def test_another_vocabulary_is_another_store_and_another_path_is_not(tmp_path, monkeypatch):
    other = "f" * 32
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with open_store("cache") as store, open_store("cache", vocabulary=other) as foreign:
        store.put([rollout(1)])
        assert contents(foreign, [1]) == {}
        foreign.put([rollout(2)])
        monkeypatch.chdir(tmp_path)  # it stays where it was
        assert contents(store, [1, 2]) == {1: [rollout(1)]}
        store.sync()
    os.rename("work/cache", "moved")
    with open_store(tmp_path / "moved") as store:
        assert contents(store, [1]) == {1: [rollout(1)]}
    assert sorted(path.name for path in Path("moved").iterdir()) == sorted([VOCABULARY, other])


def test_only_its_owner_may_read_it(tmp_path):
    with open_store(tmp_path / "cache") as store:
        store.put([rollout(1)])
        for path in (tmp_path / "cache").rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_arguments_out_of_range_are_one_line(tmp_path):
    for options in ({"max_bytes": MIB - 1}, {"responses_per_prompt": 0}, {"vocabulary": "../a"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            open_store(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("statement", ["ANALYZE", "VACUUM", "REINDEX", "PRAGMA optimize"])
def test_what_other_programs_do_to_a_database_is_no_damage(tmp_path, statement):
    with open_store(tmp_path) as store:
        store.put([rollout(p, index=i) for p in range(50) for i in range(4)])
    with changing(tmp_path) as database:
        database.execute(statement)
    with open_store(tmp_path) as store:
        assert store.stats().responses == 200
        store.put([rollout(7, 1)])
        assert len(contents(store, [7])[7]) == 5
    assert not moved_aside(tmp_path)


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("PRAGMA user_version = 4", "format-4-1"),
        (f"PRAGMA user_version = {FORMAT + 1}", f"format-{FORMAT + 1}-1"),
        ("UPDATE meta SET value = 'another' WHERE name = 'vocabulary'", "foreign-1"),
        ("DROP INDEX rollouts_by_prompt", "damaged-1"),
        ("CREATE VIEW v AS SELECT 1", "damaged-1"),
        ("DELETE FROM meta", "damaged-1"),
        ("CREATE TRIGGER t AFTER UPDATE ON meta BEGIN DELETE FROM rollouts; END", "damaged-1"),
    ],
)
def test_a_file_that_is_none_of_this_store_is_moved_beside(tmp_path, caplog, statement, name):
    with open_store(tmp_path) as store:
        store.put([rollout(1)])
    with changing(tmp_path) as database:
        database.execute(statement)
    with caplog.at_level(logging.WARNING), open_store(tmp_path) as store:
        assert contents(store, [1]) == {}
        store.put([rollout(2)])
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and name in record.getMessage()
    assert moved_aside(tmp_path) == [f"{DATA_FILE}.{name}"]
    beside = data_file(tmp_path).with_name(f"{DATA_FILE}.{name}")
    with contextlib.closing(sqlite3.connect(beside)) as database:
        assert database.execute("SELECT count(*) FROM rollouts").fetchone() == (1,)
    with open_store(tmp_path) as store:
        assert contents(store, [2]) == {2: [rollout(2)]}


def test_a_process_that_forks_and_its_child_both_go_on(tmp_path):
    script = f"""{PREAMBLE}
store = open_store(sys.argv[1])
store.put([rollout(1)])
contents(store, [1])
child = os.fork()
for version in range(1, 30):
    store.put([rollout(2 if child else 3, version)])
    assert contents(store, [1]) == {{1: [rollout(1)]}}
if child == 0:
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.put([rollout(4)])
found = contents(store, range(5))
assert [len(found[p]) for p in (1, 2, 3, 4)] == [1, 29, 29, 1], found
store.close()
"""
    with run_python(script, tmp_path) as process:
        assert process.wait() == 0
    with open_store(tmp_path) as store:
        assert store.stats().responses == 60
        assert len(contents(store, [3])[3]) == 29

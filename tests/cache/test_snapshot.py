"""Copies of stores in checkpoints."""

import logging
import random
import threading

import pytest

from nemo_specrl.errors import CacheError, ForeignStore, StoreUnavailable
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import MIB, contents, open_store

PROMPTS = 40


@pytest.fixture
def source(tmp_path):
    with open_store(tmp_path / "source") as store:
        for version in range(3):
            store.put([rollout(p, version, n=100 + p) for p in range(PROMPTS)])
        yield store


def test_a_restored_store_has_what_the_copy_has(tmp_path, source):
    file = tmp_path / "step_3" / "rollout_cache" / "rollouts"
    assert source.snapshot(file) == 3 * PROMPTS
    source.put([rollout(0, 9)])
    assert source.snapshot(file) == 3 * PROMPTS + 1  # it replaces the one before
    assert [path.name for path in file.parent.iterdir()] == ["rollouts"]
    with open_store(tmp_path / "a") as store:
        assert store.restore(file) == 3 * PROMPTS + 1
        assert contents(store, range(PROMPTS)) == contents(source, range(PROMPTS))
        assert store.restore(file) == 0
        assert store.stats().responses == 3 * PROMPTS + 1


def test_what_is_there_is_newer_than_what_is_restored(tmp_path, source):
    source.snapshot(tmp_path / "copy")
    old = [rollout(1, v, n=101) for v in range(3)]
    with open_store(tmp_path / "a", responses_per_prompt=4) as store:
        mine = [rollout(1, 7), old[1], rollout(99)]
        store.put(mine)
        assert store.restore(tmp_path / "copy") == 3 * PROMPTS - 1
        assert contents(store, [1, 99]) == {1: [old[0], old[2], *mine[:2]], 99: [mine[2]]}
        store.put([rollout(1, 8)])
        assert contents(store, [1]) == {1: [old[2], *mine[:2], rollout(1, 8)]}


def test_restoring_evicts_nothing_and_keeps_the_latest(tmp_path):
    with open_store(tmp_path / "source") as source:
        source.put([rollout(p, n=2000) for p in range(300)])
        contents(source, [7])
        source.put([rollout(300)])
        source.snapshot(tmp_path / "copy")
    with open_store(tmp_path / "a", MIB) as store:
        store.put([rollout(1000, n=2000)])
        added = store.restore(tmp_path / "copy")
        stats = store.stats()
        assert 0 < added < 300 and stats.evicted == 0 and stats.responses == added + 1
        found = set(contents(store, [*range(301), 1000]))
        assert found == {1000, 300, 7, *range(302 - added, 300)}
        store.put([rollout(2000 + i, n=2000) for i in range(5)])  # what was restored goes first
        assert {1000, 2000, 2004} <= set(contents(store, [1000, *range(2000, 2005)]))


def test_a_copy_may_be_of_the_latest_prompts_alone(tmp_path, source):
    """Prompts that do not come any more are left out."""
    source.put([rollout(p, 5) for p in range(10)])
    assert source.snapshot(tmp_path / "copy", prompts=10) == 40
    with open_store(tmp_path / "a") as store:
        store.restore(tmp_path / "copy")
        assert sorted(contents(store, range(PROMPTS))) == list(range(10))


def test_it_is_written_while_others_write(tmp_path, source):
    """A copy has each response that was there all the time, and nothing wrong."""
    stop, failures = threading.Event(), []

    def work():
        try:
            version = 100
            with open_store(tmp_path / "source") as store:
                while not stop.is_set():
                    version += 1
                    store.put([rollout(version % PROMPTS, version)])
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        for i in range(5):
            source.snapshot(tmp_path / str(i))
    finally:
        stop.set()
        writer.join()
    assert not failures
    for i in range(5):
        with open_store(tmp_path / f"restored-{i}") as store:
            store.restore(tmp_path / str(i))
            for p, group in contents(store, range(PROMPTS)).items():
                assert group[:3] == [rollout(p, v, n=100 + p) for v in range(3)]
                assert all(r == rollout(p, r.policy_version) for r in group[3:])


def test_of_a_damaged_copy_what_is_sound_is_used(tmp_path, source, caplog):
    source.snapshot(tmp_path / "copy")
    data = (tmp_path / "copy").read_bytes()
    want = contents(source, range(PROMPTS))
    rng = random.Random(3)
    for i in range(30):
        damaged = bytearray(data)
        if i % 2:
            damaged[rng.randrange(100, len(data))] ^= 1 << rng.randrange(8)
        else:
            damaged = damaged[: rng.randrange(100, len(data))]
        (tmp_path / "damaged").write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_store(tmp_path / str(i)) as store:
            added = store.restore(tmp_path / "damaged")
            found = contents(store, range(PROMPTS))
        assert added == sum(map(len, found.values())) <= 3 * PROMPTS
        assert added < 3 * PROMPTS or i % 2  # a changed bit may be in the file's own checksum
        assert all(all(r in want[p] for r in group) for p, group in found.items())
        assert len(caplog.records) == 1 and "damaged" in caplog.text


def test_what_is_no_copy_is_one_line(tmp_path, source):
    source.snapshot(tmp_path / "copy")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"something else")
    (tmp_path / "head").write_bytes((tmp_path / "copy").read_bytes()[:30])
    with open_store(tmp_path / "a", vocabulary="f" * 32) as store:
        with pytest.raises(ForeignStore, match="is of the vocabulary"):
            store.restore(tmp_path / "copy")
        for name in ("empty", "other", "head", "missing"):
            with pytest.raises(StoreUnavailable) as caught:
                store.restore(tmp_path / name)
            assert name in str(caught.value) and "\n" not in str(caught.value)
        assert store.get([prompt_key([1])]) == {}
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "other" / "copy"):
        with pytest.raises(CacheError, match="cannot write the snapshot"):
            source.snapshot(target)

"""Snapshots of a rollout store, and stores restored from them."""

import os
import random

import pytest

from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.export import read_export, reset_provenance, write_export
from nemo_specrl.cache.snapshot import read_partition, write_partition
from nemo_specrl.errors import ConfigError
from nemo_specrl.errors import StoreUnavailable as Unavailable
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    assert_one_line,
    bytes_on_disk,
    contents,
    damaged_folders,
    open_store,
    snapshot_of,
)


def test_a_snapshot_is_the_store_as_it_was(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put(rollout(p, sample_index=s) for p in range(20) for s in range(2))
        then = contents(store, range(20))
        store.snapshot(tmp_path / "new" / "snapshot")
        store.put(rollout(p, 1) for p in range(10, 30))
        now = contents(store, range(30))
        RolloutStore.restore(tmp_path / "new" / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b") as copy:
            assert contents(copy, range(30)) == then
            assert len(copy) == 40
        store.snapshot(tmp_path / "new" / "snapshot")
        assert contents(store, range(30)) == now
        RolloutStore.restore(tmp_path / "new" / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b") as copy:
            assert contents(copy, range(30)) == now
    assert len(os.listdir(tmp_path / "new" / "snapshot")) == 1


def test_a_restored_store_evicts_as_the_original_does(tmp_path):
    def use(store):
        rng = random.Random(1)
        left = []
        for step in range(60):
            store.put([rollout(1000 + step, n=3000)])
            contents(store, [rng.randrange(100)])
            if step % 20 == 19:
                store.sync()
                left.append(store.stats())
        return left, contents(store, range(2000))

    with open_store(tmp_path / "a", MIB) as store:
        store.put(rollout(p, n=1500) for p in range(100))
        contents(store, [95, 70, 80])
        store.snapshot(tmp_path / "snapshot")
        RolloutStore.restore(tmp_path / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b", MIB) as copy:
            assert contents(copy, range(90, 100)) == contents(store, range(90, 100))
            (left, found), (copy_left, copy_found) = use(store), use(copy)
    assert copy_found == found
    for a, b in zip(left, copy_left, strict=True):
        assert (a.prompts, a.rollouts, a.bytes_used) == (b.prompts, b.rollouts, b.bytes_used)


def test_restoring_replaces_what_is_there_and_ignores_leftovers(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(1)])
    with open_store(tmp_path / "b") as store:
        store.put([rollout(2)])
    (tmp_path / "b" / "rollouts.sqlite.tmp").write_bytes(b"of a restore that died" * 100_000)
    with open_store(tmp_path / "b") as store:  # it died before the rename: the old store stands
        assert contents(store, [1, 2]) == {2: [rollout(2)]}
    assert not (tmp_path / "b" / "rollouts.sqlite.tmp").exists()
    (tmp_path / "b" / "rollouts.sqlite.tmp").write_bytes(b"of a restore that died" * 100_000)
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, [1, 2]) == {1: [rollout(1)]}
    assert sorted(os.listdir(tmp_path / "b")) == [
        "lock",
        "rollouts.sqlite",
        "rollouts.sqlite-journal",
    ]


def test_restoring_over_a_damaged_store_heals_it(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(1)])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rollouts.sqlite").write_bytes(b"\xa5" * 50_000)
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, [1]) == {1: [rollout(1)]}
    assert not damaged_folders(tmp_path / "b")


def test_restoring_under_a_lower_cap_keeps_the_latest_used(tmp_path):
    snapshot = snapshot_of(tmp_path, (rollout(p, n=3000) for p in range(200)))
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b", MIB) as store:
        left = sorted(contents(store, range(200)))
        assert len(left) > 20 and left == list(range(200 - len(left), 200))
    assert bytes_on_disk(tmp_path / "b") <= MIB


def test_a_missing_or_damaged_snapshot_is_refused_and_the_store_stays(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(p, n=300) for p in range(20)])
    with open_store(tmp_path / "b") as store:
        store.put([rollout(2)])
    with pytest.raises(Unavailable) as caught:
        RolloutStore.restore(tmp_path / "nowhere", tmp_path / "b")
    assert_one_line(caught.value, tmp_path / "nowhere", "No such file")
    (file,) = snapshot.iterdir()
    whole = file.read_bytes()
    for data in (b"", *(whole[:n] for n in (1, 100, 4096, len(whole) - 1)), b"\xa5" * len(whole)):
        file.write_bytes(data)
        with pytest.raises(Unavailable, match=r"is damaged|is empty"):
            RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, range(20)) == {2: [rollout(2)]}
    file.write_bytes(whole)
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert len(contents(store, range(20))) == 20


def test_a_flipped_bit_in_a_snapshot_is_refused_or_costs_rollouts_alone(tmp_path):
    """Pages are checked before, records when they are read: nothing wrong is ever served."""
    put = {p: [rollout(p, n=300)] for p in range(20)}
    snapshot = snapshot_of(tmp_path, [r for group in put.values() for r in group])
    (file,) = snapshot.iterdir()
    whole, rng = file.read_bytes(), random.Random(0)
    refused = lost = 0
    for i in [0, 20, *rng.sample(range(len(whole)), 60)]:
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << rng.randrange(8)]) + whole[i + 1 :])
        with open_store(tmp_path / "b") as store:
            store.clear()
            store.put([rollout(2)])
        try:
            RolloutStore.restore(snapshot, tmp_path / "b")
        except Unavailable as error:
            assert_one_line(error, file, "restore another")
            refused += 1
            with open_store(tmp_path / "b") as store:
                assert contents(store, range(20)) == {2: [rollout(2)]}
            continue
        with open_store(tmp_path / "b") as store:
            found = contents(store, range(20))
            assert all(group == put[p] for p, group in found.items())
            assert len(found) >= 19
            lost += 20 - len(found)
    assert refused and lost


def test_a_store_is_no_snapshot_of_itself(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1)])
        with pytest.raises(ConfigError, match="name another folder"):
            store.snapshot(tmp_path / "a")
        assert contents(store, [1]) == {1: [rollout(1)]}


def test_both_kinds_of_snapshot_keep_freshness_incarnation_and_rawness(tmp_path):
    put = [
        rollout(p, fresh=p % 2 == 0, raw=p != 1, incarnation=incarnation)
        for p, incarnation in enumerate((0, 3, 2**64 - 1))
    ]
    RolloutStore.restore(snapshot_of(tmp_path, put), tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, range(3)) == {p: [r] for p, r in enumerate(put)}
    ordered = sorted(put, key=lambda r: r.key)
    file = write_partition(tmp_path / "parts", 0, ordered)
    assert list(read_partition(tmp_path / "parts", file)) == ordered
    write_export(tmp_path / "export", ordered, "tok")
    exported = list(read_export(tmp_path / "export")[1])
    assert [(r.finish, r.raw) for r in exported] == [(r.finish, r.raw) for r in ordered]
    assert [reset_provenance(r).raw for r in exported] == [r.raw for r in ordered]

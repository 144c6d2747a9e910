"""The rollout store: what is put is found."""

import numpy as np
import pytest

from nemo_specrl.cache.codec import STEP
from nemo_specrl.cache.metrics import store_metrics
from nemo_specrl.errors import InvalidRollout
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    bytes_on_disk,
    contents,
    damaged_folders,
    open_store,
)


def test_what_is_put_is_found_at_once_and_after_reopening(tmp_path):
    n = 30
    rng = np.random.default_rng(0)
    whole = Rollout(
        prompt_key([9]),
        3,
        rng.integers(0, 2**31, n),
        -rng.integers(0, 9999, n) * STEP,
        Finish.LENGTH,
        2**63 - 1,
        -rng.integers(0, 9999, n) * STEP,
        rng.integers(0, 2**63, n),
    )
    empty = Rollout(prompt_key([8]), 0, [], [], Finish.STOP, 5)
    long = rollout(7, n=40_000)  # many pages
    with open_store(tmp_path / "a") as store:
        store.put([whole, empty, long])
        assert contents(store, [7, 8, 9]) == {7: [long], 8: [empty], 9: [whole]}
    with open_store(tmp_path / "a") as store:
        assert contents(store, [7, 8, 9]) == {7: [long], 8: [empty], 9: [whole]}
        assert len(store) == 3


def test_keys_that_are_not_there_are_absent(tmp_path):
    with open_store(tmp_path / "a") as store:
        assert store.get([]) == {}
        assert store.get([prompt_key([1])]) == {}
        store.put([rollout(1)])
        assert list(store.get([prompt_key([2]), prompt_key([1]), prompt_key([1])])) == [
            prompt_key([1])
        ]
        stats = store.stats()
        assert (stats.lookups, stats.hits) == (3, 1)
        with pytest.raises(InvalidRollout, match="16 bytes"):
            store.get([b"short"])


@pytest.mark.parametrize("synced", [False, True], ids=["buffered", "on disk"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_newest_groups_are_kept_newest_first(tmp_path, groups, synced):
    with open_store(tmp_path / "a", groups_per_prompt=groups) as store:
        for version in range(5):
            for sample_index in (2, 0, 300):
                store.put([rollout(1, version, sample_index)])
            if synced:
                store.sync()
            kept = [v for v in range(version, -1, -1)][:groups]
            want = [rollout(1, v, sample_index) for sample_index in (0, 2, 300) for v in kept]
            assert contents(store, [1]) == {1: want}
            assert len(store) == len(want)


def test_of_a_sample_index_put_twice_in_one_call_the_later_is_kept(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1, 5), rollout(1, 4), rollout(1, 3)])
        assert contents(store, [1]) == {1: [rollout(1, 3)]}


def test_reopening_with_fewer_groups_serves_fewer(tmp_path):
    with open_store(tmp_path / "a", groups_per_prompt=3) as store:
        store.put(rollout(1, version) for version in range(3))
    with open_store(tmp_path / "a", groups_per_prompt=1) as store:
        assert contents(store, [1]) == {1: [rollout(1, 2)]}
        store.put([rollout(1, 3)])
        store.sync()
        assert len(store) == 1


def test_prompts_never_mix(tmp_path):
    # Keys that sort next to each other, at both ends of their range.
    keys = [bytes(15) + b"\0", bytes(15) + b"\1", b"\xff" * 15 + b"\xfe", b"\xff" * 16]
    made = {
        key: [
            Rollout(key, sample_index, [i, sample_index], [-1, -2], Finish.STOP, 1)
            for sample_index in (0, 1, 65535)
        ]
        for i, key in enumerate(keys)
    }
    with open_store(tmp_path / "a") as store:
        store.put(r for rollouts in made.values() for r in reversed(rollouts))
        for _ in range(2):
            for key in keys:
                assert store.get([key]) == {key: made[key]}
            assert store.get(keys) == made
            store.sync()


def test_stats_count_what_is_there_buffered_or_not(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1, sample_index=s) for s in range(3)])
        store.sync()
        on_disk = store.stats()
        store.put([rollout(1, 1, sample_index=2), rollout(1, 1, sample_index=3), rollout(2)])
        buffered = store.stats()
        store.sync()
        stats = store.stats()
        assert (on_disk.prompts, on_disk.rollouts) == (1, 3)
        assert (buffered.prompts, buffered.rollouts) == (stats.prompts, stats.rollouts) == (2, 5)
        assert stats.max_bytes == 16 * MIB
        assert 0 < stats.bytes_used <= bytes_on_disk(tmp_path / "a")
        assert (stats.corrupt_records, stats.dropped_records, stats.evicted_prompts) == (0, 0, 0)


def test_a_scan_finds_every_rollout_of_a_range_once(tmp_path):
    with open_store(tmp_path / "s", groups_per_prompt=2) as store:
        put = [rollout(p, v, s) for p in range(150) for v in range(2) for s in range(3)]
        store.put(put)
        everything = list(store.scan(b""))

        def place(r):
            return r.key, r.sample_index, r.policy_version

        assert sorted(everything, key=place) == sorted(put, key=place)
        keys = sorted({r.key for r in put})
        middle = list(store.scan(keys[20], keys[120]))
        assert [r.key for r in middle] == [k for k in keys[20:120] for _ in range(6)]
        assert middle == [r for k in keys[20:120] for r in store.get([k])[k]]
        assert list(store.scan(keys[-1] + b"\0")) == []
        assert list(store.scan(keys[-1][:8])) == [r for r in everything if r.key == keys[-1]]


def test_changing_an_array_after_the_put_changes_nothing(tmp_path):
    with open_store(tmp_path / "a") as store:
        mine = rollout(1)
        store.put([mine])
        mine.tokens[:] = 0
        found = contents(store, [1])[1][0]
        with pytest.raises(ValueError, match="read-only"):
            found.tokens[:] = 1
        assert contents(store, [1]) == {1: [rollout(1)]}


def test_a_cleared_store_is_empty_and_goes_on(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1)])
        store.sync()
        store.put([rollout(2)])
        store.clear()
        assert contents(store, [1, 2]) == {} and len(store) == 0
        store.put([rollout(3)])
    with open_store(tmp_path / "a") as store:
        assert contents(store, [1, 2, 3]) == {3: [rollout(3)]}
    assert not damaged_folders(tmp_path / "a")


def test_metrics_of_several_stores_are_sums(tmp_path):
    assert store_metrics([]) == {}
    with (
        open_store(tmp_path / "a", max_bytes=MIB) as one,
        open_store(tmp_path / "b", max_bytes=2 * MIB) as other,
    ):
        one.put([rollout(1), rollout(1, sample_index=1)])
        other.put([rollout(2)])
        one.get([prompt_key([1]), prompt_key([3])])
        other.get([prompt_key([2]), prompt_key([4])])
        stats = [one.stats(), other.stats()]
        metrics = store_metrics(stats)
    assert metrics["spec_rl/cache_prompts"] == 2 and metrics["spec_rl/cache_rollouts"] == 3
    assert metrics["spec_rl/cache_max_bytes"] == sum(s.max_bytes for s in stats) <= 3 * MIB
    assert metrics["spec_rl/cache_hit_fraction"] == 0.5
    assert 0 < metrics["spec_rl/disk_used_fraction"] == stats[0].disk_used_fraction <= 1

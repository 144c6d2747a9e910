"""The cap of a rollout store, and which prompts go first."""

import itertools
import random

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.errors import StoreUnavailable as Unavailable
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    bytes_on_disk,
    contents,
    open_store,
)


def test_the_longest_unused_prompts_go_first_and_reopening_remembers(tmp_path):
    path, rng = tmp_path / "a", random.Random(3)
    order = []  # of use, the latest last
    store = open_store(path, MIB)
    for step in range(150):
        prompt = rng.randrange(60)
        if rng.random() < 0.5:
            used = list(contents(store, [prompt]))
        else:
            store.put(
                [
                    rollout(prompt, step, sample_index, n=rng.choice([50, 3000]))
                    for sample_index in range(3)
                ]
            )
            used = [prompt]
        order = [p for p in order if p not in used] + used
        if step % 40 == 39:
            store.close()
            store = open_store(path, MIB)
    store.sync()
    left = contents(store, range(60))
    assert store.stats().prompts == len(left) < len(order)
    assert set(left) == set(order[-len(left) :])
    assert all(len(group) == 3 for group in left.values())  # a prompt goes as a whole
    store.close()


def test_a_prompt_that_is_read_outlives_those_that_are_not(tmp_path):
    path = tmp_path / "a"
    with open_store(path, MIB) as store:
        store.put([rollout(0, n=2000)])
        for prompt in range(1, 200):
            store.put([rollout(prompt, n=2000)])
            if prompt % 7 == 0:
                assert contents(store, [0])
        assert store.stats().evicted_prompts > 100
    with open_store(path, MIB) as store:  # the last reads counted, too
        for prompt in range(200, 220):
            store.put([rollout(prompt, n=2000)])
        assert contents(store, [0]) == {0: [rollout(0, n=2000)]}


@pytest.mark.parametrize(
    ("cap", "lengths", "written"),
    [
        (MIB, [0, 10, 30], MIB // 2),
        (MIB, [10, 700, 5000], 5 * MIB),
        (2 * MIB, [60_000, 100_000], 10 * MIB),
        (2 * MIB, [680], 10 * MIB),
    ],
    ids=["tiny", "mixed", "huge", "page-sized"],
)
def test_the_files_never_exceed_the_cap(tmp_path, cap, lengths, written):
    path, rng = tmp_path / "a", random.Random(0)
    total = 0
    with open_store(path, cap) as store:
        for prompt in itertools.count():
            n = rng.choice(lengths)
            store.put([rollout(prompt, n=n)])
            contents(store, [rng.randrange(prompt + 1)])
            total += 6 * n + 30
            assert bytes_on_disk(path) <= cap
            if total > written:
                break
        assert contents(store, [prompt]) == {prompt: [rollout(prompt, n=n)]}
        store.sync()
        stats = store.stats()
        assert bytes_on_disk(path) <= cap
        assert stats.dropped_records == 0
        assert stats.evicted_prompts > 0
        assert stats.prompts + stats.evicted_prompts == prompt + 1
        assert cap // 4 < stats.bytes_used <= cap


def test_what_else_is_in_the_folder_counts(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "other").write_bytes(bytes(MIB))
    with pytest.raises(Unavailable, match="other files"):
        open_store(path, MIB)
    with open_store(path, 2 * MIB) as store:
        store.put(rollout(p, n=3000) for p in range(200))
        store.sync()
        assert store.stats().evicted_prompts > 0
    assert bytes_on_disk(path) <= 2 * MIB


def test_a_record_that_can_never_fit_is_dropped_and_counted(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        store.put([rollout(1)])
        store.put([rollout(1, 1, n=200_000), rollout(2, n=200_000), rollout(3)])
        store.sync()
        assert contents(store, [1, 2, 3]) == {1: [rollout(1)], 3: [rollout(3)]}
        assert store.stats().dropped_records == 2


def test_records_that_fit_only_alone_take_turns(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        for prompt in range(8):
            store.put([rollout(prompt, n=130_000)])
            store.sync()
            assert contents(store, range(8)) == {prompt: [rollout(prompt, n=130_000)]}
        assert store.stats().dropped_records == 0


def test_a_group_larger_than_the_cap_keeps_its_last_rollouts(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        store.put(rollout(1, sample_index=sample_index, n=5000) for sample_index in range(100))
        store.sync()
        left = contents(store, [1])[1]
        assert left == [
            rollout(1, sample_index=sample_index, n=5000)
            for sample_index in range(100 - len(left), 100)
        ]
        assert bytes_on_disk(tmp_path / "a") <= MIB


def test_what_is_read_evicts_nothing(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        store.put([rollout(1, n=130_000)])  # which leaves less room than a store keeps otherwise
        store.sync()
        for _ in range(3):
            assert contents(store, [1]) == {1: [rollout(1, n=130_000)]}
            store.sync()
        assert store.stats().evicted_prompts == 0


def test_the_journal_of_a_larger_cap_is_cut_off(tmp_path):
    path = tmp_path / "a"
    with open_store(path, 256 * MIB) as store:
        store.put(rollout(p) for p in range(2000))
        store.sync()
        store.put(rollout(p, 1) for p in range(2000))
    assert (path / "rollouts.sqlite-journal").stat().st_size > MIB // 8
    with open_store(path, 2 * MIB):
        assert bytes_on_disk(path) <= 2 * MIB
    assert (path / "rollouts.sqlite-journal").stat().st_size <= MIB // 8


def test_a_lower_cap_holds_from_the_next_opening(tmp_path):
    path = tmp_path / "a"
    with open_store(path, 8 * MIB) as store:
        store.put(rollout(p, n=3000) for p in range(300))
        contents(store, [0])
    assert bytes_on_disk(path) > 4 * MIB
    with open_store(path, 2 * MIB) as store:
        assert bytes_on_disk(path) <= 2 * MIB
        left = contents(store, range(300))
        assert len(left) > 50
        assert sorted(left) == [0, *range(301 - len(left), 300)]
        store.put(rollout(p, n=3000) for p in range(300, 400))
    assert bytes_on_disk(path) <= 2 * MIB


def test_arguments_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_bytes"):
        open_store(tmp_path / "a", MIB - 1)
    with pytest.raises(ConfigError, match="groups_per_prompt"):
        open_store(tmp_path / "a", groups_per_prompt=0)
    assert not (tmp_path / "a").exists()

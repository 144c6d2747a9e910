"""Which of two rollouts of a sample index is kept, wherever two stores are merged.

Ways by which a rollout comes to a shard that has another one: a put by an old routing that comes
late, a chunk of another shard, a snapshot. A cluster of one process and a resumed run come last.
"""

import itertools

import pytest

from nemo_specrl.cache.cluster.sample_index_leases import SampleIndexLeases
from nemo_specrl.cache.cluster.shard import Chunk
from nemo_specrl.cache.codec import decode, encode_for_transfer
from nemo_specrl.cache.partitions import partition_of
from nemo_specrl.cache.recency import merge_newest, recency
from nemo_specrl.cache.snapshot import write_partition
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.cluster.machine import ClusterMachine

KEY = prompt_key([1])


def rollout(version, *, incarnation=0, occurrence=0, finish=Finish.STOP, tokens=3):
    return Rollout(
        KEY, 0, range(tokens), [-1.0] * tokens, finish, version,
        occurrence=occurrence, incarnation=incarnation,
    )  # fmt: skip


def partial(version, **kwargs):
    return rollout(version, finish=Finish.PARTIAL, **kwargs)


OLDER_FIRST = [
    (rollout(4), rollout(5)),
    (rollout(5), rollout(5, occurrence=1)),
    (partial(5), rollout(5)),
    (partial(5, tokens=9), rollout(5)),
    (partial(5, tokens=2), partial(5, tokens=3)),
    (partial(5), rollout(6)),  # completed after a refit
    (rollout(18, incarnation=1), rollout(11, incarnation=2)),  # lost steps, resumed run
    (rollout(100, incarnation=1, occurrence=90), rollout(0, incarnation=2)),  # run before
    (rollout(18), rollout(11, incarnation=2)),
    (rollout(11, incarnation=2), partial(12, incarnation=2)),
    (rollout(10, incarnation=1), rollout(18, incarnation=1)),  # checkpoint, lost steps
]
NAMES = [f"{recency(a)}-{recency(b)}" for a, b in OLDER_FIRST]
pairs = pytest.mark.parametrize(("older", "newer"), OLDER_FIRST, ids=NAMES)


def late_put(shard, rollouts, tmp_path):
    assert shard.put(rollouts, 0) is not None


def copied(shard, rollouts, tmp_path):
    assert shard.merge_range(Chunk(rollouts, [], b"", None), None) is None


def restored(shard, rollouts, tmp_path):
    file = write_partition(tmp_path / "snapshot", partition_of(KEY, 2), rollouts)
    assert shard.read_snapshot(str(tmp_path / "snapshot"), [file], {0, 1}, 2)[0] == []


WAYS = [late_put, copied, restored]


@pytest.mark.parametrize("way", WAYS)
@pairs
def test_the_newer_one_is_kept_whichever_comes_first(shards, tmp_path, way, older, newer):
    for name, (first, second) in {"a": (older, newer), "b": (newer, older)}.items():
        shard = shards(name)
        way(shard, [first], tmp_path)
        way(shard, [second], tmp_path)
        assert shard.store.get([KEY]) == {KEY: [newer]}


@pytest.mark.parametrize("way", WAYS)
@pairs
def test_a_store_without_either_gets_the_newer_one(shards, tmp_path, way, older, newer):
    """Both come at once, as from a store that keeps two groups."""
    for name, both in {"a": [newer, older], "b": [older, newer]}.items():
        shard = shards(name)
        way(shard, both, tmp_path)
        assert shard.store.get([KEY]) == {KEY: [newer]}


def test_a_partial_rollout_takes_no_place_beside_its_own_completion(shards, tmp_path):
    before, cut_off, done = (
        rollout(4, occurrence=5),
        partial(5, occurrence=6),
        rollout(5, occurrence=6),
    )
    for way, order in itertools.product(WAYS, itertools.permutations([before, cut_off, done])):
        shard = shards("-".join([way.__name__, *(str(r.finish + r.occurrence) for r in order)]),
                       groups_per_prompt=2)  # fmt: skip
        for each in order:
            way(shard, [each], tmp_path)
        # Two places: once cut_off has pushed out what came before, only a later merge can bring it.
        way(shard, [before, cut_off], tmp_path)
        assert shard.store.get([KEY])[KEY] == [done, before]
    empty = shards("empty", groups_per_prompt=2)
    copied(empty, [done, cut_off], tmp_path)
    assert empty.store.get([KEY]) == {KEY: [done]}


def test_merging_is_the_same_in_any_order_and_any_number_of_times():
    everything = list({recency(r): r for pair in OLDER_FIRST for r in pair}.values())
    expected = merge_newest(everything, [], 3)
    assert [r.finish for r in expected].count(Finish.PARTIAL) == 1  # the newest, and no other
    for order in itertools.islice(itertools.permutations(everything), 0, 2000, 7):
        assert merge_newest([*order, *order[:3]], expected, 3) == expected
        assert merge_newest(order, [], 3) == expected


def test_what_a_client_puts_carries_the_incarnation_of_its_run():
    stored = encode_for_transfer([rollout(1), rollout(2, incarnation=9)], 5)
    assert [(r.policy_version, r.incarnation) for r in stored] == [(1, 5), (2, 5)]
    assert stored[0] == rollout(1, incarnation=5)
    for again in (encode_for_transfer(stored), [decode(KEY, r._record) for r in stored]):
        assert again == stored
    assert [r.incarnation for r in encode_for_transfer(stored, 6)] == [6, 6]
    assert [
        r.incarnation for r in encode_for_transfer([rollout(1), rollout(2, incarnation=9)])
    ] == [0, 9]


def test_a_resumed_run_gets_its_own_rollouts_and_not_its_lost_future(tmp_path, monkeypatch):
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.version = 17
    machine.put(0, 0)
    machine.rest()
    assert machine.acknowledged[0] == (1, 18)
    machine.run_resumes(8)
    machine.rest()
    assert machine.get(0, 0, 0) == (1, 18)  # as a draft it will do
    first, second = machine.readers(0)
    machine.kill(first, False, True)
    machine.put(0, 0)
    machine.finish(0, False)
    assert machine.acknowledged[0] == (2, 11)
    machine.rest()
    machine.start(first)  # its disk has version 18, and is merged with the others
    machine.rest()
    assert set(machine.readers(0)) == {first, second}
    for disk in (first, second):
        assert machine.version_on(disk, 0) == 11
        assert machine.get(1, 0, disk) == (2, 11)
    machine.teardown()


def test_a_disk_of_the_run_before_does_not_win_over_the_new_run(tmp_path, monkeypatch):
    """A disk that was away while the new run began, with a version that the run never reached."""
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.version = 99
    machine.put(0, 0)
    machine.rest()
    first, _ = machine.readers(0)
    machine.kill(first, False, True)
    machine.run_resumes(80)
    machine.put(0, 0)
    machine.rest()
    machine.coordinator._keep = True  # as if it had been there at the start
    machine.start(first)
    machine.rest()
    assert machine.version_on(first, 0) == 21
    assert machine.get(0, 0, first) == (2, 21)
    machine.teardown()


def test_a_resumed_run_keeps_to_the_sample_indices_of_the_lost_steps():
    lost = [Rollout(KEY, s, [1], [0.0], Finish.STOP, 18, incarnation=1) for s in range(3)]
    claims = SampleIndexLeases()
    assert [claims.claim(KEY, lost, 11, 2) for _ in range(4)] == [0, 1, 2, 3]
    served = Rollout(KEY, 0, [1], [0.0], Finish.STOP, 11, incarnation=2)
    assert SampleIndexLeases().claim(KEY, [served, *lost[1:]], 11, 2) == 1

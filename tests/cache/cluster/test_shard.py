"""One shard: its name, its lease, what it merges and copies."""

import logging
import time

import pytest

from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.cluster import shard as shard_module
from nemo_specrl.cache.cluster.membership import ClusterView, Routing
from nemo_specrl.cache.cluster.sample_index_leases import CLAIM_SECONDS
from nemo_specrl.cache.cluster.shard import LEASE_SECONDS, Chunk, Shard
from nemo_specrl.cache.cluster.shard_identity import IDENTITY_FILE, read_identity
from nemo_specrl.cache.partitions import key_range
from nemo_specrl.cache.run_folders import WARM_START
from nemo_specrl.cache.snapshot import write_partition
from nemo_specrl.cache.storage.schema import DATA_FILE
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import Claim, Finish, Rollout, prompt_key
from tests.cache.cluster.conftest import STORE, learn, view_of
from tests.support.stores import changing

PARTITIONS = 2


def rollout(prompt, version, sample_index=0, occurrence=0, incarnation=0):
    return Rollout(
        prompt_key([prompt]), sample_index, [version], [0.0], Finish.STOP, version,
        occurrence=occurrence, incarnation=incarnation,
    )  # fmt: skip


def versions(shard, prompt):
    key = prompt_key([prompt])
    return [r.policy_version for r in shard.store.scan(key, key + b"\0")]


def test_a_folder_keeps_its_name_and_its_contents_belong_to_a_run(shards):
    shard = shards()
    shard.put([rollout(1, 1)], 1)
    info = shard.describe(PARTITIONS)
    shard.close()
    again = shards()
    assert again.name == shard.name and versions(again, 1) == [1]
    assert again.describe(PARTITIONS).name == info.name
    assert again.describe(PARTITIONS).holds == info.holds
    assert again.describe(PARTITIONS).store_id != info.store_id
    again.close()
    resumed = shards(life=2, keep=True)
    assert resumed.name == shard.name and versions(resumed, 1) == [1]
    resumed.close()
    new = shards(life=3)
    assert new.name == shard.name and versions(new, 1) == []


def test_a_flipped_bit_in_the_name_file_gives_a_new_name_and_a_warning(shards, tmp_path, caplog):
    shard = shards()
    shard.put([rollout(1, 1)], 1)
    shard.close()
    file = tmp_path / "a" / IDENTITY_FILE
    good = file.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        caplog.clear()
        identity = read_identity(tmp_path / "a")
        if identity.name == shard.name:  # all but the line's end counts
            assert bit // 8 == len(good) - 1 and identity.life == 1
            continue
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert f"{file} is damaged" in caplog.text
    file.write_bytes(b"\xff" + good[1:])
    resumed = shards(keep=True)
    assert resumed.name != shard.name and versions(resumed, 1) == [1]
    name = resumed.name
    resumed.close()
    assert shards(keep=True).name == name


def test_a_shard_without_contact_to_its_coordinator_answers_no_look_ups(tmp_path):
    now = [100.0]
    shard = Shard(str(tmp_path), 1, False, STORE, clock=lambda: now[0])
    view = view_of(1, shard.name)
    refused = pytest.raises(StoreUnavailable, match="no contact with its coordinator for 10 s")
    with refused:
        shard.get([prompt_key([1])], 1)
    _, first = shard.heartbeat(view, 0)
    with refused:  # the coordinator may not have got that answer
        shard.get([prompt_key([1])], 1)
    _, second = shard.heartbeat(view, first)
    assert shard.get([prompt_key([1])], 1) == ({}, None)
    now[0] += LEASE_SECONDS + 1  # stopped, say
    shard.put([rollout(1, 1)], 1)
    with refused:
        shard.get([prompt_key([1])], 1)
    _, third = shard.heartbeat(view, second)  # which may have waited for as long
    with refused:
        shard.claim(prompt_key([1]), 1, 1, 1)
    shard.heartbeat(view, third)
    assert shard.get([prompt_key([1])], 0) == ({prompt_key([1]): [rollout(1, 1)]}, view)
    shard.close()


def test_what_is_newer_stays_whatever_comes_late(shards):
    shard = shards(groups_per_prompt=2)
    shard.put([rollout(1, 5)], 1)
    assert shard.put([rollout(1, 3), rollout(1, 4), rollout(2, 3)], 0).routing.epoch == 1
    chunk = Chunk([rollout(1, 5, occurrence=1), rollout(1, 2)], [], b"", None)
    assert shard.merge_range(chunk, None) is None
    found, _ = shard.get([prompt_key([1]), prompt_key([2])], 1)
    assert found[prompt_key([1])] == [rollout(1, 5, occurrence=1), rollout(1, 5)]
    assert found[prompt_key([2])] == [rollout(2, 3)]


def test_chunks_are_bounded_and_leave_nothing_out(shards, monkeypatch):
    monkeypatch.setattr(shard_module, "CHUNK_TOKENS", 300)
    source, target = shards("a"), shards("b")
    source.put([rollout(p, 1, sample_index) for p in range(40) for sample_index in range(3)], 1)
    source.claims.hold(prompt_key([1]), 7)
    for partition in range(PARTITIONS):
        following, stop = key_range(partition, PARTITIONS)
        chunks = 0
        while following is not None:
            chunk = source.read_range(following, stop)
            assert len(chunk.rollouts) <= 6 and len({r.key for r in chunk.rollouts}) <= 2
            following = target.merge_range(chunk, stop)
            chunks += 1
        assert chunks > 5
    assert list(target.store.scan(b"")) == list(source.store.scan(b""))
    [(key, sample_index, seconds)] = target.claims.held(b"", None)
    assert (key, sample_index) == (prompt_key([1]), 7) and 0 < seconds <= CLAIM_SECONDS


def test_a_store_that_started_empty_by_itself_is_no_source_before_it_is_described(
    shards, tmp_path, caplog
):
    """What is damaged is an index that only commits use, and the timer commits."""
    shard = shards()
    shard.put([rollout(p, 1) for p in range(20)], 1)
    shard.close()
    with changing(tmp_path / "a") as database:
        ((page,),) = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'prompts_by_use'"
        )
        ((size,),) = database.execute("PRAGMA page_size")
    with open(tmp_path / "a" / DATA_FILE, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(16))
    shard = shards()
    before = shard.describe(PARTITIONS)
    learn(shard, view_of(1, shard.name))
    assert len(shard.get([prompt_key([p]) for p in range(20)], 1)[0]) == 20
    shard.put([rollout(1, 2)], 1)
    while "is damaged" not in caplog.text or shard.store._buffer.records:
        time.sleep(0.01)
    refused = pytest.raises(StoreUnavailable, match="started empty")
    for _ in range(2):
        with refused:
            shard.get([prompt_key([1])], 1)
        with refused:
            shard.read_range(b"", None)
        with refused:
            shard.write_snapshot(str(tmp_path / "snapshot"), [0, 1], PARTITIONS, 1)
        store_id, _ = shard.heartbeat(view_of(1, shard.name), 0)
        assert store_id != before.store_id
    after = shard.describe(PARTITIONS)
    assert after.store_id == store_id and len(after.holds) == 1
    assert len(before.holds) == PARTITIONS
    assert shard.read_range(b"", None).rollouts == [rollout(1, 2)]
    learn(shard, view_of(2, shard.name))
    assert shard.get([prompt_key([1])], 2) == ({prompt_key([1]): [rollout(1, 2)]}, None)


def test_a_shard_describes_itself_without_reading_a_rollout(shards, tmp_path):
    shard = shards()
    shard.put([rollout(p, 1) for p in range(20)], 1)
    shard.close()
    with changing(tmp_path / "a") as database:
        database.execute("UPDATE rollouts SET record = x''")
    shard = shards()
    assert shard.describe(PARTITIONS).holds == (0, 1)
    assert shard.stats().corrupt_records == 0  # what is read is found damaged, and counted


def test_only_the_first_reader_assigns_sample_indices(shards):
    shard = shards()
    key = prompt_key([1])
    table = (("other", shard.name),) * PARTITIONS
    view = ClusterView(Routing(2, table, table), {}, {})
    learn(shard, view)
    assert shard.claim(key, 1, 1, 1) == (None, view)
    shard.hold([(key, 0)])
    learn(shard, view_of(3, shard.name))
    assert shard.claim(key, 1, 3, 1) == (Claim(1, [], []), None)  # 0 was assigned by the other
    shard.release([(key, 0), (key, 7)])
    assert shard.claim(key, 1, 3, 1) == (Claim(0, [], []), None)


def test_a_claim_brings_the_group_or_its_own_rollouts_and_the_outline_of_the_group(shards):
    shard = shards(groups_per_prompt=2)
    group = [rollout(1, version, index) for index in range(3) for version in (2, 1)]
    shard.put(group[::-1], 1)
    outlines = [r.outline for r in group]
    key = group[0].key
    assert shard.claim(key, 3, 1, 1) == (Claim(0, group, outlines), None)
    claim, _ = shard.claim(key, 3, 1, 1, whole=False)
    assert claim == Claim(1, group[2:4], outlines) and not claim.whole


def test_a_snapshot_has_nothing_of_partitions_that_have_moved_away(shards, tmp_path):
    shard = shards()
    shard.put([rollout(p, 1) for p in range(40)], 1)
    files, newer = shard.write_snapshot(str(tmp_path / "first"), [0, 1], PARTITIONS, 1)
    assert ([file.partition for file in files], newer) == ([0, 1], None)
    table = ((shard.name,), ("other",))
    view = ClusterView(Routing(2, table, table), {}, {})
    learn(shard, view)
    files, newer = shard.write_snapshot(str(tmp_path / "second"), [0, 1], PARTITIONS, 1)
    assert ([file.partition for file in files], newer) == ([0], view)
    files, newer = shard.write_snapshot(str(tmp_path / "third"), [0, 1], PARTITIONS, 2)
    assert ([file.partition for file in files], newer) == ([0, 1], None)  # the caller knows best


def test_the_folder_remembers_the_largest_incarnation_that_was_put(shards, tmp_path):
    shard = shards()
    assert shard.describe(PARTITIONS).incarnation == 0
    shard.put([rollout(1, 1, incarnation=9)], 1)
    shard.put([rollout(1, 2, incarnation=7)], 1)
    assert shard.describe(PARTITIONS).incarnation == 9
    copy = Chunk([rollout(2, 1, incarnation=12)], [], b"", None)
    shard.merge_range(copy, None)
    file = write_partition(tmp_path / "snapshot", 0, [rollout(3, 1, incarnation=15)])
    assert shard.read_snapshot(str(tmp_path / "snapshot"), [file], {0, 1}, 2) == ([], 15)
    shard.close()
    new = shards(life=2)
    assert new.describe(PARTITIONS).incarnation == 15 and versions(new, 1) == []
    new.close()


def test_a_store_that_is_emptied_says_so_and_may_begin_with_a_warm_start(shards, tmp_path, caplog):
    shard = shards()
    shard.put([rollout(1, 5, incarnation=3)], 1)
    shard.close()
    with RolloutStore(tmp_path / WARM_START, **STORE) as store:
        store.put([rollout(2, 0), rollout(3, 0)])
    later = shards(life=2)  # a node that joins while the run goes on
    [line] = later.describe(PARTITIONS).remarks
    assert line.startswith(f"removed {tmp_path / 'a' / 'rollouts.sqlite'}, 0.0")
    assert f"rollout cache: {line}" in caplog.messages
    assert [versions(later, p) for p in (1, 2, 3)] == [[], [], []]
    later.close()
    new = shards(life=3, warm=True)
    assert new.describe(PARTITIONS).remarks[1].startswith("begins with the rollouts of ")
    assert [versions(new, p) for p in (1, 2, 3)] == [[], [0], [0]]
    assert new.describe(PARTITIONS).holds
    new.close()
    resumed = shards(life=4, keep=True, warm=True)
    assert resumed.describe(PARTITIONS).remarks == ()
    assert [versions(resumed, p) for p in (1, 2, 3)] == [[], [0], [0]]

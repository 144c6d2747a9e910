"""The cluster's cache on real Ray nodes: every partition in its places, late shards, snapshots."""

import asyncio
import dataclasses
import logging
import pickle
import sys
import tempfile
import threading

import pytest
import ray

from nemo_specrl.cache.cluster.client import FAILURES_TO_OPEN, CacheClient
from nemo_specrl.cache.cluster.driver import start_shards
from nemo_specrl.cache.cluster.membership import Routing, View
from nemo_specrl.cache.snapshot import partition_of, read_manifest
from nemo_specrl.errors import ForeignStore, StoreUnavailable
from nemo_specrl.rollout import Rollout, prompt_key
from tests.cache.cluster.nodes import OPTIONS as SHARED_OPTIONS
from tests.cache.cluster.nodes import add_node, ray_head, rollout, wait_until

NODES = 3
# Two cores share three nodes: nothing here tests how fast they are.
OPTIONS = SHARED_OPTIONS | {"partitions": 16, "deadline_s": 60.0}


@pytest.fixture(scope="module")
def nodes():
    """Three Ray nodes, which are processes of this machine; none is to be taken for dead."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # short
        ray_head(sys.modules[__name__], folder, failures=60) as cluster,
    ):
        for _ in range(NODES - 1):
            add_node(cluster)
        yield


@pytest.fixture
def start(nodes, tmp_path):
    """Starts caches, and closes them."""
    started = []

    def start(name="stores", **options):
        cache = start_shards(tmp_path / name, **OPTIONS | options)
        started.append(cache)
        return cache

    yield start
    for cache in started:
        cache.close()


def key_of(prompt):
    return prompt_key([prompt])


def is_dead(shard):
    try:
        ray.get(shard.sync.remote())
    except ray.exceptions.RayActorError:
        return True
    return False


def as_put(found):
    """Rollouts before they got the incarnation of their run."""
    names = [field.name for field in dataclasses.fields(Rollout)]
    return [
        Rollout(**{name: getattr(r, name) for name in names} | {"incarnation": 0}) for r in found
    ]


def contents(cache, prompts):
    found = cache.get([prompt_key([p]) for p in prompts])
    return {p: as_put(found.get(prompt_key([p]), [])) for p in prompts}


def test_what_is_put_is_found_from_every_copy_of_the_client(start):
    cache = start()
    put = [rollout(p, sample_index=s) for p in range(40) for s in range(2)]
    cache.put(put)
    cache.sync()
    copy = pickle.loads(pickle.dumps(cache))
    for client in (cache, copy):
        found = contents(client, range(41))
        assert found.pop(40) == []
        assert found == {
            p: [rollout(p, sample_index=0), rollout(p, sample_index=1)] for p in range(40)
        }
        assert client.failures == 0


def test_what_is_delivered_is_found_from_everywhere_before_it_is_synced(start):
    cache = start()
    others = [pickle.loads(pickle.dumps(cache)) for _ in range(2)]
    for version in range(1, 6):
        others[version % 2].put([rollout(p, version=version) for p in range(30)])
        others[version % 2].deliver()
        for client in (cache, *others):
            assert contents(client, range(30)) == {
                p: [rollout(p, version=version)] for p in range(30)
            }
    assert [client.failures for client in (cache, *others)] == [0, 0, 0]


def test_outlines_are_those_of_what_is_found(start):
    cache = start()
    cache.put([rollout(p, sample_index=s, version=p) for p in range(20) for s in range(2)])
    cache.sync()
    keys = [prompt_key([p]) for p in range(21)]
    found = cache.get(keys)
    assert len(found) == 20
    assert cache.outlines(keys) == {k: [r.outline for r in group] for k, group in found.items()}


def test_each_partition_lies_on_its_two_nodes_and_no_other(start):
    cache = start()
    cache.put([rollout(p) for p in range(60)])
    cache.sync()
    view = cache._view
    assert len(view.shards) == NODES
    assert all(len(nodes) == 2 for nodes in view.routing.readers)
    assert view.routing.readers == view.routing.writers
    for node, shard in view.shards.items():
        everything = ray.get(shard.read_range.remote(b"", None))
        there = [rollout.key for rollout in everything.rollouts]
        expected = {
            key for key in (prompt_key([p]) for p in range(60)) if node in view.routing.read(key)
        }
        assert len(there) == len(set(there))
        assert set(there) == expected
        assert expected, "too few prompts for a test that could fail"


def test_a_shard_that_dies_is_covered_for_and_comes_back_with_its_disk(start, caplog):
    cache = start()
    other = pickle.loads(pickle.dumps(cache))
    cache.put([rollout(p) for p in range(60)])
    cache.sync()
    # The copy on this node is the one that is read; of another node's, perhaps no partition is.
    here = ray.get_runtime_context().get_node_id()
    name = next(name for name, node in cache._view.nodes.items() if node == here)
    shard = cache._view.shards[name]
    ray.kill(shard)
    wait_until(lambda: is_dead(shard))
    with caplog.at_level(logging.WARNING):
        for client in (cache, other):  # within the call that comes upon it
            assert contents(client, range(60)) == {p: [rollout(p)] for p in range(60)}
        cache.put([rollout(p, version=1) for p in range(60)])
        cache.sync()  # to those that are left
        assert contents(cache, range(60)) == {p: [rollout(p, version=1)] for p in range(60)}
    assert cache.failures > 0
    assert len([r for r in caplog.records if "rows are decoded plainly" in r.message]) == 2

    wait_until(lambda: cache.health() == (NODES, 0, 0))
    for client in (cache, other):
        assert contents(client, range(60)) == {p: [rollout(p, version=1)] for p in range(60)}
    view = ray.get(cache._keeper.view.remote())
    assert view.shards[name] != shard
    there = {r.key for r in ray.get(view.shards[name].read_range.remote(b"", None)).rollouts}
    assert there == {key for key in map(key_of, range(60)) if name in view.routing.read(key)}


class Late:
    """A shard that answers once, and then no more."""

    def __init__(self):
        self.asked = False

    def get(self, keys, epoch):
        if self.asked:
            threading.Event().wait()
        self.asked = True
        return {}, None


def test_a_shard_that_is_late_answers_nothing_and_raises_nothing(nodes):
    late = ray.remote(Late).options(num_cpus=0).remote()
    assert ray.get(late.get.remote([], 0)) == ({}, None)
    table = (("late",),) * 4
    view = View(Routing(0, table, table), {"late": late}, {})
    cache = CacheClient(view, None, deadline_s=0.05, tokenizer_id="tok", incarnation=1)
    for tried in range(1, FAILURES_TO_OPEN + 3):
        assert cache.get([prompt_key([1])]) == {}
        assert cache.failures == min(tried, FAILURES_TO_OPEN)  # then it is left alone
    ray.kill(late)


def test_rows_that_come_alone_get_sample_indices_of_their_own_from_every_client(start):
    cache = start()
    other = pickle.loads(pickle.dumps(cache))
    key = prompt_key([5])

    async def claim(clients, version):
        return [await client.claim(key, version) for client in clients]

    sample_indices = asyncio.run(claim((cache, other, other, cache), 0))
    assert [sample_index for sample_index, _ in sample_indices] == [0, 1, 2, 3]
    assert all(rollouts == [] for _, rollouts in sample_indices)
    cache.put([rollout(5, sample_index=s) for s in (2, 0)])
    other.put([rollout(5, sample_index=s) for s in (1, 3)])
    for client in (cache, other):
        client.flush()
        client.sync()
    claimed = asyncio.run(claim((other, cache, cache, other), 1))
    assert [sample_index for sample_index, _ in claimed] == [0, 1, 2, 3]
    assert as_put(claimed[0][1]) == [rollout(5, sample_index=s) for s in range(4)]
    assert cache.failures == other.failures == 0


def test_a_snapshot_restores_onto_any_partitions_and_replicas(start, tmp_path):
    cache = start()
    put = [rollout(p, sample_index=s) for p in range(50) for s in range(3)]
    cache.put(put)
    manifest = cache.snapshot(tmp_path / "snapshot", policy_version=7)
    assert sum(f.rollouts for f in manifest.files) == len(put)  # one copy of each
    assert read_manifest(tmp_path / "snapshot") == manifest

    other = start("others", partitions=5, replicas=1)
    restored, damaged = other.restore(tmp_path / "snapshot")
    assert (restored.policy_version, damaged) == (7, [])
    assert contents(other, range(50)) == contents(cache, range(50))
    assert other.incarnation > cache.incarnation
    assert {r.incarnation for r in other.get([key_of(0)])[key_of(0)]} == {cache.incarnation}
    other.put([rollout(0, sample_index=s) for s in range(3)])  # of the same version, and newer
    other.sync()
    other.restore(tmp_path / "snapshot")
    assert {r.incarnation for r in other.get([key_of(0)])[key_of(0)]} == {other.incarnation}
    assert sum(s.rollouts for s in other.stats().values()) == len(put)


def test_a_damaged_partition_is_named_and_the_others_load(start, tmp_path):
    cache = start()
    cache.put([rollout(p) for p in range(50)])
    manifest = cache.snapshot(tmp_path / "snapshot", policy_version=1)
    lost = manifest.files[2]
    file = tmp_path / "snapshot" / f"partition-{lost.partition:05d}.rollouts"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    other = start("others")
    _, damaged = other.restore(tmp_path / "snapshot")
    assert len(damaged) == 1 and str(file) in damaged[0]
    here = [p for p in range(50) if partition_of(prompt_key([p]), 16) != lost.partition]
    assert len(here) == 50 - lost.rollouts
    expected = {p: [rollout(p)] if p in here else [] for p in range(50)}
    assert contents(other, range(50)) == expected


def test_what_is_newer_than_the_snapshot_stays(start, tmp_path):
    cache = start()
    cache.put([rollout(p) for p in range(20)])
    cache.snapshot(tmp_path / "snapshot", policy_version=1)
    cache.put([rollout(p, version=1) for p in range(10)])
    cache.restore(tmp_path / "snapshot")
    assert contents(cache, range(20)) == {p: [rollout(p, version=int(p < 10))] for p in range(20)}


def test_snapshots_that_cannot_be_are_refused(start, tmp_path):
    cache = start()
    with pytest.raises(StoreUnavailable, match=r"manifest\.json: No such file"):
        cache.restore(tmp_path / "none")
    cache.put([rollout(1)])
    cache.snapshot(tmp_path / "snapshot", policy_version=1)
    foreign = start("foreign", tokenizer_id="another")
    with pytest.raises(ForeignStore, match="is of tokenizer 'tok', not of 'another'"):
        foreign.restore(tmp_path / "snapshot")
    (tmp_path / "snapshot" / "manifest.json").write_text("{")
    with pytest.raises(StoreUnavailable, match=r"manifest\.json: damaged"):
        cache.restore(tmp_path / "snapshot")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="file"):
        start("file")

"""The cluster's cache on real Ray nodes: every partition in its places, late shards, snapshots."""

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import signal
import sys
import tempfile
import threading

import pytest
import ray

from nemo_specrl.cache.cluster import claiming_client as claiming_client_module
from nemo_specrl.cache.cluster import cluster_cache as driver_module
from nemo_specrl.cache.cluster.claiming_client import ClaimingClient
from nemo_specrl.cache.cluster.client import CacheClient
from nemo_specrl.cache.cluster.membership import ClusterView, Routing
from nemo_specrl.cache.cluster.shard_calls import FAILURES_TO_OPEN
from nemo_specrl.cache.partitions import partition_of
from nemo_specrl.cache.snapshot import read_manifest
from nemo_specrl.errors import ForeignStore, StoreUnavailable
from nemo_specrl.rollout import Claim, Rollout, prompt_key
from tests.support.cluster.nodes import add_node, ray_head, rollout, start_cache, wait_until

NODES = 3
# Two cores share three nodes: nothing here tests how fast they are.
CHANGES = {"partitions": 16, "deadline_ms": 60_000}


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
        cache = start_cache(tmp_path / name, **CHANGES | options)
        started.append(cache)
        return cache

    yield start
    for cache in started:
        with contextlib.suppress(StoreUnavailable):  # closed by the test
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
    view = ray.get(cache._coordinator.view.remote())
    assert view.shards[name] != shard
    there = {r.key for r in ray.get(view.shards[name].read_range.remote(b"", None)).rollouts}
    assert there == {key for key in map(key_of, range(60)) if name in view.routing.read(key)}


def break_disk(shard):
    """Have the store of a shard fail whatever it is asked."""

    def broken(doing):
        raise StoreUnavailable(f"cannot {doing} the disk")

    shard.store._guard = broken


def test_a_shard_that_is_given_up_ends_and_another_one_opens_its_folder(start):
    cache = start()
    cache.put([rollout(p) for p in range(60)])
    cache.sync()
    name, shard = next(iter(cache._view.shards.items()))  # the client keeps handles
    ray.get(shard.__ray_call__.remote(break_disk))
    with pytest.raises(StoreUnavailable):  # then the coordinator asks it to describe itself
        ray.get(shard.get.remote([key_of(0)], 0))

    def replaced():
        shards = ray.get(cache._coordinator.view.remote()).shards
        return shards.get(name, shard) != shard and cache.health() == (NODES, 0, 0)

    wait_until(replaced)
    assert is_dead(shard)
    assert contents(cache, range(60)) == {p: [rollout(p)] for p in range(60)}


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
    view = ClusterView(Routing(0, table, table), {"late": late}, {})
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

    claimed = asyncio.run(claim((cache, other, other, cache), 0))
    assert claimed == [Claim(sample_index, [], []) for sample_index in range(4)]
    cache.put([rollout(5, sample_index=s) for s in (2, 0)])
    other.put([rollout(5, sample_index=s) for s in (1, 3)])
    for client in (cache, other):
        client.flush()
        client.sync()
    claimed = asyncio.run(claim((other, cache, cache, other), 1))
    assert [sample_index for sample_index, _, _ in claimed] == [0, 1, 2, 3]
    whole = [rollout(5, sample_index=s) for s in range(4)]
    assert [as_put(rollouts) for _, rollouts, _ in claimed] == [whole, whole, whole[2:3], whole[3:]]
    outlines = [r.outline for r in claimed[0].rollouts]
    assert [group for *_, group in claimed] == [outlines] * 4
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


def test_a_node_whose_folder_cannot_be_used_is_left_out_until_it_can(start, tmp_path, caplog):
    refuses = [tmp_path / name for name in ("stores", "stores-1", "stores-2")]
    for file in refuses:
        file.write_text("")
    refused = r"cannot open the rollout store .*/stores.*: it is a file; .* \(and 2 more nodes\)$"
    with pytest.raises(StoreUnavailable, match=refused):
        start()
    for file in refuses[:2]:
        file.unlink()
    with caplog.at_level(logging.WARNING):
        cache = start()
    [line] = [line for line in caplog.messages if "is left out of the cache" in line]
    assert line.startswith("rollout cache: node ") and f"{refuses[2]}: it is a file;" in line
    assert cache.health() == (NODES - 1, 0, 0)
    cache.put([rollout(p) for p in range(40)])
    cache.sync()
    assert contents(cache, range(40)) == {p: [rollout(p)] for p in range(40)}
    assert cache.failures == 0
    refuses[2].unlink()
    wait_until(lambda: cache.health() == (NODES, 0, 0))
    assert contents(cache, range(40)) == {p: [rollout(p)] for p in range(40)}


def test_a_clock_that_is_set_back_makes_nothing_older(start, tmp_path, monkeypatch):
    cache = start()
    cache.put([rollout(p, version=5) for p in range(20)])
    cache.snapshot(tmp_path / "snapshot", policy_version=5)
    cache.close()
    monkeypatch.setattr(driver_module.time, "time_ns", lambda: 7)
    resumed = start(keep=True)
    assert resumed.incarnation == cache.incarnation + 1
    elsewhere = start("others")
    assert elsewhere.incarnation == 7  # new disks know nothing of it
    assert elsewhere.restore(tmp_path / "snapshot")[1] == []
    assert elsewhere.incarnation == cache.incarnation + 1
    for client in (resumed, elsewhere):
        assert contents(client, range(20)) == {p: [rollout(p, version=5)] for p in range(20)}
        client.put([rollout(p, version=1) for p in range(20)])
        client.sync()
        client.restore(tmp_path / "snapshot")
        assert contents(client, range(20)) == {p: [rollout(p, version=1)] for p in range(20)}


def test_partitions_that_nobody_can_write_are_left_out_of_a_snapshot(start, tmp_path, caplog):
    cache = start(replicas=1)
    cache.put([rollout(p) for p in range(50)])
    cache.sync()
    (wrong,) = {partition_of(key_of(0), 16)}
    (tmp_path / "snapshot" / f"partition-{wrong:05d}.rollouts").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        manifest = cache.snapshot(tmp_path / "snapshot", policy_version=1)
    assert read_manifest(tmp_path / "snapshot") == manifest
    here = {file.partition for file in manifest.files}
    assert here and wrong not in here
    [line] = [line for line in caplog.messages if "of 16 partitions are not in" in line]
    assert "Is a directory" in line
    other = start("others")
    assert other.restore(tmp_path / "snapshot")[1] == []
    expected = {p: [rollout(p)] if partition_of(key_of(p), 16) in here else [] for p in range(50)}
    assert contents(other, range(50)) == expected


def test_a_file_system_that_hangs_does_not_hold_a_checkpoint_up(start, tmp_path, network_disk,
                                                                monkeypatch):  # fmt: skip
    """A FUSE file system whose server is stopped: before the snapshot, and in the middle of it."""
    disk, server = network_disk
    cache = start()
    cache.put([rollout(p) for p in range(50)])
    cache.snapshot(disk / "good", policy_version=1)
    for name, seconds in (("SNAPSHOT", 6.0), ("WRITE", 2.0), ("RESTORE", 2.0), ("MANIFEST", 1.0)):
        monkeypatch.setattr(driver_module, f"{name}_SECONDS", seconds)
    hangs = pytest.raises(StoreUnavailable, match="its file system has not answered for")
    try:
        server.send_signal(signal.SIGSTOP)
        with hangs:
            cache.snapshot(disk / "before", policy_version=1)
        with hangs:
            cache.restore(disk / "good")
        server.send_signal(signal.SIGCONT)
        within = driver_module.within

        def stop_behind(*arguments):
            done = within(*arguments)
            server.send_signal(signal.SIGSTOP)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(driver_module, "within", stop_behind)
            with pytest.raises(StoreUnavailable, match=r"shard-\w+ has not written its part in "):
                cache.snapshot(disk / "in the middle", policy_version=1)
        with pytest.raises(StoreUnavailable, match="still hangs in an earlier checkpoint"):
            cache.snapshot(tmp_path / "elsewhere", policy_version=1)
        assert cache.health() == (NODES, 0, 0)  # and everything else goes on
        assert contents(cache, range(50)) == {p: [rollout(p)] for p in range(50)}
    finally:
        server.send_signal(signal.SIGCONT)

    def written():
        with contextlib.suppress(StoreUnavailable):
            manifest = cache.snapshot(tmp_path / "later", policy_version=1)
            return sum(file.rollouts for file in manifest.files) == 50

    wait_until(written)


def learned(shards, epoch):
    """Whether shards know a routing, or a later one."""
    calls = [s.__ray_call__.remote(lambda self: self.view.routing.epoch) for s in shards]
    return all(known >= epoch for known in ray.get(calls))


@pytest.mark.parametrize("coordinator", ["answers", "is out of reach"])
def test_a_driver_that_looks_nothing_up_saves_what_has_moved_meanwhile(
    start, tmp_path, coordinator
):
    driver = start()
    engine = pickle.loads(pickle.dumps(driver))
    here = ray.get_runtime_context().get_node_id()
    layout = {node["NodeID"] for node in ray.nodes()} - {here}
    driver.set_preferred_nodes(layout)

    def moved():
        view = ray.get(driver._coordinator.view.remote())
        places = {view.nodes[n] for nodes in view.routing.writers for n in nodes}
        return places == layout and learned(view.shards.values(), view.routing.epoch)

    wait_until(moved)
    for version in (1, 2):  # the first is sent by the old routing as well
        engine.put([rollout(p, version) for p in range(60)])
        engine.sync()
    if coordinator == "is out of reach":
        driver._coordinator, known = None, driver._coordinator  # the shards say that they are not
    driver.snapshot(tmp_path / "snapshot", policy_version=2)
    if coordinator == "is out of reach":
        driver._coordinator = known
    other = start("others")
    assert other.restore(tmp_path / "snapshot")[1] == []
    assert contents(other, range(60)) == {p: [rollout(p, version=2)] for p in range(60)}


class Assigning:
    """A shard that assigns a sample index when it is told to."""

    def __init__(self):
        self.told = threading.Event()

    def claim(self, key, policy_version, epoch, incarnation, whole):
        self.told.wait()
        return Claim(3, [], []), None

    def tell(self):
        self.told.set()


def test_a_shard_that_is_gone_by_a_newer_view_may_answer_yet(nodes):
    shard = ray.remote(Assigning).options(num_cpus=0, max_concurrency=2).remote()
    table = (("here",),) * 4
    view = ClusterView(Routing(0, table, table), {"here": shard}, {})
    client = ClaimingClient(view, None, deadline_s=60.0, tokenizer_id="tok", incarnation=1)

    async def claim():
        claiming = asyncio.create_task(client.claim(prompt_key([1]), 0))
        await asyncio.sleep(0)
        client._adopt(ClusterView(Routing(1, ((),) * 4, ((),) * 4), {}, {}))
        await shard.tell.remote()
        return await claiming

    assert asyncio.run(claim()) == Claim(3, [], [])
    ray.kill(shard)


def test_a_claim_is_renewed_until_its_row_ends_or_fails(start, monkeypatch):
    monkeypatch.setattr(claiming_client_module, "RENEW_SECONDS", 0.05)
    cache = start()
    key = prompt_key([5])

    def held():
        """Sample indices and seconds that are left, on the two shards of the partition."""
        shards = [cache._view.shards[name] for name in cache._view.routing.write(key)]
        calls = [s.__ray_call__.remote(lambda self: self.claims.held(b"", None)) for s in shards]
        return [[(index, left) for _, index, left in claims] for claims in ray.get(calls)]

    async def renewed():
        before = held()
        while True:
            await asyncio.sleep(0.05)
            now = held()
            if all(new > old for [(_, new)], [(_, old)] in zip(now, before, strict=True)):
                return
            before = now

    async def rows():
        assert (await cache.claim(key, 1))[0] == 0
        await asyncio.wait_for(renewed(), 120)
        cache.release(key, 0)
        assert held() == [[], []]
        assert (await cache.claim(key, 1))[0] == 0
        cache.put([rollout(5, version=1)])
        cache.sync()
        assert held() == [[], []]
        await asyncio.wait_for(cache._renewing, 60)  # there is nothing left to renew

    asyncio.run(rows())

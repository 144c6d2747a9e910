"""The cluster's cache while Ray nodes die, join and stop: real nodes, real kills.

What is waited for is waited for generously; how soon two copies are back after a new node is
printed.
"""

import logging
import os
import signal
import sys
import tempfile

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster import cluster_cache as driver_module
from nemo_specrl.errors import ConfigError
from tests.support.cluster.nodes import (
    DEADLINE_S,
    KEYS,
    PROMPTS,
    SAMPLE_INDICES,
    add_node,
    all_at,
    copies,
    group,
    put_all,
    ray_head,
    start_cache,
    versions_of,
    wait_until,
)


@pytest.fixture(scope="module")
def ray_cluster():
    """Three Ray nodes, the first of which is this process's own, and stays."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # short
        ray_head(sys.modules[__name__], folder, failures=5) as cluster,  # cores are busy
    ):
        cluster.others = []
        yield cluster


@pytest.fixture
def cluster(ray_cluster):
    """With three nodes, whatever was done to it before."""
    while len(ray_cluster.others) < 2:
        ray_cluster.others.append(add_node(ray_cluster))
    return ray_cluster


@pytest.fixture
def cache(cluster, tmp_path):
    cache = start_cache(tmp_path / "stores")
    yield cache
    cache.close()


@ray.remote(num_cpus=0)
class Engine:
    """A client in a process of its own."""

    def __init__(self, cache):
        self.cache = cache

    def step(self, version, pause=None):
        """Look all prompts up, a few at a time, and put what follows.

        Args:
            version: of what is put.
            pause: file to make in the middle of the step, which goes on when it is gone.

        Returns:
            The versions that were found of each prompt.
        """
        versions = []
        for first in range(0, PROMPTS, 6):
            if pause is not None and first == PROMPTS // 2:
                pause.touch()
                wait_until(lambda: not pause.exists())
            some = range(first, first + 6)
            found = self.cache.get([KEYS[p] for p in some])
            versions += [[r.policy_version for r in found.get(KEYS[p], [])] for p in some]
            self.cache.put(r for p in some for r in group(p, version))
            self.cache.flush()
        self.cache.sync()
        return versions

    def read(self):
        return versions_of(self.cache)


def kill(cluster, *nodes, meanwhile=lambda: None):
    """Kill nodes, at once; it is believed when Ray says so."""
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)
        cluster.others.remove(node)
    meanwhile()
    gone = {node.node_id for node in nodes}
    wait_until(lambda: not any(n["Alive"] for n in ray.nodes() if n["NodeID"] in gone))


def test_a_node_dies_in_the_middle_of_a_step(cluster, cache, tmp_path):
    pause = tmp_path / "pause"
    here = ray.get_runtime_context().get_node_id()
    engine = Engine.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
    ).remote(cache)
    assert ray.get(engine.step.remote(1)) == [[]] * PROMPTS
    assert ray.get(engine.step.remote(2)) == [[1] * SAMPLE_INDICES] * PROMPTS

    # One node, in the middle of a step: nothing is lost.
    step = engine.step.remote(3, pause)
    wait_until(pause.exists)
    kill(cluster, cluster.others[0], meanwhile=pause.unlink)
    assert ray.get(step) == [[2] * SAMPLE_INDICES] * PROMPTS
    assert ray.get(engine.step.remote(4)) == [[3] * SAMPLE_INDICES] * PROMPTS
    wait_until(lambda: cache.health() == (2, 0, 0))  # two are left, and have all of it
    assert copies(cache) == {
        p: {name: [4] * SAMPLE_INDICES for name in ray.get(cache._coordinator.view.remote()).shards}
        for p in range(PROMPTS)
    }

    # A new one: two copies of each, and the third node has its share.
    cluster.others.append(add_node(cluster))
    took = wait_until(lambda: cache.health() == (3, 0, 0))
    print(f"two copies of everything {took:.1f} s after a new node")
    there = copies(cache)
    assert all(len(has) == 2 for has in there.values())
    assert all(
        versions == [4] * SAMPLE_INDICES for has in there.values() for versions in has.values()
    )
    assert len({name for has in there.values() for name in has}) == 3
    assert ray.get(engine.step.remote(5)) == [[4] * SAMPLE_INDICES] * PROMPTS

    # Both copies of some: the step goes on; what is left is found, or what a disk had before.
    step = engine.step.remote(6, pause)
    wait_until(pause.exists)
    kill(cluster, *cluster.others, meanwhile=pause.unlink)
    found = ray.get(step)
    assert all(versions in ([], [4] * SAMPLE_INDICES, [5] * SAMPLE_INDICES) for versions in found)
    wait_until(lambda: cache.health() == (1, 0, 0))
    ray.get(engine.step.remote(7))
    assert ray.get(engine.read.remote()) == {p: [7] * SAMPLE_INDICES for p in range(PROMPTS)}


def test_a_node_that_comes_back_finds_its_disk(cluster, cache):
    put_all(cache, 1)
    kill(cluster, *cluster.others)  # before one can be copied to the other
    wait_until(lambda: cache.health() == (1, 0, 0))
    left = {p for p, found in versions_of(cache).items() if found}
    assert 0 < len(left) < PROMPTS, "too few prompts for a test that could fail"
    again = [p for p in range(PROMPTS) if p % 3 == 0]
    put_all(cache, 2, again)
    for _ in range(2):
        cluster.others.append(add_node(cluster))
    wait_until(lambda: cache.health() == (3, 0, 0))
    assert versions_of(cache) == all_at(1) | {p: [2] * SAMPLE_INDICES for p in again}
    assert all(len(has) == 2 for has in copies(cache).values())


def test_partitions_move_to_the_nodes_with_engines(cluster, cache):
    put_all(cache, 1)
    with pytest.raises(ConfigError, match=r"layout: \['nowhere'\] are no nodes of this Ray"):
        cache.set_preferred_nodes(["nowhere"])
    layout = {node.node_id for node in cluster.others}
    cache.set_preferred_nodes(layout)

    def moved():
        assert versions_of(cache) == all_at(1)  # meanwhile, too
        view = ray.get(cache._coordinator.view.remote())
        return all({view.nodes[n] for n in nodes} == layout for nodes in view.routing.writers)

    wait_until(moved)
    assert all(len(has) == 2 for has in copies(cache).values())
    assert cache.failures == 0


def test_a_shard_that_is_stopped_costs_a_deadline_and_catches_up(
    cluster, cache, caplog, tmp_path, monkeypatch
):
    put_all(cache, 1)
    monkeypatch.setattr(driver_module, "WRITE_SECONDS", 2.0)
    here = ray.get_runtime_context().get_node_id()  # whose shard is asked first
    name = next(n for n, node in cache._view.nodes.items() if node == here)
    shard = cache._view.shards[name]
    pid = ray.get(shard.__ray_call__.remote(lambda self: os.getpid()))
    cache.deadline_s = 1.0 / PROMPTS  # a second for all of them
    with caplog.at_level(logging.WARNING):
        os.kill(pid, signal.SIGSTOP)
        try:
            found = versions_of(cache)  # without its drafts, or with another's
            assert all(g in ([], [1] * SAMPLE_INDICES) for g in found.values())
            saved = cache.snapshot(tmp_path / "snapshot", 1)  # by those that have a copy
            assert sum(file.rollouts for file in saved.files) == PROMPTS * SAMPLE_INDICES
            put_all(cache, 2)  # ends when the shard has been left out
            assert cache.failures > 0
            assert name not in cache._view.shards
            cache.deadline_s = DEADLINE_S
            assert versions_of(cache) == all_at(2)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: cache.health() == (3, 0, 0))
        assert versions_of(cache) == all_at(2)
    assert len([r for r in caplog.records if "rows are decoded plainly" in r.message]) == 1
    has = [has[name] for has in copies(cache).values() if name in has]
    assert has and all(versions == [2] * SAMPLE_INDICES for versions in has)


def test_who_does_not_answer_is_waited_for_once_and_the_last_known_state_stands(cluster, cache):
    forever = 3600.0  # longer than the test may take
    put_all(cache, 1)
    health, stats = cache.health(), cache.stats()
    assert health == (3, 0, 0) and len(stats) == 3
    name, shard = next(iter(cache._view.shards.items()))
    pids = [
        coordinator_pid(cache),
        ray.get(shard.__ray_call__.remote(lambda self: os.getpid())),
    ]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert cache.health(0.5) == health
        assert cache.stats(0.5)[name] == stats[name]
        assert cache.failures == 1  # the shard's; the breaker is closed yet
        assert cache.health(forever) == health
        assert cache.stats(forever)[name] == stats[name]
        assert cache.failures == 1
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    put_all(cache, 2)  # of all shards, as before
    wait_until(lambda: cache.health(forever) == health and cache._health_call is None)
    assert cache.stats(forever).keys() == stats.keys() and versions_of(cache) == all_at(2)


def test_a_coordinator_that_dies_begins_again_on_the_same_disks(cluster, cache):
    put_all(cache, 1)
    names = set(cache._view.shards)
    pid = coordinator_pid(cache)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: coordinator_pid(cache) not in (None, pid))

    def whole():
        found = versions_of(cache)  # cold at first, and never an error
        assert all(g in ([], [1] * SAMPLE_INDICES) for g in found.values())
        return all(found.values()) and cache.health() == (3, 0, 0)

    wait_until(whole)
    assert set(cache._view.shards) == names


def coordinator_pid(cache):
    try:
        return ray.get(cache._coordinator.__ray_call__.remote(lambda self: os.getpid()))
    except ray.exceptions.RayError:
        return None

"""The cluster's cache while the network between Ray nodes is cut: real nodes, real packets lost.

What is waited for is waited for generously; that the cut-off side falls silent in time is read from
its own notes.
"""

import contextlib
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.shard import LEASE_SECONDS
from nemo_specrl.cache.cluster.shard_identity import Identity, write_identity
from tests.support.cluster.network import Network, address, alive, why_not
from tests.support.cluster.nodes import (
    DEADLINE_S,
    KEYS,
    PROMPTS,
    SAMPLE_INDICES,
    all_at,
    copies,
    put_all,
    ray_head,
    start_cache,
    versions_of,
    wait_until,
)

NAMES = ("zero", "one", "two")


@pytest.fixture(scope="module")
def network():
    """Three nodes, of which Ray takes one for dead some 32 s after it was cut off.

    Their shards have names from the start: with random ones, this process would read nothing from
    the node that is cut off in one placement of 160, and no call would fail.
    """
    if why := why_not():
        pytest.skip(f"no networks of namespaces here: {why}")
    with (
        tempfile.TemporaryDirectory(prefix="net", ignore_cleanup_errors=True) as folder,  # short
        contextlib.closing(Network(Path(folder))) as network,
    ):
        network.start()
        with ray_head(
            sys.modules[__name__], network.disk(0), failures=8, node_ip_address=address(0)
        ) as head:
            network.ray_address = head.address
            network.add_nodes(1, 2)
            for number, name in enumerate(NAMES):
                (network.disk(number) / "stores").mkdir()
                write_identity(network.disk(number) / "stores", Identity(name, 0))
            yield network


@pytest.fixture
def cache(network):
    """With version 1 of all prompts, and look-ups that are soon over."""
    # For each prompt: 6 s for all of them, a second for those that a step asks for at once.
    cache = start_cache(network.disk(0) / "stores", deadline_ms=100)
    put_all(cache, 1)
    yield cache
    cache.close()


@ray.remote(num_cpus=0)
class Engine:
    """A client in a process of its own, on another machine."""

    def __init__(self, cache):
        self.cache = cache

    def watch(self, folder):
        """Looks all prompts up again and again, whoever may reach it meanwhile; takes notes."""
        while not (Path(folder) / "end").exists():
            begun = time.monotonic()
            found = list(versions_of(self.cache).values())
            with (Path(folder) / "notes").open("a") as notes:
                print(json.dumps([begun, found]), file=notes)
            time.sleep(0.2)

    def step(self, version):
        """Looks all prompts up, some of them at a time, then puts this; what was found."""
        found = []
        for first in range(0, PROMPTS, 10):
            got = self.cache.get(KEYS[first : first + 10])
            some = [got.get(key, []) for key in KEYS[first : first + 10]]
            found += [[r.policy_version for r in g] for g in some]
        put_all(self.cache, version)
        return found

    def failures(self):
        return self.cache.failures


class Watch:
    """An engine on one machine, and what it sees."""

    def __init__(self, network, cache, number):
        self._folder = Path(tempfile.mkdtemp(dir=network.disk(number)))
        self._engine = engine_on(network, cache, number)
        self._engine.watch.remote(str(network.disk(0) / self._folder.name))
        wait_until(lambda: self.since(0.0))

    def since(self, when):
        """The versions that look-ups begun since then have found, prompt by prompt."""
        notes = self._folder / "notes"
        lines = notes.read_text().split("\n")[:-1] if notes.exists() else []
        return [found for begun, found in map(json.loads, lines) if begun > when]

    def end(self):
        (self._folder / "end").touch()


def engine_on(network, cache, number):
    where = NodeAffinitySchedulingStrategy(network.nodes[number], soft=False)
    return Engine.options(scheduling_strategy=where).remote(cache)


def either(found, *versions):
    """Whether a look-up found one of these, or nothing, of every prompt."""
    return all(v == [] or v in [[version] * SAMPLE_INDICES for version in versions] for v in found)


def whole(cache, version):
    """Whether two copies of each prompt are there, and are found, in this version."""
    copied = [list(has.values()) for has in copies(cache).values()]
    return copied == [[[version] * SAMPLE_INDICES] * 2] * PROMPTS and versions_of(cache) == all_at(
        version
    )


def test_a_node_is_cut_off_and_comes_back(network, cache, caplog):
    watch = Watch(network, cache, 1)
    assert watch.since(0.0)[0] == [[1] * SAMPLE_INDICES] * PROMPTS
    with caplog.at_level(logging.WARNING):
        network.cut(1)
        cut = time.monotonic()
        try:
            found = versions_of(cache)
            assert either(found.values(), 1)
            put_all(cache, 2)  # ends when the node has been left out
            assert cache.failures > 0
            cache.deadline_s = DEADLINE_S
            assert versions_of(cache) == all_at(2)
            wait_until(lambda: watch.since(cut + LEASE_SECONDS))
        finally:
            network.mend(1)
        wait_until(lambda: cache.health() == (3, 0, 0))
        assert whole(cache, 2)
    assert len([r for r in caplog.records if "rows are decoded plainly" in r.message]) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]

    # On its side: what it had, then nothing, and again something once it has caught up.
    wait_until(lambda: watch.since(0.0)[-1] == [[2] * SAMPLE_INDICES] * PROMPTS)
    watch.end()
    assert all(either(found, 1, 2) for found in watch.since(0.0))
    assert all(either(found, 2) for found in watch.since(cut + LEASE_SECONDS))


def test_two_nodes_are_cut_from_one_another(network, cache):
    watch = Watch(network, cache, 2)
    engine = engine_on(network, cache, 1)
    network.part(1, 2)
    try:
        assert either(ray.get(engine.step.remote(2)), 1)
        assert ray.get(engine.failures.remote()) > 0
        # Who is behind hears it from the coordinator, and then gives out nothing old.
        stepped = time.monotonic()
        wait_until(lambda: any(either(found, 2) for found in watch.since(stepped)))
        told = time.monotonic()
        cache.deadline_s = DEADLINE_S
        assert versions_of(cache) == all_at(2)
        put_all(cache, 3)
        assert versions_of(cache) == all_at(3)
        assert cache.failures == 0
    finally:
        network.join(1, 2)
    wait_until(lambda: cache.health() == (3, 0, 0) and whole(cache, 3))
    wait_until(lambda: watch.since(0.0)[-1] == [[3] * SAMPLE_INDICES] * PROMPTS)
    watch.end()
    assert all(either(found, 2, 3) for found in watch.since(told))


def test_a_node_is_cut_off_until_ray_gives_it_up(network, cache):
    watch = Watch(network, cache, 1)
    network.cut(1)
    cut = time.monotonic()
    put_all(cache, 2)
    cache.deadline_s = DEADLINE_S
    assert versions_of(cache) == all_at(2)
    wait_until(lambda: network.nodes[1] not in alive().values())
    wait_until(lambda: cache.health() == (2, 0, 0))
    assert whole(cache, 2)
    assert watch.since(cut + LEASE_SECONDS)
    assert all(either(found) for found in watch.since(cut + LEASE_SECONDS))

    # The machine starts again, with its disk.
    network.stop(1)
    network.add_nodes(1)
    wait_until(lambda: cache.health() == (3, 0, 0))
    assert whole(cache, 2)
    assert set(cache._view.nodes.values()) == set(alive().values())

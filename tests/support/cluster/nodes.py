"""Shared by the tests with real Ray nodes: starting nodes, known rollouts, what a cache has."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import numpy as np
import ray
import ray.cloudpickle
from ray.cluster_utils import Cluster

from nemo_specrl.cache.cluster.run_cache import start_shards
from nemo_specrl.config import CacheConfig
from nemo_specrl.rollout import Finish, Rollout, prompt_key

PROMPTS = 60
SAMPLE_INDICES = 2
NODE = {"num_cpus": 1, "object_store_memory": 2**27}
CONFIG = CacheConfig(
    partitions=32,  # if two nodes of three have none of them, once in 4e5 runs, a test fails
    deadline_ms=30_000,  # two cores share the nodes
    max_bytes_per_node=2**24,
)
DEADLINE_S = CONFIG.deadline_ms / 1000
KEYS = [prompt_key([p]) for p in range(PROMPTS)]
STARTS = 3  # on a busy machine a raylet may die while it starts


@contextlib.contextmanager
def ray_head(module, folder, failures, **arguments):
    """A Ray cluster of this process's own node.

    Args:
        module: module whose classes its workers get by value: they do not import tests.
        folder: Ray's folder, with a short name.
        failures: number of failed health checks, a second apart, after which a node is dead.
        arguments: arguments of the node, in addition to the usual ones.
    """
    # A Cluster notes its address here, whatever its temp_dir; Ray expects the folder to exist.
    os.makedirs(os.path.dirname(ray._private.utils.get_ray_address_file(None)), exist_ok=True)
    config = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 3000,
        "health_check_failure_threshold": failures,
    }
    own = {"include_dashboard": False, "temp_dir": str(folder), "_system_config": config}
    cluster = Cluster()
    start_node(cluster, NODE | own | arguments)
    for each in (sys.modules[__name__], module):
        ray.cloudpickle.register_pickle_by_value(each)
    try:
        address = cluster.head_node.node_ip_address
        ray.init(cluster.address, _node_ip_address=address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_cache(folder, *, keep=False, tokenizer_id="tok", **changes):
    """Start shards with ``CONFIG``, some of whose keys are changed."""
    config = CONFIG.model_copy(update=changes)
    return start_shards(folder, config, keep=keep, tokenizer_id=tokenizer_id)


def add_node(cluster):
    """Add a node to a cluster that has a head."""
    return start_node(cluster, NODE)


def start_node(cluster, arguments):
    """Add a node, first the head; one that dies while it starts is restarted."""
    for start in range(1, STARTS + 1):
        before = set(cluster.list_all_nodes())
        try:
            return cluster.add_node(**arguments)
        except Exception as error:  # Ray raises bare ones
            print(f"start {start} of a node: {type(error).__name__}: {error}")
            for node in set(cluster.list_all_nodes()) - before:
                cluster.remove_node(node, allow_graceful=False)
            if start == STARTS:
                raise
    raise AssertionError("unreachable")


def rollout(prompt, version=0, sample_index=0, incarnation=0):
    rng = np.random.default_rng([prompt, version, sample_index])
    return Rollout(
        prompt_key([prompt]),
        sample_index,
        rng.integers(0, 60000, 9),
        np.zeros(9),
        Finish.STOP,
        version,
        incarnation=incarnation,
    )


def group(prompt, version):
    return [rollout(prompt, version, sample_index) for sample_index in range(SAMPLE_INDICES)]


def put_all(cache, version, prompts=range(PROMPTS)):
    """Put a group of each prompt, and wait until it is on disk."""
    cache.put(r for p in prompts for r in group(p, version))
    cache.sync()


def versions_of(cache):
    """For each prompt, the versions of its rollouts, which are as they were put."""
    found = cache.get(KEYS)
    for p in range(PROMPTS):
        for r in found.get(KEYS[p], []):
            assert r == rollout(p, r.policy_version, r.sample_index, cache.incarnation)
    return {p: [r.policy_version for r in found.get(KEYS[p], [])] for p in range(PROMPTS)}


def all_at(version):
    """Like :func:`versions_of`, if every prompt has a group of a version."""
    return {p: [version] * SAMPLE_INDICES for p in range(PROMPTS)}


def wait_until(condition, seconds=120.0):
    """Wait, and return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "it did not come"
        time.sleep(0.1)
    return time.monotonic() - start


def copies(cache):
    """For each prompt, the shards that have it, and the versions that they have."""
    view = ray.get(cache._coordinator.view.remote())
    there = {p: {} for p in range(PROMPTS)}
    for name, shard in view.shards.items():
        for r in ray.get(shard.read_range.remote(b"", None)).rollouts:
            if name in view.routing.read(r.key):
                there[KEYS.index(r.key)].setdefault(name, []).append(r.policy_version)
    return there

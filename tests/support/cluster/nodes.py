"""Shared by the tests with real Ray nodes: engines that use the cache, and known responses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache import open_cache
from nemo_specrl.cache.cluster import shard as shard_module
from nemo_specrl.rollout import Finish, Rollout, prompt_key

LONG = "SPECRL_LONG_TESTS" in os.environ  # some ten minutes, with the numbers of the issue
PROMPTS = 10_000 if LONG else 500
RESPONSES = 2  # of a prompt in a version
BATCH = 100 if LONG else 25
DEADLINE_S = 1.0  # two cores share the nodes
OVERDUE_S = 5.0  # what only a look-up without a deadline takes
VOCABULARY = "0" * 32
KEYS = [prompt_key([prompt]) for prompt in range(PROMPTS)]
CHILD = """
import json, sys, time
from nemo_specrl.cache import open_cache
from nemo_specrl.cache.cluster.client import in_cluster
from nemo_specrl.config import CacheConfig

settings, vocabulary, key, nodes = json.loads(sys.argv[1])
assert in_cluster() and "ray" not in sys.modules
cache = open_cache(CacheConfig(**settings), vocabulary)
while len(cache.nodes) < nodes:
    time.sleep(0.1)
print(len(cache.get([bytes.fromhex(key)], 30.0).get(bytes.fromhex(key), [])))
cache.close()
"""


def rollout(prompt, version, number):
    rng = np.random.default_rng([prompt, version, number])
    return Rollout(
        KEYS[prompt],
        rng.integers(0, 60000, 20),
        Finish.STOP,
        version,
        np.zeros(20, np.float32),
        identity=1 + number + RESPONSES * (version + 1000 * prompt),
    )


def group(prompt, version):
    return [rollout(prompt, version, number) for number in range(RESPONSES)]


def wait_until(condition, seconds=120.0):
    """Wait, and return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "it did not come"
        time.sleep(0.2)
    return time.monotonic() - start


def kill_itself(_shard):
    """End the process in which this runs."""
    os.kill(os.getpid(), signal.SIGKILL)


class Engine:
    """What an engine does with the cache, in a process of its own on a node."""

    def __init__(self, config, idle_s=None):
        if idle_s is not None:
            shard_module.IDLE_SECONDS = idle_s
        self.config = config
        self.kept = {"kept": 0.0}  # what the engine counts
        self.cache = open_cache(config, VOCABULARY, counts=self.kept)
        self.watching = False
        self.seen = []  # of each look-up: when it began, what it took, prompts, found ones

    def nodes(self):
        return self.cache.nodes

    def counts(self):
        return {"late": self.cache.late, "failed": self.cache.failed, "healed": self.cache.healed}

    def put(self, version, prompts=range(PROMPTS)):
        """Put a group of each prompt; return how many responses were kept."""
        kept = 0
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            kept += self.cache.put([r for prompt in part for r in group(prompt, version)])
        self.kept["kept"] += kept
        return kept

    def get(self, prompts):
        """Look some prompts up; return the newest version of each, -1 where there is none."""
        started = time.time()
        found = self.cache.get([KEYS[prompt] for prompt in prompts], DEADLINE_S)
        self.seen.append((started, time.time() - started, len(prompts), len(found)))
        newest = []
        for prompt in prompts:
            history = found.get(KEYS[prompt], [])
            numbers = defaultdict(int)
            for r in history:
                assert r == rollout(prompt, r.policy_version, numbers[r.policy_version])
                numbers[r.policy_version] += 1
            newest.append(history[-1].policy_version if history else -1)
        return newest

    def read(self, prompts=range(PROMPTS), tries=1):
        """Look all prompts up; return the newest versions, and those that were found first."""
        versions = dict.fromkeys(prompts, -1)
        for _ in range(tries):
            left = [prompt for prompt in prompts if versions[prompt] < 0]
            for start in range(0, len(left), BATCH):
                part = left[start : start + BATCH]
                versions |= zip(part, self.get(part), strict=True)
        return [versions[prompt] for prompt in prompts]

    def watch(self):
        """Look random prompts up, again and again, whatever happens."""
        self.watching = True
        rng = np.random.default_rng(0)

        def look_up():
            while self.watching:
                self.get(rng.choice(PROMPTS, BATCH, replace=False).tolist())
                time.sleep(0.05)

        threading.Thread(target=look_up, daemon=True).start()

    def look_ups(self):
        """The number of look-ups so far."""
        return len(self.seen)

    def end_watch(self, since):
        """Stop looking up; return the look-ups after the first ``since``. Few enough for Ray to
        send them without its object store, which a dying node may spoil."""
        self.watching = False
        return self.seen[since:]

    def take(self, prompt, rows, version):
        drafts = self.cache.take_drafts({KEYS[prompt]: rows}, version, 30.0)
        return [draft.identity for draft in drafts.get(KEYS[prompt], [])]

    def in_child(self, prompt, nodes):
        """Look a prompt up in a child of this worker, as the engine core of AsyncLLM is one."""
        asked = [self.config.model_dump(mode="json"), VOCABULARY, KEYS[prompt].hex(), nodes]
        run = [sys.executable, "-c", CHILD, json.dumps(asked)]
        return subprocess.run(run, capture_output=True, text=True, timeout=120)


def engine_on(node, config, **options):
    """Start an engine on a node.

    Args:
        node: Ray's id of the node.
        config: the ``cache`` block.
        options: of the engine.
    """
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(num_cpus=0, max_concurrency=4)(Engine)
    # A call that is lost with its connection is made once more.
    actor = actor.options(scheduling_strategy=where, max_task_retries=3)
    return actor.remote(config, **options)

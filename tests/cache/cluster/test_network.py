"""The cluster's cache while the network between Ray nodes is cut: real nodes, real packets lost.

Every node but this process's own is a set of namespaces with a network, a disk and processes of its
own; a bridge in one more of them is the switch. All of it ends with this process. What is waited
for is waited for generously; that the cut-off side falls silent in time is read from its own notes.
"""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_specrl.cache.cluster.driver import start_shards
from nemo_specrl.cache.cluster.shard import LEASE_SECONDS
from tests.cache.cluster.nodes import (
    KEYS,
    NODE,
    OPTIONS,
    PROMPTS,
    SAMPLE_INDICES,
    STARTS,
    all_at,
    copies,
    put_all,
    ray_head,
    versions_of,
    wait_until,
)

PROGRAMS = ("ip", "unshare", "nsenter")
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SUBNET = "10.213.7"
HERE = "specrl0"  # the one link that this process's own network has of it
SWITCH = """
set -e
ip link add br0 type bridge
ip link set br0 up
echo ready
cat # until the pipe closes
"""
MACHINE = """
set -e
mount --bind "$1" "$2"
ip link set lo up
echo ready
read # until it is plugged in
ip addr add "$3/24" dev eth0
ip link set eth0 up
("${@:4}" >"$2/start.log" 2>&1; touch "$2/ended") &
cat
"""
TRIAL = "ip link add br0 type bridge && ip link add v0 type veth && mount --bind /tmp /tmp"
SOON = 20.0  # seconds, for what has a deadline of one: cores are busy


def why_not():
    """Why there can be no such network here; None: there can."""
    if os.getuid() != 0:
        return "not root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"no {', '.join(missing)}"
    tried = subprocess.run([*UNSHARE, "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"{tried.stderr.strip()} ({tried.returncode})" if tried.returncode else None


class Network:
    """Machines with a Ray node each, joined by a switch; number 0 is this process's own.

    Args:
        folder: for the disks; its ``ray`` is where each machine sees its own.
    """

    def __init__(self, folder):
        self.folder = folder
        self.ray_address = None
        self.nodes = {}  # number to the node's id
        self._processes = {}
        self._switch = 0

    def start(self):
        """The switch, and this process's link to it."""
        self.disk(0).mkdir()
        self._switch = self._begin("switch", SWITCH)
        self._plug(0, HERE, os.getpid())
        _ip("addr", "add", f"{_address(0)}/24", "dev", HERE)
        _ip("link", "set", HERE, "up")

    def add_nodes(self, *numbers):
        """Machines with a Ray node each; one that was there before has its disk.

        A node that dies while it starts is started again.
        """
        for number in numbers:
            self._start(number)
        for number in numbers:
            for left in reversed(range(STARTS)):
                wait_until(lambda n=number: _address(n) in alive() or self._ended(n).exists())
                if _address(number) in alive():
                    break
                print(f"node {number}: {(self.disk(number) / 'start.log').read_text()[-2000:]}")
                assert left, f"node {number} died {STARTS} times while starting"
                self.stop(number)
                self._start(number)
        self.nodes |= {number: alive()[_address(number)] for number in numbers}

    def _start(self, number):
        self.disk(number).mkdir(exist_ok=True)
        self._ended(number).unlink(missing_ok=True)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        start += [f"--address={self.ray_address}", f"--node-ip-address={_address(number)}"]
        start += [f"--{name.replace('_', '-')}={value}" for name, value in NODE.items()]
        folders = (self.disk(number), self.disk(0))
        pid = self._begin(number, MACHINE, *folders, _address(number), *start)
        self._plug(number, "eth0", pid)
        self._processes[number].stdin.write("\n")
        self._processes[number].stdin.flush()

    def _ended(self, number):
        """The file that is there when the Ray node of a machine has ended."""
        return self.disk(number) / "ended"

    def disk(self, number):
        """Of a machine: its own processes see it as ``ray``."""
        return self.folder / (f"n{number}" if number else "ray")

    def cut(self, number):
        """Nothing gets to this machine any more, nor away from it."""
        self._at_switch("link", "set", f"v{number}", "down")

    def mend(self, number):
        """Undo a cut."""
        self._at_switch("link", "set", f"v{number}", "up")

    def part(self, *numbers, how="on"):
        """Nothing gets from one of these machines to another; all else does."""
        for number in numbers:
            self._at_switch("link", "set", f"v{number}", "type", "bridge_slave", "isolated", how)

    def join(self, *numbers):
        """Undo a parting."""
        self.part(*numbers, how="off")

    def stop(self, number):
        """A machine's power fails."""
        self._at_switch("link", "delete", f"v{number}")  # else it lingers
        self._end(number)

    def close(self):
        """Nothing is left."""
        if self._switch:
            subprocess.run(["ip", "link", "delete", HERE], capture_output=True)  # if it is there
        for name in list(self._processes):
            self._end(name)

    def _begin(self, name, script, *arguments):
        """The pid of a machine's first process."""
        process = self._processes[name] = subprocess.Popen(
            [*UNSHARE, "bash", "-c", script, "machine", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())

    def _end(self, name):
        with self._processes.pop(name) as process:
            process.stdin.close()  # the first process ends, and with it all others

    def _plug(self, number, name, pid):
        peer = ("peer", "name", name, "netns", str(pid))
        self._at_switch("link", "add", f"v{number}", "type", "veth", *peer)
        self._at_switch("link", "set", f"v{number}", "master", "br0", "up")

    def _at_switch(self, *command):
        _ip(*command, inside=("nsenter", "-t", str(self._switch), "--net"))


def _ip(*command, inside=()):
    subprocess.run([*inside, "ip", *command], check=True)


def _address(number):
    return f"{SUBNET}.{number + 1}"


def alive():
    """Address to id of the nodes that Ray has."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


@pytest.fixture(scope="module")
def network():
    """Three nodes, of which Ray takes one for dead some 32 s after it was cut off."""
    if why := why_not():
        pytest.skip(f"no networks of namespaces here: {why}")
    with (
        tempfile.TemporaryDirectory(prefix="net", ignore_cleanup_errors=True) as folder,  # short
        contextlib.closing(Network(Path(folder))) as network,
    ):
        network.start()
        with ray_head(
            sys.modules[__name__], network.disk(0), failures=8, node_ip_address=_address(0)
        ) as head:
            network.ray_address = head.address
            network.add_nodes(1, 2)
            yield network


@pytest.fixture
def cache(network):
    """With version 1 of all prompts, and look-ups that are soon over."""
    cache = start_shards(network.disk(0) / "stores", **OPTIONS | {"deadline_s": 1.0})
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
    """What an engine on a machine sees."""

    def __init__(self, network, cache, number):
        self._folder = Path(tempfile.mkdtemp(dir=network.disk(number)))
        self._engine = engine_on(network, cache, number)
        self._engine.watch.remote(str(network.disk(0) / self._folder.name))
        wait_until(lambda: self.since(0.0))

    def since(self, when):
        """What it found in look-ups that began since then: prompt by prompt, versions."""
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
            assert time.monotonic() < cut + SOON
            assert either(found.values(), 1)
            put_all(cache, 2)  # ends when the node has been left out
            assert cache.failures > 0
            cache.deadline_s = OPTIONS["deadline_s"]
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
        # Who is behind hears it from the keeper, and then gives out nothing old.
        stepped = time.monotonic()
        wait_until(lambda: any(either(found, 2) for found in watch.since(stepped)))
        told = time.monotonic()
        cache.deadline_s = OPTIONS["deadline_s"]
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
    cache.deadline_s = OPTIONS["deadline_s"]
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

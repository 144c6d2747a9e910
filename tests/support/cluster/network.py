"""A network of namespaces with a Ray node in each, whose links can be cut.

Every node but this process's own is a set of namespaces with a network, a disk and processes of its
own; a bridge in one more of them is the switch. All of it ends with this process.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ray

from tests.support.cluster.nodes import NODE, STARTS, wait_until

__all__ = ["Network", "address", "alive", "why_not"]

PROGRAMS = ("ip", "unshare", "nsenter")
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SUBNET = "10.213.7"
HERE = "specrl0"  # the one link to it from this process's own network
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


def why_not():
    """Why there cannot be such a network here; None: there can."""
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
        _ip("addr", "add", f"{address(0)}/24", "dev", HERE)
        _ip("link", "set", HERE, "up")

    def add_nodes(self, *numbers):
        """Machines with a Ray node each; one that was there before has its disk.

        A node that dies while it starts is started again.
        """
        for number in numbers:
            self._start(number)
        for number in numbers:
            for left in reversed(range(STARTS)):
                wait_until(lambda n=number: address(n) in alive() or self._ended(n).exists())
                if address(number) in alive():
                    break
                print(f"node {number}: {(self.disk(number) / 'start.log').read_text()[-2000:]}")
                assert left, f"node {number} died {STARTS} times while starting"
                self.stop(number)
                self._start(number)
        self.nodes |= {number: alive()[address(number)] for number in numbers}

    def _start(self, number):
        self.disk(number).mkdir(exist_ok=True)
        self._ended(number).unlink(missing_ok=True)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        start += [f"--address={self.ray_address}", f"--node-ip-address={address(number)}"]
        start += [f"--{name.replace('_', '-')}={value}" for name, value in NODE.items()]
        folders = (self.disk(number), self.disk(0))
        pid = self._begin(number, MACHINE, *folders, address(number), *start)
        self._plug(number, "eth0", pid)
        self._processes[number].stdin.write("\n")
        self._processes[number].stdin.flush()

    def _ended(self, number):
        """The file that exists once the Ray node of a machine has ended."""
        return self.disk(number) / "ended"

    def disk(self, number):
        """The disk of a machine: its own processes see it as ``ray``."""
        return self.folder / (f"n{number}" if number else "ray")

    def cut(self, number):
        """Cut a machine off: nothing reaches it or leaves it any more."""
        self._at_switch("link", "set", f"v{number}", "down")

    def mend(self, number):
        """Undo a cut."""
        self._at_switch("link", "set", f"v{number}", "up")

    def part(self, *numbers, how="on"):
        """Nothing gets from one of these machines to another; everything else does."""
        for number in numbers:
            self._at_switch("link", "set", f"v{number}", "type", "bridge_slave", "isolated", how)

    def join(self, *numbers):
        """Undo a parting."""
        self.part(*numbers, how="off")

    def stop(self, number):
        """A machine's power fails."""
        self._at_switch("link", "delete", f"v{number}")  # otherwise it lingers
        self._end(number)

    def close(self):
        """End everything."""
        if self._switch:
            subprocess.run(["ip", "link", "delete", HERE], capture_output=True)  # if it is there
        for name in list(self._processes):
            self._end(name)

    def _begin(self, name, script, *arguments):
        """Start a machine's first process, and return its pid."""
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


def address(number):
    return f"{SUBNET}.{number + 1}"


def alive():
    """Return address to id of the nodes that Ray has."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}

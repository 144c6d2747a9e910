"""A network of namespaces with a Ray node in each, whose links can be cut.

Every node but this process's own is a set of namespaces with a network, a disk and processes of its
own; a bridge in one more of them is the switch. All of it ends with this process.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
import ray.cloudpickle
from ray.cluster_utils import Cluster

from tests.support.cluster import nodes
from tests.support.cluster.nodes import wait_until

__all__ = ["Network", "address", "alive", "ray_network", "why_not"]

NODE = {"num_cpus": 1, "object_store_memory": 2**27}
PORTS = {
    "dashboard_agent_listen_port": 53101,
    "metrics_agent_port": 53102,
    "metrics_export_port": 53103,
    "runtime_env_agent_port": 53104,
}
NODE_ID = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"
START_SECONDS = 60
STARTS = 3  # on a busy machine a raylet may die while it starts
# Ray takes a node that is cut off for dead after 100 s, and one that was killed after 20 s.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 20,
}

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
"${@:4}" >"$2/start.log" 2>&1 &
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


@contextlib.contextmanager
def ray_network(folder, others):
    """A Ray cluster of this process's own node and some others.

    Args:
        folder: with a short name, for the disks.
        others: number of the other nodes.
    """
    # A Cluster notes its address here, whatever its temp_dir; Ray expects the folder to exist.
    os.makedirs(os.path.dirname(ray._private.utils.get_ray_address_file(None)), exist_ok=True)
    with contextlib.closing(Network(folder)) as network:
        network.start()
        cluster = Cluster()
        own = {
            "include_dashboard": False,
            "temp_dir": str(network.disk(0)),
            "_system_config": HEALTH,
        }
        node = network.nodes[0] = secrets.token_hex(28)
        threading.Thread(target=_tell_ports, args=(network.disk(0), node), daemon=True).start()
        ray.cloudpickle.register_pickle_by_value(nodes)  # workers do not import tests
        try:
            cluster.add_node(
                **NODE, **PORTS, **own, node_ip_address=address(0), env_vars={NODE_ID: node}
            )
            ray.init(cluster.address, _node_ip_address=address(0), log_to_driver=False)
            [network.session] = {path.resolve().name for path in network.disk(0).glob("session_*")}
            network.ray_address = cluster.address
            network.add_nodes(*range(1, others + 1))
            yield network
        finally:
            ray.shutdown()
            cluster.shutdown()


def _tell_ports(temp_dir, node):
    """Write what a node's agents write when they have started.

    Its raylet waits 15 s for that, and then dies; on a busy machine agents take longer.
    """
    while not (sessions := list(temp_dir.glob("session_2*"))):
        time.sleep(0.01)
    for name, port in PORTS.items():
        (sessions[0] / f"{name}_{node}").write_text(str(port))


class Network:
    """Machines with a Ray node each, joined by a switch; number 0 is this process's own.

    Args:
        folder: for the disks; its ``ray`` is where each machine sees its own.
    """

    def __init__(self, folder):
        self.folder = folder
        self.ray_address = self.session = None
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
            for left in reversed(range(STARTS)):
                self._start(number)
                until = time.monotonic() + START_SECONDS
                while not (here := address(number) in alive()) and time.monotonic() < until:
                    time.sleep(0.2)
                if here:
                    break
                print(f"node {number}: {(self.disk(number) / 'start.log').read_text()[-2000:]}")
                assert left, f"node {number} did not start, {STARTS} times"
                self.stop(number)

    def _start(self, number):
        self.disk(number).mkdir(exist_ok=True)
        node = self.nodes[number] = secrets.token_hex(28)
        start = [
            "env",
            f"{NODE_ID}={node}",
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
        ]
        start += [f"--address={self.ray_address}", f"--node-ip-address={address(number)}"]
        for name, value in (NODE | PORTS).items():
            name = "dashboard_agent_grpc_port" if name == "metrics_agent_port" else name
            start.append(f"--{name.replace('_', '-')}={value}")
        (self.disk(number) / self.session).mkdir(exist_ok=True)
        _tell_ports(self.disk(number), node)
        folders = (self.disk(number), self.disk(0))
        pid = self._begin(number, MACHINE, *folders, address(number), *start)
        self._plug(number, "eth0", pid)
        self._processes[number].stdin.write("\n")
        self._processes[number].stdin.flush()

    def disk(self, number):
        """The disk of a machine: its own processes see it as ``ray``."""
        return self.folder / (f"n{number}" if number else "ray")

    def processes(self, number):
        """The processes of a machine: name and id there, to the id here."""
        first = Path(f"/proc/{self._processes[number].pid}/ns/pid_for_children").readlink()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (folder / "ns/pid").readlink() == first:
                    status = (folder / "status").read_text().splitlines()
                    inner = next(line for line in status if line.startswith("NSpid")).split()[-1]
                    found[(folder / "comm").read_text().strip(), int(inner)] = int(folder.name)
        return found

    def kill_raylet(self, number):
        """Kill the raylet of a machine; what else of Ray runs there ends by itself."""
        for (name, _), pid in self.processes(number).items():
            if name == "raylet":
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.nodes[number] not in alive().values())

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

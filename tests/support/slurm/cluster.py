"""A real Slurm of a few nodes on one machine, for tests; ends with the process that made it.

Each node, and the controller, is a set of namespaces: its own network, host name, processes, and
``local`` folder, which stands for the node's own disk. Nothing of the machine is touched, and when
the pipe to a node's first process closes, the kernel ends every process of that node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge iproute2"
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")
UNSHARE += ("--mount-proc", "--propagation", "private")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # not on every user's
SUBNET = "10.77.0"  # lives in the controller's network namespace alone

ENDED = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")

CONTROLLER = """
hostname ctl && mount --bind "$1/etc/hosts" /etc/hosts
ip link set lo up && ip link add br0 type bridge
ip addr add "$2.1/24" dev br0 && ip link set br0 up
munged --foreground --force --socket="$1/munge.sock" --key-file="$1/etc/munge.key" \\
  --pid-file="$1/munged.pid" --log-file="$1/log/munged.log" --seed-file="$1/munge.seed" &
until [[ -S $1/munge.sock ]]; do sleep 0.1; done
slurmctld -D -c &
while read -r; do :; done # until the pipe closes
"""
NODE = """
hostname "n$3" && mount --bind "$1/etc/hosts" /etc/hosts
mount --bind "$1/n$3/local" "$1/local"
ip link set lo up
until ip link set eth0 up; do sleep 0.1; done 2>/dev/null
ip addr add "$2.$((10 + $3))/24" dev eth0
until [[ -S $1/munge.sock ]]; do sleep 0.1; done
slurmd -D -N "n$3" &
# Not cat: as the first process of its namespace the shell reaps orphans, whom Slurm would take for
# processes of a job that do not end, and drain the node.
while read -r; do :; done
"""
CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl({subnet}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/ctl
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/%n/spool
SlurmdLogFile={folder}/log/%n.log
SlurmdPidFile={folder}/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=5
UnkillableStepTimeout=60
SlurmdTimeout=45
MessageTimeout=10
BatchStartTimeout=10
JobRequeue=1
MinJobAge=3600
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,requeue_delay=0
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=n[1-{count}] Default=YES State=UP PriorityTier=2 PreemptMode=OFF
PartitionName=low Nodes=n[1-{count}] State=UP GraceTime=60 PreemptMode=CANCEL
"""


def why_not() -> str | None:
    """The reason why no cluster can run here and what to do about it, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"no {', '.join(missing)} here; to run this test: {INSTALL}"
    if os.geteuid() or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        return "nodes are namespaces, which this user may not make; run as root, with CAP_SYS_ADMIN"
    return None


@contextlib.contextmanager
def running(count: int, plugin: Path | None = None) -> Iterator[Cluster]:
    """A cluster for a fixture; where none can run, the test is skipped with the reason."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with contextlib.closing(Cluster(count, plugin)) as cluster:
        yield cluster


class Cluster:
    """Nodes n1, n2, ..., which share the disk ``folder`` and have ``folder/local`` each.

    Seen from outside, node n1's own disk is ``folder/n1/local``.

    Args:
        count: of nodes.
        plugin: library with a plugin of Slurm's (SPANK).
    """

    def __init__(self, count: int = 2, plugin: Path | None = None):
        # Not pytest's folder: paths of sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.local = self.folder / "local"
        self.names = [f"n{i}" for i in range(1, count + 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._write_configuration()
            if plugin is not None:
                (self.folder / "etc" / "plugstack.conf").write_text(f"required {plugin}\n")
            controller = self._start("ctl", CONTROLLER)
            for number, name in enumerate(self.names, 1):
                self._connect(controller, number, self._start(name, NODE, str(number)))
            self._until(self._all_idle, "nodes that are idle")
        except BaseException:
            self.close()
            raise

    def run(
        self, *command: str, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller, as a user on a login node would."""
        return subprocess.run(
            [*self._inside(self._first("ctl")), f"--wdns={cwd}", *command],
            env={**self._environment(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def exit_code(self, job: str) -> int | None:
        """The exit code of a job, or None while it has not ended."""
        show = ("scontrol", "show", "job", "--oneliner", job)
        text = self.run(*show, cwd=self.folder).stdout
        shown = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return int(shown["ExitCode"].split(":")[0]) if shown["JobState"] in ENDED else None

    def kill(self, name: str, number: signal.Signals, pid: int) -> bool:
        """Send a signal to a process of a node, which knows it as ``pid``; False if it is gone."""
        kill = ("kill", f"-{number:d}", str(pid))
        return subprocess.run([*self._inside(self._first(name)), *kill]).returncode == 0

    def crash(self, name: str) -> None:
        """Cut a node's power: all its processes are gone at once."""
        os.kill(self._first(name), signal.SIGKILL)

    def notice(self, name: str) -> None:
        """Have Slurm take a node for dead now, which it does by itself after SlurmdTimeout."""
        self.run(
            "scontrol", "update", f"nodename={name}", "state=down", "reason=x", cwd=self.folder
        )

    def boot(self, name: str) -> None:
        """Bring a node back that has crashed."""
        index = ["ctl", *self.names].index(name)
        dead = self._processes.pop(index)
        dead.stdin.close()
        dead.wait()
        node = self._start(name, NODE, str(index))
        self._processes.insert(index, self._processes.pop())
        self._connect(self._first("ctl"), index, node)

    def close(self) -> None:
        """End every process of the cluster, and remove its files."""
        for process in reversed(self._processes):
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder)

    def _write_configuration(self) -> None:
        for name in ("etc", "log", "ctl", "local"):
            (self.folder / name).mkdir()
        for name in self.names:
            (self.folder / name / "local").mkdir(parents=True)
        self.folder.chmod(0o755)
        etc = self.folder / "etc"
        addresses = {name: f"{SUBNET}.{10 + i}" for i, name in enumerate(self.names, 1)}
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=1024 State=UNKNOWN"
            for name, address in addresses.items()
        )
        (etc / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder, subnet=SUBNET, nodes=nodes, count=len(self.names)
            )
        )
        (etc / "cgroup.conf").write_text("CgroupAutomount=no\n")
        hosts = {"localhost": "127.0.0.1", "ctl": f"{SUBNET}.1", **addresses}
        (etc / "hosts").write_text("".join(f"{ip} {name}\n" for name, ip in hosts.items()))
        (etc / "munge.key").touch(mode=0o600)
        (etc / "munge.key").write_bytes(os.urandom(1024))

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": PATH,
            "HOME": str(self.folder),
            "SLURM_CONF": str(self.folder / "etc" / "slurm.conf"),
        }

    def _start(self, name: str, script: str, *arguments: str) -> int:
        """Start a node and return its first process."""
        with (self.folder / "log" / f"{name}.out").open("wb") as log:
            process = subprocess.Popen(
                [*UNSHARE, "bash", "-c", script, name, str(self.folder), SUBNET, *arguments],
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        self._until(lambda: bool(_children(process.pid)), f"{name}'s first process")
        return _children(process.pid)[0]

    def _first(self, name: str) -> int:
        return _children(self._processes[["ctl", *self.names].index(name)].pid)[0]

    @staticmethod
    def _inside(first: int) -> list[str]:
        return ["nsenter", "-t", str(first), "--net", "--uts", "--mount", "--pid"]

    def _connect(self, controller: int, number: int, node: int) -> None:
        """Connect the node to the controller's bridge as soon as that exists."""
        ip = ["nsenter", "-t", str(controller), "--net", "ip", "link"]
        link, peer = f"v{number}", ["type", "veth", "peer", "name", "eth0", "netns", str(node)]
        for command in ([*ip, "add", link, *peer], [*ip, "set", link, "master", "br0", "up"]):
            self._until(lambda c=command: _succeeds(c), " ".join(command[4:]))

    def _all_idle(self) -> bool:
        states = self.run(
            "sinfo", "--noheader", "--Node", "--partition=test", "--format=%N %t", cwd=self.folder
        )
        return states.stdout.split("\n")[:-1] == [f"{name} idle" for name in self.names]

    def _until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = sorted((self.folder / "log").iterdir())
                ends = [f"{log.name}: {log.read_text()[-500:]}" for log in logs]
                raise TimeoutError(f"no {what} after {seconds} s\n" + "\n".join(ends))
            time.sleep(0.1)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0

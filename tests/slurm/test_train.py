"""slurm/train.sbatch on a real Slurm of three nodes, with real Ray, Megatron ranks and engines.

What the script decides by itself (limits, bad input) is tested with a stand-in for the training.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from nemo_specrl.trainer.log import read_metrics
from tests.conftest import REPOSITORY
from tests.slurm.cluster import running
from tests.trainer.test_training import DEMO, SMALL, records, train

SCRIPT = REPOSITORY / "slurm" / "train.sbatch"
RECIPE = "examples/configs/grpo_sort_megatron_cpu.yaml"
RUN = (
    *SMALL,
    "cluster.gpus_per_node=1",
    "cluster.num_nodes=2",
    "policy.generation.colocated.enabled=true",
    "grpo.max_num_epochs=5",
)
STEPS = 10

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"
)

pytestmark = pytest.mark.usefixtures("own_ray")

STAND_IN = """#!/bin/bash
# Stands for Python: a Ray that runs, and a training that does what its overrides say.
case "$*" in
    *ray.scripts*) sleep infinity ;;
    *" train "*)
        if [[ $* == *test.late=* ]]; then
            trap 'exit 130' INT
            until [[ -e $SPECRL_STATE/go ]]; do sleep 0.1; done
        fi
        echo $$ >"$SPECRL_STATE/train.pid"
        for argument; do
            case $argument in
                checkpointing.checkpoint_dir=*) folder=${argument#*=} ;;
                test.exit=*) code=${argument#*=} ;;
                test.save=*) mkdir -p "$folder/step_$SLURM_RESTART_COUNT" ;;
                test.hang=*) exec sleep infinity ;;
                test.late=*) ((${SLURM_RESTART_COUNT:-0})) || while :; do sleep 0.1; done ;;
            esac
        done
        echo "arguments: ${*:5}"
        exit "${code:-0}" ;;
esac
"""


@pytest.fixture(scope="module")
def cluster():
    with running(3) as cluster:
        (cluster.folder / "python").write_text(STAND_IN)
        (cluster.folder / "python").chmod(0o755)
        yield cluster


class Job:
    """A job of the script; its run is in a folder of its own."""

    def __init__(
        self, cluster, name, *overrides, recipe=RECIPE, options=("--nodes=2",), **settings
    ):
        self.cluster, self.run = cluster, cluster.folder / name
        self.output = cluster.folder / f"{name}.out"
        environment = {
            "SPECRL_RUN_DIR": str(self.run),
            "SPECRL_PYTHON": str(cluster.folder / "python"),
            "RAY_TMPDIR": str(cluster.local),
            "TMPDIR": str(cluster.local),
            **settings,
        }
        submitted = cluster.run(
            *("sbatch", "--parsable", *options, f"--output={self.output}"),
            *(str(SCRIPT), recipe, *overrides),
            cwd=REPOSITORY,
            env=environment,
        )
        self.id = submitted.stdout.strip()
        assert self.id, submitted.stderr

    @property
    def said(self):
        """The script's own lines, without their times."""
        lines = self.output.read_text(errors="replace").splitlines() if self.output.exists() else []
        return [line.split(": ", 1)[1] for line in lines if " train.sbatch: " in line[:60]]

    def until(self, condition, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output.read_text(errors="replace")[-3000:]
            time.sleep(0.05)

    def until_steps(self, count):
        self.until(lambda: len(read_metrics(self.run / "metrics.jsonl")) >= count)

    def signal(self, node, number):
        """Send a signal to the training, which runs on ``node``, at once; srun would take longer
        than a few of its steps."""
        pid = (self.run / f"slurm-{self.id}" / "train.pid").read_text()
        self.cluster.kill(node, number, int(pid))

    def near_its_time(self):
        """Do as Slurm does when the time limit of the job is near."""
        options = ("--batch", "--signal=USR1", self.id)
        self.cluster.run("scancel", *options, cwd=REPOSITORY)
        self.until(lambda: any(line.startswith("the time limit is near") for line in self.said))

    def reach_its_time(self, node):
        """The same for a training that runs on ``node``, and may end before it hears of it."""
        self.signal(node, signal.SIGSTOP)
        self.near_its_time()
        self.signal(node, signal.SIGCONT)

    def end(self):
        """Wait for the job's end; its exit code."""
        self.until(lambda: self.cluster.exit_code(self.id) is not None)
        return self.cluster.exit_code(self.id)


def started_on(job):
    """The nodes of each start, as the script names them."""
    return [line.split(", run ")[0] for line in job.said if line.startswith("nodes ")]


@pytest.fixture(scope="module")
def undisturbed(own_ray, tmp_path_factory):
    """The records of a run that nothing happened to, outside of Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, *RUN, config=RECIPE)
    return records(folder)


@needs_megatron
@pytest.mark.timeout(900)
def test_a_job_goes_on_after_it_has_lost_a_node_its_batch_node_and_its_time(cluster, undisturbed):
    """It ends as a run that nothing happened to, step for step."""
    job = Job(cluster, "run", *RUN, SPECRL_PYTHON=sys.executable)
    job.until_steps(3)
    cluster.crash("n2")
    job.until(lambda: len(started_on(job)) == 2)
    cluster.boot("n2")
    job.until_steps(5)
    cluster.crash("n1")
    cluster.notice("n1")
    job.until(lambda: len(started_on(job)) == 3)
    cluster.boot("n1")
    job.until_steps(7)
    job.reach_its_time("n2")
    assert job.end() == 0, job.output.read_text(errors="replace")[-3000:]
    assert started_on(job)[:3] == ["nodes n1 n2", "nodes n1 n3", "nodes n2 n3"]
    assert len(started_on(job)) == 4
    # Whether the script or Slurm notices first that n2 is dead is chance.
    assert any(line.startswith("the time limit; starting again") for line in job.said)
    assert len(read_metrics(job.run / "metrics.jsonl")) == STEPS
    assert records(job.run) == undisturbed
    assert not (job.run / f"slurm-{job.id}" / "ray-token").exists()
    for name in cluster.names:
        assert not list((cluster.folder / name / "local").glob("ray-*"))


@pytest.mark.timeout(600)
def test_a_training_that_hangs_is_killed_and_goes_on(cluster, tmp_path):
    """The monitor of ft_launcher misses its heartbeats. The job keeps its nodes."""
    pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")
    alone = tmp_path / "alone"
    steps = (*SMALL, "grpo.max_num_epochs=5")
    train(alone, *steps)
    # Once a part of a step has been seen, it may take five times as long, and no less than twelve
    # intervals of the monitor.
    often = "--ft-workload-check-interval=0.5"
    settings = {"SPECRL_PYTHON": sys.executable, "SPECRL_FT_OPTIONS": often}
    job = Job(cluster, "hang", *steps, recipe=DEMO, options=("--nodes=1",), **settings)
    job.until_steps(3)
    job.signal("n1", signal.SIGSTOP)
    assert job.end() == 0, job.output.read_text(errors="replace")[-3000:]
    assert "FT timeout elapsed" in job.output.read_text(errors="replace")
    assert job.output.read_text(errors="replace").count("resuming from step ") == 1
    assert started_on(job) == ["nodes n1"]
    assert records(job.run) == records(alone)


@needs_megatron
@pytest.mark.timeout(600)
def test_two_jobs_share_their_nodes(cluster, undisturbed):
    steps = (*RUN, "grpo.max_num_steps=2")
    options = ("--nodes=2", "--nodelist=n1,n2")
    jobs = [
        Job(cluster, name, *steps, options=options, SPECRL_PYTHON=sys.executable)
        for name in ("left", "right")
    ]
    assert [job.end() for job in jobs] == [0, 0], [job.output.read_text() for job in jobs]
    for job in jobs:
        assert started_on(job) == ["nodes n1 n2"]
        assert records(job.run) == undisturbed[:2]


def test_a_typo_fails_once_with_its_own_message(cluster):
    one_node = {"options": ("--nodes=1",), "SPECRL_PYTHON": sys.executable}
    job = Job(cluster, "typo", "grpo.max_num_stepz=3", **one_node)
    assert job.end() == 2
    assert "grpo.max_num_stepz: unknown key" in job.output.read_text()
    assert len(started_on(job)) == 1
    assert (
        job.said[-1]
        == "the training ended with exit code 2, and all nodes answer: not started again"
    )


def test_a_failure_on_two_nodes_that_answer_is_passed_on(cluster):
    job = Job(cluster, "fails", "test.exit=3")
    assert job.end() == 3
    assert job.said == [
        f"nodes n1 n2, run {job.run}, start 1",
        "the training ended with exit code 3, and all nodes answer: not started again",
    ]


def test_the_limits_of_restarts(cluster):
    """Of a training that hangs at its first step each time, and of one that saves before."""
    limits = {"SPECRL_HANG_SECONDS": "1", "SPECRL_MAX_STALLED": "1", "SPECRL_MAX_RESTARTS": "2"}
    stalled = Job(cluster, "stalled", "test.hang=1", **limits)
    saves = Job(cluster, "saves", "test.save=1", "test.hang=1", **limits)
    assert (stalled.end(), saves.end()) == (75, 75)
    assert len(started_on(stalled)) == 2
    assert stalled.said[1] == (
        "no step was logged for 1 s; starting again (restart 1 of at most 2), from checkpoint none"
    )
    assert stalled.said[-1] == (
        "no step was logged for 1 s; not started again: 1 restarts have brought no checkpoint "
        "after step 0 "
        f"(SPECRL_MAX_STALLED=1); look at the logs in {stalled.run}/slurm-{stalled.id}"
    )
    assert len(started_on(saves)) == 3
    assert saves.said[-1].endswith("not started again: SPECRL_MAX_RESTARTS=2 is reached")


def test_the_time_limit_while_the_training_is_not_up_yet(cluster):
    job = Job(cluster, "late", "test.late=1")
    job.until(lambda: started_on(job))
    job.near_its_time()
    (job.run / f"slurm-{job.id}" / "go").touch()
    assert job.end() == 0
    assert len(started_on(job)) == 2
    assert job.said[2] == (
        "the time limit; starting again (restart 1 of at most 50), from checkpoint none"
    )


def test_a_slurm_without_pyxis(cluster):
    job = Job(cluster, "no-pyxis", **IMAGE)
    assert job.end() == 2
    assert job.output.read_text() == (
        "train.sbatch: SPECRL_CONTAINER=registry#image: this Slurm has no pyxis: srun knows no "
        "--container-image\n"
    )


def test_an_array_takes_a_line_of_overrides_for_each_task(cluster):
    sweep = cluster.folder / "sweep"
    sweep.write_text("a.preset=lossless b=1\na.preset=faithful\n")
    options = ("--nodes=1", "--array=0-2")
    job = Job(cluster, "sweep-%a", options=options, SPECRL_SWEEP=str(sweep),
              SPECRL_RUN_DIR=str(cluster.folder / "swept"))  # fmt: skip
    outputs = [cluster.folder / f"sweep-{task}.out" for task in range(3)]
    job.until(lambda: not cluster.run("squeue", "--noheader", cwd=REPOSITORY).stdout)
    first, second, third = (output.read_text() for output in outputs)
    assert f"checkpoint_dir={cluster.folder}/swept/0 " in first
    assert "a.preset=lossless b=1\n" in first
    assert f"checkpoint_dir={cluster.folder}/swept/1 " in second
    assert "a.preset=faithful\n" in second
    assert third == (
        f"train.sbatch: SPECRL_SWEEP={sweep}: has no line for task 2 (lines count from 0)\n"
    )


def check(*arguments, **settings):
    """Run the script outside of a job."""
    environment = {"PATH": os.environ["PATH"], "SPECRL_PYTHON": "python3", **settings}
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_shows_what_would_run():
    done = check(RECIPE, "grpo.max_num_steps=3", SPECRL_RUN_DIR="/runs/one")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"python3 -m nemo_specrl train {RECIPE} grpo.max_num_steps=3",
        "run: /runs/one",
    ]


IMAGE = {"SPECRL_CONTAINER": "registry#image"}
BAD = [
    ([], {}, "no recipe given; usage:"),
    (["none.yaml"], {}, "none.yaml: no such recipe in"),
    ([RECIPE, "--steps"], {}, "--steps: not an override; give KEY=VALUE"),
    ([RECIPE, "logger.log_dir=/x"], {}, "logger.log_dir=/x: set SPECRL_RUN_DIR instead"),
    ([RECIPE, "policy.generation.spec_rl.cache.dir=/x"], {}, "set SPECRL_CACHE_DIR instead"),
    ([RECIPE], {"SPECRL_CACHE_DIR": "raid"}, "SPECRL_CACHE_DIR=raid: must be an absolute path"),
    ([RECIPE], {"SPECRL_CONTAINER": "/none.sqsh"}, "SPECRL_CONTAINER=/none.sqsh: no such file"),
    ([RECIPE], {"SPECRL_PYTHON": "pythn"}, "SPECRL_PYTHON=pythn: no such program"),
    ([RECIPE], {"SPECRL_SWEEP": "/none"}, "SPECRL_SWEEP=/none: no such file"),
    ([RECIPE], {"SPECRL_HANG_SECONDS": "1h"}, "SPECRL_HANG_SECONDS=1h: must be a whole number"),
    (
        [RECIPE],
        {"SPECRL_CONTAINER": "a#b", "SPECRL_MOUNTS": "/data:/data"},
        "lacks the submission's",
    ),
    (
        ["/usr/bin/env"],
        {"SPECRL_CONTAINER": "a#b"},
        "/usr/bin/env: the container does not see this recipe",
    ),
    ([RECIPE], {"SPECRL_MAX_STALLED": "-1"}, "SPECRL_MAX_STALLED=-1: must be a whole number"),
]


@pytest.mark.parametrize(("arguments", "settings", "line"), BAD, ids=[line for *_, line in BAD])
def test_bad_input_is_one_line(arguments, settings, line):
    done = check(*arguments, **settings)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert line in done.stderr

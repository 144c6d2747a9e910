"""slurm/train.sbatch on a real Slurm of three nodes, with real Ray, Megatron ranks and engines.

What the script decides by itself (limits, bad input) is tested with a stand-in for the training.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.conftest import REPOSITORY
from tests.support.slurm.cluster import SUBNET, running
from tests.trainer.test_loop import DEMO, PLAIN, SMALL, records, train

SCRIPT = REPOSITORY / "slurm" / "train.sbatch"
RECIPE = "examples/configs/grpo_sort_megatron_cpu.yaml"
RUN = (*SMALL, PLAIN, "cluster.gpus_per_node=1", "cluster.num_nodes=2", "grpo.max_num_epochs=8")
"""Plain, so that steps that are repeated are the same."""
STEPS = 16

pytestmark = pytest.mark.usefixtures("own_ray")

STAND_IN = """#!/bin/bash
# Stands for Python: a Ray that runs, and a training that does what its overrides say.
case "$*" in
    *ray.scripts*) echo "$*" && exec sleep infinity ;;
    *" train "*)
        folder=$5 first=$((!${SLURM_RESTART_COUNT:-0}))
        if [[ $* == *test.late=* ]]; then
            trap 'exit 130' INT
            until [[ -e $SPECRL_STATE/go ]]; do sleep 0.1; done
        fi
        echo $$ >"$SPECRL_STATE/train.pid"
        echo "run: $folder, arguments:" && printf '%s\\n' "${@:9}"
        save() { mkdir -p "$folder/step_$((1 - first))"; }
        for argument; do
            case $argument in
                test.exit=*) exit "${argument#*=}" ;;
                test.once=*) ((!first)) || exit "${argument#*=}" ;;
                test.save=*) save ;;
                test.sleep=*) sleep "${argument#*=}" ;;
                test.hang=*) exec sleep infinity ;;
                test.preempted=*) trap 'save; exit 130' TERM; while ((first)); do sleep 0.1; done ;;
                test.late=*) while ((first)); do sleep 0.1; done ;;
            esac
        done ;;
esac
"""


@pytest.fixture(scope="module")
def cluster():
    with running(3) as cluster:
        # Each node takes its own name for a loopback address, as with Debian's installer.
        hosts = cluster.folder / "etc" / "hosts"
        hosts.write_text(re.sub(r"\S+ (n\d)", r"127.0.1.1 \1", hosts.read_text()))
        (cluster.folder / "python").write_text(STAND_IN)
        (cluster.folder / "python").chmod(0o755)
        yield cluster


class Job:
    """A job of the script; its run is in a folder of its own."""

    def __init__(
        self,
        cluster,
        name,
        *overrides,
        recipe=RECIPE,
        options=("--nodes=2",),
        script=SCRIPT,
        **settings,
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
            *(str(script), recipe, *overrides),
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

    def steps(self):
        return len(read_metrics(self.run / "metrics.jsonl"))

    def until_steps(self, count):
        self.until(lambda: self.steps() >= count)

    def signal(self, node, number):
        """Send a signal to the training, which runs on ``node``, at once; srun would take longer
        than a few of its steps."""
        pid = (self.run / f"slurm-{self.id}" / "train.pid").read_text()
        assert self.cluster.kill(node, number, int(pid)), self.output.read_text(errors="replace")

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


def differences(steps, others):
    """What two runs' records do not have in common: step, name and both values."""
    return [
        (step["step"], name, step.get(name), other.get(name))
        for step, other in zip(steps, others, strict=True)
        for name in step.keys() | other.keys()
        if step.get(name) != other.get(name)
    ]


@pytest.mark.slow  # with a stand-in for the training: below, and test_submit
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
    done = job.steps()  # the last lines of n1 may come late
    cluster.boot("n1")
    job.until_steps(done + 2)
    job.reach_its_time("n2")
    assert job.end() == 0, job.output.read_text(errors="replace")[-3000:]
    assert started_on(job)[:3] == ["nodes n1 n2", "nodes n1 n3", "nodes n2 n3"]
    assert len(started_on(job)) == 4
    # Whether the script or Slurm notices first that n2 is dead is chance.
    assert any(line.startswith("the time limit; starting again") for line in job.said)
    assert len(read_metrics(job.run / "metrics.jsonl")) == STEPS
    assert differences(records(job.run), undisturbed) == []
    assert not (job.run / f"slurm-{job.id}" / "ray-token").exists()
    for name in cluster.names:
        assert not list((cluster.folder / name / "local").glob("ray-*"))


@pytest.mark.timeout(600)
def test_a_training_that_hangs_is_killed_and_goes_on(cluster, tmp_path):
    """The monitor of ft_launcher misses its heartbeats. The job keeps its nodes."""
    pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")
    alone = tmp_path / "alone"
    steps = (*SMALL, PLAIN, "grpo.max_num_epochs=5")
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


@pytest.mark.slow
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


def test_a_typo_is_found_before_anything_starts(cluster):
    one_node = {"options": ("--nodes=1",), "SPECRL_PYTHON": sys.executable}
    job = Job(cluster, "typo", "++grpo.max_num_stepz=3", **one_node)
    assert job.end() == 2
    assert job.output.read_text().startswith("train.sbatch: grpo.max_num_stepz: unknown key")
    assert job.output.read_text().count("\n") == 1


def test_failures_and_the_limits_of_restarts(cluster):
    """Side by side, on nodes that answer: of a training whose rank has failed, as when a GPU or a
    link does, and of one that hangs at its first step each time. Some save before."""
    failed = "the training ended with exit code 3"
    one_node = {"options": ("--nodes=1",)}
    limits = {"SPECRL_HANG_SECONDS": "1", "SPECRL_MAX_STALLED": "1", "SPECRL_MAX_RESTARTS": "2"}
    goes_on = Job(cluster, "goes-on", "test.save=1", "test.once=3", SPECRL_MAX_STALLED="0")
    stops = Job(cluster, "stops", "test.exit=3", **one_node, SPECRL_MAX_STALLED="1")
    usage = Job(cluster, "usage", "test.exit=2", **one_node)
    no_program = Job(cluster, "no-program", "test.exit=127", **one_node)
    stalled = Job(cluster, "stalled", "test.hang=1", **limits)
    saves = Job(cluster, "saves", "test.save=1", "test.hang=1", **one_node, **limits)
    jobs = (goes_on, stops, usage, no_program, stalled, saves)
    assert [job.end() for job in jobs] == [0, 3, 2, 127, 75, 75]
    assert [len(started_on(job)) for job in jobs] == [2, 2, 1, 1, 2, 3]
    assert goes_on.said[1:2] == [
        f"{failed}; starting again (restart 1 of at most 50), from checkpoint 0"
    ]
    assert stops.said[-1].startswith(
        f"{failed}; not started again: 1 restarts have brought no checkpoint after step 0 "
    )
    assert usage.said[1:] == [
        "the training ended with exit code 2, which is bad input or a full disk: not started again"
    ]
    assert stalled.said[-1] == (
        "no step was logged for 1 s; not started again: 1 restarts have brought no checkpoint "
        "after step 0 "
        f"(SPECRL_MAX_STALLED=1); look at the logs in {stalled.run}/slurm-{stalled.id}"
    )
    assert saves.said[-1].endswith("not started again: SPECRL_MAX_RESTARTS=2 is reached")
    # Not by its name, which is a loopback address here.
    head = (goes_on.run / f"slurm-{goes_on.id}" / "0" / "ray-head.log").read_text()
    assert f"--node-ip-address={SUBNET}." in head


def test_a_job_that_is_preempted_saves_and_starts_again(cluster):
    """Slurm sends SIGTERM to its steps, and would cancel it when the grace time is over."""
    options = ("--nodes=1", "--nodelist=n1", "--partition=low")
    job = Job(cluster, "preempted", "test.preempted=1", options=options)
    job.until(lambda: (job.run / f"slurm-{job.id}" / "train.pid").exists())
    urgent = ("sbatch", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.run(*urgent, cwd=REPOSITORY)
    assert job.end() == 0, job.output.read_text()
    assert len(started_on(job)) == 2
    assert job.said[1] == (
        "the training was told to end by a signal, as before a preemption; starting again "
        "(restart 1 of at most 50), from checkpoint 0"
    )


def test_ways_to_submit_it_and_names_of_folders(cluster):
    """It finds what lies beside it, and no word of a path is taken for a node's name."""
    home = cluster.folder / 'NODE\'s "own" %j home'
    shutil.copytree(SCRIPT.parent, home / "slurm")
    script, elsewhere = home / "slurm" / "train.sbatch", cluster.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "supervise.sh").write_text("echo sourced >&2\n")  # another's
    recipe, cache = REPOSITORY / RECIPE, cluster.local / 'NODE\'s "own" cache'
    direct = Job(
        cluster,
        "direct",
        "test.sleep=3",
        recipe=str(recipe),
        script=script,
        SPECRL_RUN_DIR=str(home / "run"),
        SPECRL_CACHE_DIR=str(cache),
    )
    named = cluster.folder / "n2" / "local" / 'n2\'s "own" cache' / direct.id
    named.mkdir(parents=True)

    def submit(name, command, cwd=elsewhere, **settings):
        output = cluster.folder / f"{name}.out"
        given = {
            "SPECRL_PYTHON": str(cluster.folder / "python"),
            "SPECRL_RUN_DIR": str(cluster.folder / name),
            **{"SCRIPT": str(script), "RECIPE": str(recipe), "OUT": str(output)},
            **settings,
        }
        cluster.run("bash", "-c", command, cwd=cwd, env=given)
        return output.read_text()

    by_stdin = 'sbatch --wait --output="$OUT" <"$SCRIPT"'
    wrap = """sbatch --wait --output="$OUT" --wrap 'bash "$SCRIPT" "$RECIPE"'"""
    shell = 'salloc --nodes=2 bash "$SCRIPT" "$RECIPE" >"$OUT" 2>&1'
    by_name = {"SPECRL_RECIPE": str(recipe)}
    with ThreadPoolExecutor(5) as pool:
        lost = pool.submit(submit, "lost", by_stdin, **by_name)
        found = [
            pool.submit(submit, "in-home", by_stdin, cwd=home, **by_name),
            pool.submit(submit, "told", by_stdin, SPECRL_HOME=str(home), **by_name),
            pool.submit(submit, "wrapped", wrap),
            pool.submit(submit, "shell", shell),
        ]
        lost, *found = (output.result() for output in (lost, *found))
    assert lost.startswith(f"train.sbatch: no supervise.sh of nemo_specrl in {cluster.folder}/n")
    assert lost.endswith(f"{elsewhere}; set SPECRL_HOME to a checkout of nemo_specrl\n")
    assert lost.count("\n") == 1  # and nothing was sourced
    assert direct.end() == 0, direct.output.read_text()
    for output in [direct.output.read_text(), *found]:
        assert "\nrun: " in output, output
    assert (home / "run" / f"slurm-{direct.id}" / "0" / "ray-head.log").exists()
    assert named.exists()
    for name in cluster.names:
        assert not list((cluster.folder / name / "local" / cache.name).glob("*"))


def test_the_address_of_a_head_whose_name_says_nothing(cluster):
    """Neither Slurm nor its name has one that is not the node's own: that of its interfaces, or a
    line."""
    programs = cluster.folder / "programs"
    programs.mkdir()
    texts = {
        "scontrol": f'[[ "$1 $2" != "show node" ]] && exec {shutil.which("scontrol")} "$@"; exit 1',
        "getent": "echo 127.0.1.1 STREAM; exit 2",
        "hostname": "echo 127.0.1.1 169.254.3.4 fe80::1 $ADDRESS",
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    found = Job(cluster, "found", PATH=path, ADDRESS=f"{SUBNET}.99")
    none = Job(cluster, "none", PATH=path, ADDRESS="")
    assert (found.end(), none.end()) == (0, 2), found.output.read_text()
    head = (found.run / f"slurm-{found.id}" / "0" / "ray-head.log").read_text()
    assert f"--node-ip-address={SUBNET}.99 " in head
    assert re.fullmatch(
        r"n\d has no IPv4 address that other nodes could reach, neither in Slurm's NodeAddr nor by "
        "its name nor by hostname -I",
        none.said[-1],
    )


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
    """And the one that fails starts again alone: the last, which has the array's own number."""
    sweep = cluster.folder / "sweep"
    sweep.write_text("a.preset='x  y' b=\"1\" test.sleep=8\n\ntest.save=1 test.once=3\n")
    options = ("--nodes=1", "--array=0-2")
    job = Job(
        cluster,
        "sweep-%a",
        options=options,
        SPECRL_SWEEP=str(sweep),
        SPECRL_RUN_DIR=str(cluster.folder / "swept"),
    )
    outputs = [cluster.folder / f"sweep-{task}.out" for task in range(3)]
    job.until(lambda: not cluster.run("squeue", "--noheader", cwd=REPOSITORY).stdout)
    first, second, third = (output.read_text() for output in outputs)
    assert f"run: {cluster.folder}/swept/0, arguments:\na.preset=x  y\nb=1\n" in first
    assert second == (
        f"train.sbatch: SPECRL_SWEEP={sweep}: has no line for task 1 (lines count from 0)\n"
    )
    assert third.count(f"run: {cluster.folder}/swept/2, ") == 2
    assert [text.count(" starting again ") for text in (first, third)] == [0, 1]
    assert [text.count(", start ") for text in (first, third)] == [1, 2]
    assert (cluster.folder / "swept" / "2" / f"slurm-{job.id}_2" / "restarts").exists()


def check(*arguments, **settings):
    """Run the script outside of a job."""
    environment = {"PATH": os.environ["PATH"], "SPECRL_PYTHON": sys.executable, **settings}
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
        f"{sys.executable} -m nemo_specrl train {RECIPE} grpo.max_num_steps=3",
        "run: /runs/one",
    ]


IMAGE = {"SPECRL_CONTAINER": "registry#image"}
TASK = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7"}
BAD = [
    ([], {}, "no recipe given; usage:"),
    (["none.yaml"], {}, "none.yaml: no such recipe in"),
    ([RECIPE, "--steps"], {}, "'--steps': overrides have the form key=value"),
    ([RECIPE, "++logger.log_dir='/x y'"], {}, "logger.log_dir=/x y: set SPECRL_RUN_DIR instead"),
    ([RECIPE], {"SPECRL_PYTHON": "env -u PYTHONPATH python3 -I -S"}, "has no nemo_specrl that can"),
    (
        [RECIPE],
        {"SPECRL_HOME": "/none"},
        "no supervise.sh of nemo_specrl in /none/slurm; set SPECRL",
    ),
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
    ([RECIPE], {"SPECRL_MAX_RESTARTS": "9" * 30}, "must be a whole number, of nine digits at most"),
    ([RECIPE], {"SPECRL_RUN_DIR": "~/run"}, "SPECRL_RUN_DIR=~/run: must be the path of a folder"),
    ([RECIPE], {"SPECRL_RUN_DIR": "None"}, "SPECRL_RUN_DIR=None: must be the path of a folder"),
    ([RECIPE], {"RAY_TMPDIR": "~/ray"}, "RAY_TMPDIR=~/ray: must be an absolute path"),
    ([RECIPE], TASK | {"SPECRL_SWEEP": "{sweep}"}, "logger.log_dir=/x: set SPECRL_RUN_DIR instead"),
]


@pytest.mark.parametrize(("arguments", "settings", "line"), BAD, ids=[line for *_, line in BAD])
def test_bad_input_is_one_line(tmp_path, arguments, settings, line):
    sweep = tmp_path / "sweep"
    sweep.write_text(
        "\ufeffgrpo.seed=1\r\ngrpo.seed=2 ++logger.log_dir='/x'\r\n"
    )  # as Windows has it
    done = check(*arguments, **{k: v.format(sweep=sweep) for k, v in settings.items()})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert line in done.stderr

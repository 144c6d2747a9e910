"""slurm/nemo_rl.sub on a real Slurm of two nodes.

GPUs, containers and NeMo-RL are missing, so two parts are replaced: ray.sub of the checkout, which
here runs COMMAND on the first node without a container and without Ray; and the plug-in's folder,
whose ``nemo_specrl`` records how it was called. With NEMO_RL_HOME, one test runs that checkout's
own ray.sub.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.slurm.cluster import running

SCRIPT = REPOSITORY / "slurm" / "nemo_rl.sub"
RECIPE = "examples/configs/recipe.yaml"

RAY_SUB = """
set -euo pipefail
logs=${BASE_LOG_DIR:-$SLURM_SUBMIT_DIR}/$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}-logs
mkdir "$logs"
printf '%s' "$COMMAND" >"$logs/driver_command.sh"
env >"$logs/environment"
[[ ! -f ${RAY_AUTH_TOKEN_PATH:-} ]] ||
    echo "$(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(cat "$RAY_AUTH_TOKEN_PATH")" >"$logs/token"
srun --nodes=1 --ntasks=1 bash "$logs/driver_command.sh" >"$logs/ray-driver.log" 2>&1
"""
PLUGIN = """
import json, os, pathlib, socket, sys, time
print("nemo-specrl run: loading NeMo-RL with the plug-in")
print(json.dumps({"node": socket.gethostname(), "file": __file__, "arguments": sys.argv[1:],
                  "PYTHONPATH": os.environ["PYTHONPATH"]}), flush=True)
first = "SLURM_RESTART_COUNT" not in os.environ
state = pathlib.Path(os.environ["SPECRL_STATE"])
saved = pathlib.Path("results/run").absolute()
(state / "training").write_text(f"{saved}\\n{'' if first else 1}\\n")
if first and "sleeps=1" in sys.argv:
    time.sleep(600)
if first and "slow-setup=1" in sys.argv: # the plug-in ends the first step after it, and saves
    time.sleep(max(0, float(os.environ["SPECRL_MUST_SAVE_AT"]) + 1 - time.time()))
    print("SAVED")
if first and {"slow-setup=1", "saves=1"} & set(sys.argv):
    (saved / "step_1").mkdir(parents=True, exist_ok=True)
if not first and "slow-setup=1" in sys.argv:
    sys.exit(0)
sys.exit(sum(int(a.removeprefix("exit=")) for a in sys.argv if a.startswith("exit=")))
"""
# For NeMo-RL's own ray.sub: srun without pyxis and PMIx, and a Ray that is there at once.
SRUN = """#!/bin/bash
arguments=()
for argument; do
    case $argument in
        --container-image=* | --container-name=* | --container-workdir=*) ;;
        --container-mounts=* | --no-container-mount-home | --mpi=pmix) ;;
        *) arguments+=("$argument") ;;
    esac
done
exec {srun} "${{arguments[@]}}"
"""
RAY = """#!/bin/bash
case "$*" in
    status) echo " 0.0/4.0 worker_units" ;;
    *--block) sleep infinity ;;
esac
"""


def make_checkout(folder):
    """Make the files that the script looks for in a NeMo-RL checkout."""
    (folder / "examples" / "configs").mkdir(parents=True)
    (folder / "examples" / "run_grpo.py").touch()
    (folder / RECIPE).touch()
    (folder / "ray.sub").write_text(RAY_SUB)
    return folder


def saved():
    """What NeMo-RL says when it has ended before the time limit, as the script knows it."""
    return SCRIPT.read_text().split("SAVED='")[1].split("'")[0]


def make_plugin(folder):
    """Make those files of ``pip install --no-deps --target`` that the script looks for."""
    (folder / "nemo_specrl").mkdir(parents=True)
    (folder / "nemo_specrl" / "__init__.py").touch()
    (folder / "nemo_specrl" / "__main__.py").write_text(PLUGIN.replace("SAVED", saved()))
    return folder


def settings(folder):
    """Environment variables with which all checks pass."""
    return {
        "CONTAINER": "registry#nemo-rl:v0",
        "SPECRL_CACHE_DIR": "/raid/specrl",
        "SPECRL_FOLDER": str(folder / "plugin"),
        "SPECRL_PYTHON": sys.executable,
        "GPUS_PER_NODE": "2",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture
def place(tmp_path):
    make_checkout(tmp_path / "checkout")
    make_plugin(tmp_path / "plugin")
    return tmp_path


def check(place, *arguments, checkout=None, **changes):
    """Run the script outside of a job; a change to None removes the variable."""
    env = {"PATH": os.environ["PATH"], **settings(place), **changes}
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=checkout or place / "checkout",
        env={name: value for name, value in env.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
    )


def files(folder):
    return sorted(folder.rglob("*"))


# Outside of a job: no Slurm is needed.


def test_shows_what_would_run(place):
    before = files(place)
    done = check(place, RECIPE, "grpo.max_num_steps=3", MOUNTS=f"{place}:{place},/data:/data")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "CONTAINER=registry#nemo-rl:v0",
        f"MOUNTS={place}:{place},/data:/data,/raid/specrl:/raid/specrl,"
        f"{place}/plugin:{place}/plugin:ro",
        "GPUS_PER_NODE=2",
        f"export PYTHONPATH={place}/plugin${{PYTHONPATH:+:$PYTHONPATH}}",
        f"exec {sys.executable} -m nemo_specrl run examples/run_grpo.py --config {RECIPE} "
        "cluster.num_nodes=NODES cluster.gpus_per_node=2 "
        "++policy.generation.spec_rl.cache.dir=/raid/specrl grpo.max_num_steps=3",
    ]
    assert files(place) == before


def test_plugin_in_the_image(place):
    models = {"HF_HOME": str(place / "models"), "HF_HUB_CACHE": str(place / "models" / "hub")}
    (place / "models" / "hub").mkdir(parents=True)
    image = {"SPECRL_FOLDER": None, "SPECRL_PYTHON": None, "GPUS_PER_NODE": None}
    done = check(place, RECIPE, **image, **models)
    checkout = place / "checkout"
    assert (
        f"MOUNTS={checkout}:{checkout},{place}/models:{place}/models,/raid/specrl:/raid/specrl\n"
    ) in done.stdout
    assert f"export HF_HOME={place}/models\n" in done.stdout
    assert "export PYTHONPATH=/opt/nemo_specrl$" in done.stdout
    assert "exec uv run python -m nemo_specrl run" in done.stdout
    assert "cluster.gpus_per_node=8" in done.stdout
    dockerfile = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert "\nENV PYTHONPATH=/opt/nemo_specrl" in dockerfile


def test_the_example_of_the_guide(place):
    """As pasted, but for `sbatch OPTIONS`, which is `bash` outside of a job."""
    for name in ("slurm", "examples/configs"):
        shutil.copytree(REPOSITORY / name, place / "nemo_specrl" / name)
    (place / "checkout").rename(place / "RL")
    guide = (REPOSITORY / "docs" / "guide" / "slurm.md").read_text()
    (example,) = re.findall(r"^```\n(CONTAINER=REGISTRY#[^`]*)```$", guide, re.M)
    example = re.sub(r"sbatch (--\S+ )+", "bash ", example.replace("\\\n", " "))
    done = subprocess.run(
        ["bash", "-c", example],
        cwd=place / "RL",
        env={"PATH": os.environ["PATH"], "USER": "me", "HOME": str(place)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f",{place}/nemo_specrl:{place}/nemo_specrl," in done.stdout
    assert "/raid/specrl-me" in done.stdout


BAD = [
    ([], {}, "no recipe given"),
    (["configs/none.yaml"], {}, "configs/none.yaml: no such recipe"),
    (["{place}/elsewhere.yaml"], {}, "elsewhere.yaml: the container does not see this recipe"),
    ([RECIPE, "--steps"], {}, "--steps: not an override"),
    ([RECIPE, "++policy.generation.spec_rl.cache.dir=/x"], {}, "set SPECRL_CACHE_DIR instead"),
    ([RECIPE, "policy.generation.spec_rl.cache={{dir:/y}}"], {}, "{{dir:/y}}: set SPECRL_CACHE_"),
    ([RECIPE, "+policy.generation.spec_rl={{cache:{{dir: /z}}}}"], {}, "/z}}}}: set SPECRL_CACHE"),
    ([RECIPE], {"CONTAINER": None}, "CONTAINER: not set"),
    ([RECIPE], {"CONTAINER": "/images/none.sqsh"}, "CONTAINER=/images/none.sqsh: no such file"),
    ([RECIPE], {"SPECRL_CACHE_DIR": None}, "SPECRL_CACHE_DIR: not set"),
    ([RECIPE], {"SPECRL_CACHE_DIR": "raid/specrl"}, "SPECRL_CACHE_DIR=raid/specrl: must be an abs"),
    ([RECIPE], {"SPECRL_CACHE_DIR": "/raid/a=b"}, "SPECRL_CACHE_DIR=/raid/a=b: must be an abs"),
    ([RECIPE], {"SPECRL_FOLDER": "{place}/checkout"}, "no nemo_specrl in it"),
    ([RECIPE], {"SPECRL_FOLDER": "{place}/full"}, "torch lies in it and would replace"),
    ([RECIPE], {"BASE_LOG_DIR": "/logs"}, "BASE_LOG_DIR=/logs: the container does not see it; add"),
    ([RECIPE], {"HF_HOME": "models"}, "HF_HOME=models: must be the absolute path of a folder"),
    ([RECIPE], {"SPECRL_SCRIPT": "examples/none.py"}, "SPECRL_SCRIPT=examples/none.py: no such"),
    ([RECIPE], {"MOUNTS": "/data:/data"}, "MOUNTS=/data:/data: lacks the checkout"),
    ([RECIPE], {"MOUNTS": "{place}:/elsewhere"}, "MOUNTS={place}:/elsewhere: lacks the checkout"),
    ([RECIPE], {"GPUS_PER_NODE": "all"}, "GPUS_PER_NODE=all: must be a number"),
    ([RECIPE], {"DEDICATED_RAY_HEAD": "yes"}, "DEDICATED_RAY_HEAD=yes: must be 0 or 1"),
    ([RECIPE], {"SPECRL_SAVE_SECONDS": "5m"}, "SPECRL_SAVE_SECONDS=5m: must be a whole number"),
    ([RECIPE], {"SPECRL_MAX_RESTARTS": "1.5"}, "SPECRL_MAX_RESTARTS=1.5: must be a whole number"),
    ([RECIPE], {"SPECRL_MAX_STALLED": "08"}, "SPECRL_MAX_STALLED=08: must be a whole number"),
    ([RECIPE], {"SPECRL_CHECKPOINTS": "~/run"}, "SPECRL_CHECKPOINTS=~/run: must be an absolute"),
    ([RECIPE], {"SPECRL_HANG_SECONDS": "9" * 30}, "must be a whole number, of nine digits at most"),
    ([RECIPE], {"COMMAND": "python train.py"}, "COMMAND is set"),
]


@pytest.mark.parametrize(("arguments", "changes", "line"), BAD, ids=[line for *_, line in BAD])
def test_bad_input_is_one_line(place, arguments, changes, line):
    (make_plugin(place / "full") / "torch").mkdir()
    (place / "elsewhere.yaml").touch()

    def filled(text):
        return text and text.format(place=place)

    done = check(place, *map(filled, arguments), **{k: filled(v) for k, v in changes.items()})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert filled(line) in done.stderr


def test_every_problem_has_its_line(place):
    done = check(place, "none.yaml", CONTAINER=None, SPECRL_CACHE_DIR=None)
    assert done.returncode == 2
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        "none.yaml",
        "CONTAINER",
        "SPECRL_CACHE_DIR",
    ]


def test_outside_of_a_checkout(place):
    (place / "checkout" / "ray.sub").unlink()
    done = check(place, RECIPE)
    assert done.returncode == 2
    assert done.stderr.endswith("no ray.sub here; submit from the root of a NeMo-RL checkout\n")


def test_the_recipe_is_read_before_it_waits_in_the_queue(place):
    """As `nemo-specrl check` and the training itself read it."""
    if "NEMO_RL_HOME" not in os.environ:
        pytest.skip("no NeMo-RL here; to run this test: NEMO_RL_HOME=CHECKOUT")
    home = Path(os.environ["NEMO_RL_HOME"]).resolve()
    ours = REPOSITORY / "examples" / "configs" / "nemo_rl" / "grpo_math_1B.yaml"
    stock = home / "examples" / "configs" / "grpo_math_1B.yaml"
    known = {
        "checkout": home,
        "MOUNTS": f"{home}:{home},{REPOSITORY}:{REPOSITORY}",
        "SPECRL_FOLDER": None,  # the checkout beside the script is read
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = check(place, str(ours), "grpo.max_num_steps=3", **known)
    assert done.returncode == 0, done.stderr
    assert f"{ours}: runs with preset lossless, cache in /raid/specrl" in done.stderr
    block = "policy.generation.spec_rl"
    for recipe, override, line in (
        (ours, f"{block}.preset=loseless", f"{block}.preset = 'loseless'"),
        (ours, "gpro.max_num_steps=3", "gpro"),
        (stock, "grpo.max_num_steps=3", f"{block}.enabled: not set"),
    ):
        done = check(place, str(recipe), override, **known)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("nemo-specrl: ") and done.stderr.count("\n") == 1
        assert line in done.stderr


def test_without_nemo_rls_loader_it_says_that_the_training_reads_the_recipe(place):
    done = check(place, RECIPE)
    assert done.returncode == 0
    assert f"{RECIPE} is read only when the training begins, since python3 here" in done.stderr


def supervising(folder, programs, steps):
    """Run functions of supervise.sh on three nodes, with stand-ins for programs of Slurm."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-euc", f"source {SCRIPT.with_name('supervise.sh')}; {steps}"],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SCRIPT": "nemo_rl.sub",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURMD_NODENAME": "n1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_slow_controller_makes_no_node_dead(tmp_path):
    """Slurm takes longer than a probe may to start a process anywhere; on n3 it starts none."""
    programs = {
        "scontrol": "printf '%s\\n' n1 n2 n3",
        "srun": 'case "$*" in *=n3*) sleep 60 ;; esac; sleep 1.1',
    }
    done = supervising(tmp_path, programs, "PROBE_SECONDS=1; dead_nodes")
    assert (done.returncode, done.stdout, done.stderr) == (0, "n3\n", "")


# In a job.


@pytest.fixture(scope="module")
def cluster():
    with running(2) as cluster:
        make_plugin(cluster.folder / "plugin")
        yield cluster
        assert cluster.run("squeue", "--noheader", cwd=cluster.folder).stdout == ""
    name = cluster.folder.name
    assert not cluster.folder.exists()
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert [line for line in command_lines() if name in line] == []


@pytest.fixture
def three_nodes():
    with running(3) as cluster:
        make_plugin(cluster.folder / "plugin")
        yield cluster


def command_lines():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Job:
    """A job that has ended, and the folder of its checkout."""

    def __init__(
        self, cluster, *arguments, ray_sub=RAY_SUB, training="", options=(), mounts="", **changes
    ):
        self.cluster = cluster
        self.checkout = make_checkout(
            Path(tempfile.mkdtemp(prefix="checkout-", dir=cluster.folder))
        )
        (self.checkout / "ray.sub").write_text(ray_sub)
        (self.checkout / "examples" / "run_grpo.py").write_text(training)
        self.cache = cluster.local / "specrl"
        changes = {"SPECRL_CACHE_DIR": str(self.cache), **changes}
        if mounts:
            changes["MOUNTS"] = f"{mounts},{self.checkout}:{self.checkout}"
        submitted = cluster.run(
            *("sbatch", "--parsable", "--nodes=2", "--output=%j.out", *options),
            *(str(SCRIPT), *arguments),
            cwd=self.checkout,
            env={**settings(cluster.folder), "PYTHONPATH": "/from/the/image", **changes},
        )
        assert submitted.returncode == 0, submitted.stderr
        # Not `sbatch --wait`, which looks only twice a minute after a while.
        number = submitted.stdout.strip()
        wait_for(lambda: cluster.exit_code(number) is not None)
        self.code = cluster.exit_code(number)
        self.output = "".join(out.read_text() for out in self.checkout.glob("*.out"))
        self.logs = next(iter(self.checkout.glob("*-logs")), None)

    @property
    def lines(self):
        """The script's messages, without Slurm's own lines."""
        return [line for line in self.output.splitlines() if "nemo_rl.sub: " in line[:40]]

    def on_nodes(self, path):
        """A path below each node's own disk, one for each node."""
        below = Path(path).relative_to(self.cluster.local)
        return [self.cluster.folder / name / "local" / below for name in self.cluster.names]


def test_command_reaches_the_nodes(cluster):
    odd = "data.prompt='{a: $HOME}; exit 3'"
    job = Job(cluster, RECIPE, "grpo.max_num_steps=3", odd)
    assert job.code == 0, job.output
    plugin = cluster.folder / "plugin"
    assert driver_call(job.logs) == {
        "node": "n1",
        "file": str(plugin / "nemo_specrl" / "__main__.py"),
        "PYTHONPATH": f"{plugin}:/from/the/image",
        "arguments": [
            *("run", "examples/run_grpo.py", "--config", RECIPE),
            *("cluster.num_nodes=2", "cluster.gpus_per_node=2"),
            f"++policy.generation.spec_rl.cache.dir={job.cache}",
            *("grpo.max_num_steps=3", odd),
        ],
    }
    for folder in job.on_nodes(job.cache):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # prompts and answers lie there
        assert files(folder) == []
    given = (job.logs / "environment").read_text().splitlines()
    assert "CONTAINER=registry#nemo-rl:v0" in given
    assert "GPUS_PER_NODE=2" in given
    assert (
        f"MOUNTS={job.checkout}:{job.checkout},{job.cache}:{job.cache},{plugin}:{plugin}:ro"
    ) in given
    # Ray asks for a token of the job's own, which is gone with the job and was in no log.
    token = Path(next(x for x in given if x.startswith("RAY_AUTH_TOKEN_PATH=")).split("=")[1])
    assert "RAY_AUTH_MODE=token" in given and token.is_relative_to(job.checkout)
    kept = (job.logs / "token").read_text()
    assert kept.split() == ["600", re.fullmatch(r"600 ([0-9a-f]{64})\n", kept)[1]]
    assert not token.exists()
    assert kept.split()[1] not in job.output + (job.logs / "ray-driver.log").read_text()
    # Without accounting Slurm sets none, and ray.sub would end at `set -u`.
    assert any(line.startswith("SLURM_JOB_ACCOUNT=") for line in given)


def test_cache_folder_is_kept_between_jobs(cluster):
    first = Job(cluster, RECIPE)
    for folder in first.on_nodes(first.cache):
        (folder / "rollouts").write_text("of the first job")
    second = Job(cluster, RECIPE)
    assert (first.code, second.code) == (0, 0)
    for folder in second.on_nodes(second.cache):
        assert (folder / "rollouts").read_text() == "of the first job"
        (folder / "rollouts").unlink()


def driver_call(logs):
    """What the driver was called with; on a busy machine lines of srun come before it."""
    return json.loads(re.findall(r"^{.*", (logs / "ray-driver.log").read_text(), re.M)[0])


def test_head_without_gpus_is_not_counted(cluster):
    job = Job(cluster, RECIPE, DEDICATED_RAY_HEAD="1")
    assert "cluster.num_nodes=1" in driver_call(job.logs)["arguments"]


def test_failures_hangs_and_time_limits(cluster):
    """Side by side, on nodes that answer: the first goes on, and the others stop some time."""
    one_node = ("--nodes=1", "--time=1")
    logs = cluster.folder / "logs"  # beside a checkout that cannot be written to
    logs.mkdir()
    jobs = {
        "setup longer than the margin": {
            "arguments": ("slow-setup=1",),
            "options": ("--nodes=1", "--time=2"),
            "mounts": f"{logs}:{logs}",
            "BASE_LOG_DIR": str(logs),
            "SPECRL_SAVE_SECONDS": "110",
        },
        "setup longer than the time": {
            "arguments": ("sleeps=1",),
            "options": one_node,
            "SPECRL_SAVE_SECONDS": "5",
            "SPECRL_MAX_STALLED": "1",
        },
        "fault": {
            "arguments": ("saves=1", "exit=7"),
            "options": ("--nodes=1",),
            "SPECRL_MAX_STALLED": "1",
        },
        "hang": {
            "arguments": ("sleeps=1",),
            "options": ("--nodes=1",),
            "SPECRL_HANG_SECONDS": "2",
            "SPECRL_MAX_STALLED": "0",
        },
        "bad input": {"arguments": ("exit=2",), "options": ("--nodes=1",)},
        "no network": {
            "options": ("--nodes=1",),
            "SPECRL_PYTHON": "sh -c 'exit 2'",  # as uv does
            "SPECRL_MAX_STALLED": "1",
        },
        "no time": {"options": one_node, "SPECRL_SAVE_SECONDS": "900"},
    }
    with ThreadPoolExecutor(len(jobs)) as pool:
        ended = {
            name: pool.submit(Job, cluster, RECIPE, *job.pop("arguments", ()), **job)
            for name, job in jobs.items()
        }
        ended = {name: job.result() for name, job in ended.items()}
    said = {name: [line.split(": ", 1)[1] for line in job.lines] for name, job in ended.items()}
    assert {name: job.code for name, job in ended.items()} == {
        "setup longer than the margin": 0,
        "setup longer than the time": 75,
        "fault": 7,
        "hang": 75,
        "bad input": 2,
        "no network": 2,
        "no time": 2,
    }, {name: job.output for name, job in ended.items()}
    restart = "starting again (restart 1 of at most 50), from checkpoint"
    assert said["setup longer than the margin"] == [f"the time limit; {restart} 1"]
    assert said["setup longer than the time"][0] == (
        f"the time limit, before the training had saved; {restart} none"
    )
    failed = "the training ended with exit code 7"
    assert said["fault"][0] == f"{failed}; starting again on the same nodes, from checkpoint 1"
    assert said["fault"][1].startswith(
        f"{failed}; not started again: 1 restarts have brought no checkpoint after step 1 "
    )
    assert said["hang"][0].startswith("no step was logged for 2 s; not started again: 0 restarts")
    assert said["bad input"] == [
        "the training ended with exit code 2, which is bad input or a full disk: not started again"
    ]
    begun = "exit code 2 before the training had begun"
    assert said["no network"][0] == f"{begun}; {restart} none"
    assert said["no network"][1].startswith(f"{begun}; not started again: 1 restarts have brought")
    assert re.match(
        r"SPECRL_SAVE_SECONDS=900: the job's time limit leaves [56]\d s, ", said["no time"][0]
    )
    assert list(logs.glob("*-restarts/restarts"))


def test_a_training_that_ends_for_want_of_time_is_started_again(cluster):
    """NeMo-RL is told when, and says so when it ends then; here a line of its log says it once."""
    say_it = f'[[ -n ${{SLURM_RESTART_COUNT:-}} ]] || echo "{saved()}" >>"$logs/ray-driver.log"'
    ray_sub = f"{RAY_SUB}\n{say_it}\n"
    settings = {"SPECRL_SAVE_SECONDS": "3600", "ray_sub": ray_sub}
    job = Job(cluster, RECIPE, options=("--time=1-02:00:00",), **settings)
    assert job.code == 0, job.output
    (line,) = job.lines
    assert line.endswith(
        "the time limit; starting again (restart 1 of at most 50), from checkpoint none"
    )
    first, second = (
        driver_call(logs)["arguments"]
        for logs in sorted(job.checkout.glob("*-logs"), key=lambda logs: logs.name.count("-"))
    )
    save_at = re.compile(r"\+\+checkpointing.checkpoint_must_save_by=01:0(0:59|1:00):\d\d")
    for arguments in (first, second):
        assert any(save_at.fullmatch(argument) for argument in arguments), arguments


def test_a_job_that_is_preempted_starts_again(cluster):
    """Slurm sends SIGTERM to the training, and would cancel the job when the grace time is over."""
    logs = cluster.folder / "preempted"
    logs.mkdir()
    options = ("--nodes=1", "--nodelist=n1", "--partition=low")
    settings = {"mounts": f"{logs}:{logs}", "BASE_LOG_DIR": str(logs), "options": options}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Job, cluster, RECIPE, "sleeps=1", **settings)
        wait_for(lambda: any(log.read_text() for log in logs.glob("*-logs/ray-driver.log")))
        urgent = ("sbatch", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=true")
        cluster.run(*urgent, cwd=cluster.folder)
        job = waiting.result()
    assert job.code == 0, job.output
    (line,) = job.lines
    assert re.search(r"the training ended with exit code \d+; starting again \(restart 1 of", line)
    assert len(list(logs.glob("*-logs"))) == 2


def test_ways_to_submit_it(cluster):
    """A script of one's own, a shell of salloc's, its text alone: it finds what lies beside it."""
    checkout = make_checkout(cluster.folder / "ways")
    (checkout / "supervise.sh").write_text("echo sourced >&2\n")  # another's
    own = checkout / "own.sh"
    own.write_text('#!/bin/bash\nbash "$SCRIPT" "$RECIPE"\n')

    def submit(name, command, **more):
        output = cluster.folder / f"{name}.out"
        given = {
            **settings(cluster.folder),
            "SPECRL_CACHE_DIR": str(cluster.local / "specrl"),
            **{"SCRIPT": str(SCRIPT), "RECIPE": RECIPE, "OUT": str(output)},
            **more,
        }
        done = cluster.run("bash", "-c", command, cwd=checkout, env=given)
        return done.returncode, output.read_text()

    by_stdin = 'sbatch --wait --output="$OUT" <"$SCRIPT"'
    by_name = {"SPECRL_RECIPE": RECIPE}
    with ThreadPoolExecutor(4) as pool:
        lost = pool.submit(submit, "lost", by_stdin, **by_name)
        found = [
            pool.submit(submit, "told", by_stdin, SPECRL_HOME=str(REPOSITORY), **by_name),
            pool.submit(submit, "own", f'sbatch --wait --output="$OUT" {own}'),
            pool.submit(submit, "shell", 'salloc bash "$SCRIPT" "$RECIPE" >"$OUT" 2>&1'),
        ]
        code, lost = lost.result()
        found = [way.result() for way in found]
    assert code == 2 and lost.count("\n") == 1  # and nothing was sourced
    assert lost.startswith(f"nemo_rl.sub: no supervise.sh of nemo_specrl in {cluster.folder}/n")
    assert lost.endswith(f"{checkout}; set SPECRL_HOME to a checkout of nemo_specrl\n")
    assert [code for code, _ in found] == [0, 0, 0], found
    calls = [driver_call(log.parent) for log in checkout.glob("*-logs/ray-driver.log")]
    assert [call["arguments"][3] for call in calls] == [RECIPE] * 3


def test_a_node_that_dies_gives_the_job_back_to_slurm(three_nodes):
    """The driver ends at once, long before Slurm notices."""
    fail_once = '[[ -n ${SLURM_RESTART_COUNT:-} ]] || { touch "$logs/up"; sleep 5; exit 1; }'
    ray_sub = RAY_SUB.replace("srun --nodes=1", f"{fail_once}\nsrun --nodes=1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Job, three_nodes, RECIPE, ray_sub=ray_sub)
        wait_for(lambda: list(three_nodes.folder.glob("checkout-*/*-logs/up")))
        three_nodes.crash("n2")
        job = waiting.result()
    assert job.code == 0, job.output
    assert any("no answer from n2: the training ended" in line for line in job.lines), job.output
    assert (job.logs.parent / "1-1-logs" / "ray-driver.log").exists()


FAILS_ONCE = """
failed=$SLURM_SUBMIT_DIR/failed
[[ -e $failed ]] || { date +%s >"$failed"; srun --nodes=2 true; FAULT; exit 1; }
date +%s >"$SLURM_SUBMIT_DIR/goes-on"
"""
NVIDIA_SMI = """#!/bin/bash
echo "    GPU Recovery Action                   : $(cat LOCAL/fault 2>/dev/null || echo None)"
"""


def seconds_between(job):
    """From the failure of a training to its next start."""
    return int((job.checkout / "goes-on").read_text()) - int((job.checkout / "failed").read_text())


def test_a_training_that_fails_starts_again_on_the_same_nodes(cluster):
    ray_sub = RAY_SUB.replace(
        "srun --nodes=1", f"{FAILS_ONCE.replace('FAULT', 'true')}\nsrun --nodes=1"
    )
    job = Job(cluster, RECIPE, ray_sub=ray_sub)
    assert job.code == 0, job.output
    (line,) = job.lines
    assert line.endswith(
        "the training ended with exit code 1; starting again on the same nodes, "
        "from checkpoint none"
    )
    # Slurm has not restarted it, and the logs of the first start are kept.
    assert sorted(p.name.partition("-")[2].split(".")[0] for p in job.checkout.glob("*-logs*")) == [
        "logs",
        "logs",
    ]
    print(f"seconds from death to the next start: {seconds_between(job)}")


def test_a_node_whose_gpu_reports_a_fault_is_left_out(three_nodes):
    """A GPU that has to be reset says so by nvidia-smi; a stand-in, as there are no GPUs here."""
    programs = three_nodes.folder / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI.replace("LOCAL", str(three_nodes.local)))
    (programs / "nvidia-smi").chmod(0o755)
    fault = f"srun --nodes=1 --nodelist=n2 bash -c 'echo Reset >{three_nodes.local}/fault'"
    ray_sub = RAY_SUB.replace(
        "srun --nodes=1", f"{FAILS_ONCE.replace('FAULT', fault)}\nsrun --nodes=1", 1
    )
    path = f"{programs}:{os.environ['PATH']}"
    job = Job(three_nodes, RECIPE, ray_sub=ray_sub, PATH=path)
    assert job.code == 0, job.output
    said = [line.split(": ", 1)[1] for line in job.lines]
    assert said[0] == "n2 reports a fault: GPU Recovery Action : Reset"
    assert said[1].startswith("the training ended with exit code 1; starting again (restart 1 of")
    assert said[2].startswith("left out from now on: n2; to take it back: scontrol update jobid=")
    show = ("scontrol", "show", "job", "1")
    shown = three_nodes.run(*show, cwd=three_nodes.folder).stdout
    assert " NodeList=n[1,3]" in shown and "ExcNodeList=n2" in shown
    print(f"seconds from death to the next start: {seconds_between(job)}")


def test_a_node_that_does_not_answer_twice_is_left_out(tmp_path):
    programs = {
        "scontrol": "printf '%s\\n' n1 n2 n3",
        "srun": 'case "$*" in *=n3*) exit 1 ;; *=n2*) echo "7 of 8 links are up" ;; esac',
    }
    steps = "dead_nodes; excluded; dead_nodes; excluded"
    done = supervising(tmp_path, programs, f"STATE={tmp_path}; {steps}")
    assert done.stdout.split() == ["n3", "n2", "n3", "n2,n3"], done.stderr
    assert "n2 reports a fault: 7 of 8 links are up" in done.stderr


def test_bad_input_starts_nothing(cluster):
    job = Job(cluster, "none.yaml", SPECRL_CACHE_DIR=str(cluster.local / "never"))
    assert job.code == 2
    assert job.output == f"nemo_rl.sub: none.yaml: no such recipe in {job.checkout}\n"
    assert job.logs is None
    assert not any(folder.exists() for folder in job.on_nodes(cluster.local / "never"))


def test_cache_folder_that_nodes_share(cluster):
    shared = cluster.folder / "shared"
    job = Job(cluster, RECIPE, SPECRL_CACHE_DIR=str(shared))
    assert job.code == 2
    assert f"other nodes see {shared} too" in job.lines[0]
    assert "not usable on every node" in job.lines[-1]
    assert job.logs is None
    assert files(shared) == []


def test_a_cache_folder_that_breaks_later_gives_the_job_back_to_slurm(cluster):
    """At a restart, a node that cannot use it is a fault of that node, not of the job."""
    there = cluster.folder / "n2" / "local" / "breaks"
    breaks = f"rm -r {there}\ntouch {there}\nexit 1"
    job = Job(
        *(cluster, RECIPE),
        ray_sub=RAY_SUB.replace("srun --nodes=1", f"{breaks}\nsrun --nodes=1"),
        SPECRL_CACHE_DIR=str(cluster.local / "breaks"),
        SPECRL_MAX_STALLED="3",
    )
    check = "the check of SPECRL_CACHE_DIR on all nodes failed"
    assert job.code == 75, job.output
    assert any(f"{check}; starting again (restart 2" in line for line in job.lines), job.output
    assert f"{check}; not started again: 3 restarts" in job.lines[-1], job.output


def test_cache_folder_that_one_node_cannot_make(cluster):
    broken = cluster.local / "broken"
    file = cluster.folder / "n2" / "local" / "broken"
    file.touch()
    job = Job(cluster, RECIPE, SPECRL_CACHE_DIR=str(broken / "specrl"))
    assert job.code == 2
    assert [line for line in job.lines if "cannot be made" in line] == [
        f"nemo_rl.sub: n2: {broken}/specrl cannot be made"
    ]
    assert job.logs is None


def test_the_ray_sub_of_nemo_rl(cluster):
    """Containers, Ray and GPUs are replaced; the script that starts them is NeMo-RL's."""
    if "NEMO_RL_HOME" not in os.environ:
        pytest.skip("no NeMo-RL here; to run this test: NEMO_RL_HOME=CHECKOUT")
    algorithms = Path(os.environ["NEMO_RL_HOME"]) / "nemo_rl" / "algorithms"
    assert all(saved() in (algorithms / name).read_text() for name in ("grpo.py", "ppo.py"))
    # It removes every Ray session below /tmp, as if it had the machine for itself.
    ray_sub = (Path(os.environ["NEMO_RL_HOME"]) / "ray.sub").read_text()
    ray_sub = ray_sub.replace("/tmp/", f"{cluster.local}/")
    programs = cluster.folder / "programs"
    programs.mkdir()
    for name, text in {"srun": SRUN.format(srun=shutil.which("srun")), "ray": RAY}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    job = Job(cluster, RECIPE, "exit=7", ray_sub=ray_sub, PATH=path, SPECRL_MAX_STALLED="0")
    assert job.code == 7, job.output
    call = driver_call(job.logs)
    assert call["node"] == "n1"
    assert call["arguments"][:4] == ["run", "examples/run_grpo.py", "--config", RECIPE]
    assert call["arguments"][-1] == "exit=7"
    assert call["PYTHONPATH"].startswith(f"{cluster.folder}/plugin:")
    assert "starting Ray worker" in (job.logs / "ray-worker-0.log").read_text()


TRAINING = """
import runpy, sys
sys.argv = [{job!r}, "job", "script", *sys.argv[1:]]
runpy.run_path({job!r}, run_name="__main__")
"""


@pytest.mark.timeout(900)
def test_an_engine_that_is_slow_is_named(cluster):
    """NeMo-RL's own training with two engines, one of which takes twice as long in each step."""
    if "NEMO_RL_HOME" not in os.environ:
        pytest.skip("no NeMo-RL here; to run this test: NEMO_RL_HOME=CHECKOUT")
    from tests.support.nemo_rl.jobs import environment

    recipe, slow = cluster.folder / "recipe.yaml", cluster.folder / "slow"
    home = Path(os.environ["NEMO_RL_HOME"]).resolve()
    recipe.write_text(
        f"defaults: {home}/examples/configs/grpo_math_1B.yaml\n"
        "policy: {generation: {spec_rl: {enabled: true}}}\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        job = Job(
            cluster,
            *(str(recipe), "grpo.max_num_steps=5", "grpo.val_period=0"),
            *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4"),
            *("grpo.val_at_start=false", "policy.train_global_batch_size=8"),
            *("checkpointing.enabled=false", "logger.wandb_enabled=false"),
            training=TRAINING.format(job=str(REPOSITORY / "tests/support/nemo_rl/job.py")),
            options=("--nodes=1",),
            mounts=f"{recipe.parent}:{recipe.parent}",
            SPECRL_FOLDER=str(REPOSITORY),
            SPECRL_MAX_STALLED="0",
            NEMO_RL_HOME=str(home),
            NEMO_SPECRL_TEST_RAY=folder,
            NEMO_SPECRL_TEST_SLOW=str(slow),
            PYTHONPATH=environment()["PYTHONPATH"],
        )
    assert job.logs is not None, job.output
    log = (job.logs / "ray-driver.log").read_text()
    assert job.code == 0, job.output + log[-6000:]
    named = re.findall(r"engine [01] on \S+ took 1.3 times as long as the others in 3 steps", log)
    assert len(named) == 1, log[-6000:]

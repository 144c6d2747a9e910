"""Both scripts with a container, on a real Slurm with a stand-in for pyxis and enroot.

The stand-in (container.c) makes a folder the root of a step, which sees of its node only what is
mounted. The machine's programs and the tests' Python are mounted; the model and the command that
starts Python are in the image alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.conftest import REPOSITORY
from tests.slurm import test_submit, test_train
from tests.slurm.test_train import started_on
from tests.support.slurm.cluster import running
from tests.trainer.test_loop import DEMO, SMALL

MODEL = "/models/qwen3-sort"
PYTHON = "/opt/python"
RUN = (
    *SMALL,
    f"policy.model_name={MODEL}",
    "grpo.max_num_steps=4",
    "cluster.gpus_per_node=1",
    "cluster.num_nodes=2",
)
START_PYTHON = """#!/bin/bash
case "$*" in
    *" start --head "*) what=head ;;
    *" start --block "*) what=worker ;;
    *) what=driver ;;
esac
echo "$SLURMD_NODENAME $what" >>/calls
[[ -w $HOME ]] || {{ echo "no home" >&2 && exit 9; }} # the user's is not mounted
exec {python} "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    plugin = tmp_path_factory.mktemp("plugin") / "container.so"
    source = REPOSITORY / "tests" / "support" / "slurm" / "container.c"
    if shutil.which("gcc") is None or not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip(
            "the stand-in for pyxis cannot be built here; to run this test: "
            "apt-get install --no-install-recommends gcc libslurm-dev"
        )
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, "-o", plugin, source], check=True)
    with running(2, plugin) as cluster:
        make_image(cluster.folder / "image")
        yield cluster


def make_image(image):
    """A root file system with what is not mounted into it."""
    shutil.copytree(REPOSITORY / "examples" / "models" / "qwen3-sort", f"{image}{MODEL}")
    (image / "etc").mkdir()
    for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache"):
        shutil.copy(f"/etc/{name}", image / "etc")
    (image / "opt").mkdir()
    (image / PYTHON[1:]).write_text(START_PYTHON.format(python=sys.executable))
    (image / PYTHON[1:]).chmod(0o755)


def mounts(*more):
    """The machine's programs, the tests' Python, and ``more``."""
    folders = ["/usr", "/bin", "/lib", "/lib64", REPOSITORY, sys.prefix, sys.base_prefix]
    unique = {str(folder): None for folder in folders if Path(folder).exists()}
    return ",".join([*(f"{folder}:{folder}" for folder in unique), *more])


def submit(cluster, name, *overrides, recipe=DEMO, **changes):
    settings = {
        "SPECRL_CONTAINER": str(cluster.folder / "image"),
        "SPECRL_MOUNTS": mounts(),
        "SPECRL_PYTHON": PYTHON,
        "SPECRL_CACHE_DIR": str(cluster.local / "cache"),
        "TMPDIR": str(cluster.folder / "temporary"),  # not in the container
    }
    forget_calls(cluster)
    return test_train.Job(cluster, name, *overrides, recipe=recipe, **settings | changes)


def forget_calls(cluster):
    (cluster.folder / "image" / "calls").unlink(missing_ok=True)


def calls(cluster):
    """Where, and for what, Python was started in a container since the last job was submitted."""
    return sorted((cluster.folder / "image" / "calls").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_runs_and_goes_on_in_its_container(cluster):
    """Ray's head, its worker and the driver, at both starts: the second one comes of the limit."""
    job = submit(cluster, "run", *RUN, recipe=test_train.RECIPE)
    job.until_steps(1)
    job.reach_its_time("n1")
    assert job.end() == 0, job.output.read_text(errors="replace")[-3000:]
    assert started_on(job) == ["nodes n1 n2", "nodes n1 n2"]
    assert any(line.startswith("the time limit; starting again") for line in job.said)
    assert calls(cluster) == sorted(2 * ["n1 head", "n2 worker", "n1 driver"])
    steps = read_metrics(job.run / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[-1]["spec_rl/histories_found"] > 0  # the cache came along
    assert not (job.run / f"slurm-{job.id}" / "ray-token").exists()
    for name in cluster.names:
        local = cluster.folder / name / "local"
        assert not list(local.glob("ray-*")) and not list(local.glob("cache/*"))


def test_the_exit_code_comes_out_of_the_container(cluster):
    job = submit(cluster, "typo", "grpo.max_num_stepz=3", options=("--nodes=1",))
    assert job.end() == 2
    assert "grpo.max_num_stepz: unknown key" in job.output.read_text()
    assert calls(cluster) == ["n1 driver"]
    assert len(started_on(job)) == 1


def test_what_one_node_lacks_is_named(cluster):
    data, image = cluster.local / "data", cluster.local / "image"
    for path in (data, image):
        (cluster.folder / "n1" / path.relative_to(cluster.folder)).mkdir()
    lacks = {
        f"SPECRL_MOUNTS: there is no {data} to mount": {"SPECRL_MOUNTS": mounts(f"{data}:/data")},
        f"SPECRL_CONTAINER={image}: no such file": {"SPECRL_CONTAINER": str(image)},
    }
    for line, changes in lacks.items():
        job = submit(cluster, "lacks", **changes)
        assert job.end() == 2
        output = job.output.read_text()
        assert [x for x in output.splitlines() if x.startswith("train.sbatch: ")] == [
            f"train.sbatch: n2: {line}"
        ]
        assert "the check of the nodes ended with exit code 2" in output
        job.output.unlink()


def test_the_command_of_nemo_rl_runs_in_the_container(cluster):
    """With a stand-in for NeMo-RL's ray.sub, too, which starts the container as that does."""
    in_container = (
        '--container-image="$CONTAINER" --container-mounts="$MOUNTS"'
        ' --container-workdir="$SLURM_SUBMIT_DIR"'
    )
    ray_sub = test_submit.RAY_SUB.replace("srun ", f"srun {in_container} ")
    test_submit.make_plugin(cluster.folder / "plugin")
    forget_calls(cluster)
    job = test_submit.Job(
        cluster,
        test_submit.RECIPE,
        ray_sub=ray_sub,
        mounts=mounts(),
        CONTAINER=str(cluster.folder / "image"),
        SPECRL_PYTHON=PYTHON,
    )
    assert job.code == 0, job.output
    call = test_submit.driver_call(job.logs)
    assert call["file"] == f"{cluster.folder}/plugin/nemo_specrl/__main__.py"
    assert f"++policy.generation.spec_rl.cache.dir={job.cache}" in call["arguments"]
    assert calls(cluster) == ["n1 driver"]

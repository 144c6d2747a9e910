"""The images of docker/, built for real with buildah on a stand-in base (:mod:`.stand_in`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_specrl import __version__
from tests.conftest import REPOSITORY
from tests.support.deploy.stand_in import Images, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(600),  # a minute where nothing else runs
]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LABELS = (f"--build-arg=VERSION={__version__}", f"--build-arg=COMMIT={COMMIT}")
PASSWORD = "a-password-of-an-index"
SMALL_LOCK = (
    *("annotated-types", "click", "markdown-it-py", "mdurl"),
    *("numpy", "omegaconf", "packaging", "pydantic", "pydantic-core", "pygments", "pyyaml", "rich"),
    *("safetensors", "setuptools", "shellingham", "typer", "typing-extensions"),
    *("typing-inspection", "xxhash", "annotated-doc"),
)
"""Of the CPU stack's packages, those without which `doctor` says that something is missing. The
rest is 1 GB to download."""
VLLM = "/opt/ray_venvs/nemo_rl.VllmGenerationWorker/lib/python3.13/site-packages/vllm"
CHECKOUT = "/opt/nemo-rl"
"""The working folder."""
LEFT_BEHIND = ("/build", "/tmp/", "/run/secrets", "/var/cache/apt/", "/var/lib/apt/lists/")


def checkout(folder: Path) -> Path:
    """A copy of what git has of the tree, with things beside it that belong in no image."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in names:
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    for name in ("nemo_specrl/__pycache__/secret.pyc", "results/secret", "slurm/site.env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    return folder


def nemo_rl(tree: Path) -> None:
    """A checkout, and an environment as uv makes it for workers: links to files in root's home."""
    (tree / CHECKOUT[1:] / "examples").mkdir(parents=True)
    cached, venv = tree / "root/.cache/uv/archive", tree / VLLM[1:]
    for name in ("executor/ray_executor.py", "executor/native.so"):
        for folder in (cached, venv):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cached / name).write_text("original\n")
        (cached / name).chmod(0o644)
        (venv / name).symlink_to(f"/{cached.relative_to(tree)}/{name}")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    yield Images(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def plugin(images, tree):
    """The image of docker/Dockerfile; the tests' environment stands for NeMo-RL's."""
    path = [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin"]
    images.make_base("nemo-rl", path, root_mode=0o700, add=nemo_rl)
    images.build(tree / "docker/Dockerfile", "plugin", "nemo-rl", tree, *LABELS)
    return "plugin"


@pytest.fixture(scope="module")
def cpu(images, tree):
    """The image of docker/cpu.Dockerfile, with a few of the packages of the CPU stack."""
    lock = tree / "requirements/cpu.lock"
    few = [line for line in lock.read_text().splitlines() if line.split("==")[0] in SMALL_LOCK]
    lock.write_text("\n".join(few) + "\n")
    settings = images.folder / "pip.conf"
    settings.write_text(f"# {PASSWORD}\n[global]\nno-color = true\n")
    images.make_base("python", [f"{sys.base_prefix}/bin"], root_mode=0o755)
    images.build(
        tree / "docker/cpu.Dockerfile",
        "cpu",
        "python",
        tree,
        *LABELS,
        "--build-arg=PIP_EXTRA_INDEX_URL=",
        f"--secret=id=pip.conf,src={settings}",
    )
    return "cpu"


@pytest.mark.parametrize("name", ["plugin", pytest.param("cpu", marks=pytest.mark.slow)])
def test_an_image(images, tree, name, request):
    request.getfixturevalue(name)
    config = images.config(name)
    labels = config["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.revision"] == COMMIT
    # Nothing secret, nothing that the build left over.
    files = images.files(name)
    assert "/opt/nemo_specrl" in files
    own = files - images.files_of_base("nemo-rl" if name == "plugin" else "python")
    own.discard("/var/cache/apt/archives/lock")  # empty
    assert not [file for file in own if file.startswith(LEFT_BEHIND)]
    assert not [file for file in own if "/.cache" in file or file.endswith((".whl", ".tar.gz"))]
    assert not {file.split("/")[-1] for file in own} & {"secret", "secret.pyc", "site.env"}
    assert PASSWORD not in json.dumps(config)
    # Without root, and with the doctor as its check.
    assert images.run(name, "id", "-u").strip() == "10001"
    assert config["config"]["Healthcheck"]["Test"] == ["CMD", "nemo-specrl", "doctor"]
    assert "All required packages are installed." in images.run(name, "nemo-specrl", "doctor")
    home = images.run(name, "sh", "-c", "cd && touch results && pwd").strip()
    assert home == "/home/specrl"
    assert "Permission denied" in images.run(
        name, "sh", "-c", "touch /opt/nemo_specrl/other", code=1
    )


def test_the_plugin_is_imported_first_from_a_folder_that_has_nothing_else(images, plugin):
    where = "import nemo_specrl, xxhash as x; print(nemo_specrl.__file__, x)"
    own, xxhash = images.run(plugin, "python", "-c", where).split(maxsplit=1)
    assert own.startswith("/opt/nemo_specrl/")
    assert "/opt/nemo_specrl/" not in xxhash  # NeMo-RL has it, in a version of its own
    top = {
        file.split("/")[3] for file in images.files(plugin) if file.startswith("/opt/nemo_specrl/")
    }
    packages = {name for name in top if not name.endswith(".dist-info")}
    assert packages - {"bin", ".lock"} == {"nemo_specrl"}


def test_workers_may_rewrite_vllm_as_nemo_rl_does_when_they_start(images, plugin):
    """The lock beside the file, and the file itself (nemo_rl/models/generation/vllm/patches.py)."""
    patch = "cd $0/executor && : >ray_executor.py.patch_lock && echo patched >ray_executor.py"
    images.run(plugin, "sh", "-c", patch, VLLM)
    assert images.run(plugin, "cat", f"{VLLM}/executor/ray_executor.py") == "patched\n"
    for kept in (f"{VLLM}/executor/native.so", "/opt/nemo_specrl/nemo_specrl/config.py"):
        assert "Permission denied" in images.run(plugin, "touch", kept, code=1)


def test_a_recipe_writes_its_results_into_the_working_folder(images, plugin):
    images.run(plugin, "sh", "-c", f"cd {CHECKOUT} && mkdir -p results/run logs checkpoints")
    assert "Permission denied" in images.run(plugin, "touch", f"{CHECKOUT}/examples/x", code=1)


@pytest.mark.slow
def test_the_cpu_image_runs_the_command_line(images, cpu):
    config = images.config(cpu)["config"]
    assert (config["Entrypoint"], config["Cmd"]) == (["nemo-specrl"], ["--help"])
    said = images.run(cpu, "nemo-specrl", "train", "examples/configs/none.yaml", code=2)
    assert "no such file; give a YAML recipe" in said
    assert "rollout cache" in images.run(cpu, "nemo-specrl", "cache", "--help")

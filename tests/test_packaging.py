"""A release: its script, its wheel in an empty environment, and the files that services read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from nemo_specrl import __version__
from tests.conftest import REPOSITORY

UV = Path(sys.executable).with_name("uv")
# Neither the tree under test nor an editable install of it may answer in place of the wheel.
CLEAN = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
GIT = {
    **{
        f"GIT_{who}_{what}": "test@example.com"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
    "GIT_CONFIG_GLOBAL": os.devnull,
}


def run(*command, cwd, code=0):
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**CLEAN, **GIT, "UV": str(UV)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def clone(tmp_path):
    """The tree's files as the first commit of a repository of their own, on main."""
    if not UV.exists():
        pytest.skip(f"there is no {UV}")
    tree = tmp_path / "clone"
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"):
        tree.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tree)
    without_caches = shutil.ignore_patterns("__pycache__")
    for name in ("nemo_specrl", "scripts"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=without_caches)
    (tree / ".gitignore").write_text("dist/\nbuild/\n*.egg-info/\n")
    run("git", "init", "--quiet", "--initial-branch=main", cwd=tree)
    run("git", "add", ".", cwd=tree)
    run("git", "commit", "--quiet", "--message=all", cwd=tree)
    return tree


def test_the_wheel_of_a_dry_run_works_in_an_empty_environment(clone, tmp_path):
    release = clone / "scripts/release.sh"
    said = run(release, "--dry-run", __version__, cwd=clone)
    (wheel,) = (clone / "dist").glob("*.whl")
    (archive,) = (clone / "dist").glob("*.tar.gz")
    assert wheel.name in said and archive.name in said
    assert run("git", "tag", cwd=clone) == ""

    environment = tmp_path / "environment"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=tmp_path)
    python = environment / "bin/python"
    run(UV, "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    command = environment / "bin/nemo-specrl"
    assert "doctor" in run(command, "--help", cwd=tmp_path)
    # Neither torch nor vLLM is there: the doctor says so, and nothing that is needed is missing.
    findings = run(command, "doctor", cwd=tmp_path)
    assert "not installed" in findings
    typed = "import nemo_specrl, pathlib; print(pathlib.Path(nemo_specrl.__file__).parent)"
    package = Path(run(python, "-c", typed, cwd=tmp_path).strip())
    assert package.is_relative_to(environment) and (package / "py.typed").exists()
    # What vLLM finds among its plug-ins can be loaded, in processes that have no vLLM, too.
    plugins = "[p] = entry_points(group='vllm.general_plugins'); print(p.name, p.load().__name__)"
    found = run(python, "-c", f"from importlib.metadata import *; {plugins}", cwd=tmp_path)
    assert found.split() == ["nemo_specrl", "vllm_plugin"]


def without_compiled_part(folder):
    """The package as in a checkout that nobody has built, or built without a C compiler."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(REPOSITORY / "nemo_specrl", folder / "nemo_specrl", ignore=ignored)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_a_cpu_without_the_compiled_part_is_refused_in_one_line(tmp_path):
    environment = without_compiled_part(tmp_path)
    code = "import nemo_specrl.drafting.suffix_tree"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "the compiled part of nemo_specrl" in last and "is missing" in last


def test_the_plug_in_needs_vllm_numpy_pydantic_and_xxhash_alone(tmp_path):
    """And no C compiler, where vLLM runs V2: in an engine core that joins no cluster."""
    environment = without_compiled_part(tmp_path)
    code = """
import sys
for name in ("ray", "omegaconf", "typer", "rich", "matplotlib", "nemo_rl"):
    sys.modules[name] = None  # its import fails
import nemo_specrl.engine.plugin, nemo_specrl.cache, nemo_specrl.cache.local
import nemo_specrl.engine.resident, nemo_specrl.engine.scheduler, nemo_specrl.engine.v2_config
import nemo_specrl.drafting.chances, nemo_specrl.drafting.uniform_length
nemo_specrl.engine.plugin.vllm_plugin()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment | {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_wheel_without_a_c_compiler_lacks_the_compiled_part_alone(clone, tmp_path):
    environment = {**os.environ, "CC": "no-such-compiler"}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", tmp_path, "."],
        cwd=clone,
        env=environment,
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    files = {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}
    assert {"plugin.py", "speculator.py", "py.typed"} <= files
    assert not any(name.endswith(".so") for name in files)


def test_a_release_is_tagged_on_main_alone_and_with_a_section_in_the_changelog(clone):
    release, next_one = clone / "scripts/release.sh", "98.7.0"
    for name in ("nemo_specrl/__init__.py", "CITATION.cff"):
        file = clone / name
        file.write_text(file.read_text().replace(__version__, next_one))
    run("git", "commit", "--quiet", "--all", "--message=version", cwd=clone)
    missing = run(release, next_one, cwd=clone, code=1)
    assert f"CHANGELOG.md has no section '## {next_one}'" in missing
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(f"{changelog.read_text()}\n## {next_one}\n")
    assert "the tree has changes" in run(release, next_one, cwd=clone, code=1)
    run("git", "commit", "--quiet", "--all", "--message=changelog", cwd=clone)
    run("git", "switch", "--quiet", "--create", "other", cwd=clone)
    assert "this is 'other'" in run(release, next_one, cwd=clone, code=1)
    run("git", "switch", "--quiet", "main", cwd=clone)
    run(release, next_one, cwd=clone)
    assert run("git", "tag", "--points-at", "main", cwd=clone).split() == [f"v{next_one}"]
    assert "exists already" in run(release, next_one, cwd=clone, code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a version"),
        (["v0.1.0"], "give a version such as"),
        (["0.1.0", "0.2.0"], "more than one version"),
        (["--force"], "unknown option --force"),
        (["--dry-run", "9.9.9"], "has another __version__ than 9.9.9"),
    ],
)
def test_wrong_arguments_are_one_line(clone, arguments, message):
    said = run(clone / "scripts/release.sh", *arguments, cwd=clone, code=1)
    assert message in said and len(said.splitlines()) == 1


def test_workflows_call_what_the_repository_has():
    texts = {p.name: p.read_text() for p in (REPOSITORY / ".github/workflows").glob("*.yml")}
    workflows = {name: yaml.safe_load(text) for name, text in texts.items()}
    for workflow in workflows.values():
        # YAML 1.1 reads the key `on` as a boolean.
        assert {"name", True, "jobs", "permissions"} <= workflow.keys()
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] > 0
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    assert ".ci/run" in texts["ci.yml"] and os.access(REPOSITORY / ".ci/run", os.X_OK)
    assert "make test-nemo" in texts["nemo_rl.yml"]
    assert "test-nemo:" in (REPOSITORY / "Makefile").read_text()


def test_pre_commit_runs_the_linters_of_make_lint():
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"].split()[0] for repo in config["repos"] for hook in repo["hooks"]]
    recipe = (REPOSITORY / "Makefile").read_text().split("lint: setup\n")[1].split("\n\n")[0]
    assert set(hooks) == {line.split()[0] for line in recipe.splitlines()}


def test_the_citation_has_this_version():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == __version__

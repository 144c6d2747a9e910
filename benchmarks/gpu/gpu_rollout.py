r"""Rollouts on a GPU: verification, prefix reuse, lossless drafting and memory, in ratios.

    pip install --no-deps -e . && python -m benchmarks.gpu.gpu_rollout --out results/gpu.json
    .venv/bin/python -m benchmarks.gpu.gpu_rollout --size tiny --out results/gpu_tiny.json
    .venv/bin/python -m benchmarks.gpu.gpu_rollout --report results/gpu.json --plot results/gpu.png

Needs a Hopper GPU of 80 GB and vLLM 0.25 or later; beside what vLLM brings, only xxhash and the
compiled part of this package. Downloads nothing: a model of the shape of Qwen3-8B gets random
weights (``model.py``). Plain decoding on vLLM's V2 model runner is what all is compared with. First
comes drafting in that runner: search and vote alone, and then rollouts with it. The tree proposer
runs on V1, in an engine beside it. ``points.py`` has the comparisons.

Every point goes to the file when it is measured. After ``--minutes`` the script ends; started again
with the same file, it measures what is missing. ``--size tiny`` does all of it on a CPU, what V2
does only where Triton can be imported, by its interpreter; on a GPU, it shows within minutes
whether everything works there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.model import SIZES, Size, on_gpu, size_of
from benchmarks.gpu.points import Bench
from benchmarks.gpu.report import draw, print_report
from benchmarks.shared.records import machine
from nemo_specrl.engine.vllm.compat import check_version
from nemo_specrl.engine.vllm.environment import (
    has_custom_proposers,
    has_v2_speculators,
    local_cpu_environment,
)
from nemo_specrl.errors import SpecRLError

DRAFTS = "drafts"
"""The process of what the V2 model runner does, with and without drafts."""
LEAST_SECONDS = {"qwen3-8b": 90.0}
"""Seconds that must be left to start a process, by size; 20 for other sizes."""


def v2_runs() -> bool:
    """Whether V2 model runners that draft can run: on GPUs, and on CPUs by an interpreter."""
    return has_v2_speculators() and importlib.util.find_spec("triton") is not None


def points(size: Size) -> dict[str, tuple[str, Callable[[Bench], dict[str, Any]]]]:
    """By name, the process that measures a point, and how; what matters most comes first.

    A GPU has room for the two engines of the first process, and then for those of the others.
    """
    found: dict[str, tuple[str, Callable[[Bench], dict[str, Any]]]] = {}

    def add(name: str, process: str, method: str, *args: Any) -> None:
        found[name] = process, lambda bench: getattr(bench, method)(*args)

    if v2_runs():
        add("search", DRAFTS, "searched")
        for batch in size.drafted:
            for p in size.mean_p:
                add(f"v2/{p}/{batch}", DRAFTS, "lossless", p, batch, {"v2": "v2"})
        add("steps", DRAFTS, "steps")
    *short, longest = size.places
    for rows, length in short:
        add(f"verification/{rows}x{length}", "engines", "verification", rows, length)
    add("reuse", "engines", "reuse")
    for name in ("plain", "v1"):
        add(f"memory/{name}", "engines", "memory", name)
    methods = {"proposer": "v1", "rounds": "plain"}
    if not has_custom_proposers():
        del methods["proposer"]
    for p in size.mean_p:
        for batch in size.batches:
            add(f"lossless/{p}/{batch}", "engines", "lossless", p, batch, methods)
    add("pressure", "pressure", "pressure")
    add("memory/bound", "bound", "memory", "bound")
    rows, length = longest
    add(f"verification/{rows}x{length}", "engines", "verification", rows, length)
    return found


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"points": {}, "failed": {}}
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def save(path: Path, data: dict[str, Any]) -> None:
    """Write a result atomically."""
    written = path.with_suffix(".tmp")
    rounded = json.loads(
        json.dumps(data, default=float), parse_float=lambda f: float(f"{float(f):.5g}")
    )
    written.write_text(json.dumps(rounded, indent=1) + "\n")
    os.replace(written, path)


def refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def measure(path: Path, size_name: str, names: list[str]) -> None:
    """Measure points in this process, which has a process group of its own."""
    os.setsid()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to workers
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    size, data = size_of(size_name), load(path)
    if not on_gpu():
        if points(size)[names[0]][0] == DRAFTS:
            importlib.import_module("tests.support.v2_cpu")  # before vLLM
        local_cpu_environment()
    try:
        check_version()
    except SpecRLError as error:
        refuse(str(error))
    here = {"size": size_name, **machine()}
    if size_name == "qwen3-8b" and not on_gpu():
        refuse("--size qwen3-8b: there is no GPU here; --size tiny runs on a CPU")
    if data.setdefault("machine", here) != here:
        refuse(f"--out {path}: it is of {data['machine']}, not {here}; name another file")
    with tempfile.TemporaryDirectory() as folder:
        bench, status = Bench(size, Path(folder)), 0
        for name in names:
            started = time.perf_counter()
            try:
                found = points(size)[name][1](bench)
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                data["failed"][name] = f"{type(error).__name__}: {lines[-1]}"
                save(path, data)
                print(f"{name}: {data['failed'][name]}", file=sys.stderr, flush=True)
                status = 1
                break  # its engines may be gone
            about = {"date": datetime.date.today().isoformat(), "runners": bench.runners()}
            data["points"][name] = {**about, **found}
            save(path, data)
            seconds = time.perf_counter() - started
            print(f"{name}: {len(found['repetitions'])} times, {seconds:.0f} s", flush=True)
    os._exit(status)  # engines in other processes take their time to end; the caller ends them


def run(path: Path, size_name: str, prefixes: list[str], minutes: float) -> None:
    """Measure what is missing, in one process after another, until the time is over."""
    until = time.monotonic() + 60 * minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended, too
    path.parent.mkdir(parents=True, exist_ok=True)
    data = load(path)
    failed_before, data["failed"] = set(data["failed"]), {}  # they are tried again
    save(path, data)
    everything = points(SIZES[size_name])
    stuck = False  # whether a process has failed before it measured anything
    wanted = [name for name in everything if not prefixes or name.startswith(tuple(prefixes))]
    while until - time.monotonic() > LEAST_SECONDS.get(size_name, 20.0):
        missing = [name for name in wanted if name not in {**data["points"], **data["failed"]}]
        # Those that may fail as others of their kind did come last.
        failed = {name.partition("/")[0] for name in {*failed_before, *data["failed"]}}
        missing.sort(key=lambda name: name.partition("/")[0] in failed)
        if not missing:
            break
        alike = itertools.groupby(missing, lambda name: everything[name][0])
        lot = list(next(alike)[1])
        if not on_gpu() and everything[lot[0]][0] != DRAFTS:
            # A CPU has room for all engines at once.
            lot = [name for name in missing if everything[name][0] != DRAFTS]
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(path, size_name, lot)
        )
        process.start()
        try:
            process.join(until - time.monotonic())
        finally:  # the time is over, or the user has interrupted; else its group is gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if process.exitcode == 2:
            sys.exit(2)
        data = load(path)
        if set(lot) & set(data["failed"]) and not set(lot) & set(data["points"]):
            if stuck:
                print("nothing was measured in two processes; the reason is above", file=sys.stderr)
                break
            stuck = True
        left = [name for name in lot if name not in {**data["points"], **data["failed"]}]
        if left and len(left) == len(lot) and until > time.monotonic():
            data["failed"][left[0]] = f"its process ended with exit code {process.exitcode}"
            save(path, data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--size", choices=SIZES, default="qwen3-8b")
    parser.add_argument("--points", nargs="*", default=[], help="those whose names begin so")
    parser.add_argument("--minutes", type=float, default=7.75, help="after which it ends")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print the tables of a file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw them, too")
    args = parser.parse_args()
    if (args.out is None) == (args.report is None):
        parser.error("--out JSON or --report JSON is required")
    try:
        if args.out:
            run(args.out, args.size, args.points, args.minutes)
        data = load(args.out or args.report)
        size_name = data.get("machine", {}).get("size", args.size)
        print_report(data, list(points(SIZES[size_name])))
        if args.plot:
            draw(data, args.plot)
    except (OSError, ValueError, ImportError) as error:  # a file, or matplotlib
        refuse(" ".join(str(error).split()))
    sys.exit(1 if data["failed"] else 0)


if __name__ == "__main__":
    main()

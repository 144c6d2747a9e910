"""Speed of one rollout store, beside the raw speed of the machine's disk and memory.

    .venv/bin/python -m benchmarks.cache.cache --dir /raid/somewhere --out results/cache.json

MB are 10^6 bytes of records: what is counted is what a store keeps of a response, without SQLite's
pages around it. Look-ups decode what they find. Each figure is the median of several runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import Chart, outputs, present, read, save
from nemo_specrl import Finish, Rollout, RolloutStore, prompt_key
from nemo_specrl.cache.codec import encode

ROWS = 16
"""Responses of a prompt."""
AT_ONCE = 8
"""Prompts of a look-up, and of a put."""
PROCESSES = (1, 4, 8)
VOCABULARY = "0" * 32
MB = 1e6


def groups(prompts: int, tokens: int, scored: bool, seed: int) -> Iterator[list[Rollout]]:
    """Yield the responses of ``AT_ONCE`` prompts at a time, of 152k token ids."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 151_936, (ROWS, tokens), dtype=np.int32)
    logprobs = -rng.exponential(0.5, (ROWS, tokens)).astype(np.float32)
    for start in range(0, prompts, AT_ONCE):
        yield [
            Rollout(
                prompt_key([prompt]),
                np.roll(ids[row], prompt),
                Finish.STOP,
                seed,
                np.roll(logprobs[row], prompt) if scored else None,
            )
            for prompt in range(start, min(start + AT_ONCE, prompts))
            for row in range(ROWS)
        ]


def opened(folder: Path) -> RolloutStore:
    return RolloutStore(folder, vocabulary=VOCABULARY, max_bytes=2**40)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def put(store: RolloutStore, args: argparse.Namespace, scored: bool, seed: int) -> list[float]:
    """Put everything once; returns the seconds of the puts, of the last sync, and the MB."""
    spent = mb = 0.0
    for group in groups(args.prompts, args.tokens, scored, seed):
        mb += len(encode(group[0])) * len(group) / MB
        spent += seconds(lambda some=group: store.put(some))  # type: ignore[misc]
    return [spent, seconds(store.sync), mb]


LOOKUPS = """
import sys, time
from pathlib import Path
from benchmarks.cache.cache import AT_ONCE, opened
from nemo_specrl import prompt_key
first, step, prompts = map(int, sys.argv[2:])
keys = [prompt_key([p]) for p in range(first, prompts, step)]
store = opened(Path(sys.argv[1]))
store.get(keys[:1])
print("ready", flush=True)
sys.stdin.readline()
longest = 0.0
for start in range(0, len(keys), AT_ONCE):
    began = time.perf_counter()
    store.get(keys[start : start + AT_ONCE], most=16)
    longest = max(longest, time.perf_counter() - began)
print(longest, flush=True)
"""


def look_up(folder: Path, processes: int, prompts: int) -> tuple[float, float]:
    """Look every prompt up once, divided over processes.

    Returns:
        Seconds until the last one is done, and of the longest single look-up.
    """
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(
            [sys.executable, "-c", LOOKUPS, folder, str(i), str(processes), str(prompts)],
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        for i in range(processes)
    ]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    started = time.perf_counter()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    longest = [float(process.stdout.readline()) for process in running if process.stdout]
    spent = time.perf_counter() - started
    for process in running:
        process.communicate()
    return spent, max(longest)


def raw_disk(folder: Path, mb: float) -> None:
    """Write so many MB in pieces of 4 MiB, and flush them."""
    piece = os.urandom(2**22)
    with open(folder / "raw", "wb", buffering=0) as file:
        for _ in range(round(mb * MB / len(piece))):
            file.write(piece)
        os.fsync(file.fileno())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, with stores in a folder of their own."""
    folder = Path(tempfile.mkdtemp(prefix="cache-benchmark-", dir=args.dir))
    speeds: dict[str, list[float]] = {}

    def add(name: str, mb: float, spent: float) -> None:
        speeds.setdefault(name, []).append(mb / spent)

    longest = []
    try:
        for run in range(args.runs):
            with opened(folder / "scored") as store:
                spent, flushed, mb = put(store, args, True, run)
                add("put with log-probs, synced", mb, spent + flushed)
            with opened(folder / "store") as store:
                spent, flushed, mb = put(store, args, False, run)
                add("put", mb, spent)
                add("put, synced", mb, spent + flushed)
                for processes in PROCESSES:
                    spent, waited = look_up(folder / "store", processes, args.prompts)
                    add(f"look-ups, {processes} processes", mb, spent)
                    longest.append(waited)
                add("snapshot", mb, seconds(lambda: store.snapshot(folder / "copy", args.prompts)))
                size = store.stats().bytes_on_disk / MB
                add("raw disk", mb, seconds(lambda: raw_disk(folder, mb)))  # noqa: B023
            responses = (run + 1) * args.prompts * ROWS
    finally:
        shutil.rmtree(folder)
    return {
        "load": os.getloadavg()[0],
        "prompts": args.prompts,
        "responses_per_prompt": ROWS,
        "tokens": args.tokens,
        "bytes_per_token": mb * MB / (args.prompts * ROWS * args.tokens),
        "file_bytes_per_byte_of_records": size / (mb * responses / (args.prompts * ROWS)),
        "longest_lookup_s": max(longest),
        "mb_s": speeds,
    }


def report(result: dict[str, Any]) -> str:
    """Markdown: MB/s and tokens/s, medians and ranges."""
    lines = [
        f"{result['prompts']:,} prompts of {result['responses_per_prompt']} responses of "
        f"{result['tokens']:,} tokens, {result['bytes_per_token']:.2f} bytes a token without "
        f"log-probs; the file has {result['file_bytes_per_byte_of_records']:.2f} bytes a byte of "
        f"records; load {result['load']:.1f}",
        "",
        "| | MB/s | runs |",
        "|---|---|---|",
    ]
    for name, speeds in result["mb_s"].items():
        runs = f"{min(speeds):.0f} to {max(speeds):.0f}"
        lines.append(f"| {name} | {statistics.median(speeds):.0f} | {runs} |")
    lines += ["", f"longest look-up of {AT_ONCE} prompts: {result['longest_lookup_s']:.3f} s"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--prompts", type=int, default=1024, help="of 16 responses each")
    parser.add_argument("--tokens", type=int, default=8000, help="of each response")
    parser.add_argument("--runs", type=int, default=3)
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, measure(args))
    chart = Chart("One rollout store", "MB/s", {n: {"runs": v} for n, v in result["mb_s"].items()})
    present(report(result), chart, args.plot)


if __name__ == "__main__":
    main()

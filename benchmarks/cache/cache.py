"""Speed of one rollout store, beside the raw speed of the machine's disk and memory.

    .venv/bin/python -m benchmarks.cache.cache --dir /raid/somewhere --out results/cache.json

MB are 10^6 bytes of encoded records: what is counted is what a store keeps of a rollout, without
SQLite's pages around it. Each figure is the median of several runs; the seconds of the processor
that they took stand beside it, since on a machine with other work they are what can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import Chart, outputs, present, read, save
from nemo_specrl import Finish, Rollout, RolloutStore, prompt_key
from nemo_specrl.cache.cluster.shard import Shard
from nemo_specrl.cache.codec import encode_all
from nemo_specrl.cache.storage.schema import DATA_FILE, db_key

SAMPLE_INDICES = 16
PARTITIONS = 64
MB = 1e6


def rollouts(prompts: int, tokens: int, version: int) -> list[Rollout]:
    """Rollouts as of a run with reuse: 152k token ids, the first half drafted a version ago."""
    rng = np.random.default_rng(version)
    ids = rng.integers(0, 151_936, (SAMPLE_INDICES, tokens), dtype=np.int32)
    logprobs = -rng.exponential(0.5, (2, SAMPLE_INDICES, tokens)).astype(np.float32)
    births = np.repeat([max(0, version - 1), version], [tokens // 2, tokens - tokens // 2])
    return [
        Rollout(
            prompt_key([prompt]),
            sample_index,
            np.roll(ids[sample_index], prompt),
            np.roll(logprobs[0, sample_index], prompt),
            Finish.STOP,
            version,
            np.roll(logprobs[1, sample_index], prompt),
            births,
        )
        for prompt in range(prompts)
        for sample_index in range(SAMPLE_INDICES)
    ]


class Timings:
    """Medians of wall and processor seconds, by name."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[float, float]]] = {}
        self.mb: dict[str, float] = {}

    def measure(self, name: str, mb: float, work: Callable[[], Any]) -> Any:
        """Time ``work``, which goes through ``mb`` MB."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        self.runs.setdefault(name, []).append(seconds)
        self.mb[name] = mb
        return result

    def medians(self) -> dict[str, dict[str, Any]]:
        """By name: seconds, processor seconds and MB/s, medians; the best run's MB/s; both seconds
        of all runs.
        """
        figures = {}
        for name, runs in self.runs.items():
            wall = statistics.median(run[0] for run in runs)
            figures[name] = {
                "s": wall,
                "cpu_s": statistics.median(run[1] for run in runs),
                "mb": self.mb[name],
                "mb_s": self.mb[name] / wall,
                "best_mb_s": self.mb[name] / min(run[0] for run in runs),
                "runs": runs,
            }
        return figures


def raw_disk(folder: Path, mb: float) -> None:
    """Write so many MB in pieces of 4 MiB, fsync them, and put them in place of those before."""
    piece = os.urandom(2**22)
    with open(folder / "raw.tmp", "wb", buffering=0) as file:
        for _ in range(round(mb * MB / len(piece))):
            file.write(piece)
        os.fsync(file.fileno())
    (folder / "raw.tmp").replace(folder / "raw")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def shard_memory(path: Path, prompts: int, tokens: int) -> dict[str, float]:
    """Memory of a process that only serves one store, MB; call it in a process of its own."""
    with RolloutStore(path, max_bytes=2**40, tokenizer_id="benchmark") as store:
        begun = resident()
        keys = [prompt_key([prompt]) for prompt in range(prompts)]
        for i in range(0, len(keys), 64):
            store.get(keys[i : i + 64])
        for start in range(0, prompts, 64):
            for rollout in rollouts(min(64, prompts - start), tokens, 9):
                store.put([rollout])
        store.sync()
        return {
            "at_start_mb": begun / MB,
            "after_mb": resident() / MB,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--prompts", type=int, default=512, help="of 16 rollouts each")
    parser.add_argument("--tokens", type=int, default=1000, help="of each rollout")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--opening-gb", type=float, default=0, help="size of a store to be opened")
    outputs(parser)
    parser.add_argument("--memory-of", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        print(json.dumps(shard_memory(args.memory_of, args.prompts, args.tokens)))
        return

    result = read(args.report) if args.report else save(args.out, measure(args))
    present(report(result), chart(result), args.plot)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, with stores in a folder of their own."""
    folder = Path(tempfile.mkdtemp(prefix="cache-benchmark-", dir=args.dir))
    try:
        result = benchmark(folder, args.prompts, args.tokens, args.runs)
        if args.opening_gb:
            result["opening"] = opening(folder, args.opening_gb, args.runs)
    finally:
        shutil.rmtree(folder)
    return result


def in_pieces(some: list[Any]) -> list[list[Any]]:
    return [some[i : i + 64] for i in range(0, len(some), 64)]


def arrays(found: dict[bytes, list[Rollout]]) -> list[Any]:
    """All columns of what was found; a look-up checks a record, and decodes it when it is used."""
    return [
        (r.tokens, r.logprobs, r.birth_logprobs, r.birth_versions)
        for group in found.values()
        for r in group
    ]


def one_run(
    timings: Timings, folder: Path, store: RolloutStore, made: list[Rollout], names: list[bytes]
) -> float:
    """Measure everything once; returns the MB of the records."""
    pieces = list(zip(in_pieces(made), in_pieces(names), strict=True))
    records = [encode_all(*piece) for piece in pieces]
    mb = sum(len(record) for some in records for record in some) / MB
    buffer, target = np.ones(2**25, np.uint8), np.empty(2**25, np.uint8)
    keys = list(dict.fromkeys(rollout.key for rollout in made))

    def put() -> None:
        store.put(made)
        store.sync()

    timings.measure("memory copy", 2**25 / MB, lambda: np.copyto(target, buffer))
    timings.measure("raw disk, as much", mb, lambda: raw_disk(folder, mb))
    timings.measure("encode", mb, lambda: [encode_all(*piece) for piece in pieces])
    timings.measure("put and sync", mb, put)
    timings.measure("get, warm", mb, lambda: store.get(keys))
    timings.measure("get and use all arrays", mb, lambda: arrays(store.get(keys)))
    timings.measure("snapshot", 0.0, lambda: store.snapshot(folder / "snapshot"))
    taken = sum(file.stat().st_size for file in (folder / "snapshot").iterdir()) / MB
    timings.mb["snapshot"] = taken
    timings.measure("raw disk, as the snapshot", taken, lambda: raw_disk(folder, taken))
    return mb


def benchmark(folder: Path, prompts: int, tokens: int, runs: int) -> dict[str, Any]:
    timings = Timings()
    path = folder / "store"
    with RolloutStore(path, max_bytes=8 * 2**30, tokenizer_id="benchmark") as store:
        for run in range(runs):
            made = rollouts(prompts, tokens, run)
            gc.collect()
            gc.freeze()  # as vLLM does: they are not the store's, and no collection goes over them
            names = [db_key(r.key, r.sample_index, i) for i, r in enumerate(made)]
            mb = one_run(timings, folder, store, made, names)
    waited = pauses(path, folder, prompts, runs)
    memory = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.cache.cache", "--memory-of", str(path)),
            *("--prompts", str(prompts), "--tokens", str(tokens)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "load": os.getloadavg()[0],
        "rollouts": prompts * SAMPLE_INDICES,
        "tokens": tokens,
        "bytes_per_token": mb * MB / (prompts * SAMPLE_INDICES * tokens),
        "timings": timings.medians(),
        "snapshot_by_partitions": waited,
        "memory": json.loads(memory.stdout),
    }


def pauses(path: Path, folder: Path, prompts: int, runs: int) -> dict[str, Any]:
    """A checkpoint's snapshot by partitions, and how long look-ups of 8 prompts wait meanwhile."""
    shard = Shard(str(path), 1, True, {"max_bytes": 2**40, "tokenizer_id": "benchmark"})
    keys = [prompt_key([prompt]) for prompt in range(prompts)]
    shard.store.get(keys)  # warm

    def write() -> float:
        """Write a snapshot; returns its MB/s."""
        started = time.perf_counter()
        files, _ = shard.write_snapshot(
            str(folder / "partitions"), list(range(PARTITIONS)), PARTITIONS, epoch=0
        )
        return sum(file.bytes for file in files) / MB / (time.perf_counter() - started)

    alone, beside, waits = [], [], []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(runs):
            alone.append(write())
            writing = pool.submit(write)
            while not writing.done():
                first = len(waits) * 8 % prompts
                started = time.perf_counter()
                shard.store.get(keys[first : first + 8])
                waits.append(time.perf_counter() - started)
            beside.append(writing.result())
    shard.close()
    return {
        "mb_s": alone,
        "mb_s_beside_lookups": beside,
        "lookups": len(waits),
        "median_wait_s": statistics.median(waits),
        "longest_wait_s": max(waits),
    }


KILLED = """
import os, signal, sys
from nemo_specrl import RolloutStore, prompt_key
store = RolloutStore(sys.argv[1], max_bytes=2**40, tokenizer_id="benchmark")
store.get([prompt_key([int(sys.argv[2])])])
os.kill(os.getpid(), signal.SIGKILL)
"""


def opening(folder: Path, gb: float, runs: int) -> dict[str, float]:
    """Seconds to open a store of so many GB after its process was killed, nothing of it in memory.

    Its rollouts have 20,000 tokens.
    """
    path = folder / "large"
    prompts = round(gb * 1e9 / (SAMPLE_INDICES * 20_000 * 7.2))
    with RolloutStore(path, max_bytes=2**40, tokenizer_id="benchmark") as store:
        for start in range(0, prompts, 4):
            group = rollouts(4, 20_000, 1)
            for i, rollout in enumerate(group):
                object.__setattr__(rollout, "key", prompt_key([start + i // SAMPLE_INDICES]))
            store.put(group)
    seconds = []
    for run in range(runs):
        arguments = [str(path), str(run * prompts // runs)]
        subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
        descriptor = os.open(path / DATA_FILE, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        started = time.perf_counter()
        store = RolloutStore(path, max_bytes=2**40, tokenizer_id="benchmark")
        seconds.append(time.perf_counter() - started)
        store.close()
    size = (path / DATA_FILE).stat().st_size / 1e9
    opened = {"gb": size, "s": statistics.median(seconds), "worst_s": max(seconds), "runs": runs}
    # Checkpoints of that size, too: in small ones new pages of the page cache are all that counts.
    shard = Shard(str(path), 1, True, {"max_bytes": 2**40, "tokenizer_id": "benchmark"})
    timings = Timings()
    everything = list(range(PARTITIONS))
    for _ in range(2):
        timings.measure("raw disk", size * 1e3, lambda: raw_disk(folder, size * 1e3))
        timings.measure(
            "snapshot by partitions",
            size * 1e3,
            lambda: shard.write_snapshot(str(folder / "parts"), everything, PARTITIONS, epoch=0),
        )
    shard.close()
    return opened | {
        f"{name}, MB/s": figures["mb_s"] for name, figures in timings.medians().items()
    }


RAW = {
    "encode": "memory copy",
    "put and sync": "raw disk, as much",
    "get, warm": "memory copy",
    "get and use all arrays": "memory copy",
    "snapshot": "raw disk, as the snapshot",
}
"""What each figure is compared with, run by run."""


def of_raw(result: dict[str, Any], name: str) -> list[float]:
    """Speed over the raw speed of what is below it, of each run."""
    mine, raw = result["timings"][name], result["timings"][RAW[name]]
    return [
        mine["mb"] / a[0] / (raw["mb"] / b[0])
        for a, b in zip(mine["runs"], raw["runs"], strict=True)
    ]


def over_raw(result: dict[str, Any], name: str) -> float:
    """The ratio that the table shows: quickest over quickest, or the median of the runs.

    Other work on the machine only ever slows down what the processor does, so that the quickest
    runs can be compared. A disk is also faster at times, and is measured beside each run.
    """
    mine, raw = result["timings"][name], result["timings"][RAW[name]]
    if RAW[name] == "memory copy":
        return float(mine["best_mb_s"] / raw["best_mb_s"])
    return statistics.median(of_raw(result, name))


def report(result: dict[str, Any]) -> str:
    """Markdown: speeds, their ratios to the raw ones, and sentences about the rest."""
    lines = [
        f"{result['rollouts']:,} rollouts of {result['tokens']:,} tokens, "
        f"{result['bytes_per_token']:.2f} bytes a token as records; load {result['load']:.1f}",
        "",
        "| | s | processor s | MB/s | best | M tokens/s | of the raw speed |",
        "|---" * 7 + "|",
    ]
    for name, figures in result["timings"].items():
        cells = [name, *(f"{figures[key]:.3f}" for key in ("s", "cpu_s"))]
        cells += [f"{figures[key]:.0f}" for key in ("mb_s", "best_mb_s")]
        if name in RAW:
            cells.append(f"{figures['mb_s'] / result['bytes_per_token']:.1f}")
            ratios = of_raw(result, name)
            low, high = min(ratios), max(ratios)
            ratio = over_raw(result, name)
            cells.append(f"{ratio:.3f} (runs: {low:.3f} to {high:.3f}), {RAW[name]}")
        lines.append("| " + " | ".join([*cells, *[""] * (7 - len(cells))]) + " |")
    waited, memory = result["snapshot_by_partitions"], result["memory"]
    alone, beside = (statistics.median(waited[n]) for n in ("mb_s", "mb_s_beside_lookups"))
    lines += [
        "",
        f"snapshot by partitions, medians of {len(waited['mb_s'])}: {alone:.0f} MB/s alone, "
        f"{beside:.0f} MB/s beside look-ups of 8 prompts; {waited['lookups']} of these took "
        f"{1e3 * waited['median_wait_s']:.1f} ms in the median and "
        f"{1e3 * waited['longest_wait_s']:.1f} ms at worst",
        "",
        f"memory of a shard: {memory['at_start_mb']:.0f} MB at start, "
        f"{memory['after_mb']:.0f} MB after reading and writing all",
    ]
    if opened := result.get("opening"):
        speeds = {name: value for name, value in opened.items() if name.endswith("MB/s")}
        lines += [
            "",
            f"opening {opened['gb']:.1f} GB after a kill, cold: {opened['s']:.2f} s, "
            f"at worst {opened['worst_s']:.2f} s",
            "",
            "of that size: " + "; ".join(f"{name}: {value:.0f}" for name, value in speeds.items()),
        ]
    return "\n".join(lines)


def chart(result: dict[str, Any]) -> Chart:
    """Speeds over the raw ones; the first run warms the page cache up."""
    groups = {f"{name}\nover {RAW[name]}": {"runs": of_raw(result, name)[1:]} for name in RAW}
    return Chart("One store beside disk and memory", "of the raw speed", groups)


if __name__ == "__main__":
    main()

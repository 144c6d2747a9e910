r"""The demo over several seeds: what plain training and each preset learn, and how fast.

    .venv/bin/python -m benchmarks.trainer.demo_seeds --json results/demo_seeds.json
    .venv/bin/python -m benchmarks.trainer.demo_seeds --json results/demo_seeds.json \
        --seeds 1 2 3 --sides plain lossless reuse strict

Runs ``nemo-specrl train`` for each seed and side (resumable), two at once and one a core, so that
the sides of a seed meet the machine at the same speeds, and prints two tables: held-out accuracy,
and ratios of seconds. ``--config`` takes another recipe. With ``--compare DIR``, the folder of
``nemo-specrl compare``, that comparison's picture is drawn again with the seeds in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.cores import Cores
from benchmarks.shared.records import Chart, half_width, merged, present, read
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.monitoring.report import write_comparison

SPEC = "policy.generation.spec_rl"
PARTIAL = "partial"
SIDES = {
    "plain": f"{SPEC}.enabled=false",
    "lossless": f"{SPEC}.preset=lossless",
    "reuse": f"{SPEC}.preset=reuse",
    "strict": f"{SPEC}.preset=reuse {SPEC}.reuse.lenience=1",
    PARTIAL: f"{SPEC}.preset=lossless",
}
SUMS = (
    *(metric.ROLLOUT_S, metric.TRAIN_S, metric.STEP_S),
    *(metric.DECODED_TOKENS, metric.RESPONSE_TOKENS),
)
WARM_EPOCH = 2  # as in nemo_specrl.monitoring.comparison


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every seed and side; returns one row for each run."""
    wanted = [(seed, side) for seed in args.seeds for side in args.sides]
    if not args.no_run:
        cores = Cores(args.jobs)
        if failed := cores.each(lambda which: train(args, *which, cores), wanted):
            sys.exit("\n".join(failed))
    rows = []
    for seed, side in wanted:
        if records := read_metrics(folder_of(args, seed, side) / "metrics.jsonl"):
            rows.append({"side": side, "seed": seed, **summary(records)})
    return rows


def folder_of(args: argparse.Namespace, seed: int, side: str) -> Path:
    folder: Path = args.out / f"seed_{seed}" / side
    return folder


def train(args: argparse.Namespace, seed: int, side: str, cores: Cores) -> str | None:
    """Finish a run, which may have begun before; returns None or what went wrong."""
    folder = folder_of(args, seed, side)
    algorithm = "ppo" if "ppo" in yaml.safe_load(args.config.read_text()) else "grpo"
    arguments = [
        *("-m", "nemo_specrl", "train", str(args.config)),
        f"{algorithm}.seed={seed}",
        f"{algorithm}.val_period={args.val_period}",
        f"{algorithm}.max_val_samples=256",
        *SIDES[side].split(),
        *([f"{algorithm}.partial_rollouts.enabled=true"] if side == PARTIAL else ()),
        f"checkpointing.checkpoint_dir={folder}",
        f"logger.log_dir={folder}",
        "logger.tensorboard_enabled=false",
        *args.override,
    ]
    return cores.python(f"seed {seed}, {side}", arguments, folder)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the steps of a run, and its held-out accuracy by step."""
    at_start = metric.HELDOUT_ACCURACY + metric.AT_START
    points = {"0": records[0][at_start]} if at_start in records[0] else {}
    points |= {
        str(r["step"]): r[metric.HELDOUT_ACCURACY] for r in records if metric.HELDOUT_ACCURACY in r
    }
    warm = [r[metric.ROLLOUT_S] for r in records if r["epoch"] >= WARM_EPOCH]
    return {
        "steps": len(records),
        **{name: round(sum(r[name] for r in records), 2) for name in SUMS},
        "rollout_warm_s": round(sum(warm), 2),
        metric.HELDOUT_ACCURACY: points,
    }


def learning(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of held-out accuracy: mean over seeds, and each seed."""
    steps = sorted({int(step) for row in rows for step in row[metric.HELDOUT_ACCURACY]})
    lines = [
        "| side | " + " | ".join(f"step {step}" for step in steps) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for side in SIDES:
        cells = []
        for step in steps:
            values = accuracies(rows, side, step)
            each = ", ".join(f"{v:.3f}" for v in values)
            cells.append(f"**{statistics.mean(values):.3f}** ({each})" if values else "")
        if any(cells):
            lines.append(f"| {side} | " + " | ".join(cells) + " |")
    half = band(rows, steps)
    if half is not None:
        lines += ["", f"95 % band of plain's mean (Student's t, pooled): ± {half:.3f}"]
    return "\n".join(lines)


def accuracies(rows: list[dict[str, Any]], side: str, step: int) -> list[float]:
    """Held-out accuracy of each seed of a side at a step."""
    mine = [row[metric.HELDOUT_ACCURACY] for row in rows if row["side"] == side]
    return [points[str(step)] for points in mine if str(step) in points]


def band(rows: list[dict[str, Any]], steps: list[int]) -> float | None:
    """Half width of the 95 % confidence band of plain's mean; None with a single seed."""
    by_step = [accuracies(rows, "plain", step) for step in steps]
    return half_width(by_step) if min(map(len, by_step), default=0) > 1 else None


SPEEDS = {
    metric.ROLLOUT_S: "rollouts",
    "rollout_warm_s": "from the third epoch on",
    metric.STEP_S: "whole steps",
    metric.DECODED_TOKENS: "decoded tokens",
}


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of plain and another side with the same seed and the same number of steps."""
    plain = {row["seed"]: row for row in rows if row["side"] == "plain"}
    others = [row for row in rows if row["side"] != "plain" and row["seed"] in plain]
    found = [(plain[row["seed"]], row) for row in others]
    return [(base, row) for base, row in found if base["steps"] == row["steps"]]


def speed(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of each seed's ratios, plain over the other side."""
    lines = [
        "| seed | side | rollout s: plain, side | " + " | ".join(SPEEDS.values()) + " |",
        "|---" * (3 + len(SPEEDS)) + "|",
    ]
    for base, row in pairs(rows):
        ratios = [f"{base[name] / row[name]:.2f}" if row[name] else "" for name in SPEEDS]
        seconds = f"{base[metric.ROLLOUT_S]:.0f}, {row[metric.ROLLOUT_S]:.0f}"
        lines.append(f"| {row['seed']} | {row['side']} | {seconds} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Bars of plain's values over each side's, by seed."""
    groups: dict[str, dict[str, list[float]]] = {title: {} for title in SPEEDS.values()}
    for base, row in pairs(rows):
        for name, title in SPEEDS.items():
            if row[name]:
                groups[title].setdefault(row["side"], []).append(base[name] / row[name])
    return Chart("The demo's recipe over seeds", "times less than plain", groups)


def heldout_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that ``write_comparison`` draws: plain, and ``lossless`` as its other side."""
    names = {"plain": "plain", "lossless": "speculative"}
    return [
        {
            "side": names[row["side"]],
            "seed": row["seed"],
            "step": int(step),
            metric.HELDOUT_ACCURACY: v,
        }
        for row in rows
        if row["side"] in names
        for step, v in row[metric.HELDOUT_ACCURACY].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("examples/configs/grpo_sort_cpu.yaml"))
    parser.add_argument("--out", type=Path, default=Path("results/demo_seeds"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["plain", "lossless"])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one a core at most")
    parser.add_argument("--val-period", type=int, default=20, help="steps")
    parser.add_argument("--override", nargs="*", default=[], help="further overrides, key=value")
    parser.add_argument("--no-run", action="store_true", help="only read what is in --out")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--report", type=Path, metavar="JSON", help="show the rows of a file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the speeds")
    parser.add_argument("--compare", type=Path, help="folder of a comparison to draw again")
    args = parser.parse_args()

    rows = read(args.report)["rows"] if args.report else run(args)
    if args.json:
        merged(args.json, rows, ("side", "seed"))
    present(f"{learning(rows)}\n\n{speed(rows)}", chart(rows), args.plot)
    if args.compare:
        compared = json.loads((args.compare / "compare.json").read_text())
        write_comparison(args.compare, compared, heldout_table=heldout_table(rows))


if __name__ == "__main__":
    main()

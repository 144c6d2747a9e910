"""Held-out accuracy of the demo's recipe, plain and speculative, over several seeds.

    .venv/bin/python benchmarks/demo_seeds.py --out results/demo_seeds --json docs/demo_seeds.json

Runs ``nemo-specrl train`` for each seed and side (resumable; about 15 minutes a seed on two cores)
and prints a table for docs/demo.md. With ``--compare DIR``, the folder of ``nemo-specrl compare``,
that comparison's picture is drawn again with the seeds in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from nemo_specrl.report import write_comparison
from nemo_specrl.trainer.log import read_metrics

SIDES = {"plain": "false", "speculative": "true"}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every seed and side; one row for each held-out evaluation."""
    rows = []
    for seed in args.seeds:
        for side, enabled in SIDES.items():
            folder = args.out / f"seed_{seed}" / side
            command = [
                *(sys.executable, "-m", "nemo_specrl", "train", str(args.config)),
                f"grpo.seed={seed}",
                f"grpo.val_period={args.val_period}",
                "grpo.max_val_samples=256",
                f"policy.generation.spec_rl.enabled={enabled}",
                f"checkpointing.checkpoint_dir={folder}",
                f"logger.log_dir={folder}",
                "logger.tensorboard_enabled=false",
            ]
            subprocess.run(command, check=True)
            records = read_metrics(folder / "metrics.jsonl")
            points = {0: records[0]["heldout_accuracy_at_start"]}
            points |= {r["step"]: r["heldout_accuracy"] for r in records if "heldout_accuracy" in r}
            rows += [
                {"side": side, "seed": seed, "step": step, "heldout_accuracy": accuracy}
                for step, accuracy in points.items()
            ]
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """A Markdown table: mean over seeds, and each seed."""
    steps = sorted({row["step"] for row in rows})
    print("| side | " + " | ".join(f"step {step}" for step in steps) + " |")
    print("|---" * (len(steps) + 1) + "|")
    for side in SIDES:
        cells = []
        for step in steps:
            values = [
                row["heldout_accuracy"]
                for row in rows
                if row["side"] == side and row["step"] == step
            ]
            each = ", ".join(f"{v:.3f}" for v in values)
            cells.append(f"**{statistics.mean(values):.3f}** ({each})")
        print(f"| {side} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("examples/configs/grpo_sort_cpu.yaml"))
    parser.add_argument("--out", type=Path, default=Path("results/demo_seeds"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--val-period", type=int, default=6, help="steps")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--compare", type=Path, help="folder of a comparison to draw again")
    args = parser.parse_args()

    rows = run(args)
    print_table(rows)
    if args.json:
        args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    if args.compare:
        compared = json.loads((args.compare / "compare.json").read_text())
        write_comparison(args.compare, compared, heldout_table=rows)


if __name__ == "__main__":
    main()

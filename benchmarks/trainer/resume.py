"""How much faster a killed run redoes its lost steps than it did them first.

    .venv/bin/python -m benchmarks.trainer.resume --out results/resume.json

A trainer without a checkpoint is killed by SIGKILL after some steps and started again, several
times from the beginning. The ``rollout_s`` of each lost step when it is made again is compared with
that of the first time; of both, the quickest reading counts, since other work on the machine only
ever slows them down, and minutes lie between the two.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared.records import Chart, outputs, present, read, save
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import read_metrics

RECIPE = "examples/configs/grpo_sort_cpu.yaml"


def command(folder: Path, steps: int, overrides: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "nemo_specrl", "train", RECIPE),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
        "policy.generation.spec_rl.preset=faithful",  # whose rollouts depend on the seed alone
        *("checkpointing.save_period=1000", f"grpo.max_num_steps={steps}"),
        *(f"checkpointing.checkpoint_dir={folder}", f"logger.log_dir={folder}"),
        *overrides,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="that are lost")
    parser.add_argument("--repeats", type=int, default=3, help="of run, kill and new start")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, run(args))
    present(report(result), chart(result), args.plot)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Kill runs, start them again, and compare the steps that they had lost."""
    first, again = [], []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory(prefix="resume-benchmark-") as name:
            folder = Path(name)
            first.append(killed_after(folder, args.steps, args.overrides))
            subprocess.run(
                command(folder, args.steps, args.overrides), check=True, stdout=subprocess.DEVNULL
            )
            again.append(read_metrics(folder / "metrics.jsonl"))
    return compared(first, again)


def report(result: dict[str, Any]) -> str:
    """Markdown: seconds of rollouts of each lost step, and the ratio of their sums."""
    lines = ["| step | s first | s again | times faster | reward |", "|---" * 5 + "|"]
    lines += [
        f"| {row['step']} | {row['first_s']:.2f} | {row['again_s']:.3f} "
        f"| {row['first_s'] / row['again_s']:.0f} | {row['reward']:.4f} |"
        for row in result["steps"]
    ]
    same = "the same" if result["same"] else "DIFFERENT"
    return "\n".join(
        [*lines, "", f"{result['ratio']:.0f} times faster; rewards and lengths {same}"]
    )


def chart(result: dict[str, Any]) -> Chart:
    """How many times faster each lost step's rollouts were the second time."""
    groups = {
        f"step {row['step']}": {"again": [row["first_s"] / row["again_s"]]}
        for row in result["steps"]
    }
    return Chart("Rollouts of lost steps, made again", "times faster than the first time", groups)


def killed_after(folder: Path, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Run the first steps, kill the run, and return their records."""
    process = subprocess.Popen(
        command(folder, 1000, overrides), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while len(read_metrics(folder / "metrics.jsonl")) < steps and process.poll() is None:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    return read_metrics(folder / "metrics.jsonl")[:steps]


def compared(
    first: list[list[dict[str, Any]]], again: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Each step's quickest seconds the first time and again, and whether all made the same.

    Args:
        first: records of the lost steps, for each repetition.
        again: those of the same steps after the new start.
    """
    rows = []
    for lost, made in zip(zip(*first, strict=True), zip(*again, strict=True), strict=True):
        first_s, again_s = ([step[metric.ROLLOUT_S] for step in steps] for steps in (lost, made))
        rows.append(
            {
                "step": lost[0]["step"],
                "first_s": min(first_s),
                "again_s": min(again_s),
                "repetitions_s": {"first": first_s, "again": again_s},
                "reward": lost[0]["reward"],
                "tokens": lost[0][metric.RESPONSE_TOKENS],
            }
        )
    names = ("prompts", "reward", metric.RESPONSE_LENGTH, "loss", metric.GRAD_NORM)
    return {
        "steps": rows,
        "ratio": sum(r["first_s"] for r in rows) / sum(r["again_s"] for r in rows),
        "same": all(
            step[name] == one[name]
            for run in (*first, *again)
            for one, step in zip(first[0], run, strict=True)
            for name in names
        ),
    }


if __name__ == "__main__":
    main()

"""How much faster a killed run redoes its lost steps than it did them first.

    .venv/bin/python benchmarks/resume.py --out results/resume.json

A trainer without a checkpoint is killed by SIGKILL after some steps and started again, several
times from the same state; the ``rollout_s`` of each lost step when it is made again, the median of
these times, is compared with that of the first time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import Chart, outputs, present, read, save

from nemo_specrl.trainer.log import read_metrics

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
    parser.add_argument("--starts", type=int, default=3, help="after the kill, from one state")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, run(args))
    present(report(result), chart(result), args.plot)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Kill a run, start it again, and compare the steps that it had lost."""
    with tempfile.TemporaryDirectory(prefix="resume-benchmark-") as name:
        folder, state = Path(name, "run"), Path(name, "state")
        lost = killed_after(folder, args.steps, args.overrides)
        folder.rename(state)
        again = []
        for _ in range(args.starts):
            shutil.copytree(state, folder)
            subprocess.run(
                command(folder, len(lost), args.overrides), check=True, stdout=subprocess.DEVNULL
            )
            again.append(read_metrics(folder / "metrics.jsonl"))
            shutil.rmtree(folder)
    return compared(lost, again)


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
    """Run the first steps, kill the run, and return the records of these steps."""
    process = subprocess.Popen(
        command(folder, 1000, overrides), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while len(read_metrics(folder / "metrics.jsonl")) < steps and process.poll() is None:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    return read_metrics(folder / "metrics.jsonl")


def compared(lost: list[dict[str, Any]], again: list[list[dict[str, Any]]]) -> dict[str, Any]:
    rows = [
        {
            "step": first["step"],
            "first_s": first["rollout_s"],
            "again_s": statistics.median(step["rollout_s"] for step in steps),
            "starts_s": [step["rollout_s"] for step in steps],
            "reward": first["reward"],
            "tokens": first["response_tokens"],
        }
        for first, *steps in zip(lost, *again, strict=True)
    ]
    names = ("prompts", "reward", "response_length", "loss", "grad_norm")
    return {
        "steps": rows,
        "ratio": sum(r["first_s"] for r in rows) / sum(r["again_s"] for r in rows),
        "same": all(
            step[name] == first[name]
            for first, *steps in zip(lost, *again, strict=True)
            for step in steps
            for name in names
        ),
    }


if __name__ == "__main__":
    main()

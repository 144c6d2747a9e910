r"""Rollout seconds of NeMo-RL's own GRPO job on a CPU, with ``spec_rl.enabled`` false and true.

    NEMO_RL_HOME=DIR .venv-nemo-0.25.1/bin/python -m benchmarks.nemo_rl.nemo_rl_overhead \
        --out benchmarks/results/nemo_rl_overhead.json

Runs the job of tests/nemo_rl (NeMo-RL's real ``setup`` and trainer, two vLLM engines) with the
plug-in registered, with speculation off and on side by side. Each has half of the cores, and they
swap halves from pair to pair. What NeMo-RL logs as ``timing/train/generation`` is compared step by
step. In the first epoch the cache is cold and both sides make the same tokens, so a difference is
overhead. From the second epoch on, rows have drafts. With speculation off, the workers are
NeMo-RL's own classes.

`make test-nemo` makes .venv-nemo-0.25.1. Takes about ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.records import Chart, outputs, present, read, save
from nemo_specrl.monitoring import names as metric
from tests.support.nemo_rl.jobs import HOME, Job

SIDES = ("off", "on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2, help="of jobs, one off and one on")
    parser.add_argument("--epochs", type=int, default=2, help="the first of them cold")
    parser.add_argument("--steps", type=int, default=6, help="of an epoch")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=32, help="rows of a prompt")
    parser.add_argument("--preset", default="faithful")
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, run(parser, args))
    present(report(result), chart(result), args.plot)


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Run the pairs of jobs and compare them."""
    if not HOME:
        parser.error("set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL")

    runs: dict[str, list[list[dict[str, float]]]] = {side: [] for side in SIDES}
    for pair in range(args.pairs):
        for side, steps in side_by_side(SIDES if pair % 2 else SIDES[::-1], args).items():
            runs[side].append(steps)
            seconds = " ".join(f"{step['generation']:.2f}" for step in steps)
            print(f"{side:>3}: {seconds} s", flush=True)

    asked = {name: getattr(args, name) for name in ("pairs", "epochs", "steps", "prompts", "group")}
    return {"asked": {**asked, "preset": args.preset}, **compared(runs, args.steps), "runs": runs}


def side_by_side(sides: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run a job of each side, both at once, on halves of the cores in the order of ``sides``.

    The speed of a machine with other work drifts within minutes: jobs one after the other would
    meet different machines.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(sides):
        sys.exit(f"{len(sides)} jobs run side by side, and here is {len(cores)} core")
    with tempfile.TemporaryDirectory() as folder:
        try:
            jobs = {}
            for i, side in enumerate(sides):
                os.sched_setaffinity(0, cores[i :: len(sides)])  # which the job inherits
                jobs[side] = started(Path(folder) / side, side, args)
        finally:
            os.sched_setaffinity(0, cores)
        try:
            return {side: steps_of(job.wait()) for side, job in jobs.items()}
        finally:
            for job in jobs.values():
                job.kill()


def started(folder: Path, side: str, args: argparse.Namespace) -> Job:
    """A job of one side."""
    return Job(
        folder / "out",
        steps=args.epochs * args.steps,
        spec_rl={"enabled": str(side == "on").lower(), "preset": args.preset},
        **{
            "++env.prompts": args.prompts * args.steps,
            "++env.recorded": "false",
            "grpo.num_prompts_per_step": args.prompts,
            "grpo.num_generations_per_prompt": args.group,
            "policy.train_global_batch_size": args.prompts * args.group,
            "grpo.val_period": 0,
            "grpo.val_at_start": "false",
            "checkpointing.enabled": "false",
        },
    )


def steps_of(job: Job) -> list[dict[str, float]]:
    """For each step of a job that is done, the seconds of rollouts and of speculation."""
    kept = ("generation", "reward", "mean_gen_tokens_per_sample")
    train, timings = job.train(), job.metrics("timing/train")
    return [
        {
            name: value
            for name, value in {**train[step], **timing}.items()
            if name in kept or "spec_rl" in name
        }
        for step, timing in zip(sorted(train), timings, strict=True)
    ]


def compared(runs: dict[str, list[list[dict[str, float]]]], steps: int) -> dict[str, Any]:
    """Ratios, on over off, of steps that did the same work; the first step of a job warms up."""
    pairs = [list(zip(*pair, strict=True)) for pair in zip(runs["on"], runs["off"], strict=True)]
    cold = [on["generation"] / off["generation"] for p in pairs for on, off in p[1:steps]]
    warm = [off["generation"] / on["generation"] for p in pairs for on, off in p[steps:]]
    same = all(
        on[metric.DRAFT_COVERAGE] == 0 and on["reward"] == off["reward"]
        for pair in pairs
        for on, off in pair[:steps]
    )
    return {
        "same_when_cold": same,
        "cold_overhead": spread([ratio - 1 for ratio in cold]),
        "warm_speed_up": spread(warm),
        "warm_decoded_share": spread(
            [
                on[metric.ENGINE_DECODED_TOKENS] / on[metric.ENGINE_RESPONSE_TOKENS]
                for pair in pairs
                for on, _ in pair[steps:]
            ]
        ),
        "warm_seconds": {
            name: statistics.median(
                step[name] for run in runs["on"] for step in run[steps:] if name in step
            )
            for name in ("generation", "spec_rl_lookup", "spec_rl_verification", "spec_rl_decoding")
        },
    }


RATIOS = {
    "cold_overhead": "seconds more with a cold cache",
    "warm_speed_up": "times faster from the second epoch on",
    "warm_decoded_share": "tokens decoded, share of all, from the second epoch on",
}


def report(result: dict[str, Any]) -> str:
    """Markdown: medians and quartiles over steps."""
    lines = ["| NeMo-RL's rollouts | median | quartiles | steps |", "|---" * 4 + "|"]
    for name, title in RATIOS.items():
        found = result[name]
        quartiles = f"{found['lower_quartile']:.3f}, {found['upper_quartile']:.3f}"
        lines.append(f"| {title} | {found['median']:.3f} | {quartiles} | {found['of']} |")
    if not result["same_when_cold"]:
        lines.append(
            "\nWith a cold cache the two sides made different rollouts: no overhead is shown."
        )
    return "\n".join(lines)


def chart(result: dict[str, Any]) -> Chart:
    """Median and quartiles of each ratio."""
    names = ("lower_quartile", "median", "upper_quartile")
    groups = {
        textwrap.fill(title, 20): {"steps": [result[ratio][name] for name in names]}
        for ratio, title in RATIOS.items()
    }
    return Chart("NeMo-RL's job, speculation on and off", "ratio", groups)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high, "of": len(values)}


if __name__ == "__main__":
    main()

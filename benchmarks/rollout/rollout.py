r"""Compare what rollouts cost with each method of speculation, policies and prompts being the same.

    .venv/bin/python -m benchmarks.rollout.rollout --out results/rollout
    .venv/bin/python -m benchmarks.rollout.rollout --out results/rollout --tasks sorting --arms tree
    .venv/bin/python -m benchmarks.rollout.rollout --out results/rollout --sequences \
        --groups 4 16 64 256
    .venv/bin/python -m benchmarks.rollout.rollout --report benchmarks/results/rollout.json

A plain GRPO training is recorded once (``recording.py``): the weights with which each epoch begins.
Every arm then rolls out the same prompts under the same weights, epoch by epoch with an engine and
a cache of its own, from a cold first epoch on. Within an epoch arms take turns, some steps each, so
that drift of the machine favours none. Everything is repeated, with the same steps of the engine
each time, and the quickest reading of each step counts. ``--groups`` does the same with
a few prompts and groups of growing size. Rows go to DIR/rollout.json, where those of other places
(task, sequences, group, seed) stay. Counts do not depend on the machine; seconds do, and
processor seconds less so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.rollout.tables import chart, report
from benchmarks.shared.arms import (
    ARMS,
    LOSSLESS,
    PLAIN,
    SPEC,
    TREE,
    Comparison,
    Epochs,
    arguments,
    environment,
    in_own_process,
    recorded,
)
from benchmarks.shared.recording import TASKS, TOY_TASKS
from benchmarks.shared.records import merged, present, read

MEASURED = ("task", "sequences", "group", "seed", "of_groups")
"""Rows with the same of these are of one measurement."""
SMALL_BOUND = 2 * 2**20
GROUP_ARMS = {
    PLAIN: ARMS[PLAIN],
    TREE: ARMS[TREE],
    "tree, 2 MiB": (*LOSSLESS, f"{SPEC}tree.max_bytes={SMALL_BOUND}"),
}
GROUP_PROMPTS, GROUP_SEQUENCES, GROUP_EPOCHS = 4, 16, 2


def measure(
    part: dict[str, Any],
    recording: Path,
    arms: dict[str, tuple[str, ...]],
    epochs: int,
    repeats: int,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure arms side by side, in a process of its own.

    Args:
        part: task, sequences, group, seed and number of prompts; rows are labelled with it.
        recording: folder of the task's recording.
        arms: overrides by name.
        epochs: to measure.
        repeats: of everything, for seconds.

    Returns:
        Rows, and why arms were left out.
    """
    place = (part["task"], recording, arms, part["group"], part["sequences"])
    point = Epochs(part, part["prompts"], range(epochs))
    with Comparison(*place) as comparison:
        [rows] = comparison.repeated([point], [part["seed"]], repeats)
        return rows, comparison.left_out


def added(path: Path, rows: list[dict[str, Any]], left_out: dict[str, str]) -> dict[str, Any]:
    """Add rows to a file, instead of all those that it has of their places, and return it all."""
    had = read(path) if path.exists() else {"rows": [], "left_out": {}}
    measured = {row["arm"] for row in [*had["rows"], *rows]}
    reasons = {**had["left_out"], **left_out}
    reasons = {name: why for name, why in reasons.items() if name not in measured}
    return ordered(merged(path, rows, MEASURED, left_out=reasons))


def ordered(data: dict[str, Any]) -> dict[str, Any]:
    """The same with its rows in the order of the arms."""
    order = [*ARMS, *GROUP_ARMS]
    return {**data, "rows": sorted(data["rows"], key=lambda row: order.index(row["arm"]))}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for; what the file then has."""
    environment()
    result = args.out / "rollout.json"
    data: dict[str, Any] = {"rows": [], "left_out": {}}
    for task in args.tasks:
        recording = recorded(args, task, args.epochs)
        of_arms = {"group": args.group, "prompts": args.prompts, "of_groups": False}
        of_groups = {"sequences": GROUP_SEQUENCES, "prompts": GROUP_PROMPTS, "of_groups": True}
        parts = [{**of_arms, "sequences": n} for n in args.sequences]
        parts += [{**of_groups, "group": n} for n in args.groups]
        for seed in args.seeds:
            for part in parts:
                epochs = min(args.epochs, GROUP_EPOCHS) if part["of_groups"] else args.epochs
                arms = (
                    GROUP_ARMS if part["of_groups"] else {a: ARMS[a] for a in [PLAIN, *args.arms]}
                )
                part = {"task": task, "seed": seed, **part}
                amount = (arms, epochs, args.repeats)
                data = added(result, *in_own_process(measure, part, recording, *amount))
    return data


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TOY_TASKS)
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="beside plain, always measured"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="of everything, for seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of sampling")
    parser.add_argument("--sequences", type=int, nargs="*", default=[64], help="max_num_seqs")
    parser.add_argument("--prompts", type=int, default=16, help="of an epoch")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--groups", type=int, nargs="*", default=[], help="such as 4 16 64 256")
    parser.add_argument("--by-epoch", action="store_true", help="columns for each epoch")
    args = parser.parse_args()
    data = ordered(read(args.report)) if args.report else run(args)
    present(report(data, args.by_epoch), chart(data), args.plot)


if __name__ == "__main__":
    main()

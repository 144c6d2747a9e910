r"""Are drafts as long as they are worth it ever slower than plain decoding, or fixed lengths?

    .venv/bin/python -m benchmarks.rollout.regimes --out results/regimes
    .venv/bin/python -m benchmarks.rollout.regimes --report benchmarks/results/regimes.json

Drafts of the trees end where a token is not worth its verification, by what an engine has measured
(speculation/adaptive_length.py). This measures fixed chances of being accepted beside it, at which
drafts end instead (``tree.adaptive: false``), and no drafts at all, on two tasks, with few, many
and all rows at once, the first time that prompts come up and later. Engines and recorded policies
are those of ``rollout.py``; arms take turns. Everything is repeated, with the same steps of the
engine each time, and the quickest reading of each step counts.
Rows go to DIR/regimes.json, where those of other places stay.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.shared.arms import (
    ADAPTIVE_LENGTHS,
    ARMS,
    PLAIN,
    TREE,
    Comparison,
    Epochs,
    arguments,
    environment,
    in_own_process,
    recorded,
    scatter,
)
from benchmarks.shared.recording import TASKS, TOY_TASKS
from benchmarks.shared.records import Chart, merged, present, read

FIXED = (0.1, 0.2, 0.4, 0.6)
"""Chances below which a draft ends."""
ADAPTIVE = "adaptive"
GROUP, EPOCHS = 8, 2
KEYS = ("task", "sequences", "epoch", "seed", "arm")
PLACE = ("task", "sequences", "seed")
"""Rows of a place are of one measurement."""


def ends_at(arm: Any, probability: float) -> None:
    """Have the drafts of one engine end at ``probability``; all engines are in this process."""
    from nemo_specrl.engine.drafters import v1_proposer

    drafter = arm.counter.drafter
    propose = drafter.propose

    def proposed(*args: Any, **kwargs: Any) -> Any:
        v1_proposer.MIN_PROBABILITY = probability
        return propose(*args, **kwargs)

    drafter.propose = proposed


def measure(
    part: dict[str, Any], recording: Path, prompts: int, seeds: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Measure all arms of a task and a number of rows at once, in a process of its own."""
    adaptive = (*ARMS[TREE], ADAPTIVE_LENGTHS)
    arms = {PLAIN: ARMS[PLAIN], ADAPTIVE: adaptive, **{f"{p:g}": ARMS[TREE] for p in FIXED}}
    with Comparison(part["task"], recording, arms, GROUP, part["sequences"]) as comparison:
        for probability in FIXED:
            ends_at(comparison.arms[f"{probability:g}"], probability)
        point = Epochs(part, prompts, range(EPOCHS))
        [rows] = comparison.repeated([point], seeds, repeats)
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what was asked for; all rows of the file."""
    environment()
    rows: list[dict[str, Any]] = []
    for task in args.tasks:
        recording = recorded(args, task, EPOCHS)
        for sequences in args.sequences:
            part = {"task": task, "sequences": sequences}
            new = in_own_process(measure, part, recording, args.prompts, args.seeds, args.repeats)
            rows = merged(args.out / "regimes.json", new, PLACE)["rows"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: processor time of each choice over plain's, all seeds together, in each regime."""
    names = [PLAIN, ADAPTIVE, *(f"{p:g}" for p in FIXED)]
    lines = [
        "| task | at once | epoch | mean p of a token | tokens a step | "
        + " | ".join([ADAPTIVE, *(f"to {name}" for name in names[2:])])
        + f" | {ADAPTIVE} over the best other |",
        "|---" * (5 + len(names)) + "|",
    ]
    for task, sequences, epoch in sorted({tuple(row[k] for k in KEYS[:3]) for row in rows}):
        here = [r for r in rows if tuple(r[k] for k in KEYS[:3]) == (task, sequences, epoch)]
        seconds = {name: sum(r["processor_s"] for r in here if r["arm"] == name) for name in names}
        over = {name: seconds[name] / seconds[PLAIN] for name in names}
        mine = [r for r in here if r["arm"] == ADAPTIVE]
        gain = sum(r["response_tokens"] for r in mine) / sum(r["row_steps"] for r in mine)
        p = statistics.fmean(r["mean_p"] for r in here if r["arm"] == PLAIN)
        best = min(value for name, value in over.items() if name != ADAPTIVE)
        lines.append(
            f"| {task} | {sequences} | {'later' if epoch else 'first'} | {p:.2f} | {gain:.1f} | "
            + " | ".join(f"{over[name]:.2f}" for name in names[1:])
            + f" | {over[ADAPTIVE] / best:.2f} |"
        )
    return "\n".join([*lines, "", scatter(rows, KEYS[:-1])])


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Plain's processor seconds over each choice's, of each seed, in each regime."""
    plain = {tuple(row[k] for k in KEYS[:-1]): row for row in rows if row["arm"] == PLAIN}
    groups: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: [row[k] for k in KEYS[:3]]):
        if row["arm"] != PLAIN:
            name = f"{row['task']}\n{row['sequences']}, {'later' if row['epoch'] else 'first'}"
            ratio = plain[tuple(row[k] for k in KEYS[:-1])]["processor_s"] / row["processor_s"]
            groups.setdefault(name, {}).setdefault(row["arm"], []).append(ratio)
    title = "Draft lengths: adaptive, and to fixed chances; rows at once, epoch"
    return Chart(title, "times faster than plain decoding", groups)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TOY_TASKS)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of sampling")
    parser.add_argument("--repeats", type=int, default=2, help="of everything, for seconds")
    parser.add_argument("--prompts", type=int, default=16, help="of an epoch, groups of 8")
    args = parser.parse_args()
    rows = read(args.report)["rows"] if args.report else run(args)
    present(table(rows), chart(rows), args.plot)


if __name__ == "__main__":
    main()

r"""What a method of speculation gains, and on what that depends: one thing is varied at a time.

    .venv/bin/python -m benchmarks.rollout.sweep --out results/sweep
    .venv/bin/python -m benchmarks.rollout.sweep --out results/sweep --axes drift --all \
        --seeds 1 2 3
    .venv/bin/python -m benchmarks.rollout.sweep --out results/sweep_language --task word-problems
    .venv/bin/python -m benchmarks.rollout.sweep --report benchmarks/results/sweep.json \
        --plot sweep.png

At each point, plain decoding and each method roll out the same prompts for the second time. The
first time was under the weights that a training began with, by plain decoding, whose rollouts all
caches have; this time is under those it had some epochs later. A recorded training provides them,
and arms take turns, as in ``rollout.py``, since the machine may have other work. Points are
repeated until every arm has taken two seconds in all, in the same steps of the engine, and the
quickest reading of each step counts: with as many as these, two runs then differ less than by
medians. Rows go to DIR/sweep.json, where those of other points of the task stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.arms import (
    ARMS,
    PLAIN,
    TREE,
    Comparison,
    Epochs,
    arguments,
    environment,
    in_own_process,
    recorded,
    repeated_until,
    scatter,
)
from benchmarks.shared.recording import WORD_PROBLEMS
from benchmarks.shared.records import merged, read, show

METHODS = (TREE, "faithful", "faithful, tree", "fast")
PLACE = ("axis", "value", "seed")
"""What tells points apart; rows of a point are of one measurement."""


AXES = {
    "drift": "epochs of training since the draft",
    "temperature": "temperature of the policy's logits",
    "length": "most tokens of a response",
    "group": "rollouts of a prompt",
    "sequences": "rows that the engine runs at once",
    "engines": "engines that share the rows",
}
"""What is varied, with its title in tables and plots."""
Values = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Point:
    """Where to measure; of each axis the value that the others are measured at."""

    drift: int = 1
    temperature: float = 1.0
    length: int = 160
    group: int = 8
    sequences: int = 8
    engines: int = 1


@dataclass(frozen=True)
class Setting:
    """What is measured on a task.

    Args:
        rows: rollouts of an epoch, at every point.
        point: see ``Point``.
        values: of each axis the values of the points that are measured by default.
        more: of those that ``--all`` adds.
    """

    rows: int
    point: Point
    values: Values
    more: Values


SETTINGS = {
    "sorting": Setting(
        64,
        Point(),
        {
            "drift": (0, 1, 4),
            "temperature": (0.5, 1, 1.5),
            "length": (40, 160),
            "group": (2, 8, 32),
            "sequences": (4, 8, 64),
            "engines": (1, 2, 4),
        },
        {"drift": (2, 8), "temperature": (1.25,), "length": (20, 80), "sequences": (16,)},
    ),
    WORD_PROBLEMS: Setting(
        32,
        Point(length=256, group=4, sequences=4),
        {
            "drift": (0, 1, 2),
            "temperature": (0.6, 0.8, 1, 1.2),
            "group": (2, 4, 8),
            "sequences": (4, 8),
        },
        {"length": (64, 256), "engines": (1, 2, 4)},
    ),
}


def point_of(setting: Setting, axis: str, value: float) -> Point:
    of_axis: dict[str, Any] = {axis: value if axis == "temperature" else int(value)}
    return dataclasses.replace(setting.point, **of_axis)


def fits(setting: Setting, axis: str, value: float) -> bool:
    """Whether an axis has a point at a value."""
    if axis == "temperature":
        return value > 0
    if value != int(value) or value < (axis != "drift"):
        return False
    shared = {"group": setting.rows, "engines": setting.rows // setting.point.group}
    return axis not in shared or shared[axis] % int(value) == 0


# --- what the rows say --------------------------------------------------------------------------


def values_of(rows: list[dict[str, Any]], axis: str) -> list[float]:
    """The values of an axis that were measured."""
    return sorted({row["value"] for row in rows if row["axis"] == axis})


def speed(rows: list[dict[str, Any]], axis: str, value: float, arm: str, name: str) -> list[float]:
    """Plain's ``name`` over the arm's at a point, warm: one ratio for each seed."""
    here = [row for row in rows if (row["axis"], row["value"], row["epoch"]) == (axis, value, 1)]
    plain = {row["seed"]: row[name] for row in here if row["arm"] == PLAIN}
    return [plain[row["seed"]] / row[name] for row in here if row["arm"] == arm]


def spread(values: list[float]) -> str:
    """Median, and what the values lie between."""
    text = f"{statistics.median(values):.2f}"
    return text if len(values) == 1 else f"{text} ({min(values):.2f} to {max(values):.2f})"


def table(rows: list[dict[str, Any]], axis: str) -> str:
    """Markdown: how many times fewer steps and less processor time each method takes, warm."""
    arms = [arm for arm in ARMS if arm != PLAIN and any(row["arm"] == arm for row in rows)]
    names = [f"{arm}: steps | processor s" for arm in arms]
    lines = [
        f"| {AXES[axis]} | mean p of a token | tokens of a response | {' | '.join(names)} |",
        "|---" * (3 + 2 * len(arms)) + "|",
    ]
    for value in values_of(rows, axis):
        plain = [
            row for row in rows
            if (row["axis"], row["value"], row["arm"], row["epoch"]) == (axis, value, PLAIN, 1)
        ]  # fmt: skip
        cells = [
            f"{value:g}",
            f"{statistics.fmean(row['mean_p'] for row in plain):.3f}",
            f"{statistics.fmean(row['length'] for row in plain):.0f}",
        ]
        for arm in arms:
            for name in ("engine_steps", "processor_s"):
                cells.append(spread(speed(rows, axis, value, arm, name)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(rows: list[dict[str, Any]]) -> str:
    """The tables of all axes that were measured."""
    tables = [table(rows, axis) for axis in AXES if values_of(rows, axis)]
    return "\n\n".join([*tables, scatter(rows, (*PLACE, "epoch"))])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each axis: plain's processor seconds over each method's, with all seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    measured = [axis for axis in AXES if values_of(rows, axis)]
    panels = figure.subplots(2, -(-len(measured) // 2), squeeze=False).ravel()
    for panel in panels[len(measured) :]:
        panel.axis("off")
    for axis, panel in zip(measured, panels, strict=False):
        values = values_of(rows, axis)
        for arm in [arm for arm in ARMS if any(row["arm"] == arm for row in rows) and arm != PLAIN]:
            ratios = [speed(rows, axis, v, arm, "processor_s") for v in values]
            middle = [statistics.median(of_point) for of_point in ratios]
            lines = panel.plot(range(len(values)), middle, marker="o", label=arm)
            lowest, highest = [min(r) for r in ratios], [max(r) for r in ratios]
            colour = lines[0].get_color()
            panel.fill_between(range(len(values)), lowest, highest, color=colour, alpha=0.15, lw=0)
        panel.axhline(1, color="#888888", lw=1)
        panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        panel.set_xlabel(AXES[axis])
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#E6E6E6")
    panels[0].legend(fontsize=9)
    figure.suptitle("Times less processor time than plain decoding, second time a prompt comes up")
    figure.savefig(path, dpi=80)


# --- measuring ----------------------------------------------------------------------------------


def measure(
    task: str,
    points: dict[Point, dict[str, Any]],
    seeds: list[int],
    seconds: float,
    recording: Path,
    methods: list[str],
) -> list[list[dict[str, Any]]]:
    """Measure points in a process of its own: engines serve them all.

    Args:
        task: a task of ``SETTINGS``.
        points: the label of each.
        seeds: of sampling.
        seconds: a point is repeated until every arm has taken so long in all.
        recording: folder of the recording.
        methods: arms beside plain decoding.

    Returns:
        The rows of each point, with its label.
    """
    arms = {arm: ARMS[arm] for arm in (PLAIN, *methods)}
    most = max(point.sequences for point in points)
    setting = SETTINGS[task]
    with Comparison(task, recording, arms, setting.point.group, most) as comparison:
        if comparison.left_out:
            raise SystemExit("; ".join(": ".join(arm) for arm in comparison.left_out.items()))
        of_points = [
            Epochs(
                label,
                setting.rows // point.group,
                (point.drift,),
                earlier=0,
                temperature=point.temperature,
                sequences=point.sequences,
                engines=point.engines,
                overrides=(
                    f"grpo.num_generations_per_prompt={point.group}",
                    f"policy.train_global_batch_size={point.group}",
                    f"policy.generation.max_new_tokens={point.length}",
                ),
            )
            for point, label in points.items()
        ]
        return comparison.repeated(of_points, seeds, repeats=1, seconds=seconds)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the points of the axes that were asked for, each once, and label them with these."""
    environment()
    result, setting = args.out / "sweep.json", SETTINGS[args.task]
    if result.exists() and (had := read(result)["task"]) != args.task:
        raise SystemExit(f"{result} has points of {had}; give another folder")
    labels: dict[Point, list[dict[str, Any]]] = {}
    for axis, values in asked_for(args, setting).items():
        for value in values:
            point = point_of(setting, axis, value)
            labels.setdefault(point, []).append({"axis": axis, "value": value})
    recording = recorded(args, args.task, 1 + max(point.drift for point in labels))
    points = {point: first for point, (first, *_) in labels.items()}
    amount = (args.seeds, args.seconds, recording, args.arms)
    measured = in_own_process(measure, args.task, points, *amount)
    new = [
        {**row, **label}
        for point, of_point in zip(points, measured, strict=True)
        for label in labels[point]
        for row in of_point
    ]
    rows: list[dict[str, Any]] = merged(result, new, PLACE, task=args.task)["rows"]
    return rows


def asked_for(args: argparse.Namespace, setting: Setting) -> Values:
    """Axes and their values."""
    if args.points:
        return dict(args.points)
    more = setting.more if args.all else {}
    both = {axis: setting.values.get(axis, ()) + more.get(axis, ()) for axis in args.axes}
    return {axis: values for axis, values in both.items() if values}


def points_of(text: str) -> tuple[str, tuple[float, ...]]:
    """Read the points of an axis: ``length=5,20``."""
    axis, _, listed = text.partition("=")
    if axis not in AXES:
        raise argparse.ArgumentTypeError(f"{axis!r} is no axis; there are {', '.join(AXES)}")
    try:
        values = tuple(float(value) for value in listed.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give AXIS=VALUE,VALUE,...") from None
    return axis, values


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--task", choices=SETTINGS, default="sorting")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    points = parser.add_mutually_exclusive_group()
    points.add_argument("--all", action="store_true", help="points of the documentation's tables")
    points.add_argument(
        "--points", nargs="+", type=points_of, metavar="AXIS=VALUE,...", help="these, and no others"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS)[1:], default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of sampling")
    repeated_until(parser)
    args = parser.parse_args()
    setting = SETTINGS[args.task]
    for axis, values in args.points or ():
        if not all(fits(setting, axis, value) for value in values):
            parser.error(
                f"--points {axis}: whole numbers, but for temperature; groups divide "
                f"{setting.rows} rows, and engines {setting.rows // setting.point.group} prompts"
            )
    rows = read(args.report)["rows"] if args.report else run(args)
    show(report(rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()

"""Files of figures, tables and plots for all benchmarks.

Each file names the machines and the versions with which its figures were measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def machine() -> dict[str, str]:
    """The device, and the versions of the packages that were measured."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    import nemo_specrl

    device = current_platform.get_device_name()
    if current_platform.is_cpu():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        device = f"CPU: {models[0] if models else os.uname().machine}, {os.cpu_count()} cores"
    return {
        "device": device,
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "nemo_specrl": nemo_specrl.__version__,
    }


def measured_here() -> dict[str, str]:
    """The date and the machine of the latest figures."""
    return {"date": datetime.date.today().isoformat(), **machine()}


def read(path: Path) -> dict[str, Any]:
    """Read a file: ``measured``, a list of machines, the newest last, and ``rows``."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def merged(
    path: Path, rows: Sequence[dict[str, Any]], keys: tuple[str, ...], **more: Any
) -> dict[str, Any]:
    """Add rows to a file, and remove its earlier rows with the same values of ``keys``.

    Args:
        path: the file.
        rows: rows that were measured now, on this machine.
        keys: keys whose values identify a measurement; rows of one are compared with each other.
        more: further values of the file.

    Returns:
        the content of the file.
    """
    had = read(path) if path.exists() else {"measured": [], "rows": []}
    here = measured_here()
    places = {tuple(row[key] for key in keys) for row in rows}
    kept = [row for row in had["rows"] if tuple(row[key] for key in keys) not in places]
    data = {
        "measured": [*(other for other in had["measured"] if other != here), here],
        **more,
        "rows": rounded([*kept, *rows]),
    }
    write(path, data)
    return data


def save(path: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """Add date and machine to a result, write it to a file if one is given, and return it."""
    data: dict[str, Any] = {"measured": [measured_here()], **result}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, data)
    return data


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file with a line for each value, and for each item of a long list."""

    def text(value: Any) -> str:
        if isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict):
            lines = ",\n".join(json.dumps(item) for item in value)
            return f"[\n{lines}\n]"
        return json.dumps(value)

    lines = ",\n".join(f"{json.dumps(name)}: {text(value)}" for name, value in data.items())
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(f"{{{lines}}}\n")
    partial.replace(path)


def rounded(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Round the numbers of rows to five digits."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return [{name: short(value) for name, value in row.items()} for row in rows]


def half_width(values: Sequence[Sequence[float]]) -> float:
    """Half width of the 95 % confidence band of a curve's mean over seeds (Student's t).

    The spread over seeds is pooled over the curve's points, since with three seeds that of a single
    point is hardly known.

    Args:
        values: for each point, the values of all seeds; at least two, equally many at all points.
    """
    from scipy import stats

    seeds = len(values[0])
    pooled = statistics.mean(statistics.variance(at_point) for at_point in values) ** 0.5
    return float(stats.t.ppf(0.975, seeds - 1)) * pooled / seeds**0.5


def outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark that writes one file."""
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the figures to this file")
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="measure nothing, show the figures of a file"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the figures")


# Okabe and Ito's, which the colour-blind can tell apart, and three greys.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"),
    *("#333333", "#777777", "#BBBBBB"),
)


@dataclass(frozen=True)
class Chart:
    """Bars in groups.

    Args:
        title: title of the plot.
        unit: unit of the values, for the axis.
        groups: values of all repetitions, by the name of a group and that of a bar. A bar shows
            their median, and dots show each of them.
        level: height of a line across the plot that marks the value of no difference.
    """

    title: str
    unit: str
    groups: dict[str, dict[str, list[float]]]
    level: float | None = 1.0


def show(text: str) -> None:
    """Print Markdown: formatted on a terminal, unchanged into a file."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(f"\n{text}", flush=True)


def present(table: str, chart: Chart, plot: Path | None) -> None:
    """Print a table, and draw a plot if requested."""
    show(table)
    if plot is not None:
        draw(chart, plot)


def draw(chart: Chart, path: Path) -> None:
    """Draw a chart into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for group in chart.groups.values() for name in group))
    if not names:
        print(f"{path}: nothing to draw", file=sys.stderr)
        return
    figure = Figure(figsize=(max(7.0, 3 + 1.4 * len(chart.groups)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        places = [
            (place + (i - (len(names) - 1) / 2) * width, group[name])
            for place, group in enumerate(chart.groups.values())
            if group.get(name)
        ]
        heights = [statistics.median(values) for _, values in places]
        colour = COLOURS[i % len(COLOURS)]
        axes.bar([x for x, _ in places], heights, width, label=name, color=colour)
        dots = [(x, value) for x, values in places for value in values if len(values) > 1]
        axes.scatter([x for x, _ in dots], [y for _, y in dots], s=5, color="black", zorder=3)
    if chart.level is not None:
        axes.axhline(chart.level, color="#888888", lw=1)
    axes.set_xticks(range(len(chart.groups)), list(chart.groups))
    axes.set_ylabel(chart.unit)
    axes.set_title(chart.title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6")
    axes.set_axisbelow(True)
    if len(names) > 1:
        figure.legend(loc="outside right upper", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)

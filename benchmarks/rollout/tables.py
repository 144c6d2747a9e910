"""The tables of ``rollout.py``, from the rows that it wrote. Nothing here measures."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.shared.arms import PLAIN, scatter
from benchmarks.shared.recording import TASKS
from benchmarks.shared.records import Chart

PLACE = ("task", "sequences", "group", "seed", "epoch", "of_groups")
"""The keys that tell the rows of an arm apart."""


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def total(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows)


def same_places(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of some rows whose place one of the others has."""
    places = {tuple(row[k] for k in PLACE) for row in others}
    return [row for row in rows if tuple(row[k] for k in PLACE) in places]


def deviation(mine: list[dict[str, Any]], base: list[dict[str, Any]], name: str) -> str:
    """Mean over epochs of the difference to plain, with its standard error."""
    by_place = {tuple(row[k] for k in PLACE): row for row in base}
    pairs = [(row, by_place[tuple(row[k] for k in PLACE)]) for row in mine]
    difference = statistics.fmean(a[name] - b[name] for a, b in pairs)
    squares = sum(a[f"{name}_se"] ** 2 + b[f"{name}_se"] ** 2 for a, b in pairs)
    return f"{difference:+.4f} ± {math.sqrt(squares) / len(pairs):.4f}"


def ratios(mine: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[str]:
    """Tokens a step of a row, and plain over this arm: engine steps, processor seconds."""
    names = ("engine_steps", "processor_s")
    return [
        f"{total(mine, 'response_tokens') / total(mine, 'row_steps'):.2f}",
        *(f"{total(base, name) / total(mine, name):.2f}" for name in names),
    ]


def table(rows: list[dict[str, Any]], by_epoch: bool) -> str:
    """Markdown: each arm in its first epoch and in those behind it, or in each, beside plain."""
    epochs = range(1 + max(row["epoch"] for row in rows))
    lots = {"cold": epochs[:1], "warm": epochs[1:]}
    if by_epoch:
        lots = {f"epoch {1 + epoch}": epochs[epoch : epoch + 1] for epoch in epochs}
    base = [row for row in rows if row["arm"] == PLAIN]
    heads = [f"{name}: tokens a step | steps | processor s" for name in lots]
    lines = [
        f"| arm | {' | '.join(heads)} | accepted of drafted | proposer | reward | log-prob |",
        "|---" * (5 + 3 * len(lots)) + "|",
    ]
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        cells = []
        for lot in lots.values():
            here = [row for row in mine if row["epoch"] in lot]
            cells += ratios(here, same_places(base, here)) if here else [""] * 3
        drafted = total(mine, "drafted_tokens")
        cells.append(f"{total(mine, 'accepted_tokens') / drafted:.2f}" if drafted else "")
        # The proposer's seconds are those of the first repetition.
        share = total(mine, "proposer_s") / sum(row["repetitions_s"][0] for row in mine)
        cells.append(f"{share:.1%}" if share else "")
        cells += (
            ["", ""] if name == PLAIN else [deviation(mine, base, q) for q in ("reward", "logprob")]
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def group_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: cost of a rollout as groups grow; processor seconds are plain's over the arm's."""
    lines = [
        "| n | arm | cold: steps a rollout | processor s | warm: steps a rollout | processor s "
        "| trees, MiB |",
        "|---" * 7 + "|",
    ]
    for group in sorted({row["group"] for row in rows}):
        here = [row for row in rows if row["group"] == group]
        for name in dict.fromkeys(row["arm"] for row in here):
            mine = [row for row in here if row["arm"] == name]
            cells = []
            for warm in (False, True):
                lot, base = (
                    [row for row in here if row["arm"] == arm and (row["epoch"] > 0) == warm]
                    for arm in (name, PLAIN)
                )
                rollouts = sum(row["prompts"] * row["group"] for row in lot) or math.nan
                cells.append(f"{total(lot, 'engine_steps') / rollouts:.2f}")
                seconds = total(lot, "processor_s") or math.nan
                base = same_places(base, lot)
                cells.append(f"{total(base, 'processor_s') / seconds:.2f}")
            most = max((row["tree_bytes"] for row in mine), default=0)
            cells.append(f"{most / 2**20:.2f}" if most else "")
            lines.append(f"| {group} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(data: dict[str, Any]) -> Chart:
    """Plain's processor seconds over each arm's in each epoch, tasks and sequences apart."""
    rows = [row for row in data["rows"] if not row["of_groups"]]
    plain = {tuple(row[k] for k in PLACE): row for row in rows if row["arm"] == PLAIN}
    groups: dict[str, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: (row["task"], row["sequences"], row["epoch"] > 0)):
        if row["arm"] != PLAIN:
            name = f"{row['task']}, {row['sequences']}\n{'warm' if row['epoch'] else 'cold'}"
            ratio = plain[tuple(row[k] for k in PLACE)]["processor_s"] / row["processor_s"]
            groups.setdefault(name, {}).setdefault(row["arm"], []).append(ratio)
    title = "Methods side by side; task, sequences at once, epoch"
    return Chart(title, "times faster than plain decoding", groups)


def report(data: dict[str, Any], by_epoch: bool) -> str:
    """All tables of a result, as Markdown; see ``table``."""
    parts = []
    places = {(r["task"], r["sequences"]) for r in data["rows"] if not r["of_groups"]}
    for task, sequences in sorted(places):
        rows = [
            r for r in data["rows"]
            if (r["task"], r["sequences"], r["of_groups"]) == (task, sequences, False)
        ]  # fmt: skip
        p = mean([r for r in rows if r["arm"] == PLAIN] or rows, "mean_p")
        title = f"{TASKS[task].title}; {sequences} sequences at once; mean p of a token {p:.3f}"
        parts += [title, table(rows, by_epoch)]
    for task in sorted({r["task"] for r in data["rows"] if r["of_groups"]}):
        rows = [r for r in data["rows"] if r["of_groups"] and r["task"] == task]
        prompts, sequences = rows[0]["prompts"], rows[0]["sequences"]
        title = (
            f"{TASKS[task].title}; groups of n rollouts of {prompts} prompts, {sequences} at once"
        )
        parts += [title, group_table(rows)]
    parts.append(scatter(data["rows"], PLACE))
    parts += [f"{name}: left out: {why}" for name, why in data["left_out"].items()]
    return "\n\n".join(parts)

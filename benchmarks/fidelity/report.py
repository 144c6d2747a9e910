"""Data, tables and pictures of the runs of ``fidelity.py``. Reads folders of runs; runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fidelity.settings import GRIDS, LENIENCE, PLAIN, SETTINGS, SHOWN, VARIANTS
from benchmarks.shared.records import COLOURS, half_width, merged, read
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import read_lines, read_metrics

# What is kept of a run, by epoch: the mean over its steps, or what an evaluation at its end gave.
MEANS = (
    *(metric.REWARD, metric.FRESH_REWARD, metric.REUSED_REWARD, metric.RESPONSE_LENGTH),
    *(metric.DISTINCT_IN_GROUP, metric.REWARD_STD_IN_GROUP),
    *(metric.GROUPS_WITHOUT_ADVANTAGE, metric.CLIP_FRACTION),
)
COUNTS = "counts.jsonl"
"""File in a run's folder with the counts of ``train.py``."""
COUNTED = ("rollout_cpu_s", "engine_steps")
SUMS = (
    *(metric.ROLLOUT_S, metric.VERIFY_S, metric.TRAIN_S, metric.STEP_S),
    *(metric.DECODED_TOKENS, metric.RESPONSE_TOKENS),
)
KEYS = ("setting", "variant", "seed", "epoch")
"""Keys whose values identify a row."""
EVALUATED = (
    *(metric.HELDOUT_ACCURACY, metric.HELDOUT_KL_TO_START),
    *(metric.HELDOUT_ENTROPY, metric.HELDOUT_LENGTH),
)


def with_counts(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The records of a run's steps with their counts; unchanged if counts are missing."""
    lines, _ = read_lines(path, json.loads) if path.exists() else ([], [])
    counted = {(line["step"], line["attempt"]): line for line in lines}
    by_step: dict[int, dict[str, float]] = {}
    for (step, _), line in counted.items():  # the last one of a step that was repeated
        sums = by_step.setdefault(step, dict.fromkeys(COUNTED, 0.0))
        for name in COUNTED:
            sums[name] += line[name]
    if any(record["step"] not in by_step for record in records):
        return records
    return [{**record, **by_step[record["step"]]} for record in records]


def summary(out: Path) -> list[dict[str, Any]]:
    """A row for each epoch of each run in ``out``; seconds and tokens are sums from the start."""
    rows = []
    for path in sorted(out.glob("*/*/*/metrics.jsonl")):
        setting, variant, seed = path.parts[-4:-1]
        records = with_counts(read_metrics(path), path.with_name(COUNTS))
        if setting not in SETTINGS or not records:
            continue
        label = {"setting": setting, "variant": variant, "seed": int(seed)}
        at_start = {name: f"{name}_at_start" for name in EVALUATED}
        first = {name: records[0][key] for name, key in at_start.items() if key in records[0]}
        rows.append({**label, "epoch": 0, "step": 0, **dict.fromkeys(SUMS, 0.0), **first})
        totals = dict.fromkeys((*SUMS, *(name for name in COUNTED if name in records[0])), 0.0)
        per_epoch = SETTINGS[setting].steps_per_epoch
        for epoch in range(len(records) // per_epoch):  # without one that is under way
            steps = records[epoch * per_epoch : (epoch + 1) * per_epoch]
            row = {**label, "epoch": epoch + 1, "step": steps[-1]["step"]}
            for name in totals:
                totals[name] += sum(r[name] for r in steps)
                row[name] = totals[name]
            for name in MEANS:
                values = [r[name] for r in steps if r.get(name) is not None]
                row[name] = float(np.mean(values)) if values else None
            row |= {name: steps[-1][name] for name in EVALUATED if name in steps[-1]}
            rows.append(row)
    return [
        {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in rows
    ]


# --- what the rows say --------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Mean over seeds by epoch, and the half width of its 95 % confidence band (Student's t)."""

    epochs: list[int]
    mean: np.ndarray
    half: float
    seeds: int


def band(rows: Iterable[dict[str, Any]], name: str) -> Band | None:
    """The band of a metric in the rows of one setting and variant."""
    by_epoch: dict[int, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            by_epoch.setdefault(row["epoch"], []).append(row[name])
    if not by_epoch:
        return None
    most = max(len(v) for v in by_epoch.values())
    epochs = sorted(e for e, v in by_epoch.items() if len(v) == most)
    values = np.array([by_epoch[e] for e in epochs])  # [epochs, seeds]
    half = half_width(values.tolist()) if most > 1 else 0.0
    return Band(epochs, values.mean(axis=1), half, most)


def of(rows: list[dict[str, Any]], setting: str, variant: str) -> list[dict[str, Any]]:
    """The rows of one setting and variant."""
    return [r for r in rows if r["setting"] == setting and r["variant"] == variant]


def variants_in(rows: list[dict[str, Any]], setting: str) -> list[str]:
    """The variants of a setting that have rows, in the order of their definition, plain first."""
    there = {r["variant"] for r in rows if r["setting"] == setting}
    return [v for v in VARIANTS if v in there]


def times_less(rows: list[dict[str, Any]], setting: str, variant: str, name: str) -> str:
    """Plain's value of a metric over the variant's: the mean over seeds, and each seed's.

    Runs that have fewer or more epochs than plain's with the same seed are left out.
    """

    def by_seed(which: str) -> dict[tuple[int, int], dict[str, Any]]:
        return {(r["seed"], r["epoch"]): r for r in last_rows(of(rows, setting, which))}

    plain, mine = by_seed(PLAIN), by_seed(variant)
    pairs = [(plain[run], mine[run]) for run in sorted(plain.keys() & mine.keys())]
    ratios = [a[name] / b[name] for a, b in pairs if name in a and name in b and b[name]]
    if variant == PLAIN or not ratios:
        return ""
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"{np.mean(ratios):.2f}" + (f" ({each})" if len(ratios) > 1 else "")


def last_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the last epoch."""
    last = max((row["epoch"] for row in rows), default=0)
    return [row for row in rows if row["epoch"] == last]


def at_end(rows: list[dict[str, Any]], name: str, digits: int) -> str:
    """Mean over seeds in the last epoch."""
    values = [row[name] for row in last_rows(rows) if row.get(name) is not None]
    return f"{np.mean(values):.{digits}f}" if values else ""


TIMES_LESS = {
    metric.ROLLOUT_S: "rollout s",
    "rollout_cpu_s": "processor s",
    "engine_steps": "engine steps",
    metric.DECODED_TOKENS: "decoded tokens",
}
LEARNED = "reward at the end | KL to the start, nats a token | entropy, nats a token"


def learned(rows: list[dict[str, Any]]) -> str:
    """Cells of a variant's rows: reward, KL and entropy at the end."""
    names = {"reward": 2, metric.HELDOUT_KL_TO_START: 3, metric.HELDOUT_ENTROPY: 3}
    return " | ".join(at_end(rows, name, digits) for name, digits in names.items())


def table(rows: list[dict[str, Any]], setting: str) -> str:
    """Markdown: speed of each variant of a setting beside plain's, and what it learned."""
    reference = band(of(rows, setting, PLAIN), metric.HELDOUT_ACCURACY)
    if reference is None:
        return ""
    names = [f"epoch {epoch}" for epoch in reference.epochs]
    less = " | ".join(TIMES_LESS.values())
    lines = [
        "Times less than plain with the same seed: mean (each seed)",
        "",
        f"| variant | seeds | {less} | {LEARNED} | " + " | ".join(names) + " |",
        "|---" * (5 + len(TIMES_LESS) + len(names)) + "|",
    ]
    for variant in variants_in(rows, setting):
        mine = of(rows, setting, variant)
        held = band(mine, metric.HELDOUT_ACCURACY)
        if held is None or last_rows(mine)[0]["epoch"] == 0:
            continue  # just begun
        at_epoch = dict(zip(held.epochs, held.mean, strict=True))
        cells = []
        for epoch, lowest in zip(reference.epochs, lower_bound(reference), strict=True):
            value = at_epoch.get(epoch)
            below = " (below)" if value is not None and value < lowest else ""
            cells.append("" if value is None else f"{value:.3f}{below}")
        speeds = (times_less(rows, setting, variant, name) for name in TIMES_LESS)
        lines.append("| " + " | ".join(
            [variant, str(held.seeds), *speeds, learned(mine), *cells]
        ) + " |")  # fmt: skip
    note = f"95 % band of plain: ± {reference.half:.3f}; *below*: under it."
    return "\n".join([*lines, "", note if reference.seeds > 1 else "One seed: no band."])


def lower_bound(reference: Band) -> np.ndarray:
    """Lower bound of a band at each of its epochs; minus infinity with a single seed."""
    if reference.seeds == 1:
        return np.full(len(reference.mean), -np.inf)
    return reference.mean - reference.half


def lenience_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: speed and reward of each lenience on each task, over the seeds that all have.

    Values that end below the band of all seeds of plain training are in bold.
    """
    lines = []
    for setting in GRIDS["lenience"][0]:
        reference = band(of(rows, setting, PLAIN), metric.HELDOUT_ACCURACY)
        shown = {variant: of(rows, setting, variant) for variant in (PLAIN, *LENIENCE)}
        if reference is None or not all(shown.values()):
            continue
        seeds = set.intersection(*({row["seed"] for row in mine} for mine in shown.values()))
        same = [row for row in rows if row["seed"] in seeds]
        for variant in shown:
            mine = of(same, setting, variant)
            held = band(mine, metric.HELDOUT_ACCURACY)
            assert held is not None
            name = LENIENCE.get(variant, variant)
            name = f"**{name}**" if held.mean[-1] < lower_bound(reference)[-1] else name
            speeds = [times_less(same, setting, variant, each) for each in COUNTED[::-1]]
            speeds.append(times_less(same, setting, variant, metric.DECODED_TOKENS))
            each = ", ".join(f"{row[metric.HELDOUT_ACCURACY]:.3f}" for row in last_rows(mine))
            accuracies = " ".join(f"{mean:.3f}" for mean in held.mean)
            cells = [SETTINGS[setting].task, name, *speeds, learned(mine), f"{accuracies} ({each})"]
            lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return ""
    less = "engine steps | processor s | decoded tokens"
    heading = f"| task | l | {less} | {LEARNED} | held-out: start, epoch 5, 10, 15 (each seed) |"
    return "\n".join([heading, "|---" * 9 + "|", *lines])


PANELS = [
    (metric.HELDOUT_ACCURACY, "step", "Held-out accuracy by steps"),
    (metric.HELDOUT_ACCURACY, metric.STEP_S, "Held-out accuracy by minutes"),
    (metric.FRESH_REWARD, "step", "Reward, fresh rows"),
    (metric.REUSED_REWARD, "step", "Reward, reused rows"),
    (metric.HELDOUT_KL_TO_START, "step", "KL to the start, nats per token"),
    (metric.HELDOUT_ENTROPY, "step", "Entropy, nats per token"),
    (metric.RESPONSE_LENGTH, "step", "Response length, tokens"),
    (metric.DISTINCT_IN_GROUP, "step", "Distinct rollouts of a group of 8"),
    (metric.REWARD_STD_IN_GROUP, "step", "Std of rewards in a group"),
]


def picture(rows: list[dict[str, Any]], setting: str, variants: list[str], path: Path) -> None:
    """Curves of the variants of a setting: means over seeds with their 95 % bands."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 11), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 3).ravel()
    figure.suptitle(f"{SETTINGS[setting].title}: mean over seeds, 95 % band", fontsize=14)
    for ax, (name, against, title) in zip(axes, PANELS, strict=True):
        for variant, colour in zip(variants, COLOURS, strict=False):
            mine = of(rows, setting, variant)
            curve = band(mine, name)
            if curve is None:
                continue
            x = np.array(
                [np.mean([r[against] for r in mine if r["epoch"] == e]) for e in curve.epochs]
            )
            x = x / 60 if against == metric.STEP_S else x
            label = f"{variant} ({curve.seeds} seeds)"
            ax.plot(x, curve.mean, color=colour, label=label, marker=".")
            if curve.seeds > 2:  # the band of two is as wide as the panel
                low, high = curve.mean - curve.half, curve.mean + curve.half
                ax.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        ax.set_title(title, loc="left", fontsize=11)
        ax.grid(axis="y", color="#E6E6E6")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=9)
    figure.savefig(path, dpi=80)


def report(out: Path, prefix: Path) -> None:
    """Data, pictures and tables of what is in ``out``."""
    data = Path(f"{prefix}.json")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    new = summary(out)
    # Runs that were made elsewhere stay.
    rows = merged(data, new, KEYS)["rows"] if new else read(data)["rows"]
    for setting in SETTINGS:
        variants = variants_in(rows, setting)
        if not variants:
            continue
        print(f"\n{SETTINGS[setting].title}\n\n{table(rows, setting)}")
        for chosen, least, name in ((SHOWN, 2, ""), ((PLAIN, *LENIENCE), 3, "-lenience")):
            shown = [v for v in chosen if v in variants]
            if len(shown) >= least:
                picture(rows, setting, shown, Path(f"{prefix}-{setting}{name}.png"))
    if lenience := lenience_table(rows):
        print(f"\nLenience\n\n{lenience}")

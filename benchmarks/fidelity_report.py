"""Data, tables and pictures of the runs of ``fidelity.py``. Reads folders of runs; runs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_settings import LENIENCE, PLAIN, SETTINGS, SHOWN, VARIANTS
from records import merged, read
from scipy import stats

from nemo_specrl.trainer.log import read_metrics

# What is kept of a run, by epoch: the mean over its steps, or what an evaluation at its end gave.
MEANS = (
    *("reward", "fresh_reward", "reused_reward", "response_length", "distinct_in_group"),
    *("reward_std_in_group", "groups_without_advantage", "clip_fraction"),
)
COUNTS = "counts.jsonl"
"""File of a run with what ``fidelity_train.py`` counts."""
COUNTED = ("rollout_cpu_s", "engine_steps")
SUMS = ("rollout_s", "verify_s", "train_s", "step_s", "decoded_tokens", "response_tokens")
KEYS = ("setting", "variant", "seed", "epoch")
"""What tells rows apart."""
EVALUATED = ("heldout_accuracy", "heldout_kl_to_start", "heldout_entropy", "heldout_length")


def with_counts(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The records of a run's steps with their counts; as they are where some were not counted."""
    counted = {(line["step"], line["attempt"]): line for line in read_metrics(path)}
    by_step: dict[int, dict[str, float]] = {}
    for (step, _), line in counted.items():  # of a step that was repeated, the last
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
    """Of the rows of one setting and variant.

    The spread over seeds is pooled over the epochs: with three seeds, one epoch's says little.
    """
    by_epoch: dict[int, list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            by_epoch.setdefault(row["epoch"], []).append(row[name])
    if not by_epoch:
        return None
    most = max(len(v) for v in by_epoch.values())
    epochs = sorted(e for e, v in by_epoch.items() if len(v) == most)
    values = np.array([by_epoch[e] for e in epochs])  # [epochs, seeds]
    half = 0.0
    if most > 1:
        pooled = math.sqrt(values.var(axis=1, ddof=1).mean())
        half = stats.t.ppf(0.975, most - 1) * pooled / math.sqrt(most)
    return Band(epochs, values.mean(axis=1), half, most)


def of(rows: list[dict[str, Any]], setting: str, variant: str) -> list[dict[str, Any]]:
    """The rows of one setting and variant."""
    return [r for r in rows if r["setting"] == setting and r["variant"] == variant]


def variants_in(rows: list[dict[str, Any]], setting: str) -> list[str]:
    """In the order in which they are defined, plain first."""
    there = {r["variant"] for r in rows if r["setting"] == setting}
    return [v for v in VARIANTS if v in there]


def table(rows: list[dict[str, Any]], setting: str) -> str:
    """Markdown: speed of each variant of a setting, and what it learned."""
    plain = of(rows, setting, PLAIN)
    reference = band(plain, "heldout_accuracy")
    if reference is None:
        return ""
    names = [f"epoch {e}" for e in reference.epochs]
    lines = [
        "| variant | seeds | rollout s | processor s | engine steps | decoded tokens "
        "| reward at the end | KL to the start, nats a token | entropy, nats a token | "
        + " | ".join(names) + " |",
        "|---" * (9 + len(names)) + "|",
    ]  # fmt: skip
    for variant in variants_in(rows, setting):
        mine = of(rows, setting, variant)
        held = band(mine, "heldout_accuracy")
        last = max(r["epoch"] for r in mine)
        if held is None or last == 0:
            continue  # just begun

        def at_end(name: str, mine: Any = mine, last: int = last) -> float:
            return float(np.mean([r[name] for r in mine if r["epoch"] == last]))

        cells = []
        for epoch in reference.epochs:
            if epoch not in held.epochs:
                cells.append("")
                continue
            mean = held.mean[held.epochs.index(epoch)]
            i = reference.epochs.index(epoch)
            below = reference.seeds > 1 and mean < reference.mean[i] - reference.half
            cells.append(f"{mean:.3f}" + (" (below)" if below else ""))
        decoded = at_end("decoded_tokens")
        curves = (band(mine, name) for name in ("heldout_kl_to_start", "heldout_entropy"))
        evaluated = [f"{curve.mean[-1]:.3f}" if curve else "" for curve in curves]
        counted = all(name in r for r in mine if r["epoch"] == last for name in COUNTED)
        counts = [f"{at_end(name):,.0f}" if counted else "" for name in COUNTED]
        lines.append(
            f"| {variant} | {held.seeds} | {at_end('rollout_s'):.0f} | {' | '.join(counts)}"
            f" | {decoded / 1e6:.2f}M | {at_end('reward'):.2f}"
            f" | {' | '.join(evaluated)} | "
            + " | ".join(cells) + " |"
        )  # fmt: skip
    note = f"95 % band of plain: ± {reference.half:.3f}; *below*: under it."
    return "\n".join([*lines, "", note if reference.seeds > 1 else "One seed: no band."])


PANELS = [
    ("heldout_accuracy", "step", "Held-out accuracy by steps"),
    ("heldout_accuracy", "step_s", "Held-out accuracy by minutes"),
    ("fresh_reward", "step", "Reward, fresh rows"),
    ("reused_reward", "step", "Reward, reused rows"),
    ("heldout_kl_to_start", "step", "KL to the start, nats per token"),
    ("heldout_entropy", "step", "Entropy, nats per token"),
    ("response_length", "step", "Response length, tokens"),
    ("distinct_in_group", "step", "Distinct rollouts of a group of 8"),
    ("reward_std_in_group", "step", "Std of rewards in a group"),
]
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#8C5A94", "#56B4E9", "#E69F00", "#555555"]


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
            x = x / 60 if against == "step_s" else x
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

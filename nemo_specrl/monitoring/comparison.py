"""Comparison of a plain and a speculative run of the same recipe and seed.

:func:`comparison` returns the content of ``compare.json``; ``report`` writes it, with a picture and
a page. Times are seconds; ``rollout_s`` is a part of ``step_s``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemo_specrl.config import clipped
from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.comparison_plot import SIDES, HeldOut, gains
from nemo_specrl.monitoring.drawing import applies
from nemo_specrl.monitoring.metrics_file import METRICS
from nemo_specrl.monitoring.run_steps import column, logged_steps, number

__all__ = [
    "OPTIONAL",
    "REQUIRED",
    "comparison",
    "heldout",
    "read_comparison",
    "summary",
    "verdict",
]

WARM_EPOCH = 2  # counted from 0
REQUIRED = (
    *(metric.ROLLOUT_S, metric.TRAIN_S, metric.STEP_S),
    *(metric.DECODED_TOKENS, metric.REWARD),
)
"""Metrics that every step of both runs must have."""
OPTIONAL = (metric.FRESH_REWARD, metric.HELDOUT_ACCURACY, metric.TOKENS_PER_STEP)


def comparison(plain_dir: Path, speculative_dir: Path) -> dict[str, Any]:
    """Compare two runs of the same recipe and seed.

    Returns:
        the content of ``compare.json``. ``plain`` and ``speculative``: lists with one entry for
        each step, None if there is no value (and ``heldout_accuracy_at_start``, a number, if the
        runs have it). ``ratio``: plain divided by speculative, of sums over the steps; above 1,
        speculation needs less.

    Raises:
        ConfigError: a run cannot be read, or the runs differ in their steps or prompts.
    """
    runs = [logged_steps(Path(folder)) for folder in (plain_dir, speculative_dir)]
    if len(runs[0]) != len(runs[1]):
        raise ConfigError(
            f"the runs differ in length: plain has {len(runs[0])} steps, "
            f"speculative {len(runs[1])}; run the shorter one to its end"
        )
    for plain, speculative in zip(*runs, strict=True):
        for name in (metric.STEP, metric.EPOCH, metric.PROMPTS):
            if name not in plain or plain.get(name) != speculative.get(name):
                raise ConfigError(
                    f"the runs differ at step {plain[metric.STEP]}: {name} is "
                    f"{clipped(plain.get(name))} in plain, {clipped(speculative.get(name))} in "
                    f"speculative; compare runs of the same recipe and seed"
                )
    compare: dict[str, Any] = {
        side: _side(rows, folder)
        for side, rows, folder in zip(SIDES, runs, (plain_dir, speculative_dir), strict=True)
    }
    warm = [i for i, row in enumerate(runs[0]) if row[metric.EPOCH] >= WARM_EPOCH]
    compare["ratio"] = {
        "rollout": _ratio(compare, metric.ROLLOUT_S),
        "rollout_warm": _ratio(compare, metric.ROLLOUT_S, warm),
        "step": _ratio(compare, metric.STEP_S),
        "decoded_tokens": _ratio(compare, metric.DECODED_TOKENS),
    }
    return compare


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read the ``compare.json`` in a folder.

    Raises:
        ConfigError: it cannot be read, or is damaged; the message says how.
    """
    path = folder / "compare.json"
    try:
        compare: dict[str, Any] = json.loads(path.read_bytes())
        steps = len(compare["plain"][metric.EPOCH])
        for side in SIDES:
            for name in (metric.EPOCH, *REQUIRED, *OPTIONAL[:2]):
                values = [number(value, f"{side}: {name}") for value in compare[side][name]]
                full = name not in OPTIONAL
                if not steps or len(values) != steps or (full and None in values):
                    raise ValueError(f"{side}: {name} is not known of each step")
        for name in ("rollout", "rollout_warm", "step", "decoded_tokens"):
            number(compare["ratio"][name], f"ratio: {name}")
        list(compare.get("heldout_table") or ())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise ConfigError(f"{path}: damaged: it has no {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged: {error}") from None
    return compare


def verdict(compare: dict[str, Any]) -> str:
    """Say where speculation has lower held-out accuracy."""
    plain, speculative = ({p.step: p for p in heldout(compare)[side]} for side in SIDES)
    common = sorted(plain.keys() & speculative.keys())
    if not common:
        return "Held-out accuracy: not evaluated on both sides."
    gaps = {s: 100 * (speculative[s].mean - plain[s].mean) for s in common}
    last = common[-1]
    lower = [s for s in common if gaps[s] < -1e-9]
    ending = f"{abs(gaps[last]):.1f} points {'LOWER' if gaps[last] < 0 else 'higher'}"
    if abs(gaps[last]) < 0.05:
        ending = "equal"
    words = (
        f"Held-out accuracy at step {last}: plain {_percent(plain[last].mean)}, "
        f"speculative {_percent(speculative[last].mean)} ({ending}). "
        f"Speculation is lower at {len(lower) or 'none'} of {len(common)} "
        f"evaluation{'s' * (len(common) != 1)}"
    )
    if lower:
        worst = min(lower, key=gaps.__getitem__)
        words += f", by {-gaps[worst]:.1f} points at most (step {worst})"
    seeds = min(plain[last].seeds, speculative[last].seeds)
    if seeds > 1:
        return words + f". Means of {seeds} seeds."
    return words + ". One run a side: a small gap can be chance."


def summary(compare: dict[str, Any]) -> list[list[str]]:
    """Rows of the summary: a quantity, its values on both sides, and their ratio or difference."""
    lines = []
    for name, label in (
        (metric.ROLLOUT_S, "rollout, s"),
        (metric.TRAIN_S, "training, s"),
        (metric.STEP_S, "whole steps, s"),
        (metric.DECODED_TOKENS, "decoded tokens"),
    ):
        sums = [_total(compare[side][name]) for side in SIDES]
        pattern = ",.0f" if name == metric.DECODED_TOKENS else ",.1f"
        change = _times_less(_ratio(compare, name))
        lines.append([label, *(format(s, pattern) for s in sums), change])
    warm = _times_less(compare["ratio"]["rollout_warm"])
    lines.insert(1, ["  rollout from the third epoch on", "", "", warm])
    if per_step := gains(compare):
        gain = math.fsum(per_step) / len(per_step)
        change = f"{gain:.2f}x more" if gain > 1 else "equal"
        lines.append(["tokens of a row per engine step", "1.0", f"{gain:.1f}", change])
    for name, label in (
        (metric.REWARD, "reward, mean of the last epoch"),
        (metric.FRESH_REWARD, "  of freshly decoded rows"),
    ):
        if name == metric.FRESH_REWARD and not applies(compare["speculative"], name):
            continue
        means = [_last_epoch_mean(compare[side], name) for side in SIDES]
        if name == metric.FRESH_REWARD and means[0] is None:  # in plain, every row is fresh
            means[0] = _last_epoch_mean(compare["plain"], metric.REWARD)
        cells = ["-" if mean is None else f"{mean:.3f}" for mean in means]
        lines.append([label, *cells, _difference(*means)])
    for which, position in (("first", 0), ("last", -1)):
        points = [by_side[position] if by_side else None for by_side in heldout(compare).values()]
        cells = [f"{_percent(p.mean)} (step {p.step})" if p else "-" for p in points]
        means = [100 * p.mean if p else None for p in points]
        change = _difference(*means, unit=" points", digits=1)
        lines.append([f"held-out accuracy, {which}", *cells, change])
    return lines


def heldout(compare: dict[str, Any]) -> dict[str, list[HeldOut]]:
    """Held-out accuracy of each side by step, over several seeds if they were evaluated."""
    values: dict[str, dict[int, list[float]]] = {side: {} for side in SIDES}
    for side in SIDES:
        at_start = compare[side].get(metric.HELDOUT_ACCURACY + metric.AT_START)
        for step, value in enumerate([at_start, *compare[side][metric.HELDOUT_ACCURACY]]):
            if value is not None and not compare.get("heldout_table"):
                values[side][step] = [value]
    for row in compare.get("heldout_table") or ():
        try:
            value = number(row["heldout_accuracy"], f"held-out table: seed {row['seed']}")
            if value is not None:
                values[row["side"]].setdefault(int(row["step"]), []).append(value)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"held-out table: {clipped(row)} must have side (plain or speculative), seed, "
                f"step and heldout_accuracy"
            ) from None
    return {
        side: [
            HeldOut(step, sum(v) / len(v), min(v), max(v), len(v))
            for step, v in sorted(by_step.items())
        ]
        for side, by_step in values.items()
    }


def _side(rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: column(rows, name) for name in (metric.EPOCH, *REQUIRED, *OPTIONAL)
    }
    for name in (metric.EPOCH, *REQUIRED):
        if None in columns[name]:
            step = rows[columns[name].index(None)][metric.STEP]
            raise ConfigError(f"{Path(folder) / METRICS}: step {step} has no {name}")
    name = metric.HELDOUT_ACCURACY + metric.AT_START
    if rows[0].get(name) is not None:
        columns[name] = number(rows[0][name], name)
    return columns


def _ratio(compare: dict[str, Any], name: str, steps: Sequence[int] | None = None) -> float | None:
    plain, speculative = (compare[side][name] for side in SIDES)
    if steps is not None:
        plain, speculative = [plain[i] for i in steps], [speculative[i] for i in steps]
    return _total(plain) / _total(speculative) if _total(speculative) else None


def _total(values: Iterable[float | None]) -> float:
    return math.fsum(v for v in values if v is not None)


def _last_epoch_mean(side: dict[str, list[Any]], name: str) -> float | None:
    epochs = side[metric.EPOCH]
    by_epoch = zip(epochs, side[name], strict=True)
    values = [v for epoch, v in by_epoch if epoch == epochs[-1] and v is not None]
    return math.fsum(values) / len(values) if values else None


def _times_less(ratio: float | None) -> str:
    if not ratio:
        return "-"
    if round(ratio, 2) == 1:
        return "equal"
    return f"{ratio:.2f}x less" if ratio > 1 else f"{1 / ratio:.2f}x MORE"


def _difference(
    plain: float | None, speculative: float | None, *, unit: str = "", digits: int = 3
) -> str:
    if plain is None or speculative is None:
        return "-"
    gap = round(speculative - plain, digits)
    word = "LOWER" if gap < 0 else "higher"
    return f"{abs(gap):.{digits}f}{unit} {word}" if gap else "equal"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"

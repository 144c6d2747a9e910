"""The picture of a plain and a speculative run, drawn from columns of numbers into a PNG."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.drawing import (
    BLUE,
    GREY,
    ORANGE,
    Column,
    applies,
    canvas,
    draw_column,
    finish_panel,
    panel_title,
    png_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SIDES", "HeldOut", "comparison_picture", "gains"]

SIDES = ("plain", "speculative")
_COLOUR = {"plain": BLUE, "speculative": ORANGE}


class HeldOut(NamedTuple):
    """Held-out accuracy (0 to 1) of one side at one step, over the seeds that were evaluated."""

    step: int
    mean: float
    low: float
    high: float
    seeds: int


def comparison_picture(
    compare: dict[str, Any], heldout: dict[str, list[HeldOut]], verdict: str
) -> bytes:
    """Draw both sides of a comparison into a PNG of 1400 x 900 pixels.

    Args:
        compare: content of ``compare.json``.
        heldout: held-out accuracies of each side, by step.
        verdict: text of the box next to the big figures.

    Raises:
        ConfigError: matplotlib is missing.
    """
    with canvas() as figure:
        _headline(figure, compare, verdict)
        panels = [_draw_rollout_seconds, _draw_cumulative]
        panels.append(_draw_tokens_per_step if gains(compare) else _draw_decoded_tokens)
        panels.append(_draw_all_rewards)
        if applies(compare["speculative"], metric.FRESH_REWARD):
            panels.append(_draw_fresh_rewards)
        grid = figure.add_gridspec(
            2, 6, left=0.055, right=0.985, bottom=0.07, top=0.69, hspace=0.52, wspace=0.75
        )
        below = 6 // (len(panels) - 2)  # columns of a panel in the lower row
        places = [grid[0, i : i + 2] for i in (0, 2, 4)]
        places += [grid[1, i : i + below] for i in range(0, 6, below)]
        axes = [figure.add_subplot(place) for place in places]
        for ax, draw in zip(axes, panels, strict=False):
            draw(ax, compare)
        _draw_heldout(axes[-1], heldout)
        for ax in axes:
            # Cumulative curves rise to the right and leave room for the legend on the left.
            room = 0.3 if ax is axes[1] and len(compare["plain"][metric.EPOCH]) >= 10 else None
            finish_panel(ax, compare["plain"][metric.EPOCH], room=room)
        # Use one scale for both rewards, so that noise in the few fresh rows does not look like a
        # gap.
        rewards = axes[3:-1]
        low = min(ax.get_ylim()[0] for ax in rewards)
        high = max(ax.get_ylim()[1] for ax in rewards)
        for ax in rewards:
            ax.set_ylim(low, high)
        return png_of(figure)


def gains(compare: dict[str, Any]) -> list[float]:
    """Tokens of a row per engine step, by training step; empty without lossless drafts."""
    column = compare["speculative"].get(metric.TOKENS_PER_STEP) or []
    return [gain for gain in column if gain is not None]


def _headline(figure: Figure, compare: dict[str, Any], verdict: str) -> None:
    """Draw the title, what the two sides are, the ratios as big figures, and the verdict."""
    _draw_title(figure, compare)
    for i, (ratio, caption) in enumerate(_ratios(compare)):
        _draw_ratio(figure, 0.085 + 0.148 * i, ratio, caption)
    figure.text(
        0.64,
        0.883,
        textwrap.fill(verdict, 54),
        fontsize=11.5,
        va="top",
        linespacing=1.4,
        bbox={"boxstyle": "round,pad=0.6", "facecolor": "#F3F3F3", "edgecolor": "#BBBBBB"},
    )


def _draw_title(figure: Figure, compare: dict[str, Any]) -> None:
    steps = len(compare["plain"][metric.STEP_S])
    lossless = bool(gains(compare))
    what = (
        "speculative drafts from earlier responses, and the engine verifies losslessly"
        if lossless
        else "speculative verifies an earlier response and keeps the accepted prefix"
    )
    last = " The last one: speculative, where plain has 1." if lossless else ""
    title = "Plain and speculative rollouts, side by side"
    figure.text(0.015, 0.968, title, fontsize=20, weight="bold", va="center")
    figure.text(
        0.015,
        0.945,
        f"{steps} training step{'s' * (steps != 1)}, the same prompts at each. "
        f"Plain decodes every response from scratch; {what}.\n"
        f"Big figures: plain divided by speculative. Above 1, speculation needs less.{last}",
        fontsize=11,
        color=GREY,
        va="top",
        linespacing=1.4,
    )


def _ratios(compare: dict[str, Any]) -> list[tuple[float | None, str]]:
    """The big figures, each with its caption; None if a run is too short for one."""
    ratios: dict[str, float | None] = compare["ratio"]
    warm = "rollout time from\nthe third epoch on"
    if ratios["rollout_warm"] is None:
        warm = "rollout time, third\nepoch on: not reached"
    shown = [
        (ratios["rollout"], "rollout time"),
        (ratios["rollout_warm"], warm),
        (ratios["step"], "time of whole steps"),
    ]
    if per_step := gains(compare):
        return [*shown, (statistics.mean(per_step), "tokens of a row\nper engine step")]
    return [*shown, (ratios[metric.DECODED_TOKENS], "decoded tokens")]


def _draw_ratio(figure: Figure, x: float, ratio: float | None, caption: str) -> None:
    number, colour = "n/a", "black"
    if ratio is not None:
        number = f"{ratio:.3g}x" if ratio >= 10 else f"{ratio:.2f}x"
        caption += "\nMORE with speculation" if round(ratio, 2) < 1 else ""
        colour = ORANGE if round(ratio, 2) > 1 else "black"
    figure.text(
        x, 0.853, number, fontsize=33, weight="bold", ha="center", va="center", color=colour
    )
    figure.text(x, 0.818, caption, fontsize=11.5, ha="center", va="top")


def _draw_rollout_seconds(ax: Axes, compare: dict[str, Any]) -> None:
    plain, speculative = compare["plain"], compare["speculative"]
    edges = [i + 0.5 for i in range(len(plain[metric.ROLLOUT_S]) + 1)]
    before, now = plain[metric.ROLLOUT_S], speculative[metric.ROLLOUT_S]
    ax.stairs(now, edges, fill=True, color=ORANGE, alpha=0.55, label="speculative")
    ax.stairs(before, edges, baseline=None, color=BLUE, linewidth=2, label="plain")
    ax.set_ylim(0, max(*before, *now, 1e-9))
    panel_title(ax, "Rollout seconds per step", "lower is better")


def _draw_cumulative(ax: Axes, compare: dict[str, Any]) -> None:
    longest = max(sum(compare[side][metric.STEP_S]) for side in SIDES)
    divisor, unit = next(
        (d, u) for d, u in ((3600, "h"), (60, "min"), (1, "s")) if longest >= 2 * d or d == 1
    )
    for style, name, label in (
        ("--", metric.STEP_S, "whole steps"),
        ("-", metric.ROLLOUT_S, "rollouts"),
    ):
        for side in SIDES:
            sums = list(accumulate((s / divisor for s in compare[side][name]), initial=0.0))
            caption = f"{label}, {side}: {sums[-1]:.3g} {unit}"
            ax.plot(range(len(sums)), sums, style, color=_COLOUR[side], label=caption)
    ax.set_ylim(0, None)
    panel_title(ax, f"Time spent so far, {unit}", "lower is better")


def _draw_decoded_tokens(ax: Axes, compare: dict[str, Any]) -> None:
    most = max(max(compare[side][metric.DECODED_TOKENS]) for side in SIDES)
    divisor, unit = (1000, ", thousands") if most >= 10_000 else (1, "")
    for side in SIDES:
        tokens = [n / divisor for n in compare[side][metric.DECODED_TOKENS]]
        draw_column(ax, range(1, len(tokens) + 1), tokens, side, _COLOUR[side])
    ax.set_ylim(0, most / divisor or 1)
    panel_title(ax, f"Decoded tokens per step{unit}", "lower is better: the rest is reused")


def _draw_tokens_per_step(ax: Axes, compare: dict[str, Any]) -> None:
    column = compare["speculative"][metric.TOKENS_PER_STEP]
    steps = range(1, len(column) + 1)
    for side, values in (("plain", [1.0] * len(column)), ("speculative", column)):
        draw_column(ax, steps, values, side, _COLOUR[side])
    ax.set_ylim(0, 1.25 * max(gains(compare)))
    panel_title(ax, "Tokens of a row per engine step", "higher is better; plain decodes one")


def _draw_all_rewards(ax: Axes, compare: dict[str, Any]) -> None:
    _draw_rewards(ax, {side: compare[side][metric.REWARD] for side in SIDES})
    panel_title(ax, "Training reward, all rows", "higher is better")


def _draw_fresh_rewards(ax: Axes, compare: dict[str, Any]) -> None:
    fresh = {side: compare[side][metric.FRESH_REWARD] for side in SIDES}
    if not any(v is not None for v in fresh["plain"]):
        fresh["plain"] = compare["plain"][metric.REWARD]  # without speculation every row is fresh
    _draw_rewards(ax, fresh)
    panel_title(ax, "Reward of freshly decoded rows", "higher is better; in plain, every row")


def _draw_rewards(ax: Axes, rewards: dict[str, Column]) -> None:
    window = max(1, len(rewards["plain"]) // 12)
    for side, marker in zip(SIDES, ("o", "^"), strict=True):
        steps = range(1, len(rewards[side]) + 1)
        points = [math.nan if value is None else value for value in rewards[side]]
        if all(map(math.isnan, points)):
            continue
        if window > 1:
            ax.plot(steps, points, marker, color=_COLOUR[side], alpha=0.3, markeredgewidth=0)
        means, style = _moving_mean(points, window), "-" if window > 1 else f"-{marker}"
        label = f"{side}, mean over {window} steps" if window > 1 else side
        ax.plot(steps, means, style, color=_COLOUR[side], label=label)


def _draw_heldout(ax: Axes, heldout: dict[str, list[HeldOut]]) -> None:
    plain = {point.step: point.mean for point in heldout["plain"]}
    for side in SIDES:
        points = heldout[side]
        if not points:
            continue
        steps = [p.step for p in points]
        seeds = max(p.seeds for p in points)
        label = f"{side}, mean of {seeds} seeds" if seeds > 1 else side
        ax.plot(steps, [100 * p.mean for p in points], "-o", color=_COLOUR[side], label=label)
        if seeds > 1:
            low, high = [100 * p.low for p in points], [100 * p.high for p in points]
            ax.fill_between(steps, low, high, color=_COLOUR[side], alpha=0.15, linewidth=0.8)
    lower = [p for p in heldout["speculative"] if p.mean < plain.get(p.step, 0) - 1e-11]
    if lower:
        steps, means = [p.step for p in lower], [100 * p.mean for p in lower]
        (marks,) = ax.plot(steps, means, "kv", markersize=9, label="speculation lower here")
        marks.set_markerfacecolor(ORANGE)
    banded = any(p.seeds > 1 for points in heldout.values() for p in points)
    note = "higher is better; band: all seeds" if banded else "higher is better"
    panel_title(ax, "Held-out accuracy, %", note)


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last ``window`` steps at each step; steps without a value are skipped."""
    means = []
    for i in range(len(values)):
        recent = [v for v in values[max(0, i + 1 - window) : i + 1] if not math.isnan(v)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means

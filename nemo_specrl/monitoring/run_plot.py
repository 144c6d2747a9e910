"""The picture of one run, drawn from columns of numbers into a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.drawing import (
    BLUE,
    GREEN,
    INCHES,
    ORANGE,
    PURPLE,
    SKY,
    applies,
    canvas,
    draw_column,
    finish_panel,
    panel_title,
    png_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["run_picture"]

# Panels after the first: heading and the note below it, and (metric, label, colour) of each line.
_PANELS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("Rollout tokens per second", "higher is better"): [
        ("rollout_speed", "rollouts", ORANGE),
        ("plain_speed", "plain decoding, in evaluations", BLUE),
    ],
    ("Tokens of a row per engine step", "plain decoding: 1; higher is faster"): [
        (metric.TOKENS_PER_STEP, "with drafts", ORANGE),
    ],
    ("Tokens per training step", "fewer are decoded where prefixes are reused"): [
        (metric.RESPONSE_TOKENS, "in the responses", BLUE),
        (metric.DECODED_TOKENS, "decoded", ORANGE),
    ],
    ("Drafts", "fractions; higher is faster"): [
        (metric.DRAFT_ACCEPTED_FRACTION, "draft tokens accepted", SKY),
    ],
    ("Prefix reuse", "fractions; higher is faster"): [
        (metric.REUSE_COVERAGE, "rows with an earlier response", BLUE),
        (metric.REUSE_ACCEPTED_FRACTION, "its tokens accepted", ORANGE),
        (metric.REUSED_WHOLE_FRACTION, "accepted whole", GREEN),
        (metric.REUSED_TOKEN_FRACTION, "response reused", PURPLE),
    ],
    ("Reward of fresh minus reused rows", "in standard errors; near 0 in a healthy run"): [
        (metric.REWARD_GAP_Z, "reward", BLUE),
    ],
    ("Training reward", "higher is better"): [
        (metric.REWARD, "all rows", BLUE),
        (metric.FRESH_REWARD, "freshly decoded rows", ORANGE),
    ],
    ("Held-out accuracy, %", "higher is better"): [
        ("heldout_percent", "held-out prompts", BLUE),
    ],
    ("Size of the updates", "both stay small in a healthy run"): [
        (metric.KL, "KL, nats", BLUE),
        (metric.CLIP_FRACTION, "tokens clipped, fraction", ORANGE),
    ],
}


def run_picture(columns: dict[str, list[float | None]], title: str) -> bytes:
    """Draw one run into a PNG of 1400 x 1300 pixels.

    Args:
        columns: metric name to its value at each step; metrics may be missing.
        title: title of the picture; empty: none.

    Raises:
        ConfigError: matplotlib is missing.
    """
    width, _ = INCHES
    with canvas((width, 13)) as figure:
        if title:
            written = figure.text(0.015, 0.97, title, fontsize=20, weight="bold", va="center")
            written.set_parse_math(False)
        # A kind of draft that the run does not use has no panel.
        panels = {
            words: lines
            for words, lines in _PANELS.items()
            if any(not n.startswith(metric.PREFIX) or applies(columns, n) for n, _, _ in lines)
        }
        top = 0.9 if title else 0.95
        figure.subplots_adjust(0.055, 0.05, 0.975, top, wspace=0.24, hspace=0.45)
        count = 1 + len(panels)
        axes = [figure.add_subplot(-(-count // 3), 3, i + 1) for i in range(count)]
        steps = [int(step or 0) for step in columns[metric.STEP]]
        _draw_step_seconds(axes[0], steps, columns)
        panel_title(axes[0], "Seconds per step", "lower is better")
        columns = columns | {
            "heldout_percent": [
                None if a is None else 100 * a for a in columns.get(metric.HELDOUT_ACCURACY, [])
            ],
            "rollout_speed": _ratios(columns, metric.RESPONSE_TOKENS, metric.ROLLOUT_S),
            "plain_speed": _ratios(columns, metric.HELDOUT_TOKENS, metric.HELDOUT_DECODE_S),
        }
        for ax, ((heading, note), lines) in zip(axes[1:], panels.items(), strict=True):
            for name, label, colour in lines:
                if applies(columns, name):
                    draw_column(ax, steps, columns[name], label, colour)
            panel_title(ax, heading, note)
        for ax in axes:
            finish_panel(ax, columns.get(metric.EPOCH, ()), steps)
        return png_of(figure)


def _ratios(columns: dict[str, list[float | None]], over: str, under: str) -> list[float | None]:
    return [
        a / b if a is not None and b else None
        for a, b in zip(columns.get(over, []), columns.get(under, []), strict=False)
    ]


def _draw_step_seconds(ax: Axes, steps: Sequence[int], columns: dict[str, list[Any]]) -> None:
    """Stack the rollout, training and the rest of the step."""
    empty: list[float | None] = [None] * len(steps)
    rollout, train, whole = (
        [value or 0.0 for value in columns.get(name, empty)]
        for name in (metric.ROLLOUT_S, metric.TRAIN_S, metric.STEP_S)
    )
    parts = {
        "rollout": (rollout, ORANGE),
        "training": (train, SKY),
        "rest": (
            [max(0.0, w - r - t) for w, r, t in zip(whole, rollout, train, strict=True)],
            "#BBBBBB",
        ),
    }
    heights, colours = zip(*parts.values(), strict=True)
    ax.stackplot(steps, *heights, labels=list(parts), colors=colours)
    ax.set_ylim(0, max(*whole, *rollout, 1e-9))

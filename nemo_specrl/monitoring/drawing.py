"""What the pictures share: their canvas, colours and panels, and which metrics a run has.

matplotlib is optional and is imported only when a picture is drawn. Figures are made without
pyplot, so that no display is needed and no global state changes. The colours are safe for the
colour-blind (Okabe and Ito), and no information is conveyed by colour alone.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring import names as metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "INCHES",
    "ORANGE",
    "PURPLE",
    "SKY",
    "Column",
    "applies",
    "canvas",
    "draw_column",
    "finish_panel",
    "panel_title",
    "png_of",
]

Column = Sequence[float | None]
"""A metric's values by step; None if a step has none."""

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#8C5A94", "#56B4E9"
GREY = "#555555"
INCHES, DPI = (14, 9), 100  # 1400 x 900 pixels
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2,
    "lines.markersize": 4,
    "legend.fontsize": 10,
    "legend.loc": "upper left",
    "legend.framealpha": 1,
    "legend.edgecolor": "none",
    "legend.borderpad": 0.1,
    "legend.borderaxespad": 0.3,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1,
}


def applies(columns: Mapping[str, Column], name: str) -> bool:
    """Whether a metric is worth showing for a run.

    It is not if the engine reports 0 throughout, for a kind of draft that the run does not use; nor
    if it repeats another metric, since without reuse every row is fresh and every token is decoded.
    """
    column = columns.get(name) or ()
    same = {metric.FRESH_REWARD: metric.REWARD, metric.DECODED_TOKENS: metric.RESPONSE_TOKENS}.get(
        name
    )
    if same is not None and column == columns.get(same):
        return False
    if name.startswith(metric.PREFIX):
        return any(column)
    return any(value is not None for value in column)


@contextlib.contextmanager
def canvas(inches: tuple[float, float] = INCHES) -> Iterator[Figure]:
    """Yield a figure in the style of all pictures.

    matplotlib's global settings are left as they are, and those of the user do not count.
    """
    backend = os.environ.pop("MPLBACKEND", None)  # of a notebook: the import may refuse it
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from None
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield Figure(figsize=inches, dpi=DPI, facecolor="white")


def png_of(figure: Figure) -> bytes:
    """Render a figure as a PNG file's bytes."""
    from PIL import Image  # comes with matplotlib

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # 256 colours are enough for flat drawings and take a third of the bytes.
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def panel_title(ax: Axes, title: str, note: str) -> None:
    """Put a panel's title and its explanatory note above it."""
    ax.set_title(title, pad=22)
    ax.text(0, 1.025, note, transform=ax.transAxes, fontsize=10.5, color=GREY)


def finish_panel(
    ax: Axes, epochs: Column, steps: Sequence[int] = (), room: float | None = None
) -> None:
    """Add a legend above the data and thin lines where epochs begin.

    Args:
        ax: the panel.
        epochs: epoch of each step.
        steps: number of each step; empty: counted from 1.
        room: share of the height that the legend gets; None: as much as it needs.
    """
    from matplotlib.ticker import MaxNLocator

    entries = len(ax.get_legend_handles_labels()[0])
    ax.set_xlabel("training step")
    if not entries:
        ax.text(0.5, 0.5, "not in this run", transform=ax.transAxes, ha="center", color=GREY)
        ax.set_xticks([])
        ax.set_yticks([])
        return
    short = max(len(label) for label in ax.get_legend_handles_labels()[1]) < 24
    columns = 2 if entries == 4 and short else 1
    low, high = ax.get_ylim()
    room = 0.05 + 0.09 * entries / columns if room is None else room
    ax.set_ylim(low, low + (high - low) / (1 - room))
    ax.legend(ncols=columns)
    steps = steps or range(1, len(epochs) + 1)
    begins = [s for s, a, b in zip(steps[1:], epochs, epochs[1:], strict=False) if a != b]
    if 0 < len(begins) <= 30:
        for step in begins:
            ax.axvline(step - 0.5, color="#D5D5D5", linewidth=0.8, zorder=0)
        ax.set_xlabel("training step (grey lines: a new epoch)")
    last = steps[-1] if steps else 1
    ax.set_xlim(-0.02 * last, 1.02 * last + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_column(ax: Axes, steps: Sequence[int], column: Column, label: str, colour: str) -> None:
    """Draw a line through the values that are present, with markers if they are few."""
    present = [
        (step, value) for step, value in zip(steps, column, strict=False) if value is not None
    ]
    if present:
        style = "-o" if len(present) <= 30 else "-"
        ax.plot(*zip(*present, strict=True), style, color=colour, label=label)

"""Pictures, HTML pages and tables of one run, and of a plain and a speculative run side by side.

The input is the ``metrics.jsonl`` in a run's folder, one JSON object for each training step. Times
are seconds; ``rollout_s`` is a part of ``step_s``. Drawing is
in ``comparison_plot`` and ``run_plot``.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_specrl.errors import ConfigError
from nemo_specrl.files import replacing
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.comparison import (
    OPTIONAL,
    REQUIRED,
    heldout,
    summary,
    verdict,
)
from nemo_specrl.monitoring.comparison_plot import SIDES, comparison_picture
from nemo_specrl.monitoring.drawing import applies
from nemo_specrl.monitoring.run_plot import run_picture
from nemo_specrl.monitoring.run_steps import column, logged_steps

__all__ = ["print_comparison", "write_comparison", "write_report"]

_TABLE_COLUMNS = (
    *(metric.STEP, metric.EPOCH, metric.REWARD, metric.FRESH_REWARD, metric.HELDOUT_ACCURACY),
    *(metric.ROLLOUT_S, metric.TRAIN_S, metric.STEP_S),
    *(metric.DECODED_TOKENS, metric.RESPONSE_TOKENS, metric.REUSED_TOKEN_FRACTION),
    *(metric.TOKENS_PER_STEP, metric.KL, metric.CLIP_FRACTION, metric.GRAD_NORM, metric.LOSS),
)
_OF_THE_PICTURE = (
    *(metric.TOTAL_STEPS, metric.EVAL_S, metric.CHECKPOINT_S),
    *(metric.HELDOUT_TOKENS, metric.HELDOUT_DECODE_S),
    *(metric.HELDOUT_TOKENS + metric.AT_START, metric.HELDOUT_DECODE_S + metric.AT_START),
)


def run_columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """The metrics that a run's picture and table show, by step; None if a step has no value.

    Raises:
        ConfigError: a value is not a number.
    """
    known = {name for row in rows for name in row if name.startswith(metric.PREFIX)}
    known.update(_TABLE_COLUMNS, _OF_THE_PICTURE)
    return {name: column(rows, name) for name in known}


def write_report(run_dir: Path, reload_s: int | None = None) -> tuple[Path, bool]:
    """Write ``report.png`` and the self-contained ``report.html`` into a run's folder.

    Args:
        run_dir: the folder.
        reload_s: seconds after which a browser reads the page anew, until the run is done. None:
            it does not.

    Returns:
        The path of the page, and whether all steps of the run are done.

    Raises:
        ConfigError: there is nothing to report on, the folder cannot be written, or matplotlib is
            missing.
    """
    run_dir = Path(run_dir)
    rows = logged_steps(run_dir)
    columns = run_columns(rows)
    name = run_dir.resolve().name
    picture = run_picture(columns, f"Run {name}: {len(rows)} steps")
    shown = [key for key in _TABLE_COLUMNS if applies(columns, key)]
    table = _html_table(shown, ([_short(columns[k][i]) for k in shown] for i in range(len(rows))))
    _write(run_dir / "report.png", picture)
    page = run_dir / "report.html"
    done = rows[-1][metric.STEP] >= (columns[metric.TOTAL_STEPS][-1] or 0)
    body = f"<h2>Every step</h2>{table}"
    _write(page, _html_page(f"Run {name}", picture, body, None if done else reload_s))
    return page, done


def write_comparison(
    out_dir: Path, compare: dict[str, Any], *, heldout_table: list[dict[str, Any]] | None = None
) -> None:
    """Write ``compare.json``, ``compare.png`` and the self-contained ``compare.html``.

    Args:
        out_dir: folder, created if missing.
        compare: result of :func:`comparison`, or the content of a ``compare.json``.
        heldout_table: held-out accuracies of several seeds, dicts of ``side`` (plain or
            speculative), ``seed``, ``step`` and ``heldout_accuracy`` (0 to 1). Drawn as their mean
            with a band from minimum to maximum, and kept in ``compare.json``.

    Raises:
        ConfigError: the table is malformed, the folder cannot be written, or matplotlib is missing.
    """
    if heldout_table is not None:
        compare = compare | {"heldout_table": heldout_table}
    points, words = heldout(compare), verdict(compare)
    out_dir = Path(out_dir)
    # Write the numbers first, so that they are kept if the picture cannot be drawn.
    _write(out_dir / "compare.json", json.dumps(compare, indent=1).encode())
    picture = comparison_picture(compare, points, words)
    sums = _html_table(("", "plain", "speculative", "with speculation"), summary(compare))
    tables = f"<p>{html.escape(words)}</p>{sums}"
    if compare.get("heldout_table"):
        names = ("side", "seed", "step", "heldout_accuracy")
        seeds = ([str(row[name]) for name in names] for row in compare["heldout_table"])
        tables += "<h2>Held-out accuracy of every seed</h2>" + _html_table(names, seeds)
    shown = [
        (side, name)
        for name in (*REQUIRED, *OPTIONAL)
        for side in SIDES
        if applies(compare[side], name)
    ]
    steps = _html_table(
        ("step", *(f"{side} {name}" for side, name in shown)),
        (
            [str(i + 1), *(_short(compare[side][name][i]) for side, name in shown)]
            for i in range(len(compare["plain"][metric.STEP_S]))
        ),
    )
    tables += f"<details><summary>Every step</summary>{steps}</details>"
    _write(out_dir / "compare.png", picture)
    _write(out_dir / "compare.html", _html_page("Plain and speculative", picture, tables))


def print_comparison(compare: dict[str, Any], console: Console) -> None:
    """Print the sums of both sides, their ratios, and the verdict on held-out accuracy."""
    table = Table(title="Plain and speculative rollouts, same prompts at every step")
    table.add_column("", overflow="fold")
    for name in ("plain", "speculative", "with speculation"):
        table.add_column(name, justify="right", overflow="fold")
    for line in summary(compare):
        table.add_row(*line)
    console.print(table)
    console.print(verdict(compare))


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if value else "0"


def _html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(v)}</{tag}>" for v in values) + "</tr>"

    body = "\n".join(cells(row, "td") for row in rows)
    return f"<table><thead>{cells(header, 'th')}</thead><tbody>\n{body}\n</tbody></table>"


def _html_page(title: str, picture: bytes, body: str, reload_s: int | None = None) -> bytes:
    """Return an HTML page that needs no other file and no network."""
    style = (
        "body{font:15px/1.5 sans-serif;max-width:1400px;margin:24px auto;padding:0 16px;color:#222}"
        "img{max-width:100%}table{border-collapse:collapse;display:block;overflow-x:auto}"
        "td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd;"
        "font-variant-numeric:tabular-nums}td:first-child{text-align:left;white-space:pre}"
    )
    data = base64.b64encode(picture).decode()
    again = "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n"
        f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">\n'
        f"{body}\n</body></html>\n"
    ).encode()


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with replacing(path, temporary, private=False) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None

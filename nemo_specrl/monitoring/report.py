"""Pictures, HTML pages and tables of one run, and of a plain and a speculative run side by side.

The input is the ``metrics.jsonl`` in a run's folder, one JSON object for each training step. Times
are seconds; ``verify_s`` is a part of ``rollout_s``, and ``rollout_s`` of ``step_s``. Drawing is
in ``_plots`` and ``_run_plots``.
"""

from __future__ import annotations

import base64
import html
import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_specrl.config import clipped
from nemo_specrl.errors import ConfigError
from nemo_specrl.files import replacing
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.comparison_plot import (
    SIDES,
    HeldOut,
    applies,
    comparison_picture,
    gains,
)
from nemo_specrl.monitoring.metrics_file import METRICS, read_steps
from nemo_specrl.monitoring.run_plot import run_picture

__all__ = [
    "comparison",
    "print_comparison",
    "read_comparison",
    "run_columns",
    "run_steps",
    "verdict",
    "write_comparison",
    "write_report",
]

WARM_EPOCH = 2  # counted from 0; from here on drafts contain reused tokens themselves
_REQUIRED = (
    *(metric.ROLLOUT_S, metric.VERIFY_S, metric.TRAIN_S, metric.STEP_S),
    *(metric.DECODED_TOKENS, metric.REWARD),
)
_OPTIONAL = (metric.FRESH_REWARD, metric.HELDOUT_ACCURACY, metric.TREE_TOKENS_PER_STEP)
_TABLE_COLUMNS = (
    *(metric.STEP, metric.EPOCH, metric.REWARD, metric.FRESH_REWARD, metric.HELDOUT_ACCURACY),
    *(metric.ROLLOUT_S, metric.VERIFY_S, metric.TRAIN_S, metric.STEP_S),
    *(metric.DECODED_TOKENS, metric.RESPONSE_TOKENS, metric.REUSED_TOKEN_FRACTION),
    *(metric.TREE_TOKENS_PER_STEP, metric.KL, metric.CLIP_FRACTION, metric.GRAD_NORM, metric.LOSS),
)
_OF_THE_PAGE = (
    *(metric.TOTAL_STEPS, metric.EVAL_S, metric.CHECKPOINT_S),
    *(metric.HELDOUT_TOKENS, metric.HELDOUT_DECODE_S),
    *(metric.HELDOUT_TOKENS + metric.AT_START, metric.HELDOUT_DECODE_S + metric.AT_START),
)
logger = logging.getLogger(__name__)


def run_steps(run_dir: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the steps of a run in order, and a sentence on what is damaged (``read_steps``).

    Raises:
        ConfigError: there is no metrics.jsonl, or it has no complete step.
    """
    path = Path(run_dir) / METRICS
    try:
        rows, damaged = read_steps(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{run_dir}: no {METRICS} here; give the folder of a run") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if not rows:
        raise ConfigError(f"{path}: holds no complete step yet")
    return rows, damaged


def _logged_steps(run_dir: Path) -> list[dict[str, Any]]:
    rows, damaged = run_steps(run_dir)
    if damaged:
        logger.warning("%s", damaged)
    return rows


def run_columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """What a run's picture and table show, by metric; None where a step has no value.

    Raises:
        ConfigError: a value is no number.
    """
    known = {name for row in rows for name in row if name.startswith(metric.PREFIX)}
    known.update(_TABLE_COLUMNS, _OF_THE_PAGE)
    return {name: _column(rows, name) for name in known}


def write_report(run_dir: Path) -> Path:
    """Write ``report.png`` and the self-contained ``report.html`` into a run's folder.

    Returns:
        The path of the page.

    Raises:
        ConfigError: there is nothing to report on, the folder cannot be written, or matplotlib is
            missing.
    """
    run_dir = Path(run_dir)
    rows = _logged_steps(run_dir)
    columns = run_columns(rows)
    name = run_dir.resolve().name
    picture = run_picture(columns, f"Run {name}: {len(rows)} steps")
    shown = [key for key in _TABLE_COLUMNS if applies(columns, key)]
    table = _html_table(shown, ([_short(columns[k][i]) for k in shown] for i in range(len(rows))))
    _write(run_dir / "report.png", picture)
    page = run_dir / "report.html"
    _write(page, _html_page(f"Run {name}", picture, f"<h2>Every step</h2>{table}"))
    return page


def comparison(plain_dir: Path, speculative_dir: Path) -> dict[str, Any]:
    """Compare two runs of the same recipe and seed.

    Returns:
        the content of ``compare.json``. ``plain`` and ``speculative``: lists with one entry for
        each step, None where there is no value (and ``heldout_accuracy_at_start``, a number, where
        the runs have it). ``ratio``: plain divided by speculative, of sums over the steps; above 1,
        speculation needs less.

    Raises:
        ConfigError: a run cannot be read, or the runs differ in their steps or prompts.
    """
    runs = [_logged_steps(Path(folder)) for folder in (plain_dir, speculative_dir)]
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
    """Read the ``compare.json`` in a folder; a ConfigError says how it is damaged."""
    path = folder / "compare.json"
    try:
        compare: dict[str, Any] = json.loads(path.read_bytes())
        steps = len(compare["plain"][metric.EPOCH])
        for side in SIDES:
            for name in (metric.EPOCH, *_REQUIRED, *_OPTIONAL[:2]):
                column = compare[side][name]
                values = [_number(value, f"{side}: {name}") for value in column]
                full = name not in _OPTIONAL
                if not steps or len(values) != steps or (full and None in values):
                    raise ValueError(f"{side}: {name} is not known of each step")
        for name in ("rollout", "rollout_warm", "step", "decoded_tokens"):
            _number(compare["ratio"][name], f"ratio: {name}")
        list(compare.get("heldout_table") or ())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except KeyError as error:
        raise ConfigError(f"{path}: damaged: it has no {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged: {error}") from None
    return compare


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
    heldout, words = _heldout(compare), verdict(compare)
    out_dir = Path(out_dir)
    # The numbers first, so that they are kept even where the picture cannot be drawn.
    _write(out_dir / "compare.json", json.dumps(compare, indent=1).encode())
    picture = comparison_picture(compare, heldout, words)
    summary = _html_table(("", "plain", "speculative", "with speculation"), _summary(compare))
    tables = f"<p>{html.escape(words)}</p>{summary}"
    if compare.get("heldout_table"):
        names = ("side", "seed", "step", "heldout_accuracy")
        seeds = ([str(row[name]) for name in names] for row in compare["heldout_table"])
        tables += "<h2>Held-out accuracy of every seed</h2>" + _html_table(names, seeds)
    shown = [
        (side, name)
        for name in (*_REQUIRED, *_OPTIONAL)
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
    table.add_column("")
    for name in ("plain", "speculative", "with speculation"):
        table.add_column(name, justify="right")
    for line in _summary(compare):
        table.add_row(*line)
    console.print(table)
    console.print(verdict(compare))


def verdict(compare: dict[str, Any]) -> str:
    """Say in words where speculation is lower in held-out accuracy."""
    plain, speculative = ({p.step: p for p in _heldout(compare)[side]} for side in SIDES)
    common = sorted(plain.keys() & speculative.keys())
    if not common:
        return "Held-out accuracy: not evaluated on both sides."
    gaps = {s: 100 * (speculative[s].mean - plain[s].mean) for s in common}
    last = common[-1]
    lower = [s for s in common if gaps[s] < -1e-9]
    ending = "equal" if abs(gaps[last]) < 0.05 else (
        f"{abs(gaps[last]):.1f} points {'LOWER' if gaps[last] < 0 else 'higher'}"
    )  # fmt: skip
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


def _summary(compare: dict[str, Any]) -> list[list[str]]:
    """Rows of the summary: a quantity, its value on both sides, and their ratio or difference."""
    lines = []
    for name, label in (
        (metric.ROLLOUT_S, "rollout, s"),
        (metric.VERIFY_S, "  of it verification, s"),
        (metric.TRAIN_S, "training, s"),
        (metric.STEP_S, "whole steps, s"),
        (metric.DECODED_TOKENS, "decoded tokens"),
    ):
        if name == metric.VERIFY_S and not any(applies(compare[side], name) for side in SIDES):
            continue
        sums = [_total(compare[side][name]) for side in SIDES]
        pattern = ",.0f" if name == metric.DECODED_TOKENS else ",.1f"
        change = "" if name == metric.VERIFY_S else _times_less(_ratio(compare, name))
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
        if name == metric.FRESH_REWARD and means[0] is None:
            means[0] = _last_epoch_mean(
                compare["plain"], metric.REWARD
            )  # plain: every row is fresh
        cells = ["-" if mean is None else f"{mean:.3f}" for mean in means]
        lines.append([label, *cells, _difference(*means)])
    for which, position in (("first", 0), ("last", -1)):
        points = [heldout[position] if heldout else None for heldout in _heldout(compare).values()]
        cells = [f"{_percent(p.mean)} (step {p.step})" if p else "-" for p in points]
        means = [100 * p.mean if p else None for p in points]
        change = _difference(*means, unit=" points", digits=1)
        lines.append([f"held-out accuracy, {which}", *cells, change])
    return lines


def _heldout(compare: dict[str, Any]) -> dict[str, list[HeldOut]]:
    """Held-out accuracy of each side by step, from the seeds' table where there is one."""
    values: dict[str, dict[int, list[float]]] = {side: {} for side in SIDES}
    for side in SIDES:
        at_start = compare[side].get(metric.HELDOUT_ACCURACY + metric.AT_START)
        for step, value in enumerate([at_start, *compare[side][metric.HELDOUT_ACCURACY]]):
            if value is not None and not compare.get("heldout_table"):
                values[side][step] = [value]
    for row in compare.get("heldout_table") or ():
        try:
            value = _number(row["heldout_accuracy"], f"held-out table: seed {row['seed']}")
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
        name: _column(rows, name) for name in (metric.EPOCH, *_REQUIRED, *_OPTIONAL)
    }
    for name in (metric.EPOCH, *_REQUIRED):
        if None in columns[name]:
            step = rows[columns[name].index(None)][metric.STEP]
            raise ConfigError(f"{Path(folder) / METRICS}: step {step} has no {name}")
    name = metric.HELDOUT_ACCURACY + metric.AT_START
    if rows[0].get(name) is not None:
        columns[name] = _number(rows[0][name], name)
    return columns


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    return [_number(row.get(name), f"step {row[metric.STEP]}: {name}") for row in rows]


def _number(value: Any, where: str) -> float | None:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if not isinstance(value, int | float) or abs(value) >= 1e300:
        raise ConfigError(f"{where} must be a number, got {clipped(value)}")
    return value


def _ratio(compare: dict[str, Any], name: str, steps: Sequence[int] | None = None) -> float | None:
    plain, speculative = (compare[side][name] for side in SIDES)
    if steps is not None:
        plain, speculative = [plain[i] for i in steps], [speculative[i] for i in steps]
    return _total(plain) / _total(speculative) if _total(speculative) else None


def _total(values: Iterable[float | None]) -> float:
    return math.fsum(v for v in values if v is not None)


def _last_epoch_mean(side: dict[str, list[Any]], name: str) -> float | None:
    last = side[metric.EPOCH][-1]
    values = [v for v, epoch in zip(side[name], side[metric.EPOCH], strict=True)
              if epoch == last and v is not None]  # fmt: skip
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


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if value else "0"


def _html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(v)}</{tag}>" for v in values) + "</tr>"

    body = "\n".join(cells(row, "td") for row in rows)
    return f"<table><thead>{cells(header, 'th')}</thead><tbody>\n{body}\n</tbody></table>"


def _html_page(title: str, picture: bytes, body: str) -> bytes:
    """An HTML page that needs no other file and no network."""
    style = (
        "body{font:15px/1.5 sans-serif;max-width:1400px;margin:24px auto;padding:0 16px;color:#222}"
        "img{max-width:100%}table{border-collapse:collapse;display:block;overflow-x:auto}"
        "td,th{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd;"
        "font-variant-numeric:tabular-nums}td:first-child{text-align:left;white-space:pre}"
    )
    data = base64.b64encode(picture).decode()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
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

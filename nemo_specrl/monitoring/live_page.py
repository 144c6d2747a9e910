"""The live page of a run: its state in figures, its picture, and warnings.

It is made only from the steps in metrics.jsonl and that file's age.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_specrl.monitoring import names as metric

__all__ = ["content", "page", "state_of", "warnings_of"]

RECENT = 20
"""Number of the newest steps over which the time of a step is averaged."""
PATIENCE = (5, 1800.0)
"""A run counts as stalled after this many times the duration of a step, and at least this many
seconds."""

_COUNTED = (
    (metric.CACHE_ERRORS, "calls of the cache failed"),
    (metric.REFUSED_DRAFTS, "drafts could not be verified"),
    (metric.UNCACHED_ROWS, "rows of the engine were invalid (NaN...)"),
)
"""Counts that a warning states, if they are not 0."""
_SHARES = (
    (metric.TREE_ACCEPTED_FRACTION, "Accepted", "of tokens from trees"),
    (metric.ACCEPTED_FRACTION, "Accepted", "of draft tokens"),
    (metric.REUSED_TOKEN_FRACTION, "Reused", "of response tokens"),
)

Row = Mapping[str, Any]


def state_of(rows: Sequence[Row], age: float) -> tuple[str, str]:
    """Return the state of a run as a word (waiting, running, stalled, done) and as a sentence.

    Args:
        rows: the run's steps.
        age: time since the last write to the file, seconds.
    """
    if not rows:
        return "waiting", "no step is done yet"
    last, pace = rows[-1], _seconds_per_step(rows)
    if last[metric.STEP] >= last.get(metric.TOTAL_STEPS, math.inf):
        return "done", "all steps are done"
    if age > max(PATIENCE[0] * pace, PATIENCE[1]):
        return "stalled", f"no step for {_duration(age)}"
    return "running", f"the last step took {_duration(last.get(metric.STEP_S) or 0)}"


def warnings_of(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Return the warnings of all steps, newest first: step and sentence."""
    found: list[tuple[int, str]] = []
    before: Row = {}
    for row in rows:
        drifting = {
            name for name in metric.DRIFT_QUANTITIES if _value(row, metric.drifts(name))
        } - {name for name in metric.DRIFT_QUANTITIES if _value(before, metric.drifts(name))}
        damaged = _value(row, metric.CORRUPT_RECORDS) - _value(before, metric.CORRUPT_RECORDS)
        full = [_value(r, metric.DISK_USED_FRACTION) > 0.9 for r in (before, row)]
        for applies, sentence in (
            (drifting, f"reused rows drift from fresh ones: {', '.join(sorted(drifting))}"),
            (damaged > 0, f"the cache skipped {damaged:.0f} damaged records"),
            (full == [False, True], "the cache's disk is used to more than 90 %"),
            *((count := _value(row, name), f"{count:.0f} {what}") for name, what in _COUNTED),
            (metric.LOSS in row and row[metric.LOSS] is None, "the loss is no finite number"),
        ):
            if applies:
                found.append((row[metric.STEP], sentence))
        before = row
    return found[::-1]


def content(name: str, rows: Sequence[Row], age: float, *, version: str, problem: str) -> str:
    """Make the part of the page that changes.

    Args:
        name: name of the run.
        rows: the run's steps.
        age: time since the last write to the file, seconds.
        version: version of the picture, which makes the browser load a new one.
        problem: what is wrong with the file; empty if nothing is.
    """
    state, sentence = state_of(rows, age)
    head = (
        f'<header><h1>{html.escape(name)}</h1><span class="state {state}">{state}</span>'
        f"<span>{html.escape(problem or sentence)}</span></header>"
    )
    if not rows:
        return f"{head}<p>The page shows figures once the first step is done.</p>"
    tiles = "".join(
        f'<div class="tile"><span>{label}</span><b>{value}</b><small>{note}</small></div>'
        for label, value, note in _tiles(rows)
    )
    last = rows[-1]
    total = last.get(metric.TOTAL_STEPS)
    bar = f'<progress max="{total}" value="{last[metric.STEP]}"></progress>' if total else ""
    picture = f'<img alt="Metrics of every step" src="picture.png?{version}">'
    return (
        f'{head}{bar}<section class="tiles">{tiles}</section>'
        f'<section class="columns">{_drift(rows)}{_cache(last)}{_warnings(rows)}</section>{picture}'
    )


def page(name: str, inner: str, nonce: str) -> bytes:
    """Make the whole page, which fetches its content every two seconds.

    Args:
        name: name of the run.
        inner: the content as of now.
        nonce: nonce of the content security policy that allows the page's script.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style></head>"
        f'<body><main id="content">{inner}</main><footer id="lost" hidden>The server has ended; '
        f'showing the last data received.</footer><script nonce="{nonce}">{_SCRIPT}</script>'
        f"</body></html>\n"
    ).encode()


def _tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Label, figure and note of each tile for which the run has a value."""
    last, pace = rows[-1], _seconds_per_step(rows)
    total = last.get(metric.TOTAL_STEPS)
    tiles = [("Step", f"{last[metric.STEP]:,}", f"of {total:,}" if total else "")]
    if metric.EPOCH in last:
        tiles.append(("Epoch", str(last[metric.EPOCH] + 1), ""))
    if pace:
        tiles.append(("Steps per hour", f"{3600 / pace:,.3g}", f"{_duration(pace)} each"))
        if total and total > last[metric.STEP]:
            tiles.append(
                ("Time to end", _duration(pace * (total - last[metric.STEP])), "at this pace")
            )
    if last.get(metric.ROLLOUT_S) and last.get(metric.RESPONSE_TOKENS):
        speed = last[metric.RESPONSE_TOKENS] / last[metric.ROLLOUT_S]
        plain = _plain_speed(rows)
        note = f"{speed / plain:.2f} times plain in evaluations" if plain else "in rollouts"
        tiles.append(("Tokens per second", f"{speed:,.0f}", note))
    gain = last.get(metric.TREE_TOKENS_PER_STEP)
    if gain:
        tiles.append(("Tokens per engine step", f"{gain:.2f}", "of a row; plain: 1"))
    for key, label, note in _SHARES:
        if last.get(key):
            tiles.append((label, f"{100 * last[key]:.0f} %", note))
    if last.get(metric.REWARD) is not None:
        tiles.append(("Reward", f"{last[metric.REWARD]:.3f}", "mean of the last step"))
    return tiles


def _drift(rows: Sequence[Row]) -> str:
    last = rows[-1]
    quantities = [name for name in metric.DRIFT_QUANTITIES if metric.drifts(name) in last]
    if quantities and not any(_value(row, metric.DRAFT_COVERAGE) for row in rows):
        return _table("Drift", (), [["no row has been reused: all are fresh", ""]])
    lines = []
    for name in quantities:
        mean = last.get(metric.drift(name))
        z = last.get(metric.drift_z(name))
        drifts = bool(_value(last, metric.drifts(name)))
        lines.append(
            [name, _short(mean), _short(z), '<b class="bad">drifts</b>' if drifts else "no drift"]
        )
    if not lines:
        return _table("Drift", (), [["the monitor is off, or the preset reuses no row", ""]])
    return _table("Drift", ("fresh minus reused", "mean", "standard errors", ""), lines)


def _cache(last: Row) -> str:
    lines = []
    if metric.CACHE_BYTES in last:
        used, cap = _value(last, metric.CACHE_BYTES), _value(last, metric.CACHE_MAX_BYTES)
        disk = _value(last, metric.DISK_USED_FRACTION)
        damaged = _value(last, metric.CORRUPT_RECORDS)
        lines = [
            ["size", f"{used / 2**20:,.1f} of {cap / 2**20:,.0f} MiB"],
            ["rollouts", f"{_value(last, metric.CACHE_ROLLOUTS):,.0f}"],
            ["prompts found", f"{100 * _value(last, metric.CACHE_HIT_FRACTION):.0f} %"],
            ["damaged records", _marked(f"{damaged:.0f}", damaged > 0)],
            ["disk used", _marked(f"{100 * disk:.0f} %", disk > 0.9)],
        ]
    return _table("Cache", (), lines or [["this run has none", ""]])


def _warnings(rows: Sequence[Row]) -> str:
    found = warnings_of(rows)
    lines = [[f"step {step}", html.escape(sentence)] for step, sentence in found[:8]]
    return _table("Last warnings", (), lines or [["none", ""]])


def _table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{value}</{tag}>" for value in values) + "</tr>"

    head = cells(header, "th") if header else ""
    body = "".join(cells(line, "td") for line in lines)
    return f"<div><h2>{title}</h2><table>{head}{body}</table></div>"


def _marked(text: str, bad: bool) -> str:
    return f'<b class="bad">{text}</b>' if bad else text


def _value(row: Row, name: str) -> float:
    return float(row.get(name) or 0)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3g}"


def _seconds_per_step(rows: Sequence[Row]) -> float:
    """Mean duration of the newest steps, including evaluations and checkpoints between them."""
    recent = rows[-RECENT:]
    parts = (metric.STEP_S, metric.EVAL_S, metric.CHECKPOINT_S)
    return sum(_value(row, part) for row in recent for part in parts) / len(recent)


def _plain_speed(rows: Sequence[Row]) -> float | None:
    """Tokens per second of plain decoding, over all evaluations."""
    ends = ("", metric.AT_START)
    tokens = sum(_value(r, metric.HELDOUT_TOKENS + end) for r in rows for end in ends)
    seconds = sum(_value(r, metric.HELDOUT_DECODE_S + end) for r in rows for end in ends)
    return tokens / seconds if seconds else None


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1d2430;background:#f3f5f8;margin:0}
main{max-width:1400px;margin:0 auto;padding:20px}
header{display:flex;align-items:center;gap:14px;flex-wrap:wrap}
h1{font-size:24px;margin:0}h2{font-size:16px;margin:0 0 8px}
.state{padding:2px 12px;border-radius:12px;color:#fff;background:#667085;font-weight:600}
.state.running{background:#0072b2}.state.done{background:#00795a}.state.stalled{background:#b3261e}
progress{width:100%;height:10px;margin:14px 0 0;accent-color:#0072b2}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:14px 0}
.tile,.columns>div{background:#fff;border:1px solid #dfe3ea;border-radius:8px;padding:12px 14px}
.tile span,.tile small{display:block;color:#5b6573}.tile b{font-size:24px;display:block}
.tile b,td{font-variant-numeric:tabular-nums}.tile small{min-height:1.45em}
img{width:100%;border:1px solid #dfe3ea;border-radius:8px;background:#fff;box-sizing:border-box}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(330px,1fr));gap:12px}
.columns{margin:12px 0}
table{border-collapse:collapse;width:100%}
td,th{padding:3px 10px 3px 0;text-align:left;border-bottom:1px solid #edf0f4}
th{font-weight:400;color:#5b6573}.bad{color:#b3261e}
footer{position:fixed;bottom:0;width:100%;padding:10px;background:#b3261e;color:#fff;text-align:center}
footer[hidden]{display:none}
"""

# The new picture is loaded before the old one is replaced, so that the page does not flicker.
_SCRIPT = """
let shown = "";
async function update() {
  try {
    const answer = await fetch("content", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();
    if (text !== shown) {
      const next = document.createElement("template");
      next.innerHTML = text;
      const picture = next.content.querySelector("img");
      if (picture) {
        const loaded = new Image();
        loaded.src = picture.getAttribute("src");
        await loaded.decode().catch(() => {});
      }
      document.getElementById("content").replaceChildren(next.content);
      shown = text;
    }
    document.getElementById("lost").hidden = true;
  } catch (error) {
    document.getElementById("lost").hidden = false;
  }
  setTimeout(update, 2000);
}
setTimeout(update, 2000);
"""

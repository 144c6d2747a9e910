"""Tables and a picture of what ``gpu_rollout.py`` measured. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LEAST_CACHED = 0.8
"""If less than this share of the context was in the KV cache, more than decoding was timed."""

Repetition = dict[str, Any]


def of(point: dict[str, Any], value: Callable[[Repetition], float]) -> list[float]:
    """A value for each repetition."""
    return [value(repetition) for repetition in point["repetitions"]]


def faster(base: str, side: str, clock: str = "seconds") -> Callable[[Repetition], float]:
    """Seconds of one side over those of another."""
    return lambda r: float(r[base][clock] / r[side][clock])


def rate(side: str, clock: str = "seconds") -> Callable[[Repetition], float]:
    """Tokens per second of a side."""
    return lambda r: float(r[side]["tokens"] / r[side][clock])


def spread(values: list[float], digits: int = 2) -> str:
    """Median, minimum and maximum as text."""
    low, high = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return f"{statistics.median(values):,.{digits}f} ({low} to {high})"


def chosen(data: dict[str, Any], kind: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The rest of the name and the result of each point of a kind, in order."""
    for name, point in data["points"].items():
        head, *rest = name.split("/")
        if head == kind:
            yield rest, point


def over_decoding(clock: str) -> Callable[[Repetition], float]:
    """Tokens per second of verification over those of decoding."""
    verified, decoded = rate("verification", clock), rate("decoding", clock)
    return lambda r: verified(r) / decoded(r)


def tables(data: dict[str, Any]) -> Iterator[Table]:
    """A table for each kind of point."""
    table = Table("rows", "tokens searched by each", title="Search and vote alone, microseconds")
    table.add_column("until the device has done it")
    table.add_column("of the host")
    for _, point in chosen(data, "search"):
        for rows, tokens in point["searched"].items():
            cells = [
                spread(of(point, lambda r, rows=rows, of=clock: 1e6 * r[rows][of]), 0)
                for clock in ("seconds", "host_s")
            ]
            table.add_row(rows, f"{tokens:,}", *cells)
    yield table
    yield drafting(data, "v2", ("v2",), "Lossless drafting in the V2 model runner over plain")
    for _, point in chosen(data, "steps"):
        yield stepped(point)

    # A CPU engine runs in the process that calls it, on a machine that may be busy.
    on_cpu = data.get("machine", {}).get("device", "").startswith("CPU")
    clock = "processor_s" if on_cpu else "seconds"
    ratios = ["verification over prefill", "prompt log-probs over prefill", "... over decoding"]
    table = Table("sequences x draft", "prefill, tokens/s", *ratios, "times")
    table.title = f"Verification of whole drafts, by {'processor' if on_cpu else 'wall'} seconds"
    for (place,), point in chosen(data, "verification"):
        alone = min(of(point, lambda r: r["decoding"]["cached_fraction"])) >= LEAST_CACHED
        table.add_row(
            place,
            spread(of(point, rate("prefill", clock)), 0),
            spread(of(point, faster("prefill", "verification", clock))),
            spread(of(point, faster("prefill", "prompt_logprobs", clock))),
            spread(of(point, over_decoding(clock)), 1) if alone else "",
            str(len(point["repetitions"])),
        )
    yield table

    table = Table("accepted: wanted", "found", "times faster", title="Prefix reuse over plain")
    for _, point in chosen(data, "reuse"):
        for side in list(point["repetitions"][0])[1:]:
            found = of(point, lambda r, side=side: r[side]["accepted_fraction"])
            table.add_row(side, spread(found), spread(of(point, faster("plain", side))))
    yield table

    yield drafting(data, "lossless", ("proposer", "rounds"), "Lossless drafting over plain")

    table = Table("engine", "tokens in a step", title="Memory of prompt log-probs beside prefill's")
    table.add_column("measured, MiB")
    table.add_column("prompt_logprob_bytes, MiB")
    for (engine,), point in chosen(data, "memory"):
        more = of(point, lambda r: (r["verification"]["bytes"] - r["prefill"]["bytes"]) / 2**20)
        bound = f"{point['prompt_logprob_bytes'] / 2**20:,.0f}"
        batched = f"{point['max_num_batched_tokens']:,}"
        table.add_row(f"{engine}: {point['runners'][engine]}", batched, spread(more, 0), bound)
    yield table

    table = Table("accepted", "step loop over two phases", title="Under KV pressure")
    table.add_column("tokens computed again: step loop")
    table.add_column("two phases")
    for _, point in chosen(data, "pressure"):
        table.add_row(
            spread(of(point, lambda r: r["loop"]["accepted_fraction"])),
            spread(of(point, faster("phases", "loop"))),
            *(
                spread(of(point, lambda r, side=side: r[side]["recomputed_tokens"]), 0)
                for side in ("loop", "phases")
            ),
        )
    yield table


def stepped(point: dict[str, Any]) -> Table:
    """Seconds of a step by rows and draft tokens."""
    times: dict[str, dict[str, str]] = {}
    for name, computed in point["computed"].items():
        rows, length = name.split("/")
        found = [s for s in of(point, lambda r, name=name: r[name]["seconds"]) if s is not None]
        measured = f"{1e3 * statistics.median(found):.2f}" if found else "?"
        times.setdefault(rows, {})[length] = f"{measured} ({1e3 * computed:.2f})"
    lengths = list(dict.fromkeys(length for cells in times.values() for length in cells))
    table = Table("rows", *lengths, title="Milliseconds of a step by draft tokens (computed)")
    for rows, cells in times.items():
        table.add_row(rows, *(cells.get(length, "") for length in lengths))
    return table


def drafting(data: dict[str, Any], kind: str, sides: tuple[str, ...], title: str) -> Table:
    """Lossless drafting by some methods over plain decoding."""
    table = Table("mean p", "rows", title=title)
    for side in sides:
        table.add_column(f"{side}: tokens a step")
        table.add_column("drafted a step")
        table.add_column("times faster")
    table.add_column("fastest")
    for (_, batch), point in chosen(data, kind):
        cells = []
        there = list(point["repetitions"][0])
        for side in sides:
            if side not in there:
                cells += ["", "", ""]
                continue
            for name in ("tokens_per_step", "drafted_per_step"):
                values = of(point, lambda r, side=side, name=name: r[side][name])
                cells.append(f"{statistics.median(values):.2f}")
            cells.append(spread(of(point, faster("plain", side))))
        seen = statistics.median(of(point, lambda r: r["plain"]["mean_p"]))
        table.add_row(f"{seen:.3f}", batch, *cells, fastest(point))
    return table


def fastest(point: dict[str, Any]) -> str:
    """The side that took the least time, by median."""
    return min(
        point["repetitions"][0],
        key=lambda side: statistics.median(of(point, lambda r: r[side]["seconds"])),
    )


def print_report(data: dict[str, Any], names: list[str]) -> None:
    """Print the tables, and which points are missing."""
    console = Console(width=130)
    if "machine" in data:
        console.print(", ".join(f"{key} {value}" for key, value in data["machine"].items()))
    console.print("Medians of repetitions; in brackets, the least and the largest.")
    for table in tables(data):
        if table.rows:
            console.print(table)
    for name, reason in data["failed"].items():
        console.print(f"failed: {name}: {reason}", markup=False)
    missing = [name for name in names if name not in data["points"]]
    console.print(f"not measured: {', '.join(missing)}" if missing else "all points are measured")


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw the figures into a PNG; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    labels, ratios = [], []
    for (place,), point in chosen(data, "verification"):
        labels.append(place.replace("x", " x\n"))
        ratios.append(of(point, faster("prefill", "verification")))
    left.boxplot(ratios or [[0.0]], whis=(0, 100))
    left.set_xticks(range(1, len(labels) + 1), labels)
    left.axhline(0.85, color="#555555", linestyle=":")
    left.set(title="Verification over raw prefill", xlabel="sequences x draft", ylim=(0, 1.2))

    for _, point in chosen(data, "reuse"):
        sides = list(point["repetitions"][0])[1:]
        found = [of(point, lambda r, side=side: r[side]["accepted_fraction"]) for side in sides]
        ratios = [of(point, faster("plain", side)) for side in sides]
        x = [statistics.median(values) for values in found]
        y = [statistics.median(values) for values in ratios]
        errors = [
            [m - min(v) for m, v in zip(y, ratios, strict=True)],
            [max(v) - m for m, v in zip(y, ratios, strict=True)],
        ]
        middle.errorbar(x, y, yerr=errors, marker="o", color="#D55E00")
    middle.axhline(1, color="#555555", linestyle=":")
    middle.set(title="Prefix reuse over plain", xlabel="accepted fraction", ylim=(0, None))

    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (p, batch), point in [*chosen(data, "v2"), *chosen(data, "lossless")]:
        for side in list(point["repetitions"][0])[1:]:
            ratio = statistics.median(of(point, faster("plain", side)))
            lines.setdefault((side, p), []).append((int(batch), ratio))
    styles = {"v2": "-", "proposer": "--", "rounds": ":"}
    colours = dict(
        zip(sorted({p for _, p in lines}), ("#0072B2", "#009E73", "#D55E00"), strict=False)
    )
    for (side, p), places in lines.items():
        x, y = zip(*sorted(places), strict=True)
        label = f"{side}, mean p {p}"
        right.plot(x, y, styles[side], marker="o", color=colours[p], label=label)
    right.axhline(1, color="#555555", linestyle=":")
    right.set(title="Lossless drafting over plain", xlabel="rows", xscale="log", ylim=(0, None))
    if lines:
        right.legend(fontsize=8)
    if "machine" in data:
        figure.suptitle(f"{data['machine']['device']}, vLLM {data['machine']['vllm']}")
    figure.savefig(path, dpi=110)

r"""Predict the rollouts of an 8B policy on 8 to 1,024 GPUs in the simulated engine.

    .venv/bin/python -m benchmarks.simulation.simulate_8b --out benchmarks/results/simulator_8b.json
    .venv/bin/python -m benchmarks.simulation.simulate_8b \
        --report benchmarks/results/simulator_8b.json

Nothing here is measured by this project. Lengths are drawn, what drafts bring is taken from
publications, and what a step costs from the size of the model and the data sheet of the GPU. The
inputs, with their sources, are in docs/evidence/simulation.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.shared.records import Chart, outputs, present, read, save
from nemo_specrl.config import PRESETS
from nemo_specrl.engine.load_balance import balanced_order
from nemo_specrl.simulation.simulated_engine import (
    FEATURES,
    SimulatedEngine,
    SimulatedRequest,
    run,
    verifying,
)

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
PROMPTS, GROUP, PROMPT_TOKENS = 512, 16, 200
MEAN_LENGTH, LONGEST = 4000, 16384
SPREAD_OF_PROMPTS, SPREAD_IN_GROUP = 0.5, 0.4
"""Standard deviations of the logarithm of a length: between prompts, and within a group."""
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
ENGINE = SimulatedEngine(256, 8192, kv_tokens=300_000, graph_sizes=GRAPH_SIZES)
LAWS = {"first": (2.36, 0.52, 0.78), "later": (2.66, 0.50, 0.89)}
"""By epoch: tokens of a step, share of drafted tokens accepted, share of steps with a draft."""
LAWS_SHOWN = {"first": "lossless, first epoch", "later": "lossless, later"}
PLAIN = ("plain", "balanced")
"""As NeMo-RL splits a batch, and as the plug-in does where it knows earlier lengths."""
REUSE = {"faithful": (0.0, 0.26), "fast": (0.6, 0.3)}
"""Share of drafts accepted to their end, and mean share accepted of the others."""
COSTS = {"steps": (5.8e-3, 8.2e-3), "tokens": (25e-6, 41e-6), "kv_tokens": (55e-9, 88e-9)}
"""Lowest and highest cost of each feature, seconds."""
DRAFTING = (1.03, 2.0, 3.5)
"""What a step costs with a drafter, over one without, beside its tokens and KV cache."""
DRAWS = 200
SLOWEST = 4
"""Engines that are simulated: those with most tokens, and those with the longest rows."""

Trace = list[tuple[int, int]]


def lengths(rng: np.random.Generator) -> np.ndarray:
    """Of an epoch's responses, int ``[PROMPTS, GROUP]``; prompts are the same in all epochs."""
    of_prompts = np.random.default_rng(8).normal(0, SPREAD_OF_PROMPTS, (PROMPTS, 1))
    drawn = np.exp(of_prompts + rng.normal(0, SPREAD_IN_GROUP, (PROMPTS, GROUP)))
    return np.minimum(MEAN_LENGTH * drawn / drawn.mean(), LONGEST).astype(int) + 1


def drafted(length: int, law: tuple[float, float, float], rng: np.random.Generator) -> Trace:
    """Steps of a row whose drafts are accepted as the law says."""
    tokens, accepted, hit = law
    gain = (tokens - 1) / hit  # of a step with a draft, geometric
    offered = round((tokens - 1) / accepted / hit)
    trace: Trace = [(0, 1)]
    while length > 1:
        draws = np.where(rng.random(512) < hit, rng.geometric(1 / (1 + gain), 512) - 1, -1)
        for gained in draws.tolist():
            step = (max(offered, gained), min(gained + 1, length - 1)) if gained >= 0 else (0, 1)
            trace.append(step)
            length -= step[1]
            if length <= 1:
                break
    return trace


def requests(
    method: str, share: list[tuple[int, int]], rng: np.random.Generator
) -> list[SimulatedRequest]:
    """The requests of an engine for rows, each a prompt and a length."""
    made, prefilled = [], set()
    for prompt, length in share:
        cached = PROMPT_TOKENS // 16 * 16 if prompt in prefilled else 0
        prefilled.add(prompt)
        if method in LAWS:
            trace = drafted(length, LAWS[method], rng)
        elif method in PLAIN or rng.random() < PRESETS[method]["fresh_fraction"]:
            trace = [(0, 1)] * length
        else:
            whole, part = REUSE[method]
            accepted = length if rng.random() < whole else int(length * 2 * part * rng.random())
            then = []
            if accepted < length:
                tokens = PROMPT_TOKENS + accepted
                rest = iter([(0, 1)] * (length - accepted))
                then = [SimulatedRequest(tokens, rest, cached=(tokens - 1) // 16 * 16)]
            made.append(SimulatedRequest(PROMPT_TOKENS + length, verifying(), then=then))
            continue
        made.append(SimulatedRequest(PROMPT_TOKENS, iter(trace), cached=cached))
    return made


def simulate(gpus: int, method: str, rng: np.random.Generator) -> list[list[float]]:
    """Counts of the engines that may be the slowest, one engine a GPU."""
    drawn = lengths(rng)
    rows = [(p, int(n)) for p, group in enumerate(drawn) for n in group]
    order = list(range(len(rows)))
    if method not in ("plain", "first"):  # earlier lengths are known of each prompt
        earlier = lengths(rng).mean(axis=1)
        order = balanced_order([float(earlier[p]) for p, _ in rows], gpus)
    size = -(-len(rows) // gpus)
    shares = [[rows[j] for j in order[i * size : (i + 1) * size]] for i in range(gpus)]
    most = sorted(range(gpus), key=lambda i: -sum(n for _, n in shares[i]))[:SLOWEST]
    longest = sorted(range(gpus), key=lambda i: -max(n for _, n in shares[i]))[:SLOWEST]
    return [
        run(ENGINE, requests(method, shares[i], rng)).tolist() for i in sorted({*most, *longest})
    ]


def predict() -> dict[str, Any]:
    """Simulate all methods at all sizes."""
    methods = (*PLAIN, *LAWS, *REUSE)
    return {
        "features": FEATURES,
        "counts": {
            str(gpus): {m: simulate(gpus, m, np.random.default_rng([8, gpus])) for m in methods}
            for gpus in GPUS
        },
    }


Speedups = dict[str, list[np.ndarray]]


def speedups(result: dict[str, Any]) -> dict[str, tuple[np.ndarray, Speedups, str]]:
    """For each number of GPUs, over draws of the costs: seconds of plain rollouts, how many times
    faster the others are, by column of the table, and up to which cost of a step drafting is faster
    than balance alone.
    """
    rng = np.random.default_rng(0)
    draws = {name: rng.uniform(*COSTS[name], DRAWS) for name in COSTS}
    names = list(result["features"])

    def seconds(counts: Any, ratio: float) -> np.ndarray:
        values = np.array(counts)  # [engines, features]
        column = {name: values[:, i, None] for i, name in enumerate(names)}
        of_engines = sum(column[name] * draws[name] for name in COSTS)
        of_engines = of_engines + (ratio - 1) * column["steps"] * draws["steps"]
        return of_engines.max(axis=0)

    found = {}
    for gpus, counts in result["counts"].items():
        plain = seconds(counts["plain"], 1)
        balanced = seconds(counts["balanced"], 1)  # to be had without drafts
        faster: Speedups = {"balance alone": [plain / balanced]}
        for method, title in LAWS_SHOWN.items():
            faster[title] = [plain / seconds(counts[method], ratio) for ratio in DRAFTING]
        faster |= {method: [plain / seconds(counts[method], 1)] for method in REUSE}
        ratios = np.arange(1, 20, 0.1)
        even = [r for r in ratios if np.median(balanced / seconds(counts["later"], r)) >= 1]
        found[gpus] = plain, faster, f"x {max(even):.1f}" if even else "never"
    return found


def report(result: dict[str, Any]) -> str:
    """Speed-ups with intervals over costs, as Markdown, and the break-even of drafting."""
    steps = " | x ".join(f"{ratio:g}" for ratio in DRAFTING)
    lines = [
        "| GPUs | rows an engine | plain, s | balance alone | "
        + " | ".join(f"{title}: step x {steps}" for title in LAWS_SHOWN.values())
        + " | pays below | faithful | fast |",
        "|---" * (7 + 2 * len(DRAFTING)) + "|",
    ]

    def cell(values: np.ndarray) -> str:
        low, middle, high = np.percentile(values, [5, 50, 95])
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    for gpus, (plain, faster, even) in speedups(result).items():
        columns = {name: [cell(values) for values in some] for name, some in faster.items()}
        cells = [gpus, str(PROMPTS * GROUP // int(gpus))]
        cells.append(f"{np.median(plain):.0f} ({plain.min():.0f} to {plain.max():.0f})")
        for name in ("balance alone", *LAWS_SHOWN.values()):
            cells += columns[name]
        cells += [even, *(cell for method in REUSE for cell in columns[method])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(result: dict[str, Any]) -> Chart:
    """Medians over costs, and their 5th and 95th percentiles, by number of GPUs."""
    groups: dict[str, dict[str, list[float]]] = {}
    for gpus, (_, faster, _) in speedups(result).items():
        groups[f"{gpus} GPUs"] = {
            name if len(some) == 1 else f"{name}, step x {ratio:g}": [
                float(value) for value in np.percentile(values, [5, 50, 95])
            ]
            for name, some in faster.items()
            for ratio, values in zip(DRAFTING, some, strict=False)
        }
    return Chart("8B, simulated, not measured", "times faster than plain rollouts", groups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, predict())
    present(report(result), chart(result), args.plot)


if __name__ == "__main__":
    main()

r"""Compare what the simulator predicts with what the real engine does.

    .venv/bin/python -m benchmarks.simulation.simulate --out results/simulate
    .venv/bin/python -m benchmarks.simulation.simulate --out results/simulate_language \
        --parts word-problems-4 word-problems-8 --prompts 8
    .venv/bin/python -m benchmarks.simulation.simulate --report benchmarks/results/simulator.json

The policies are those of ``recording.py``. Each method rolls out the same prompts under the same
weights, first a cold epoch, then a warm one. The simulator is given what plain decoding recorded
(tokens and log-probs) and what a step of the engine costs, which is fitted to some parts alone. The
others are predicted: of the toy tasks another policy, which is less sure of its tokens, and another
number of rows at once; of word problems another number of rows. The machine may have other work: so
methods take turns, points are repeated, one after the other, until every method has taken two
seconds in all at each of them, and since a repetition takes the very same steps of the engine, the
quickest reading of each step counts.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.arms import (
    ARMS,
    PLAIN,
    TREE,
    Comparison,
    Epochs,
    arguments,
    environment,
    in_own_process,
    recorded,
    repeated_until,
)
from benchmarks.shared.recording import TOY_TASKS, WORD_PROBLEMS, recipe_of
from benchmarks.shared.records import Chart, present, read, save
from nemo_specrl.config import PRESETS
from nemo_specrl.rollout import prompt_key
from nemo_specrl.simulation.prediction import REJECTIONS
from nemo_specrl.simulation.recorded_run import RecordedSample
from nemo_specrl.simulation.replay_presets import (
    acceptance_rates,
    groups_of,
    histories_of,
    phase,
    rejecting,
    rows_of,
)
from nemo_specrl.simulation.simulated_engine import FEATURES, SimulatedEngine, fit_costs

METHODS = {PLAIN: "plain", TREE: "lossless", "faithful": "faithful", "fast": "fast"}
"""Arms of ``rollout.py`` by the preset that they are."""
REUSE = ("faithful", "fast")
"""Presets whose acceptance is estimated."""


@dataclass(frozen=True)
class Part:
    """What is measured with the same policies.

    Args:
        task: a task of ``recording.TASKS``.
        sequences: rows that the engine runs at once.
        fitted: whether costs are fitted to its points, instead of predicting them.
        group: rollouts of a prompt.
    """

    task: str
    sequences: int
    fitted: bool = False
    group: int = 8


PARTS = {
    f"{part.task}-{part.sequences}": part
    for part in (
        Part("sorting", 16, fitted=True),
        Part("sorting", 64, fitted=True),
        Part("any-order", 32),
        Part("any-order", 64),
        Part(WORD_PROBLEMS, 4, fitted=True, group=4),
        Part(WORD_PROBLEMS, 8, group=4),
    )
}
TOY_PARTS = [name for name, part in PARTS.items() if part.task in TOY_TASKS]
EPOCHS, SEED = 2, 100
BLOCK_SIZE = 32
ROWS = FEATURES.index("rows")
POINT = ("task", "sequences", "arm", "epoch")


def measure(
    parts: list[Part],
    recordings: dict[str, Path],
    prompts: int,
    seeds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Measure all methods side by side, in a process of its own.

    Args:
        parts: parts whose models have the same shape, and whose tasks have the same problems.
        recordings: folder of each task's recording.
        prompts: of an epoch.
        seeds: of sampling.
        seconds: a part is repeated until every method has taken so long in each epoch in all.

    Returns:
        A row for each part, method, epoch and seed.
    """
    arms = {name: ARMS[name] for name in METHODS}
    most = max(part.sequences for part in parts)
    first = parts[0]
    with Comparison(first.task, recordings[first.task], arms, first.group, most) as comparison:
        chosen = comparison.problems[:prompts]

        def record_plain(row: dict[str, Any], arm: Any) -> None:
            if row["arm"] == PLAIN:
                row["prompt_lengths"] = [len(problem.prompt) for problem in chosen]
                row["keys"] = [prompt_key(problem.prompt).hex() for problem in chosen]
                row["responses"], row["logprobs"] = arm.responses, arm.logprobs

        of_parts = [
            Epochs(
                {"task": part.task, "sequences": part.sequences},
                prompts,
                range(EPOCHS),
                recording=recordings[part.task],
                sequences=part.sequences,
            )
            for part in parts
        ]
        numbers = range(SEED, SEED + seeds)
        measured = comparison.repeated(of_parts, numbers, 1, record_plain, seconds)
    return [row for of_part in measured for row in of_part]


def points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Simulate each point from what plain decoding recorded; means over seeds, beside measured."""
    recorded = {(r["task"], r["sequences"], r["seed"], r["epoch"]): r for r in rows if "keys" in r}
    measured = {(*(row[name] for name in POINT), row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    found = []
    order = list(METHODS)
    places = {key[:-1] for key in measured}
    is_fitted = {(part.task, part.sequences): part.fitted for part in PARTS.values()}
    for place in sorted(
        places, key=lambda p: (not is_fitted[p[:2]], p[1], p[3], order.index(p[2]))
    ):
        task, sequences, method, epoch = place
        engine = engine_of(task, sequences)
        counts, drafted, decoded, ends = [], [], [], []
        for seed in seeds:
            steps = [_samples(recorded[task, sequences, seed, e]) for e in range(epoch + 1)]
            simulated = _simulated(METHODS[method], steps, engine, seed)
            counts.append(simulated[0])
            if epoch and METHODS[method] in REUSE:
                of_ends = [
                    _simulated(METHODS[method], steps, engine, seed, times)[0][ROWS]
                    for times in (min(REJECTIONS), max(REJECTIONS))
                ]
                ends.append(of_ends)
            drafted.append(sum(d for row in simulated[1] for d, _ in row.trace))
            decoded.append(sum(y for row in simulated[1] for _, y in row.trace))
        of_seeds = [measured[(*place, seed)] for seed in seeds]
        mean_counts = np.mean(counts, axis=0)
        real = {
            name: float(np.mean([row[name] for row in of_seeds]))
            for name in ("engine_steps", "row_steps", "drafted_tokens", "decoded_tokens")
        }
        made = (mean_counts[:2].sum(), mean_counts[ROWS], np.mean(drafted), np.mean(decoded))
        found.append(
            {
                **dict(zip(POINT, place, strict=True)),
                "fitted": is_fitted[task, sequences],
                "counts": dict(zip(FEATURES, mean_counts.tolist(), strict=True)),
                "simulated": dict(zip(real, map(float, made), strict=True)),
                **({"row_steps_range": np.mean(ends, axis=0).tolist()} if ends else {}),
                "measured": real,
                "measured_s": float(np.mean([row["processor_s"] for row in of_seeds])),
                "repetitions_s": [row["repetitions_s"] for row in of_seeds],
            }
        )
    return found


def _samples(row: dict[str, Any]) -> list[RecordedSample]:
    return [
        RecordedSample(
            bytes.fromhex(key),
            length,
            np.array(tokens, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
        )
        for key, length, group, of_group in zip(
            row["keys"], row["prompt_lengths"], row["responses"], row["logprobs"], strict=True
        )
        for tokens, logprobs in zip(group, of_group, strict=True)
    ]


@functools.cache
def engine_of(task: str, sequences: int) -> SimulatedEngine:
    """The engine of a task's recipe, with so many rows at once."""
    recipe = recipe_of(task, Path())
    return SimulatedEngine(
        sequences,
        sequences * recipe.policy.generation.vllm_cfg.max_model_len,
        block_size=BLOCK_SIZE,
        max_draft_tokens=recipe.spec_rl.tree.max_draft_tokens,
    )


def _simulated(
    preset: str,
    steps: list[list[RecordedSample]],
    engine: SimulatedEngine,
    seed: int,
    rejections: float = 1.0,
) -> Any:
    """Counts and rows of the last of an engine's steps, those before it being its history.

    ``rejections`` is how many times as often as estimated prefix reuse rejects a token.
    """
    history = list(histories_of(steps))[-1]
    rates = None
    if preset in REUSE and history:
        pairs = [(history[key][-1], group) for key, group in groups_of(steps[-1]).items()]
        rates = acceptance_rates(pairs, PRESETS[preset]["lenience"])
        rates = None if rates is None else rejecting(rates, rejections)
    rows = rows_of(preset, steps[-1], history, rates, seed)
    return phase(preset, rows, engine, 1, history if preset == "lossless" else None)[0], rows


def predict(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the costs of a step to the fitted points, and predict the seconds of all of them."""
    vectors = np.array([list(point["counts"].values()) for point in found])
    # A hundred tokens of context cost a tiny model nothing, and grow with rows, like which they
    # would pass.
    vectors[:, FEATURES.index("kv_tokens")] = 0
    seconds = np.array([point["measured_s"] for point in found])
    fitted = np.array([point["fitted"] for point in found])
    costs = fit_costs(vectors[fitted], seconds[fitted])
    for point, predicted in zip(found, vectors @ costs, strict=True):
        point["predicted_s"] = float(predicted)
        point["error"] = float(predicted / point["measured_s"] - 1)
    return {"costs_s": dict(zip(FEATURES, costs.tolist(), strict=True)), "points": found}


def place(point: dict[str, Any]) -> tuple[Any, ...]:
    """What methods are compared at."""
    return tuple(point[name] for name in POINT if name != "arm")


def report(result: dict[str, Any]) -> str:
    """The points that costs were not fitted to, as a Markdown table."""
    lines = [
        "| task | max_num_seqs | method | epoch | engine steps: simulated, measured "
        "| row steps: simulated (range), measured |"
        " s: predicted, measured | error | times faster than plain: predicted, measured | error |",
        "|---" * 10 + "|",
    ]
    plain = {place(point): point for point in result["points"] if point["arm"] == PLAIN}
    for point in result["points"]:
        if point["fitted"]:
            continue
        made, real = point["simulated"], point["measured"]
        base = plain[place(point)]
        predicted, measured = (base[name] / point[name] for name in ("predicted_s", "measured_s"))
        rows = f"{made['row_steps']:,.0f}"
        if "row_steps_range" in point:
            rows += " ({:,.0f} to {:,.0f})".format(*point["row_steps_range"])
        faster = f"{predicted:.2f}, {measured:.2f} | {predicted / measured - 1:+.0%}"
        lines.append(
            f"| {point['task']} | {point['sequences']} | {point['arm']} "
            f"| {'warm' if point['epoch'] else 'cold'} "
            f"| {made['engine_steps']:.0f}, {real['engine_steps']:.0f} "
            f"| {rows}, {real['row_steps']:,.0f} "
            f"| {point['predicted_s']:.2f}, {point['measured_s']:.2f} | {point['error']:+.0%} "
            f"| {' | ' if point is base else faster} |"
        )
    costs = ", ".join(f"{name} {1000 * s:.3f}" for name, s in result["costs_s"].items())
    return "\n".join(lines) + f"\n\nfitted costs, ms: {costs}"


def chart(result: dict[str, Any]) -> Chart:
    """Predicted over measured seconds of the points that costs were not fitted to."""
    groups: dict[str, dict[str, list[float]]] = {}
    for point in result["points"]:
        if not point["fitted"]:
            epoch = "warm" if point["epoch"] else "cold"
            group = groups.setdefault(f"{point['task']}, {point['sequences']}\n{epoch}", {})
            group[point["arm"]] = [point["predicted_s"] / point["measured_s"]]
    title = "The simulator beside the engine; task, sequences at once, epoch"
    return Chart(title, "predicted seconds over measured ones", groups)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=TOY_PARTS)
    parser.add_argument("--prompts", type=int, default=16, help="of an epoch")
    parser.add_argument("--seeds", type=int, default=1, help="of sampling")
    repeated_until(parser)
    args = parser.parse_args()
    if not any(PARTS[name].fitted for name in args.parts):
        fitted = ", ".join(name for name, part in PARTS.items() if part.fitted)
        parser.error(f"--parts: costs are fitted to {fitted}, of which there is none")
    if len({name in TOY_PARTS for name in args.parts}) > 1:
        parser.error("--parts: word problems have another model; measure them by themselves")
    result = read(args.report) if args.report else run(args)
    present(report(result), chart(result), args.plot)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts, and predict all points."""
    environment()
    parts = [PARTS[name] for name in args.parts]
    recordings = {part.task: recorded(args, part.task, EPOCHS) for part in parts}
    amount = (args.prompts, args.seeds, args.seconds)
    rows = in_own_process(measure, parts, recordings, *amount)
    return save(args.out / "simulator.json", predict(points(rows)))


if __name__ == "__main__":
    main()

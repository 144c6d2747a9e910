"""Measure what run-ahead gains and costs: the demo's rollouts with and without it, same seeds.

    .venv/bin/python -m benchmarks.rollout.run_ahead --out results/run_ahead.json

Batches of sorting problems, 16 prompts with eight rows each, through ``SpeculativeLLM`` with
``preset: lossless``; two epochs, weights unchanged. For each epoch, with and without run-ahead:
steps of the engine, tokens that a row of the batch gains from a step, tokens decoded ahead,
processor seconds. The two engines take turns, some steps each; repetitions take the same steps,
and the median reading of each step counts. ``--places`` is ``max_num_seqs``. With 8, the engine is
idle in the tail of a batch alone; with 256, twice the rows of a batch, all the time. Needs the CPU
stack.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections import defaultdict
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks.shared.arms import in_own_process
from benchmarks.shared.engines import Steps, of_steps, sorting_engine
from benchmarks.shared.records import Chart, outputs, present, read, rounded, save
from benchmarks.shared.turns import Turns, by_processor_time
from nemo_specrl import RolloutStore, SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.trainer.data.toy_tasks import EOS, problems

PROMPTS, GROUP = 16, 8


def config(ahead: bool) -> SpecRLConfig:
    return SpecRLConfig(
        enabled=True,
        preset="lossless",
        tree={"adaptive": False},  # so that counts are the same on any machine
        run_ahead={"enabled": ahead},
    )


def measure(
    llm: Any, steps: Steps, ahead: bool, epochs: int, batches: int, seed: int
) -> list[dict[str, Any]]:
    """Figures by epoch, with empty trees and empty caches at the start.

    ``seconds`` are those of each step, and of what lies behind the last one of a batch.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    drafter = engine.model_executor.driver_worker.worker.model_runner.drafter
    drafter.__init__(engine.vllm_config)
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": p.prompt} for p in problems("sorting", PROMPTS * batches, 5)]
    order = [
        i
        for epoch in range(epochs)
        for i in np.random.default_rng([seed, epoch]).permutation(len(prompts)).tolist()
    ]
    figures = []
    with (
        tempfile.TemporaryDirectory() as folder,
        RolloutStore(folder, max_bytes=2**26, tokenizer_id="benchmark") as store,
    ):
        speculative = SpeculativeLLM(llm, store, config(ahead), seed=seed)
        for epoch in range(epochs):
            total: dict[str, float] = {}
            seconds: list[float] = []
            for batch in range(batches):
                start = (epoch * batches + batch) * PROMPTS
                chosen, behind = order[start : start + PROMPTS], order[start + PROMPTS :]
                params = [
                    SamplingParams(
                        max_tokens=160,
                        temperature=1.0,
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        stop_token_ids=[EOS],
                        seed=GROUP * (start + i) + k + 10**6 * seed,
                    )
                    for i in range(PROMPTS)
                    for k in range(GROUP)
                ]
                steps.begin()
                speculative.generate(
                    [prompts[i] for i in chosen for _ in range(GROUP)],
                    params,
                    upcoming=[prompts[i] for i in behind[:PROMPTS]],
                    use_tqdm=False,
                )
                store.sync()
                steps.end()
                seconds += steps.seconds
                metrics = speculative.metrics
                for name, value in (
                    ("engine_steps", len(steps.seconds) - 1),
                    ("response_tokens", metrics.response_tokens),
                    ("tree_steps", metrics.tree_steps),
                    ("tree_drafted_tokens", metrics.tree_drafted_tokens),
                    ("tree_accepted_tokens", metrics.tree_accepted_tokens),
                    ("run_ahead_tokens", metrics.run_ahead_tokens),
                ):
                    total[name] = total.get(name, 0) + value
                speculative.policy_version += 1
            figures.append({**total, "seconds": seconds})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=3, help="of an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, {"rows": run(args)})
    present(report(result["rows"]), chart(result["rows"]), args.plot)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each number of places in a process of its own."""
    amount = args.epochs, args.batches, args.seed, args.repeats
    parts = (in_own_process(both, places, *amount) for places in args.places)
    return rounded(row for part in parts for row in part)


def both(places: int, epochs: int, batches: int, seed: int, repeats: int) -> list[dict[str, Any]]:
    """Figures by epoch without and with run-ahead; ``repetitions_s`` has those of each."""
    local_cpu_environment()
    llms = {ahead: sorting_engine(places, engine_options(config(True))) for ahead in (False, True)}
    by_processor_time(engines=2)
    turns, amount = Turns(), (epochs, batches, seed)
    works = {
        ahead: functools.partial(measure, llm, Steps(llm.llm_engine, turns), ahead, *amount)
        for ahead, llm in llms.items()
    }
    found: dict[tuple[bool, int], list[dict[str, Any]]] = defaultdict(list)
    expected: dict[bool, float] = {}
    for _ in range(repeats):
        for ahead, of_epochs in turns.run(works, expected).items():
            expected[ahead] = sum(sum(figures["seconds"]) for figures in of_epochs)
            for epoch, figures in enumerate(of_epochs):
                found[ahead, epoch].append(figures)
    rows = []
    for (ahead, epoch), repetitions in sorted(found.items()):
        readings = [figures.pop("seconds") for figures in repetitions]
        rows.append(
            {
                **{"places": places, "seed": seed, "run_ahead": ahead, "epoch": epoch},
                **repetitions[0],
                "cpu_s": of_steps(readings),
                "repetitions_s": list(map(sum, readings)),
            }
        )
    return rows


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each epoch without run-ahead, and with it."""
    place = itemgetter("places", "seed", "epoch")
    on = {place(row): row for row in rows if row["run_ahead"]}
    return [(row, on[place(row)]) for row in rows if not row["run_ahead"]]


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: what run-ahead saves in each epoch, and what it decodes for that."""
    lines = [
        "| `max_num_seqs` | epoch | engine steps: without, with "
        "| tokens of a row's step: without, with | tokens ahead of all "
        "| processor s: without over with |",
        "|---" * 6 + "|",
    ]
    for off, on in pairs(rows):
        gains = [row["response_tokens"] / row["tree_steps"] for row in (off, on)]
        lines.append(
            f"| {off['places']} | {'later' if off['epoch'] else 'first'} "
            f"| {off['engine_steps']}, {on['engine_steps']} "
            f"| {gains[0]:.2f}, {gains[1]:.2f} "
            f"| {on['run_ahead_tokens'] / on['response_tokens']:.0%} "
            f"| {off['cpu_s'] / on['cpu_s']:.2f} |"
        )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Engine steps and processor seconds without run-ahead, over those with it."""
    names = {"engine_steps": "engine steps", "cpu_s": "processor seconds"}
    groups = {
        f"{off['places']} at once\n{'later' if off['epoch'] else 'first'} epoch": {
            title: [off[name] / on[name]] for name, title in names.items()
        }
        for off, on in pairs(rows)
    }
    return Chart("Run-ahead", "without over with", groups)


if __name__ == "__main__":
    main()

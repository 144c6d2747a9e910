"""Draft lengths of the controller beside fixed ones and plain decoding, on real CPU engines.

    .venv/bin/python benchmarks/controller.py --json benchmarks/results/controller.json

Twelve regimes: trees without and with earlier responses, low and high entropy (temperature), short
and long answers, few and many sequences. In each, the same requests run through a plain engine,
which has no ``speculative_config``, and through one with the tree proposer, whose drafts are cut by
the controller or by a fixed least chance and greatest length. Sides alternate; figures are medians
of processor seconds over the rounds, of which the first warms up. One controller serves all
regimes, as in a run whose regime changes. Needs the CPU stack.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrl import SpecRLConfig, prompt_key
from nemo_specrl.engine.compat import local_cpu_environment
from nemo_specrl.engine.drafting import EXTRA_ARG, engine_options
from nemo_specrl.engine.proposer import DraftCounts
from nemo_specrl.speculation.controller import Controller
from nemo_specrl.speculation.drafts import response_id
from nemo_specrl.speculation.trees import CHANCES, DraftTrees
from nemo_specrl.trainer.task import EOS, problems

GROUP = 8
EPOCHS = 3  # of earlier responses in a warm tree
HOT = 1.6
LEAST, LONGEST = (0.05, 0.2, 0.5), (4, 8, 24)
TOKENS = {"short": 24, "long": 120}


class Fixed(Controller):
    """Drafts up to a fixed chance and length, by the chances that a controller begins with."""

    def __init__(self, least: float, longest: int) -> None:
        super().__init__(CHANCES)
        self.price = self.least = least
        self._longest = longest

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Nothing is learnt."""

    def outcome(self, cells: bytes, accepted: int) -> None:
        """Nothing is learnt."""

    def prepare(self, rows: int) -> bool:
        """Drafts are always looked up."""
        return True

    def lengths(self, rows: int, chances: Sequence[bytes]) -> list[int] | None:
        """All of each draft, up to the greatest length."""
        return [min(len(of_draft) // 4, self._longest) for of_draft in chances]


class Regime:
    """Requests of one kind, and the earlier responses to their prompts."""

    def __init__(self, name: str, warm: bool, hot: bool, answer: str, rows: int, groups: int):
        self.name, self.warm, self.rows = name, warm, rows
        self.prompts = [p.prompt for p in problems("sorting", groups, seed=5)]
        self.options = {
            "temperature": HOT if hot else 1.0,
            "max_tokens": TOKENS[answer],
            "stop_token_ids": [EOS],
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }
        self.history: dict[bytes, list[tuple[int, bytes]]] = {}

    def requests(self, version: int) -> tuple[list[Any], list[Any]]:
        """Prompts and sampling parameters of a batch, with seeds of its own for each version."""
        from vllm import SamplingParams

        prompts, params = [], []
        for prompt in self.prompts:
            for i in range(GROUP):
                key = prompt_key(prompt)
                extra = {EXTRA_ARG: [key, response_id(i, version), [], len(prompt)]}
                seed = int.from_bytes(key[:4], "little") ^ (version * GROUP + i)
                prompts.append({"prompt_token_ids": prompt})
                params.append(SamplingParams(seed=seed, extra_args=extra, **self.options))
        return prompts, params

    def begin(self, llm: Any) -> None:
        """Have an engine write the earlier responses."""
        for version in range(EPOCHS if self.warm else 0):
            prompts, params = self.requests(version)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for i, output in enumerate(outputs):
                key, tokens = (
                    prompt_key(prompts[i]["prompt_token_ids"]),
                    output.outputs[0].token_ids,
                )
                known = self.history.setdefault(key, [])
                known.append((response_id(i % GROUP, version), np.int32(tokens).tobytes()))


def run(llm: Any, proposer: Any, regime: Regime, version: int) -> dict[str, float]:
    """One batch; processor seconds, tokens and the proposer's counts."""
    prompts, params = regime.requests(version)
    if proposer is not None:
        proposer.trees = DraftTrees(2**28)
        rows = [proposer.trees.open(key, -1, h) for key, h in regime.history.items()]
        del rows
        proposer.counts = DraftCounts()
    llm.reset_prefix_cache()
    wall, started = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    figures = {
        "cpu_s": time.process_time() - started,
        "wall_s": time.perf_counter() - wall,
        "tokens": float(sum(len(o.outputs[0].token_ids) for o in outputs)),
    }
    if proposer is not None:
        counts = proposer.counts
        figures["tokens_per_step"] = 1 + counts.accepted / max(1, counts.steps)
        figures["draft_length"] = counts.drafted / max(1, counts.steps)
        figures["plain_fraction"] = counts.plain_batches / max(1, counts.batches)
        figures["price"] = counts.price / max(1, counts.batches)
        figures["proposer_s"] = counts.seconds
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="examples/models/qwen3-sort")
    parser.add_argument("--rounds", type=int, default=5, help="the first of them warms up")
    parser.add_argument("--regimes", default="", help="only those whose name has this in it")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    local_cpu_environment()
    from vllm import LLM

    def engine(rows: int, **options: Any) -> Any:
        return LLM(
            model=args.model,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=rows,
            max_num_batched_tokens=rows * 256,
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            kv_cache_memory_bytes=2**28,
            **options,
        )

    config = SpecRLConfig(enabled=True, preset="lossless")
    sides: dict[str, Any] = {"plain": None, "controller": Controller(CHANCES)}
    for least, longest in itertools.product(LEAST, LONGEST):
        sides[f"{least}, {longest}"] = Fixed(least, longest)
    result: dict[str, Any] = {}
    for answer, rows, groups in (("short", 8, 6), ("long", 8, 3), ("long", 32, 8)):
        plain, drafting = engine(rows), engine(rows, **engine_options(config))
        runner = drafting.llm_engine.model_executor.driver_worker.worker.model_runner
        for warm, hot in itertools.product((False, True), (False, True)):
            heat = "high" if hot else "low"
            name = f"{'warm' if warm else 'cold'}, {heat} entropy, {answer}, {rows} rows"
            if args.regimes not in name:
                continue
            regime = Regime(name, warm, hot, answer, rows, groups)
            regime.begin(plain)
            measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for turn in range(args.rounds):
                order = list(sides)
                order = order[turn % len(order) :] + order[: turn % len(order)]
                for side in order if turn % 2 else order[::-1]:
                    proposer = None if side == "plain" else runner.drafter
                    if proposer is not None:
                        proposer.controller = sides[side]
                    llm = plain if proposer is None else drafting
                    measured[side].append(run(llm, proposer, regime, EPOCHS + turn))
            result[name] = summary(measured)
            report(name, result[name])
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
        del plain, drafting, runner


def summary(measured: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds but the first; microseconds of processor time for a token."""
    figures: dict[str, dict[str, float]] = {}
    for side, rounds in measured.items():
        rounds = rounds[1:] or rounds
        figures[side] = {
            name: round(statistics.median(r[name] for r in rounds), 5) for name in rounds[0]
        }
        each = [1e6 * r["cpu_s"] / r["tokens"] for r in rounds]
        figures[side]["us_per_token"] = round(statistics.median(each), 3)
    return figures


def report(name: str, figures: dict[str, dict[str, float]]) -> None:
    """Print a regime's figures: the controller over plain and over the best fixed choice."""
    cost = {side: f["us_per_token"] for side, f in figures.items()}
    fixed = {side: c for side, c in cost.items() if side != "controller"}
    best = min(fixed, key=lambda side: fixed[side])
    made = figures["controller"]
    print(
        f"{name}: plain {cost['plain']:.0f} us a token, controller {cost['controller']:.0f}: "
        f"{cost['controller'] / cost['plain']:.3f} of plain, "
        f"{cost['controller'] / cost[best]:.3f} of the best ({best}); "
        f"{made['tokens_per_step']:.2f} tokens a step, {made['draft_length']:.2f} drafted, "
        f"price {made['price']:.2f}, {made['plain_fraction']:.2f} without",
        flush=True,
    )


if __name__ == "__main__":
    main()

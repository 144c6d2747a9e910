"""Overhead of speculation where it cannot help: rollouts with a cache that never hits.

    .venv/bin/python -m benchmarks.rollout.cold_overhead --out results/cold_overhead.json

Pairs of the same batch of new prompts, once through ``vllm.LLM.generate`` and once through
``SpeculativeLLM`` on a real store. The two engines take turns, some steps each. The figure is the
ratio of a pair, of processor seconds and those of ``RolloutStore.sync``, which commits what was put
and waits for the disk.
Needs the CPU stack.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from typing import Any

from benchmarks.shared.engines import Steps
from benchmarks.shared.records import Chart, outputs, present, read, save
from benchmarks.shared.turns import Turns, by_processor_time
from nemo_specrl import RolloutStore, SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.trainer.data.toy_tasks import EOS, problems

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="examples/models/qwen3-arith")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="of a batch, eight rows each")
    outputs(parser)
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error(f"--pairs {args.pairs}: the quartiles take two pairs at least")
    result = read(args.report) if args.report else save(args.out, measure(args))
    present(report(result), chart(result), args.plot)


def processor_seconds(steps: Steps, llm: Any, prompts: list[Any], params: list[Any]) -> float:
    """Generate for a batch; seconds of this engine's thread, without those of other turns."""
    steps.begin()
    llm.generate(prompts, params, use_tqdm=False)
    steps.end()
    return sum(steps.seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each side of each pair, and their ratios."""
    local_cpu_environment()
    from vllm import LLM, SamplingParams

    def engine() -> LLM:
        return LLM(
            model=args.model,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=16,
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    plain, under = engine(), engine()
    turns = Turns()
    by_processor_time(engines=2)
    plain_steps, under_steps = (Steps(llm.llm_engine, turns) for llm in (plain, under))
    sums = problems("arithmetic", (args.pairs + 1) * args.prompts, seed=5)
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        RolloutStore(folder, max_bytes=2**28, tokenizer_id="benchmark") as store,
    ):
        speculative = SpeculativeLLM(under, store, SpecRLConfig(enabled=True, preset="faithful"))

        def plainly(*batch: list[Any]) -> float:
            return processor_seconds(plain_steps, plain, *batch)

        def speculatively(*batch: list[Any]) -> float:
            processor_s = processor_seconds(under_steps, speculative, *batch)
            started = time.perf_counter()
            store.sync()
            assert speculative.metrics.drafts == 0
            return processor_s + time.perf_counter() - started

        works = {"plain": plainly, "speculative": speculatively}
        for pair in range(args.pairs + 1):
            batch = sums[pair * args.prompts : (pair + 1) * args.prompts]
            prompts = [{"prompt_token_ids": p.prompt} for p in batch for _ in range(GROUP)]
            params = [
                SamplingParams(
                    max_tokens=240,
                    temperature=1.0,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    stop_token_ids=[EOS],
                    seed=i,
                )
                for i in range(len(prompts))
            ]
            order = list(works) if pair % 2 else list(works)[::-1]
            of_pair = {side: functools.partial(works[side], prompts, params) for side in order}
            for side, value in turns.run(of_pair, {}).items():
                if pair:  # the first pair warms up
                    seconds[side].append(value)
    ratios = [s / p for s, p in zip(seconds["speculative"], seconds["plain"], strict=True)]
    return {"seconds": seconds, "ratios": ratios}


def report(result: dict[str, Any]) -> str:
    """Markdown: the ratios' median and quartiles, and the ratio of the sums."""
    low, middle, high = statistics.quantiles(result["ratios"], n=4)
    sums = {side: sum(values) for side, values in result["seconds"].items()}
    return "\n".join(
        [
            "| pairs | speculative over plain: median | quartiles | of the sums |",
            "|---" * 4 + "|",
            f"| {len(result['ratios'])} | {middle:.4f} | {low:.4f}, {high:.4f} "
            f"| {sums['speculative'] / sums['plain']:.4f} |",
        ]
    )


def chart(result: dict[str, Any]) -> Chart:
    groups = {"cache that never hits": {"pairs": result["ratios"]}}
    return Chart("Overhead where nothing is reused", "speculative over plain seconds", groups)


if __name__ == "__main__":
    main()

"""Measure what run-ahead gains and costs: the demo's rollouts with and without it, same seeds.

    .venv/bin/python benchmarks/run_ahead.py --places 8 --json benchmarks/results/run_ahead.json

Batches of sorting problems, 16 prompts with eight rows each, through ``SpeculativeLLM`` with
``preset: lossless``; two epochs, weights unchanged. For each epoch, with and without run-ahead:
steps of the engine, tokens that a row of the batch gains from a step, tokens decoded ahead,
processor seconds. ``--places`` is ``max_num_seqs``. With 8, the engine is idle in the tail of a
batch alone; with 256, twice the rows of a batch, all the time. Needs the CPU stack.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from records import merged

from nemo_specrl import RolloutStore, SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.compat import local_cpu_environment
from nemo_specrl.engine.drafting import engine_options
from nemo_specrl.trainer.task import EOS, problems

PROMPTS, GROUP = 16, 8


def config(ahead: bool) -> SpecRLConfig:
    return SpecRLConfig(
        enabled=True,
        preset="lossless",
        tree={"adaptive": False},  # so that counts are the same on any machine
        run_ahead={"enabled": ahead},
    )


def measure(llm: Any, ahead: bool, epochs: int, batches: int, seed: int) -> list[dict[str, float]]:
    """Figures by epoch, with empty trees and an empty cache at the start."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    drafter = engine.model_executor.driver_worker.worker.model_runner.drafter
    drafter.__init__(engine.vllm_config)
    step, steps = engine.step, 0

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

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
        engine.step = counted
        for epoch in range(epochs):
            total: dict[str, float] = {}
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
                steps, started = 0, time.process_time()
                speculative.generate(
                    [prompts[i] for i in chosen for _ in range(GROUP)],
                    params,
                    upcoming=[prompts[i] for i in behind[:PROMPTS]],
                    use_tqdm=False,
                )
                store.sync()
                metrics = speculative.metrics
                for name, value in (
                    ("engine_steps", steps),
                    ("cpu_s", time.process_time() - started),
                    ("response_tokens", metrics.response_tokens),
                    ("tree_steps", metrics.tree_steps),
                    ("tree_drafted_tokens", metrics.tree_drafted_tokens),
                    ("tree_accepted_tokens", metrics.tree_accepted_tokens),
                    ("run_ahead_tokens", metrics.run_ahead_tokens),
                ):
                    total[name] = total.get(name, 0) + value
                speculative.policy_version += 1
            figures.append(total)
    engine.step = step
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=3, help="of an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    args = parser.parse_args()

    local_cpu_environment()
    from vllm import LLM

    llm = LLM(
        model="examples/models/qwen3-sort",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=args.places,
        max_num_batched_tokens=args.places * 256,
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **engine_options(config(True)),
    )
    rows = []
    for ahead in (False, True):
        epochs = measure(llm, ahead, args.epochs, args.batches, args.seed)
        for epoch, e in enumerate(epochs):
            place = {"places": args.places, "seed": args.seed, "run_ahead": ahead, "epoch": epoch}
            rows.append({**place, **e})
            print(
                f"{args.places} places, run-ahead {'on ' if ahead else 'off'}, epoch {epoch}: "
                f"{e['engine_steps']} engine steps, "
                f"{1 + e['tree_accepted_tokens'] / e['tree_steps']:.2f} tokens a row and step, "
                f"{e['run_ahead_tokens']} tokens ahead of {e['response_tokens']}, "
                f"{e['cpu_s']:.1f} processor seconds",
                flush=True,
            )
    if args.json:
        merged(args.json, rows, ("places", "seed", "run_ahead", "epoch"))


if __name__ == "__main__":
    main()

"""What run-ahead gains and costs: the demo's training with and without it, same seeds.

    .venv/bin/python benchmarks/run_ahead.py --json benchmarks/results/run_ahead.json

For each epoch and side: steps of the engine, steps in which fewer of the batch's rows than half of
``max_num_seqs`` ran, tokens that a row gains from a step, tokens decoded ahead, and processor
seconds of the rollouts. ``--places`` is ``max_num_seqs``; with as many places as rows, engines are
partly idle all the time, as where a batch is small for its GPUs. Needs the CPU stack; two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE = Path("examples/configs/grpo_sort_cpu.yaml")


def trained(folder: str, ahead: bool, epochs: int, places: int, rows: int, seed: int) -> Any:
    """Train in this process; returns a list of figures by epoch."""
    from nemo_specrl.engine.compat import local_cpu_environment

    local_cpu_environment()
    from nemo_specrl.trainer.recipe import load_recipe
    from nemo_specrl.trainer.trainer import Trainer

    generation = "policy.generation"
    recipe = load_recipe(
        RECIPE,
        [
            f"checkpointing.checkpoint_dir={folder}",
            f"logger.log_dir={folder}",
            "logger.tensorboard_enabled=false",
            "checkpointing.save_period=1000",
            f"grpo.max_num_epochs={epochs}",
            f"grpo.num_generations_per_prompt={rows}",
            f"grpo.seed={seed}",
            f"policy.train_global_batch_size={16 * rows}",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "grpo.val_period=0",
            f"{generation}.vllm_kwargs.max_num_seqs={places}",
            f"{generation}.spec_rl.run_ahead.enabled={str(ahead).lower()}",
        ],
    )
    trainer = Trainer(recipe)
    figures: list[dict[str, float]] = []
    run = trainer.run()
    build, steps, seconds = trainer._build, [], []

    def counted() -> None:
        build()
        engine, rollouts = trainer.generation.llm.llm_engine, trainer.generation.rollouts
        step = engine.step

        def one() -> Any:
            steps.append(len(engine.output_processor.request_states))
            return step()

        def timed(*args: Any) -> Any:
            started = time.process_time()
            try:
                return rollouts(*args)
            finally:
                seconds.append(time.process_time() - started)

        engine.step, trainer.generation.rollouts = one, timed

    trainer._build = counted
    for record in run:
        if record["epoch"] == len(figures):
            figures.append({})
        of_step = {
            "engine_steps": len(steps),
            "row_steps": sum(steps),
            "cpu_s": sum(seconds),
            "response_tokens": record["response_tokens"],
            "run_ahead_tokens": record["spec_rl/run_ahead_tokens"],
            "tree_drafted_tokens": record["spec_rl/tree_drafted_tokens"],
            "tree_accepted_tokens": record["spec_rl/tree_accepted_fraction"]
            * record["spec_rl/tree_drafted_tokens"],
        }
        steps.clear()
        seconds.clear()
        total = figures[-1]
        for name, value in of_step.items():
            total[name] = total.get(name, 0) + value
    return figures


def in_a_process(queue: Any, *args: Any) -> None:
    queue.put(trained(*args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--places", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rows", type=int, default=8, help="of a prompt")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    results: list[dict[str, Any]] = []
    for places in args.places:
        for seed in range(args.seeds):
            for ahead in (False, True):
                with contextlib.ExitStack() as stack:
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                    queue = context.Queue()
                    options = (folder, ahead, args.epochs, places, args.rows, seed)
                    process = context.Process(target=in_a_process, args=(queue, *options))
                    process.start()
                    epochs = queue.get()
                    process.join()
                results.append(
                    {"places": places, "rows": 16 * args.rows, "seed": seed, "run_ahead": ahead}
                    | {"epochs": epochs}
                )
                for epoch, e in enumerate(epochs):
                    print(
                        f"{places} places, seed {seed}, run-ahead {'on ' if ahead else 'off'}, "
                        f"epoch {epoch}: {e['engine_steps']} engine steps, "
                        f"{e['response_tokens'] / e['engine_steps']:.1f} tokens each, "
                        f"{e['tree_accepted_tokens']:.0f} of {e['tree_drafted_tokens']:.0f} "
                        f"drafted tokens accepted, {e['run_ahead_tokens']:.0f} tokens ahead, "
                        f"{e['cpu_s']:.1f} processor seconds",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

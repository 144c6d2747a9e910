"""Seconds and memory of refits: from Megatron ranks to a vLLM engine, or to several.

    .venv/bin/python -m benchmarks.trainer.refit --out results/refit.json
    .venv/bin/python -m benchmarks.trainer.refit --out results/refit.json --layout 2x1x1 --random
    .venv/bin/python -m benchmarks.trainer.refit --out results/refit.json --layout 2x1x1 --engines 2

One engine is in the driver's process, unless ``--engines`` gives each a process of its own.
Without ``--random`` the model is that of the recipe, with ``--untied`` its copy with an output
layer of its own; with it, a Qwen3 of random weights is made, of a billion parameters unless another
size is given. The engine is in bfloat16. The log-probs of 64 of its rollouts are compared with the
policy's, which is in float32, after an optimizer step and again after a refit: on the recipe's
model, since one of random weights has no rollouts to speak of. Results are added to the file. All
processes run on this machine. Memory is the resident set (VmRSS) before a refit, and by how much
its peak (VmHWM) within the refit is above it, MB of 10^6 bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shared.records import Chart, merged, outputs, present, read
from nemo_specrl.engine.vllm.environment import local_cpu_environment

local_cpu_environment()

import numpy as np  # noqa: E402

from nemo_specrl.trainer.data.toy_tasks import problems  # noqa: E402
from nemo_specrl.trainer.generation.in_process import InProcessEngine  # noqa: E402
from nemo_specrl.trainer.generation.ray_engines import RayEngines  # noqa: E402
from nemo_specrl.trainer.policy import Sample, build_policy  # noqa: E402
from nemo_specrl.trainer.recipe import Recipe, load_recipe  # noqa: E402

RECIPE = Path("examples/configs/grpo_sort_megatron_cpu.yaml")
MB = 1e6
KEYS = ("layout", "engines", "tied", "parameters")
"""Keys whose values identify a row."""


def memory(pid: int, name: str) -> float:
    """One of a process's memory counters, MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024 / MB
    raise ValueError(f"/proc/{pid}/status has no {name}")


def write_random_model(folder: Path, args: argparse.Namespace) -> None:
    """Write a Qwen3 of random weights in bfloat16, with the recipe's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 256,
        head_dim=128,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("examples/models/qwen3-sort") / name, folder)


def write_untied(source: str | Path, folder: Path) -> None:
    """Write a model with an output layer of its own, equal to the embedding at first.

    Args:
        source: the model's folder.
        folder: where to write it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def differences(
    recipe: Recipe, policy: Any, generation: InProcessEngine | RayEngines
) -> dict[str, float]:
    """Mean absolute difference of the engine's and the policy's log-probs of rollouts, nats.

    Once the policy has taken an optimizer step, and again after the refit that follows.
    """
    prompts = [p.prompt for p in problems(recipe.data.dataset_name, 8, 1)]

    def rollouts() -> tuple[list[Sample], list[Any]]:
        samples, logprobs = [], []
        for prompt, group in zip(prompts, generation.rollouts(prompts), strict=True):
            for i, row in enumerate(group):
                sample = Sample.to_score(prompt, row.tokens)
                sample.advantages = np.full(len(row.tokens), (-1.0) ** i, dtype=np.float32)
                sample.anchor = np.full(len(row.tokens), np.nan, dtype=np.float32)
                samples.append(sample)
                logprobs.append(row.policy_logprobs)
        return samples, logprobs

    def difference(samples: list[Sample], logprobs: list[Any]) -> float:
        own = np.concatenate(policy.logprobs(samples))
        return float(np.abs(own - np.concatenate(logprobs)).mean())

    samples, logprobs = rollouts()
    policy.reload()
    policy.train(samples, epochs=1)
    policy.offload()
    before = difference(samples, logprobs)
    generation.refit(policy.stream_weights(recipe.dtype), 1)
    return {"before_refit": before, "after_refit": difference(*rollouts())}


def measured(
    works: dict[str, Callable[[], None]], pids: dict[str, int], runs: int
) -> dict[str, dict[str, Any]]:
    """Seconds of some runs of each work, by turns, and the largest growth of each process.

    Everything is run once before, to warm up.
    """
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    growth = {name: dict.fromkeys(pids, 0.0) for name in works}
    for _ in range(runs):
        for name, work in works.items():
            before = {process: memory(pid, "VmRSS") for process, pid in pids.items()}
            for pid in pids.values():
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
            for process, pid in pids.items():
                grown = memory(pid, "VmHWM") - before[process]
                growth[name][process] = max(growth[name][process], grown)
    return {
        name: {
            "seconds": seconds[name],
            "median_seconds": statistics.median(seconds[name]),
            "growth_mb": growth[name],
        }
        for name in works
    }


def measure(
    overrides: list[str],
    layout: tuple[int, int, int],
    engines: int,
    runs: int,
    *,
    compare: bool,
) -> dict[str, Any]:
    """Stream weights from ranks in a layout without an engine, and then refit the engines."""
    tp, pp, dp = layout
    recipe = load_recipe(
        RECIPE,
        [
            *overrides,
            f"policy.megatron_cfg.tensor_model_parallel_size={tp}",
            f"policy.megatron_cfg.pipeline_model_parallel_size={pp}",
            f"cluster.gpus_per_node={tp * pp * dp}",
            f"policy.generation.colocated.enabled={not engines}",
            f"policy.generation.colocated.resources.gpus_per_node={engines or 'null'}",
            "policy.generation.spec_rl.enabled=false",
            "policy.generation.vllm_cfg.precision=bfloat16",
            "policy.optimizer.kwargs.lr=1e-3",
        ],
    )
    policy: Any = build_policy(recipe)
    try:
        policy.offload()  # as the training loop does, but for the first refit
        generation: RayEngines | InProcessEngine
        generation = RayEngines(recipe, None) if engines else InProcessEngine(recipe, None)
        dtype = recipe.dtype
        names = [(name, weight.numel()) for name, weight in policy.stream_weights()]
        pids = {"driver": os.getpid()}
        pids |= {f"rank {rank}": pid for rank, pid in enumerate(policy.pids())}
        if isinstance(generation, RayEngines):
            pids |= {f"engine {i}": pid for i, pid in enumerate(generation.engines.pids)}

        def stream() -> None:
            for _ in policy.stream_weights(dtype):
                pass

        def refit() -> None:
            generation.refit(policy.stream_weights(dtype), 1)

        found: dict[str, Any] = measured({"stream": stream, "refit": refit}, pids, runs)
        if compare:
            found["logprob_differences"] = differences(recipe, policy, generation)
    finally:
        policy.shutdown()
    return {
        "layout": f"{tp}x{pp}x{dp}",
        "engines": engines,
        "tied": policy.architecture.tied,
        "parameters": sum(count for _, count in names),
        "largest_tensor_mb": max(count for _, count in names) * dtype.itemsize / MB,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    outputs(parser)
    parser.add_argument("--random", action="store_true", help="a model of random weights")
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--layout", default="2x1x1", help="tensor x pipeline x data parallel")
    parser.add_argument("--engines", type=int, default=0, help="in processes of their own")
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    if args.report is None and args.out is None:
        parser.error("--out JSON or --report JSON is required")
    rows = read(args.report)["rows"] if args.report else run(args)
    present(report(rows), chart(rows), args.plot)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a layout; all rows of the file, in which it replaces what is there of it."""
    tp, pp, dp = map(int, args.layout.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        overrides = []
        if args.random:
            write_random_model(Path(folder), args)
        elif args.untied:
            write_untied(load_recipe(RECIPE).policy.model_name, Path(folder))
        if args.random or args.untied:
            overrides = [f"policy.model_name={folder}"]
        layout = tp, pp, dp
        found = measure(overrides, layout, args.engines, args.runs, compare=not args.random)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = merged(args.out, [found], KEYS)["rows"]
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: seconds of a refit, of them those of streaming, memory and log-probs."""
    lines = [
        "| TP x PP x DP | engines | parameters, M | output layer | refit, s | refit over streaming "
        "| driver grows by, MB | largest tensor, MB | log-probs, nats off: before, after |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        differences = row.get("logprob_differences", {})
        lines.append(
            f"| {row['layout']} | {row['engines'] or 'in the driver'} "
            f"| {row['parameters'] / 1e6:.1f} | {'tied' if row['tied'] else 'its own'} "
            f"| {row['refit']['median_seconds']:.3f} | {min(ratios(row)):.2f} "
            f"| {row['refit']['growth_mb']['driver']:.0f} | {row['largest_tensor_mb']:.1f} "
            f"| {', '.join(f'{value:.4f}' for value in differences.values())} |"
        )
    return "\n".join(lines)


def ratios(row: dict[str, Any]) -> list[float]:
    """Seconds of each refit over the least that streaming the same weights to nobody took.

    The least of them compares both at their quickest: several processes share the cores, and what
    they wait for each other differs from run to run.
    """
    return [seconds / min(row["stream"]["seconds"]) for seconds in row["refit"]["seconds"]]


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Refits over streaming, by layout."""
    groups: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        name = f"{row['parameters'] / 1e6:.1f}M, {row['engines'] or 'no'} processes"
        groups.setdefault(row["layout"], {})[name] = ratios(row)
    return Chart("Refits by layout of the ranks", "seconds over those of streaming", groups)


if __name__ == "__main__":
    main()

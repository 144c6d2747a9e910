r"""What the V2 drafter drafts from: siblings, earlier epochs, other prompts; tokens a step of each.

    .venv/bin/python -m benchmarks.rollout.v2_corpus --json benchmarks/results/v2_corpus.json
    .venv/bin/python -m benchmarks.rollout.v2_corpus --json benchmarks/results/v2_language.json \\
        --tasks word-problems --temperatures 0.4 0.6 0.8 1.0 1.2 --lengths 3 5 11
    .venv/bin/python -m benchmarks.rollout.v2_corpus --trees --temperatures 0.6 1.0 1.5 1.7 \\
        --lengths 3 8 24 --prompts 8 --json benchmarks/results/v2_trees.json
    .venv/bin/python -m benchmarks.rollout.v2_corpus --newest 4 16 64 128 --epochs 33 \\
        --lengths 5 11 --prompts 8 --json benchmarks/results/v2_history.json

Plain decoding of a model's own task makes responses, the same weights in every epoch. They are
replayed in batches through the drafter's index on the host, by the numpy reference, and steps are
counted. In the first epoch without the corpus, only a prompt's own siblings draft. Without history,
prompts are new ones in every epoch, as where days lie between two epochs. With ``--trees``, each
prompt's index stands beside the C tree of the V1 proposer instead, on the same responses. With
``--newest``, the last epoch drafts from so many of a prompt's newest responses, by these trees.
Needs no Triton: importing the kernels is avoided.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.recording import WORD_PROBLEMS
from benchmarks.shared.records import merged, read
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.trainer.data.dataset import open_dataset
from nemo_specrl.trainer.recipe import Recipe, load_recipe

RECIPES = {
    "sorting": ("grpo_sort_cpu", ()),
    "arithmetic": ("dapo_arith_cpu", ("policy.model_name=examples/models/qwen3-arith-small",)),
    # All templates of word problems, not those alone on which its recipe trains.
    WORD_PROBLEMS: (
        "grpo_gsm_smollm2_cpu",
        (
            *("data.dataset_name=reasoning_gym:gsm_symbolic", "data.data_path=null"),
            *("data.split_validation_size=0", "data.env_name=null"),
        ),
    ),
}
"""Recipe and overrides of each task."""
GROUP = 4


def task_recipe(task: str, prompts: int) -> Recipe:
    """The recipe of a task with so many prompts."""
    name, overrides = RECIPES[task]
    options = [f"data.num_prompts={prompts}", "grpo.num_prompts_per_step=1", *overrides]
    options += ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=1"]
    return load_recipe(Path(f"examples/configs/{name}.yaml"), options)


def responses(
    task: str, temperatures: list[float], prompts: int, epochs: int
) -> list[tuple[Any, float]]:
    """For each temperature: responses by epoch, prompt and row, and their tokens' mean probability.

    Probabilities are those with which the tokens were drawn.
    """
    from vllm import LLM, SamplingParams

    from nemo_specrl.trainer.policy_config import eos_token_ids

    recipe = task_recipe(task, prompts)
    policy, generation = recipe.policy, recipe.policy.generation
    problems = open_dataset(recipe.data, policy, 0).training
    llm = LLM(
        policy.model_name, enforce_eager=True, max_model_len=generation.vllm_cfg.max_model_len,
        seed=0, skip_tokenizer_init=True, block_size=32, dtype=generation.vllm_cfg.precision,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    found = []
    for temperature in temperatures:
        params = SamplingParams(
            n=GROUP, temperature=temperature, max_tokens=generation.max_new_tokens, logprobs=0,
            stop_token_ids=eos_token_ids(policy.model_name), detokenize=False,
        )  # fmt: skip
        asked = [{"prompt_token_ids": p.prompt} for p in problems]
        made, p = [], []
        for _ in range(epochs):
            outputs = llm.generate(asked, params, use_tqdm=False)
            made.append([[list(c.token_ids) for c in output.outputs] for output in outputs])
            for completion in (c for output in outputs for c in output.outputs):
                pairs = zip(completion.logprobs, completion.token_ids, strict=True)
                p += [float(np.exp(entry[token].logprob)) for entry, token in pairs]
        found.append((made, float(np.mean(p))))
    return found


def replay(
    made: Any, *, history: bool, corpus: bool, length: int, prompts_at_once: int
) -> list[float]:
    """Tokens a step, by epoch, with at most ``length`` drafted tokens a row and step."""
    from tests.support.v2_drafting import Rows, steps_of

    longest = max(len(r) for prompts in made for group in prompts for r in group) + 32
    rows = Rows(rows=prompts_at_once * GROUP, longest=longest, length=length, max_bytes=64 << 20)
    if not corpus:
        rows.index._share = lambda page: None
    found = []
    for epoch, prompts in enumerate(made):
        steps = tokens = 0
        for first in range(0, len(prompts), prompts_at_once):
            lot = [r for group in prompts[first : first + prompts_at_once] for r in group]
            for row in range(len(lot)):
                prompt = first + row // GROUP
                key = b"%d" % prompt if history else b"%d/%d" % (epoch, prompt)
                rows.open(row, key, identity=epoch << 16 | row % GROUP)
            steps += steps_of(rows, lot)
            tokens += sum(map(len, lot))
            for row in range(len(lot)):
                rows.index.close_row(row)
        found.append(tokens / steps)
    return found


def beside_trees(made: Any, length: int) -> dict[str, list[float]]:
    """Tokens a step, by epoch, of each prompt's index, and of its tree with as long drafts."""
    from tests.support.v2_drafting import steps_with_index, steps_with_trees

    vocabulary = 1 + max(t for prompts in made for group in prompts for r in group for t in r)
    found: dict[str, list[float]] = {"index": [], "trees": []}
    for epoch, prompts in enumerate(made):
        steps = {name: 0 for name in found}
        for prompt, group in enumerate(prompts):
            history = [r for earlier in made[:epoch] for r in earlier[prompt]]
            steps["index"] += steps_with_index(group, history, length, vocabulary)
            steps["trees"] += steps_with_trees(group, history, length)
        tokens = sum(len(r) for group in prompts for r in group)
        for name in found:
            found[name].append(tokens / steps[name])
    return found


def by_history(made: Any, length: int, newest: list[int]) -> dict[str, list[float]]:
    """Tokens a step of the last epoch, with so many earlier responses in a prompt's tree."""
    from tests.support.v2_drafting import steps_with_trees

    steps = [0] * len(newest)
    for prompt, group in enumerate(made[-1]):
        history = [r for earlier in made[:-1] for r in earlier[prompt]]
        for i, count in enumerate(newest):
            steps[i] += steps_with_trees(group, history[-count:], length)
    tokens = sum(len(r) for group in made[-1] for r in group)
    return {"newest": newest, "tokens_per_step": [tokens / n for n in steps]}


def without_triton() -> None:
    """Have the numpy reference stand where the index launches kernels."""
    name = "nemo_specrl.engine.drafters.v2.kernels"
    sys.modules[name] = types.SimpleNamespace(SCATTERED=types.SimpleNamespace(value=256))  # type: ignore[assignment]
    from nemo_specrl.engine.drafters.v2 import arrays
    from tests.support import v2_numpy

    arrays.kernels = v2_numpy  # type: ignore[attr-defined]


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens a step over the mean probability of a token, with history and corpus."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    chosen = [row for row in rows if row["history"] and row["corpus"]]
    lengths = sorted({row["length"] for row in chosen})
    for length, style in zip(lengths, ("-", "--", ":"), strict=False):
        line = sorted((r for r in chosen if r["length"] == length), key=lambda r: r["mean_p"])
        for epoch, name in ((0, "first epoch"), (1, "second"), (2, "third")):
            axes.plot(
                [row["mean_p"] for row in line],
                [row["tokens_per_step"][epoch] for row in line],
                style,
                color=f"C{epoch}",
                marker="o",
                label=f"{name}, at most {length} drafted",
            )
    axes.set_xlabel("mean probability of a sampled token")
    axes.set_ylabel("tokens of a row per engine step")
    axes.set_ylim(bottom=1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=RECIPES, default=["sorting", "arithmetic"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 1.5])
    parser.add_argument("--lengths", nargs="+", type=int, default=[5], help="drafted tokens")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompts-at-once", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--trees", action="store_true", help="beside the trees of the V1 proposer")
    parser.add_argument("--newest", nargs="+", type=int, help="earlier responses to draft from")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the rows of --json instead of measuring")
    args = parser.parse_args()
    if args.plot:
        chart(read(args.json)["rows"], args.plot)
        return
    local_cpu_environment()
    without_triton()
    rows = []
    for task in args.tasks:
        measured = responses(task, args.temperatures, args.prompts, args.epochs)
        for temperature, (made, p) in zip(args.temperatures, measured, strict=True):
            for length in args.lengths:
                of = {"task": task, "temperature": temperature, "mean_p": p, "length": length}
                for found in measured_ways(made, length, args):
                    rows.append(of | found)
                    print(rows[-1], flush=True)
    if args.json:
        keys = ("task", "temperature", "length")
        others = ("prompts_at_once", "history", "corpus")
        merged(args.json, rows, keys if args.trees or args.newest else keys + others)


def measured_ways(made: Any, length: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is asked for of one task, temperature and length."""
    if args.trees:
        yield beside_trees(made, length)
        return
    if args.newest:
        yield by_history(made, length, args.newest)
        return
    for history in (True, False):
        for corpus in (False, True):
            place = {"prompts_at_once": args.prompts_at_once, "history": history, "corpus": corpus}
            found = replay(made, length=length, **place)
            yield place | {"tokens_per_step": found}


if __name__ == "__main__":
    main()

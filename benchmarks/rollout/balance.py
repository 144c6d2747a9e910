"""Measure how far apart four engines end that share a batch, by how its rows are dealt out.

    .venv/bin/python -m benchmarks.rollout.balance --out results/balance.json

A batch of sorting problems, eight rows of each prompt, through four engines, each a
``SpeculativeLLM`` with ``preset: lossless`` and trees of its own, in two epochs with unchanged
weights. Each row is cut off at a length that is drawn, if it does not end before. Lengths are
log-normal, with a standard deviation of the logarithm of 1 between prompts, which is a heavy tail,
and of 0.3 among the rows of a prompt, anew in each epoch.

The engines do their shares one after the other, in one process, from what was cached before the
batch: as on four machines, none sees what another one makes meanwhile. An engine's end is the
number of steps, or processor seconds, that it takes for its share; the spread of a batch is the
latest end minus the earliest one. ``--places`` is ``max_num_seqs``: with 64, all rows of an engine
run at once. ``--drafts`` is ``tree.max_draft_tokens``. Needs the CPU stack.

- ``split``: each engine gets the next rows, as NeMo-RL's synchronous engines do
- ``in turn``: rows go one by one to one engine after the other, as NeMo-RL gives them to
  asynchronous ones
- ``queue``: what the plug-in does with asynchronous engines, all rows at once
- ``prompts``: what the embedded trainer does, which keeps the rows of a prompt together
- ``rows``: what the plug-in does with synchronous ones
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks.shared.arms import in_own_process
from benchmarks.shared.engines import Steps, sorting_engine
from benchmarks.shared.records import Chart, outputs, present, read, rounded, save
from benchmarks.shared.turns import Turns
from nemo_specrl import RolloutStore, SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.load_balance import balanced_order, row_costs
from nemo_specrl.engine.row_queue import RowQueue
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.rollout import Rollout, prompt_key
from nemo_specrl.trainer.data.toy_tasks import EOS, problems

ENGINES, GROUP = 4, 8
MEDIAN, FEWEST, MOST = 20, 4, 160
"""Tokens at which responses are cut off."""
BETWEEN, WITHIN = 1.0, 0.3
"""Standard deviations of their logarithm: between prompts, and among the rows of one."""
MODES = (("split", "in turn", "queue"), ("split", "in turn", "queue", "prompts", "rows"))
"""What is measured in the first epoch, in which nothing is known, and in the second one."""


def lengths(prompts: int, seed: int, epoch: int) -> np.ndarray:
    """Tokens at which the rows of each prompt are cut off, int ``[prompts, GROUP]``."""
    of_prompts = np.random.default_rng(seed).normal(0, BETWEEN, (prompts, 1))
    of_rows = np.random.default_rng([seed, epoch]).normal(0, WITHIN, (prompts, GROUP))
    return (MEDIAN * np.exp(of_prompts + of_rows)).clip(FEWEST, MOST).astype(int)


def configured(drafts: int) -> SpecRLConfig:
    return SpecRLConfig(
        enabled=True,
        preset="lossless",
        tree={"adaptive": False, "max_draft_tokens": drafts},  # counts are the same anywhere
    )


class LaterStore(RolloutStore):
    """A store in which rollouts are found once the batch in which they were made has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: list[Rollout] = []

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Keep rollouts until the end of the batch."""
        self._made += rollouts

    def forget_batch(self) -> None:
        """Forget what was put since the last batch's end."""
        self._made = []

    def end_batch(self) -> None:
        """Store what the batch has made."""
        super().put(self._made)
        self.sync()
        self._made = []


def shares_of(mode: str, keys: Sequence[bytes], store: RolloutStore) -> list[list[int]]:
    """Indices of a batch's rows, by engine."""
    rows = range(len(keys))
    if mode == "in turn":
        return [list(rows[engine::ENGINES]) for engine in range(ENGINES)]
    if mode == "queue":
        engines = asyncio.run(engines_of(keys, store))
        return [[row for row in rows if engines[row] == engine] for engine in range(ENGINES)]
    order = list(rows)
    if mode == "rows":  # as nemo_rl/generation.py does
        order = balanced_order(row_costs(keys, store.get(keys)), ENGINES)
    elif mode == "prompts":  # as trainer/generation/ray_engines.py does
        prompts = keys[::GROUP]
        of_prompts = balanced_order(row_costs(prompts, store.get(prompts)), ENGINES)
        order = [GROUP * prompt + k for prompt in of_prompts for k in range(GROUP)]
    size = len(keys) // ENGINES
    return [order[start : start + size] for start in range(0, len(keys), size)]


async def engines_of(keys: Sequence[bytes], store: RolloutStore) -> list[int]:
    """The engine of each row by a queue that has seen the epoch before, if there was one."""
    queue = RowQueue(ENGINES, together=GROUP)
    lengths = {key: [len(rollout) for rollout in made] for key, made in store.get(keys).items()}
    if lengths:
        async with AsyncExitStack() as places:
            for key in keys:
                place = await places.enter_async_context(queue.place(key))
                places.callback(queue.leave, place, lengths[key].pop())
    async with AsyncExitStack() as places:
        return [(await places.enter_async_context(queue.place(key))).engine for key in keys]


def measure(
    llms: Sequence[Any], steps: Sequence[Steps], config: SpecRLConfig, count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Figures of both epochs, each from empty trees; the second from what the first has cached."""
    prompts = [problem.prompt for problem in problems("sorting", count, seed)]
    order = np.random.default_rng(seed).permutation(count)
    batch = [(int(prompt), k) for prompt in order for k in range(GROUP)]
    keys = [prompt_key(prompts[prompt]) for prompt, _ in batch]
    with (
        tempfile.TemporaryDirectory() as folder,
        LaterStore(folder, max_bytes=2**26, tokenizer_id="benchmark") as store,
    ):
        for epoch, modes in enumerate(MODES):
            budgets = lengths(count, seed, epoch)
            for mode in modes:
                ends, seconds, row_steps, tokens = [], [], 0, 0
                store.forget_batch()
                shares = shares_of(mode, keys, store)
                for llm, of_engine, share in zip(llms, steps, shares, strict=True):
                    engine = emptied(llm, store, config, seed, epoch)
                    of_engine.begin()
                    made = engine.generate(
                        [{"prompt_token_ids": prompts[batch[i][0]]} for i in share],
                        [params(batch[i], budgets, epoch, seed) for i in share],
                        sample_indices=[batch[i][1] for i in share],
                        use_tqdm=False,
                    )
                    of_engine.end()
                    ends.append(len(of_engine.seconds) - 1)
                    seconds.append(sum(of_engine.seconds))
                    row_steps += engine.metrics.tree_steps
                    tokens += sum(len(output.outputs[0].token_ids) for output in made)
                yield {
                    **{"seed": seed, "epoch": epoch, "mode": mode, "ends": ends},
                    **{"ends_s": seconds, "row_steps": row_steps, "tokens": tokens},
                }
            store.end_batch()


def emptied(llm: Any, store: Any, config: SpecRLConfig, seed: int, epoch: int) -> SpeculativeLLM:
    """An engine without trees and KV cache."""
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    drafter.__init__(llm.llm_engine.vllm_config)
    llm.reset_prefix_cache()
    return SpeculativeLLM(llm, store, config, seed=seed, policy_version=epoch)


def params(row: tuple[int, int], budgets: np.ndarray, epoch: int, seed: int) -> Any:
    """Sampling parameters of a row, a prompt's index and a sample index."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=int(budgets[row]),
        stop_token_ids=[EOS],
        temperature=1.0,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        seed=(epoch * len(budgets) + row[0]) * GROUP + row[1] + 10**6 * seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 24])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[24, 64], help="each a multiple of four"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    outputs(parser)
    args = parser.parse_args()
    result = read(args.report) if args.report else save(args.out, {"rows": run(args)})
    present(report(result["rows"]), chart(result["rows"]), args.plot)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each kind of engine in a process of its own."""
    kinds = itertools.product(args.prompts, args.places, args.drafts)
    parts = (in_own_process(of_kind, *kind, args.seeds) for kind in kinds)
    return rounded(row for part in parts for row in part)


def of_kind(prompts: int, places: int, drafts: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of all seeds, on the same engines."""
    local_cpu_environment()
    config = configured(drafts)
    llms = [sorting_engine(places, engine_options(config)) for _ in range(ENGINES)]
    steps = [Steps(llm.llm_engine, Turns()) for llm in llms]
    return [
        {"prompts": prompts, "places": places, "drafts": drafts, **row}
        for seed in seeds
        for row in measure(llms, steps, config, prompts, seed)
    ]


def means(rows: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """For each kind of engine and epoch, means over the seeds by way of dealing out."""
    place = itemgetter("prompts", "places", "drafts", "epoch")
    for here in sorted({place(row) for row in rows}):
        found = {}
        for mode in MODES[here[-1]]:
            some = [row for row in rows if place(row) == here and row["mode"] == mode]
            ends, seconds = (np.array([row[of] for row in some]) for of in ("ends", "ends_s"))
            found[mode] = {
                "spread": np.ptp(ends, axis=1).mean(),
                "spread_s": np.ptp(seconds, axis=1).mean(),
                "end": ends.max(axis=1).mean(),
                "end_s": seconds.max(axis=1).mean(),
                "gain": sum(row["tokens"] for row in some) / sum(row["row_steps"] for row in some),
            }
        yield here, found


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: how far apart engines end and when the last one does, by way of dealing out."""
    lines = [
        "| prompts | `max_num_seqs` | drafts of at most | epoch | dealt out "
        "| between the ends: steps | over `split` | processor s "
        "| last end: steps | over `split` | processor s "
        "| tokens of a row's step |",
        "|---" * 12 + "|",
    ]
    for (prompts, places, drafts, epoch), found in means(rows):
        split = found["split"]
        for mode, of in found.items():
            lines.append(
                f"| {prompts} | {places} | {drafts} | {'later' if epoch else 'first'} | {mode} "
                f"| {of['spread']:.1f} | {of['spread'] / split['spread']:.2f} "
                f"| {of['spread_s']:.2f} | {of['end']:.1f} | {of['end'] / split['end']:.2f} "
                f"| {of['end_s']:.2f} | {of['gain']:.2f} |"
            )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Spread of the engines' ends by way of dealing out."""
    groups = {
        f"{prompts}, {places}, {drafts}\n{'later' if epoch else 'first'} epoch": {
            mode: [float(of["spread"])] for mode, of in found.items()
        }
        for (prompts, places, drafts, epoch), found in means(rows)
    }
    return Chart("Four engines that share a batch", "steps between the ends", groups, None)


if __name__ == "__main__":
    main()

r"""Compare what rollouts cost with each method of speculation, policies and prompts being the same.

    .venv/bin/python benchmarks/rollout.py --out results/rollout
    .venv/bin/python benchmarks/rollout.py --out results/rollout --tasks sorting --arms plain tree
    .venv/bin/python benchmarks/rollout.py --report benchmarks/results/rollout.json

A plain GRPO training is recorded once (``recording.py``): the weights with which each epoch begins.
Every arm then rolls out the same prompts under the same weights, epoch by epoch with an engine and
a cache of its own, from a cold first epoch on. Arms take turns within an epoch, in another order
each time, so that drift of the machine favours none. ``--groups`` does the same with a few prompts
and groups of growing size. Rows go to DIR/rollout.json, where those of an earlier call stay unless
they were measured again. Counts do not depend on the machine; seconds do, and processor seconds
less so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from recording import TASKS, recipe_of, record, weights
from rollout_tables import PLACE, PLAIN, report

from nemo_specrl.engine.compat import local_cpu_environment, mend_cpu_rejection_sampler
from nemo_specrl.errors import SpecRLError

SPEC = "policy.generation.spec_rl."
NGRAM, TREE = "n-gram", "tree"
LOSSLESS = (f"{SPEC}enabled=true", f"{SPEC}preset=lossless")
WITH_TREE = f"{SPEC}tree.enabled=true"


def reuse(preset: str, *more: str) -> tuple[str, ...]:
    return (f"{SPEC}enabled=true", f"{SPEC}preset={preset}", *more)


def of_vllm(speculative_config: str) -> tuple[str, ...]:
    options = f"policy.generation.vllm_kwargs.speculative_config={{{speculative_config}}}"
    return (f"{SPEC}enabled=false", options)


ARMS: dict[str, tuple[str, ...]] = {
    PLAIN: (f"{SPEC}enabled=false",),
    NGRAM: of_vllm(
        "method: ngram, num_speculative_tokens: 5, prompt_lookup_min: 2, prompt_lookup_max: 4"
    ),
    "suffix": of_vllm("method: suffix, num_speculative_tokens: 24"),
    TREE: LOSSLESS,
    "rounds": (*LOSSLESS, f"{SPEC}tree.method=rounds"),
    "tree, run-ahead": (*LOSSLESS, f"{SPEC}run_ahead.enabled=true"),
    "faithful": reuse("faithful"),
    "faithful, tree": reuse("faithful", WITH_TREE),
    "fast": reuse("fast"),
    "fast, tree": reuse("fast", WITH_TREE),
}
"""Arms of the comparison, by the overrides of the recipe that make them."""
SMALL_BOUND = 2 * 2**20
GROUP_ARMS = {
    PLAIN: ARMS[PLAIN],
    TREE: ARMS[TREE],
    "tree, 2 MiB": (*LOSSLESS, f"{SPEC}tree.max_bytes={SMALL_BOUND}"),
}
GROUP_PROMPTS, GROUP_SEQUENCES, GROUP_EPOCHS = 4, 16, 2
QUANTITIES = ("reward", "logprob", "length")


class Counter:
    """Counts of an engine in this process, the same for every method of drafting.

    Args:
        llm: the engine.

    Attributes:
        steps: of the engine.
        row_steps: steps in which a row yielded a token, summed over rows; without drafting, as
            many as tokens.
        drafted: tokens that a drafter inside the engine had proposed and the engine verified.
        accepted: those of them that were accepted.
        proposer_s: time of that drafter, seconds.
        tree_bytes: memory of trees, at most.
    """

    def __init__(self, llm: Any) -> None:
        self.clear()
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        update = core.scheduler.update_from_output

        def update_from_output(scheduled: Any, output: Any) -> Any:
            self._count(scheduled, output)
            return update(scheduled, output)

        core.scheduler.update_from_output = update_from_output
        self.drafter = getattr(runner, "drafter", None)
        if self.drafter is not None:
            propose = self.drafter.propose

            def timed(*args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                drafts = propose(*args, **kwargs)
                self.proposer_s += time.perf_counter() - started
                if self.steps % 32 == 0:
                    self.look()
                return drafts

            self.drafter.propose = timed

    def clear(self) -> None:
        """Set everything to 0."""
        self.steps = self.row_steps = self.drafted = self.accepted = self.tree_bytes = 0
        self.proposer_s = 0.0

    def look(self) -> None:
        """Note the memory of the trees."""
        trees = getattr(self.drafter, "trees", None)
        if trees is not None:
            self.tree_bytes = max(self.tree_bytes, trees.nbytes)

    def _count(self, scheduled: Any, output: Any) -> None:
        self.steps += scheduled.total_num_scheduled_tokens > 0
        drafts = scheduled.scheduled_spec_decode_tokens
        for name in scheduled.num_scheduled_tokens:
            if not output.sampled_token_ids:
                break
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            self.row_steps += len(sampled) > 0
            if drafts.get(name):
                self.drafted += len(drafts[name])
                self.accepted += len(sampled) - 1


class Arm:
    """An engine with its options, and a rollout cache if it needs one."""

    def __init__(
        self, task: str, recording: Path, folder: Path, overrides: tuple[str, ...]
    ) -> None:
        from nemo_specrl.cache.journal import JournaledStore
        from nemo_specrl.trainer.generation import Generation, tokenizer_identity

        self.recipe = recipe = recipe_of(task, recording, overrides)
        self.store = None
        if recipe.spec_rl.enabled:
            self.store = JournaledStore(
                folder / "cache",
                folder / "journal",
                run="benchmark",
                max_bytes=2**30,
                tokenizer_id=tokenizer_identity(recipe.policy.model_name),
                groups_per_prompt=recipe.spec_rl.cache.groups_per_prompt,
            )
        self.generation = Generation(recipe, self.store)
        config = self.generation.llm.llm_engine.vllm_config
        if config.speculative_config is not None:
            mend_cpu_rejection_sampler()
        self.counter = Counter(self.generation.llm)
        self.responses: list[list[list[int]]] = []  # of the last epoch, [prompt][sample]
        self.logprobs: list[list[list[float]]] = []  # of their tokens, nats

    def measure(self, epoch: int, new_weights: Any, chosen: list[Any]) -> dict[str, Any]:
        """Roll out a group for each problem under an epoch's weights."""
        from nemo_specrl.trainer.task import reward

        self.generation.refit(new_weights, epoch)
        self.counter.clear()
        wall, processor = time.perf_counter(), time.process_time()
        groups = self.generation.rollouts([problem.prompt for problem in chosen])
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        self.counter.look()
        self.responses = [[g.tokens for g in group] for group in groups]
        self.logprobs = [[g.policy_logprobs.tolist() for g in group] for group in groups]
        times = self.generation.take_times()
        if self.store is not None:
            self.store.forget()  # the journal, as at a checkpoint
        rows = [
            [(reward(problem, g.tokens), g.policy_logprobs.mean(), len(g.tokens)) for g in group]
            for problem, group in zip(chosen, groups, strict=True)
        ]
        values = np.array(rows, dtype=float)  # [prompts, group, quantities]
        se = np.sqrt(values.var(axis=1, ddof=1).mean(axis=0) / values[..., 0].size)
        p = np.exp(np.concatenate([g.policy_logprobs for group in groups for g in group]))
        counter = self.counter
        return {
            "prompts": len(chosen),
            "wall_s": wall,
            "processor_s": processor,
            "engine_steps": counter.steps,
            "row_steps": counter.row_steps,
            "response_tokens": times.response_tokens,
            "decoded_tokens": times.decoded_tokens,
            "drafted_tokens": counter.drafted,
            "accepted_tokens": counter.accepted,
            "proposer_s": counter.proposer_s,
            "tree_bytes": counter.tree_bytes,
            "mean_p": float(p.mean()),
            **dict(zip(QUANTITIES, values.mean(axis=(0, 1)), strict=True)),
            **{f"{name}_se": value for name, value in zip(QUANTITIES, se, strict=True)},
        }


def measure(
    part: dict[str, Any], recording: Path, arms: dict[str, tuple[str, ...]], epochs: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure arms side by side, in a process of its own.

    Args:
        part: task, sequences, group, seed and number of prompts.
        recording: folder of the task's recording.
        arms: overrides by name.
        epochs: to measure.

    Returns:
        Rows, and why arms were left out.
    """
    from nemo_specrl.trainer.task import problems

    common = (
        f"grpo.seed={part['seed']}",
        "grpo.num_prompts_per_step=1",  # nothing is trained
        f"grpo.num_generations_per_prompt={part['group']}",
        f"policy.train_global_batch_size={part['group']}",
        f"policy.generation.vllm_kwargs.max_num_seqs={part['sequences']}",
    )
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    made: dict[str, Arm] = {}
    with tempfile.TemporaryDirectory() as scratch:
        # vLLM 0.32 cannot make an engine where llvmlite was loaded, as by its n-gram drafter
        # (triton_utils/dispatcher.py asks every module's values for an attribute).
        for name, overrides in sorted(arms.items(), key=lambda arm: arm[0] == NGRAM):
            try:
                folder = Path(scratch) / name
                made[name] = Arm(part["task"], recording, folder, (*overrides, *common))
            except (SpecRLError, ImportError) as error:
                if name == PLAIN:
                    raise
                left_out[name] = " ".join(str(error).split())
                print(f"{name}: left out: {left_out[name]}", flush=True)
        data = recipe_of(part["task"], recording).data
        chosen = list(problems(data.dataset_name, data.num_prompts, data.seed)[: part["prompts"]])
        others = [p.prompt for p in problems(data.dataset_name, 2, data.seed + 1000)]
        for arm in made.values():  # what happens once is not measured
            arm.generation.heldout(others, 2)
        for epoch in range(epochs):
            turn = epoch % len(made)
            for name in [*list(made)[turn:], *list(made)[:turn]]:
                row = made[name].measure(epoch, weights(recording, epoch), chosen)
                label = {**part, "arm": name, "epoch": epoch, "load": os.getloadavg()[0]}
                rows.append({**label, **row})
                if name == PLAIN:  # for replays of drafting without an engine
                    path = recording / f"responses_{part['group']}_{part['seed']}_{epoch}.json"
                    path.write_text(json.dumps(made[name].responses))
                print(
                    f"{part['task']}, {part['sequences']} at once, groups of {part['group']}, "
                    f"epoch {epoch}: {name}: {row['wall_s']:.1f} s, {row['engine_steps']} steps",
                    flush=True,
                )
        for arm in made.values():
            if arm.store is not None:
                arm.store.close()
    return rows, left_out


def in_own_process(function: Any, *args: Any) -> Any:
    """Run a function in a new process: engines are not taken down in one that makes others."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def merged(path: Path, rows: list[dict[str, Any]], left_out: dict[str, str]) -> dict[str, Any]:
    """Add rows to a file, instead of those that it has of the same place, and return it all."""
    had = json.loads(path.read_text()) if path.exists() else {"rows": [], "left_out": {}}
    order = [*ARMS, *GROUP_ARMS]
    everything = sorted([*had["rows"], *rows], key=lambda row: order.index(row["arm"]))
    by_key = {(row["arm"], *(row[k] for k in PLACE)): row for row in everything}
    measured = {row["arm"] for row in by_key.values()}
    reasons = {**had["left_out"], **left_out}
    data = {
        "left_out": {name: why for name, why in reasons.items() if name not in measured},
        "rows": [
            {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
            for row in by_key.values()
        ],
    }
    lines = ",\n".join(json.dumps(row) for row in data["rows"])
    path.write_text(f'{{"left_out": {json.dumps(data["left_out"])},\n"rows": [\n{lines}\n]}}\n')
    return data


def run(args: argparse.Namespace) -> None:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    local_cpu_environment()
    result = args.out / "rollout.json"
    for task in args.tasks:
        recording = args.recordings or args.out / "recordings"
        recording = recording / task
        in_own_process(
            record, task, recording, args.epochs, args.warm_up_steps, tuple(args.override)
        )
        of_arms = {"group": args.group, "prompts": args.prompts, "of_groups": False}
        of_groups = {"sequences": GROUP_SEQUENCES, "prompts": GROUP_PROMPTS, "of_groups": True}
        parts = [{**of_arms, "sequences": n} for n in args.sequences]
        parts += [{**of_groups, "group": n} for n in args.groups]
        for seed in args.seeds:
            for part in parts:
                epochs = min(args.epochs, GROUP_EPOCHS) if part["of_groups"] else args.epochs
                arms = (
                    GROUP_ARMS if part["of_groups"] else {a: ARMS[a] for a in [PLAIN, *args.arms]}
                )
                part = {"task": task, "seed": seed, **part}
                data = merged(result, *in_own_process(measure, part, recording, arms, epochs))
                print(f"\n{report(data)}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the recordings and of rollout.json")
    parser.add_argument("--recordings", type=Path, help="folder of the recordings, if another")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="beside plain, always measured"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of sampling")
    parser.add_argument("--sequences", type=int, nargs="*", default=[10, 64], help="max_num_seqs")
    parser.add_argument("--prompts", type=int, default=32, help="of an epoch")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--groups", type=int, nargs="*", default=[4, 16, 64, 256])
    parser.add_argument("--warm-up-steps", type=int, default=300, help="of a task's own model")
    parser.add_argument("--override", nargs="*", default=[], help="of the recording's recipe")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print the tables of a file")
    args = parser.parse_args()
    if args.report:
        print(report(json.loads(args.report.read_text())))
    elif args.out is None:
        parser.error("--out DIR or --report JSON is required")
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        run(args)


if __name__ == "__main__":
    main()

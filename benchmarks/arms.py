"""Engines with each method of speculation, side by side on recorded policies.

``rollout.py``, ``sweep.py``, ``regimes.py`` and ``simulate.py`` compare them. Engines are in the
process of the caller, where their steps are counted; ``environment`` sets what that needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from recording import recipe_of, record, weights

from nemo_specrl.engine.compat import local_cpu_environment, mend_cpu_rejection_sampler
from nemo_specrl.errors import SpecRLError

PLAIN, NGRAM, TREE = "plain", "n-gram", "tree"
SPEC = "policy.generation.spec_rl."
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


class Steps:
    """Processor seconds of each step of an engine in this process, with what lies before it.

    Attributes:
        seconds: by step, of the last call of ``Generation.rollouts``.
    """

    def __init__(self, generation: Any) -> None:
        self.seconds: list[float] = []
        self._last = 0.0
        engine = generation.llm.llm_engine
        step, rollouts = engine.step, generation.rollouts

        def timed() -> Any:
            outputs = step()
            now = time.process_time()
            self.seconds.append(now - self._last)
            self._last = now
            return outputs

        def begun(*args: Any) -> Any:
            self.seconds, self._last = [], time.process_time()
            return rollouts(*args)

        engine.step, generation.rollouts = timed, begun


def quickest(readings: Sequence[Sequence[float]]) -> float:
    """Seconds of a phase that was repeated: the sum of each step's quickest reading.

    Repetitions with the same seeds take the same steps, and what a machine does beside makes them
    only slower. One that took another number of steps than the first is left out.
    """
    same = [seconds for seconds in readings if len(seconds) == len(readings[0])]
    return float(np.min(same, axis=0).sum())


class Arm:
    """An engine with its options, and a rollout cache if it needs one.

    Attributes:
        responses: of the last epoch, ``[prompt][sample]``.
        logprobs: of their tokens, nats.
        step_s: processor seconds of each step of the last epoch, by engine that shares the rows.
    """

    def __init__(
        self, task: str, recording: Path, folder: Path, overrides: tuple[str, ...]
    ) -> None:
        from nemo_specrl.trainer.generation import Generation

        self.recipe = recipe_of(task, recording, overrides)
        self._folders = (folder / str(i) for i in itertools.count())
        self.store = self._new_store() if self.recipe.spec_rl.enabled else None
        self.generation = Generation(self.recipe, self.store)
        config = self.generation.llm.llm_engine.vllm_config
        if config.speculative_config is not None:
            mend_cpu_rejection_sampler()
        self.counter = Counter(self.generation.llm)
        self._steps = Steps(self.generation)
        self.responses: list[list[list[int]]] = []
        self.logprobs: list[list[list[float]]] = []
        self.step_s: list[list[float]] = []

    def _new_store(self) -> Any:
        from nemo_specrl.cache.journal import JournaledStore
        from nemo_specrl.trainer.generation import tokenizer_identity

        folder = next(self._folders)
        return JournaledStore(
            folder / "cache",
            folder / "journal",
            run="benchmark",
            max_bytes=2**28,
            tokenizer_id=tokenizer_identity(self.recipe.policy.model_name),
            groups_per_prompt=self.recipe.spec_rl.cache.groups_per_prompt,
        )

    def begin_again(self, seed: int) -> None:
        """Empty the cache and the trees, and set the seed of sampling."""
        from nemo_specrl.speculation.trees import DraftTrees

        generation = self.generation
        object.__setattr__(generation.recipe.algorithm, "seed", seed)  # it is frozen
        generation.speculative.seed = generation.speculative.draw_seed = seed
        if self.store is not None:
            self.store.close()
            self.store = generation.store = generation.cache = self._new_store()
            generation.speculative.cache = self.store
        if isinstance(getattr(self.counter.drafter, "trees", None), DraftTrees):
            self.counter.drafter.trees = DraftTrees(self.recipe.spec_rl.tree.max_bytes)
        self.responses, self.logprobs = [], []

    def measure(
        self, epoch: int, new_weights: Any, chosen: list[Any], engines: int = 1
    ) -> dict[str, Any]:
        """Roll out a group for each problem under an epoch's weights.

        With several engines, this one does the work of each, one after the other; seconds and steps
        are those of the share that takes longest, counts are sums.
        """
        from nemo_specrl.speculation.balance import balanced_order
        from nemo_specrl.trainer.task import reward

        self.generation.refit(new_weights, epoch)
        self.counter.clear()
        if self.store is not None and self.responses:  # as trainer/engines.py does
            costs = [fmean(map(len, group)) for group in self.responses]
            order = balanced_order(costs, engines)
        else:
            order = list(range(len(chosen)))
        size = -(-len(chosen) // engines)
        longest = dict.fromkeys(("wall_s", "processor_s", "engine_steps"), 0.0)
        by_prompt: dict[int, list[Any]] = {}
        self.step_s = []
        for start in range(0, len(chosen), size):
            share = order[start : start + size]
            steps, wall, processor = self.counter.steps, time.perf_counter(), time.process_time()
            rollouts = self.generation.rollouts([chosen[i].prompt for i in share])
            here = {
                "wall_s": time.perf_counter() - wall,
                "processor_s": time.process_time() - processor,
                "engine_steps": self.counter.steps - steps,
            }
            longest = {name: max(longest[name], here[name]) for name in longest}
            self.step_s.append(self._steps.seconds)
            by_prompt.update(zip(share, rollouts, strict=True))
        groups = [by_prompt[i] for i in range(len(chosen))]
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
            **longest,
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


class Comparison:
    """Arms side by side in this process, on the first problems of a recording's task.

    Args:
        task: of ``recording.TASKS``.
        recording: folder of its recording.
        arms: overrides by name.
        group: rollouts of a prompt.
        sequences: that an engine runs at once.
        more: overrides of all arms.

    Attributes:
        arms: that could be made, by name.
        left_out: why others could not, by name.
    """

    def __init__(
        self,
        task: str,
        recording: Path,
        arms: dict[str, tuple[str, ...]],
        group: int,
        sequences: int,
        more: tuple[str, ...] = (),
    ) -> None:
        from nemo_specrl.trainer.task import problems

        common = (
            "grpo.num_prompts_per_step=1",  # nothing is trained
            f"grpo.num_generations_per_prompt={group}",
            f"policy.train_global_batch_size={group}",
            f"policy.generation.vllm_kwargs.max_num_seqs={sequences}",
            *more,
        )
        self.recording = recording
        self.arms: dict[str, Arm] = {}
        self.left_out: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory()
        # vLLM 0.32 cannot make an engine where llvmlite was loaded, as by its n-gram drafter
        # (triton_utils/dispatcher.py asks every module's values for an attribute).
        for name, overrides in sorted(arms.items(), key=lambda arm: arm[0] == NGRAM):
            try:
                folder = Path(self._scratch.name) / name
                self.arms[name] = Arm(task, recording, folder, (*overrides, *common))
            except (SpecRLError, ImportError) as error:
                if name == PLAIN:
                    raise
                self.left_out[name] = " ".join(str(error).split())
                print(f"{name}: left out: {self.left_out[name]}", flush=True)
        data = recipe_of(task, recording).data
        self.problems = problems(data.dataset_name, data.num_prompts, data.seed)
        others = [p.prompt for p in problems(data.dataset_name, 2, data.seed + 1000)]
        for arm in self.arms.values():  # what happens once is not measured
            arm.generation.heldout(others, 2)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        for arm in self.arms.values():
            if arm.store is not None:
                arm.store.close()
        self._scratch.cleanup()

    def epochs(
        self,
        label: dict[str, Any],
        prompts: int,
        versions: Sequence[int],
        *,
        temperature: float = 1.0,
        engines: int = 1,
        turn: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """Measure epochs of all arms, in another order each time.

        Args:
            label: what every row has beside its figures.
            prompts: of an epoch.
            versions: for each epoch to measure, the recorded epoch whose weights it has.
            temperature: see ``recording.weights``.
            engines: see ``Arm.measure``.
            turn: the arm that begins.
        """
        chosen = list(self.problems[:prompts])
        for epoch, version in enumerate(versions):
            first = (turn + epoch) % len(self.arms)
            for name in [*list(self.arms)[first:], *list(self.arms)[:first]]:
                new_weights = weights(self.recording, version, temperature)
                row = self.arms[name].measure(epoch, new_weights, chosen, engines)
                print(
                    *(f"{key} {value}," for key, value in label.items()),
                    f"epoch {epoch}: {name}: {row['wall_s']:.1f} s, {row['engine_steps']} steps",
                    flush=True,
                )
                yield {**label, "arm": name, "epoch": epoch, "load": os.getloadavg()[0], **row}

    def repeated(
        self, points: Sequence[dict[str, Any]], seeds: Sequence[int], repeats: int
    ) -> list[list[dict[str, Any]]]:
        """Measure points with each seed, from an empty cache, and all of it several times.

        Repetitions take the same steps of the engine. Processor seconds are the sum of each step's
        quickest reading; everything else is the first repetition's.

        Args:
            points: of each, what ``epochs`` takes, by name.
            seeds: of sampling.
            repeats: how often.

        Returns:
            The rows of each point.
        """
        made: dict[tuple[Any, ...], dict[str, Any]] = {}
        readings: dict[tuple[Any, ...], list[list[list[float]]]] = defaultdict(list)
        order = itertools.product(range(repeats), seeds, enumerate(points))
        for turn, (_, seed, (i, point)) in enumerate(order):
            for arm in self.arms.values():
                arm.begin_again(seed)
            label = {**point["label"], "seed": seed}
            for row in self.epochs(**{**point, "label": label}, turn=turn):
                key = i, seed, row["arm"], row["epoch"]
                made.setdefault(key, row)
                readings[key].append(self.arms[row["arm"]].step_s)
        for key, row in made.items():
            of_engines = zip(*readings[key], strict=True)
            row["processor_s"] = max(quickest(of_engine) for of_engine in of_engines)
        return [[row for key, row in made.items() if key[0] == i] for i in range(len(points))]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = parser.add_mutually_exclusive_group(required=True)
    results.add_argument("--out", type=Path, help="folder of the recordings and the results")
    results.add_argument("--report", type=Path, metavar="JSON", help="print the tables of a file")
    parser.add_argument("--recordings", type=Path, help="folder of the recordings, if another")
    parser.add_argument("--warm-up-steps", type=int, default=300, help="of a task's own model")
    parser.add_argument("--override", nargs="*", default=[], help="of the recording's recipe")
    return parser


def recorded(args: argparse.Namespace, task: str, epochs: int) -> Path:
    """Make the folder of the results, and the recording of a task unless it is there."""
    args.out.mkdir(parents=True, exist_ok=True)
    folder: Path = (args.recordings or args.out / "recordings") / task
    in_own_process(record, task, folder, epochs, args.warm_up_steps, tuple(args.override))
    return folder


def environment() -> None:
    """Set what engines on a CPU need, in this process and those that it starts."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    local_cpu_environment()


def rounded(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with numbers of five digits, as they are kept."""
    return [
        {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in rows
    ]


def merged(
    path: Path, rows: Sequence[dict[str, Any]], keys: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Add rows to a file, instead of those with the same ``keys`` that it has, and return all."""
    had = json.loads(path.read_text()) if path.exists() else []
    by_key = {tuple(row[key] for key in keys): row for row in [*had, *rows]}
    everything = rounded(by_key.values())
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in everything) + "\n]\n")
    return everything


def in_own_process(function: Any, *args: Any) -> Any:
    """Run a function in a new process: engines are not taken down in one that makes others."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()

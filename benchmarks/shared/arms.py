"""Engines with each method of speculation, side by side on recorded policies.

``rollout.py``, ``sweep.py``, ``regimes.py`` and ``simulate.py`` compare them. Engines
(``engines.py``) run in the caller's process, which has to call :func:`environment` first.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import signal
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.engines import Arm, of_steps
from benchmarks.shared.recording import recipe_of, record, weights
from benchmarks.shared.turns import Turns, by_processor_time
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.errors import SpecRLError
from nemo_specrl.rollout import Rollout

PLAIN, NGRAM, TREE = "plain", "n-gram", "tree"
SPEC = "policy.generation.spec_rl."
LOSSLESS = (f"{SPEC}enabled=true", f"{SPEC}preset=lossless")
WITH_TREE = f"{SPEC}tree.enabled=true"
FIXED_LENGTHS, ADAPTIVE_LENGTHS = (f"{SPEC}tree.adaptive={value}" for value in ("false", "true"))


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
    "faithful": reuse("faithful"),
    "faithful, tree": reuse("faithful", WITH_TREE),
    "fast": reuse("fast"),
    "fast, tree": reuse("fast", WITH_TREE),
}
"""The arms of the comparison by name, each as overrides of the recipe. Drafts end at a fixed chance
of being accepted unless an arm says otherwise, so that counts do not depend on the machine.
"""


@dataclass(frozen=True)
class Epochs:
    """Epochs of rollouts for which all arms are measured.

    Args:
        label: values that every row has beside its figures.
        prompts: number of prompts of an epoch.
        versions: for each epoch, the recorded epoch whose weights it uses.
        earlier: the recorded epoch under whose weights plain decoding makes the rollouts that are
            in every cache when the first epoch begins. None: caches are empty then.
        recording: folder of the recording. None: that of the comparison.
        temperature: see ``recording.weights``.
        sequences: number of sequences that an engine runs at once. None: that of the comparison.
        engines: see ``Arm.measure``.
        overrides: overrides of the arms' recipe.
    """

    label: dict[str, Any]
    prompts: int
    versions: Sequence[int]
    earlier: int | None = None
    recording: Path | None = None
    temperature: float = 1.0
    sequences: int | None = None
    engines: int = 1
    overrides: Sequence[str] = ()


class Comparison:
    """Arms side by side in this process, on the first problems of a recording's task.

    Args:
        task: a task of ``recording.TASKS``.
        recording: folder of its recording.
        arms: overrides by name.
        group: number of rollouts of a prompt.
        sequences: largest number of sequences that an engine runs at once.

    Attributes:
        arms: the arms that could be made, by name.
        left_out: for each other arm, why it could not be made.
    """

    def __init__(
        self,
        task: str,
        recording: Path,
        arms: dict[str, tuple[str, ...]],
        group: int,
        sequences: int,
    ) -> None:
        from nemo_specrl.trainer.data.dataset import open_dataset

        common = (
            "grpo.num_prompts_per_step=1",  # nothing is trained
            f"grpo.num_generations_per_prompt={group}",
            f"policy.train_global_batch_size={group}",
            f"policy.generation.vllm_kwargs.max_num_seqs={sequences}",
            # Of 32 tokens each: 512 a row. Engines of all arms share the machine's memory.
            f"policy.generation.vllm_kwargs.num_gpu_blocks_override={max(1024, 16 * sequences)}",
        )
        self._recording, self._sequences = recording, sequences
        self.arms: dict[str, Arm] = {}
        self.left_out: dict[str, str] = {}
        self._turns = Turns()
        by_processor_time(len(arms))
        self._last_s: dict[tuple[str, int], float] = {}
        self._scratch = tempfile.TemporaryDirectory()
        # vLLM 0.32 cannot make an engine where llvmlite was loaded, as by its n-gram drafter
        # (triton_utils/dispatcher.py asks every module's values for an attribute).
        for name, overrides in sorted(arms.items(), key=lambda arm: arm[0] == NGRAM):
            try:
                folder = Path(self._scratch.name) / name
                options = (FIXED_LENGTHS, *overrides, *common)
                self.arms[name] = Arm(task, recording, folder, options, self._turns)
            except (SpecRLError, ImportError) as error:
                if name == PLAIN:
                    raise
                self.left_out[name] = " ".join(str(error).split())
                print(f"{name}: left out: {self.left_out[name]}", flush=True)
        recipe = recipe_of(task, recording)
        self.problems = open_dataset(recipe.data, recipe.policy, 0).training

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        for arm in self.arms.values():
            if arm.store is not None:
                arm.store.close()
        gc.unfreeze()
        self._scratch.cleanup()

    def repeated(
        self,
        points: Sequence[Epochs],
        seeds: Sequence[int],
        repeats: int,
        note: Callable[[dict[str, Any], Arm], None] = lambda row, arm: None,
        seconds: float = 0.0,
    ) -> list[list[dict[str, Any]]]:
        """Measure points with each seed, from the same caches each time, several times over.

        Repetitions take the same steps of the engine, even where draft lengths depend on measured
        times: they verify the drafts of the first one. ``processor_s`` is the sum of each step's
        fastest reading, since other work on the machine can only slow a step down.
        ``repetitions_s`` has the seconds of each repetition. Everything else is from the first one.

        Args:
            points: points to be measured with the same engines.
            seeds: seeds of sampling.
            repeats: smallest number of repetitions.
            seconds: time that every arm is to be measured for, in each epoch; short points are
                repeated more often.
            note: called with each row of the first repetition and its arm, to add to the row.

        Returns:
            the rows of each point.
        """
        made: dict[tuple[Any, ...], dict[str, Any]] = {}
        readings: dict[tuple[Any, ...], list[list[list[float]]]] = defaultdict(list)
        proposed: dict[tuple[Any, ...], Any] = defaultdict(dict)
        earlier: dict[tuple[int, int], list[list[Rollout]]] = {}
        left = deque(itertools.product(seeds, range(len(points))))
        self._rehearse(points[0], seeds[0])
        turn = itertools.count()
        while left:
            seed, i = left.popleft()
            if (i, seed) not in earlier:
                earlier[i, seed] = self._earlier(points[i], seed)
            expected = {
                key[2:]: row["processor_s"] for key, row in made.items() if key[:2] == (i, seed)
            }
            enough = True
            state = earlier[i, seed], proposed[i, seed], expected
            for row in self._measure(points[i], seed, next(turn), *state):
                key = i, seed, row["arm"], row["epoch"]
                arm = self.arms[row["arm"]]
                if key not in made:
                    made[key] = row
                    note(row, arm)
                readings[key].append(arm.step_s)
                in_all = sum(map(sum, itertools.chain(*readings[key])))
                enough &= len(readings[key]) >= repeats and in_all >= seconds
            if not enough:
                left.append((seed, i))
        for key, row in made.items():
            of_engines = list(zip(*readings[key], strict=True))
            row["processor_s"] = max(of_steps(of_engine, np.min) for of_engine in of_engines)
            row["repetitions_s"] = [max(map(sum, engines)) for engines in readings[key]]
        return [[row for key, row in made.items() if key[0] == i] for i in range(len(points))]

    def _rehearse(self, point: Epochs, seed: int) -> None:
        """Run a part of a point, so that one-time costs are not measured.

        It also yields how long each arm takes, by which turns are divided from the first epoch on.
        """
        prompts = max(1, point.prompts // 4)
        part = dataclasses.replace(point, label={"part": "rehearsal"}, prompts=prompts)
        for _ in self._measure(part, seed, 0, self._earlier(part, seed), {}, {}):
            pass
        gc.collect()
        gc.freeze()  # as vLLM does: else one arm pays for collections over the heaps of all

    def _earlier(self, point: Epochs, seed: int) -> list[list[Rollout]]:
        """The rollouts that caches have when a point's first epoch begins, by prompt."""
        if point.earlier is None:
            return []
        plain = self.arms[PLAIN]
        self._begin_again(plain, point, seed)
        new_weights = self._weights(point, point.earlier)
        chosen = self.problems[: point.prompts]
        self._turns.run({PLAIN: lambda: plain.measure(0, new_weights, chosen)}, {})
        return plain.rollouts(chosen)

    def _begin_again(
        self, arm: Arm, point: Epochs, seed: int, earlier: Sequence[Sequence[Rollout]] = ()
    ) -> None:
        arm.begin_again(seed, point.sequences or self._sequences, point.overrides, earlier)

    def _weights(self, point: Epochs, version: int) -> Iterator[tuple[str, Any]]:
        return weights(point.recording or self._recording, version, point.temperature)

    def _measure(
        self,
        point: Epochs,
        seed: int,
        turn: int,
        earlier: list[list[Rollout]],
        proposed: dict[tuple[str, int], list[list[list[int]]]],
        expected: Mapping[tuple[str, int], float],
    ) -> Iterator[dict[str, Any]]:
        """Measure epochs of all arms, which take turns within an epoch (``turns.Turns``).

        Args:
            point: what to measure.
            seed: seed of sampling.
            turn: the arm that begins.
            earlier: rollouts of each prompt that are in the caches at the start.
            proposed: drafts of adaptive arms by arm and epoch. Those that it has are used again, so
                that a repetition takes the same steps; others are added.
            expected: processor seconds by arm and epoch from an earlier repetition; empty: those of
                the last measurement.
        """
        expected = expected or self._last_s
        chosen = list(self.problems[: point.prompts])
        for arm in self.arms.values():
            self._begin_again(arm, point, seed, earlier)
        for epoch, version in enumerate(point.versions, start=1 if earlier else 0):
            first = (turn + epoch) % len(self.arms)
            names = [*list(self.arms)[first:], *list(self.arms)[:first]]
            works = {
                name: functools.partial(
                    self.arms[name].measure,
                    epoch,
                    self._weights(point, version),
                    chosen,
                    point.engines,
                    proposed.get((name, epoch)),
                )
                for name in names
            }
            known = {name: expected[name, epoch] for name in names if (name, epoch) in expected}
            for name, row in self._turns.run(works, known).items():
                self._last_s[name, epoch] = row["processor_s"]
                proposed.setdefault((name, epoch), self.arms[name].counter.proposed)
                label = {**point.label, "seed": seed}
                print(
                    *(f"{key} {value}," for key, value in label.items()),
                    f"epoch {epoch}: {name}: {row['processor_s']:.1f} s, "
                    f"{row['engine_steps']} steps",
                    flush=True,
                )
                yield {**label, "arm": name, "epoch": epoch, "load": os.getloadavg()[0], **row}


def scatter(rows: Sequence[dict[str, Any]], place: Sequence[str]) -> str:
    """How far single repetitions are from the ratios of processor seconds that tables show.

    Args:
        rows: rows of all arms, including plain decoding.
        place: keys that tell rows of an arm apart.
    """

    def at(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in place)

    plain = {at(row): row for row in rows if row["arm"] == PLAIN}
    apart = []
    for row in rows:
        base = plain.get(at(row), row)
        if base is row or len(row["repetitions_s"]) < 2:
            continue
        shown = base["processor_s"] / row["processor_s"]
        pairs = zip(base["repetitions_s"], row["repetitions_s"], strict=True)
        apart += [abs(theirs / mine / shown - 1) for theirs, mine in pairs]
    if not apart:
        return "Everything was measured once."
    return (
        f"Ratios of seconds of {len(apart)} single repetitions lie {np.median(apart):.1%} from "
        f"those of all in the median, nine tenths within {np.quantile(apart, 0.9):.0%}, all within "
        f"{max(apart):.0%}."
    )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = parser.add_mutually_exclusive_group(required=True)
    results.add_argument("--out", type=Path, help="folder of the recordings and the results")
    results.add_argument("--report", type=Path, metavar="JSON", help="print the tables of a file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the figures")
    parser.add_argument("--recordings", type=Path, help="folder of the recordings, if another")
    parser.add_argument("--warm-up-steps", type=int, default=300, help="of any-order's model")
    parser.add_argument("--override", nargs="*", default=[], help="of the recording's recipe")
    return parser


def repeated_until(parser: argparse.ArgumentParser) -> None:
    """Add the option of a benchmark whose points are repeated until their readings settle."""
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="a point is repeated until every method has taken so long in all",
    )


def recorded(args: argparse.Namespace, task: str, epochs: int) -> Path:
    """Make the folder of the results, and the recording of a task unless it is there."""
    args.out.mkdir(parents=True, exist_ok=True)
    folder: Path = (args.recordings or args.out / "recordings") / task
    in_own_process(record, task, folder, epochs, args.warm_up_steps, tuple(args.override))
    return folder


def environment() -> None:
    """Set environment variables for engines on a CPU, in this process and those that it starts.

    By default, glibc returns a thread's memory to the system after large frees. The page faults
    that follow took up to a third of a short phase, and varied from run to run. glibc reads its
    settings when a process starts, so they only apply to processes that this one starts.
    """
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # engines are in threads
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 * 2**20))  # the largest there is
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 * 2**30))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    local_cpu_environment()


def in_own_process(function: Any, *args: Any) -> Any:
    """Run a function in a new process, so that its engines end with that process.

    The process ends with this one, also if this one is killed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent) as pool:
        return pool.submit(function, *args).result()


def _end_with_parent() -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

r"""What do partial rollouts save where lengths have a heavy tail, and what do they do to lengths?

    .venv/bin/python -m benchmarks.simulation.partial_rollouts \
        --out results/partial_rollouts.json
    .venv/bin/python -m benchmarks.simulation.partial_rollouts --parts "256 rows" engine \
        --out results/partial_rollouts.json

An epoch of prompts, step by step, in the order of ``nemo_specrl.trainer.partial_rollouts``: in the
simulated engine (``--parts "256 rows" "64 rows"``), and on a real one with a tiny model
(``engine``); ``--out`` adds to a file. Lengths
are drawn: that of a row is log-normal, with a part that its prompt decides. A row that was cut off
is drawn anew in the next step, as lossless drafting does. In the simulator a draft token, of which
there are as many as the row had, is accepted with the probability ``accepted``; ``continued`` is
prefix reuse at its best, where the row goes on from where it was. In the real engine the model
writes on whatever the length, and its trees draft; its steps are counted, not timed. The bias is
the mean length of what is trained on, over that of the same prompts' first draws.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.shared.arms import in_own_process
from benchmarks.shared.records import Chart, merged, outputs, present, read, rounded
from nemo_specrl.config import PartialRolloutsConfig
from nemo_specrl.engine.early_end import EarlyEnd
from nemo_specrl.simulation.simulated_engine import (
    FEATURES,
    SimulatedEngine,
    SimulatedRequest,
    Steps,
    run,
)
from nemo_specrl.speculation.acceptance import derived_seed
from nemo_specrl.trainer.partial_rollouts import (
    PutOff,
    asked_for,
    chosen_of,
    end_of_phase,
    put_off_after,
)
from nemo_specrl.trainer.recipe import Algorithm

Lengths = npt.NDArray[np.int64]
Phase = Callable[[list[int], Lengths, EarlyEnd | None], tuple[dict[str, float], list[int]]]
"""Roll out prompts, given the lengths of their rows, ``[prompts, group]``; returns what it took,
and the tokens that each row has made, in order."""

SECONDS = {"steps": 7e-3, "tokens": 33e-6, "kv_tokens": 70e-9}
"""Of an 8B model on an H100: the middle of the ranges in ``simulate_8b.py``."""
CASES = [(None, 0), (1.5, 1), (1.5, 3), (1.25, 1), (1.25, 3), (2.0, 1), (2.0, 3)]
"""``over_provision`` and ``max_put_off``; None: without partial rollouts. The real engine has the
first three."""
ACCEPTED = (0.0, 0.65, 0.9, None)
"""Probability of a draft token; 0.65 is what ``simulate_8b.py`` takes from publications for a later
epoch. None: rows go on from where they were."""
LEAST_CHANCE = 0.3
"""Drafts end where a token's chance falls below it, as adaptive drafts do."""


@dataclass(frozen=True)
class Setting:
    """An engine, and the lengths that it has to make.

    Args:
        prompts: of a step.
        group: rows of a prompt.
        steps: of an epoch.
        median: of a row's length, tokens.
        longest: tokens.
        of_prompts, in_group: standard deviations of the logarithm of a length.
        engine: limits.
    """

    prompts: int
    group: int
    steps: int
    median: int
    longest: int
    of_prompts: float
    in_group: float
    engine: SimulatedEngine

    def lengths(self, seed: int, prompt: int, draw: int) -> Lengths:
        """Of a prompt's rows at the draw-th time that it is asked for, int64 ``[group]``."""
        own = np.random.default_rng([seed, prompt]).normal(0, self.of_prompts)
        rows = np.random.default_rng([seed, prompt, draw]).normal(0, self.in_group, self.group)
        return np.clip(self.median * np.exp(own + rows), 2, self.longest).astype(np.int64)

    def algorithm(self, factor: float | None, most: int) -> Algorithm:
        """The block of a recipe with these ``over_provision`` and ``max_put_off``."""
        partial = PartialRolloutsConfig()
        if factor is not None:
            partial = PartialRolloutsConfig(enabled=True, over_provision=factor, max_put_off=most)
        return Algorithm(
            num_prompts_per_step=self.prompts,
            num_generations_per_prompt=self.group,
            partial_rollouts=partial,
        )


SIMULATED = {
    "256 rows": Setting(16, 16, 8, 400, 4096, 0.7, 0.7, SimulatedEngine(320)),
    "64 rows": Setting(4, 16, 16, 400, 4096, 0.7, 0.7, SimulatedEngine(128)),
}
REAL = Setting(4, 4, 8, 24, 224, 0.7, 0.7, SimulatedEngine(64, 64 * 256))


def epoch(
    setting: Setting, seed: int, case: tuple[float | None, int], phase: Phase, *, redrawn: bool
) -> dict[str, Any]:
    """Roll out an epoch; returns what it took, summed, and the lengths that were trained on."""
    algorithm, order = setting.algorithm(*case), list(range(setting.prompts * setting.steps))
    put_off: PutOff = []
    took: dict[str, float] = {}
    trained: list[float] = []
    times: list[int] = []
    for step in range(setting.steps):
        done = step * setting.prompts
        asked = order[done : done + setting.prompts]
        end = None
        if algorithm.partial_rollouts.enabled:
            asked = asked_for(order, done, put_off, algorithm)
            end = end_of_phase(put_off, algorithm)
        before = dict(map(tuple, put_off))
        drawn = np.stack(
            [setting.lengths(seed, p, before.get(p, 0) if redrawn else 0) for p in asked]
        )
        counts, made = phase(asked, drawn, end)
        for name, value in counts.items():
            took[name] = took.get(name, 0) + value
        ended = np.array(made).reshape(drawn.shape) >= drawn
        chosen = chosen_of(ended.all(axis=1).tolist(), setting.prompts)
        trained += drawn[chosen].ravel().tolist()
        times += [before.get(asked[k], 0) for k in chosen]
        put_off = put_off_after(put_off, asked, chosen)
    first = np.stack([setting.lengths(seed, p, 0) for p in order])
    return {
        **took,
        "put_off": float(np.mean(np.array(times) > 0)),
        "most_put_off": max(times),
        "length_ratio": float(np.mean(trained) / first.mean()),
        "long_ratio": float(
            np.mean(np.array(trained) > np.quantile(first, 0.9))
            / np.mean(first > np.quantile(first, 0.9))
        ),
    }


class Simulated:
    """Phases in the simulated engine, with the partial rollouts that each has left.

    Args:
        setting: the engine.
        accepted: probability of a draft token; None: a row goes on from where it was.
        seed: of what is accepted.
    """

    def __init__(self, setting: Setting, accepted: float | None, seed: int) -> None:
        self.setting, self.accepted = setting, accepted
        self.partial: dict[int, list[int]] = {}
        self.rng = np.random.default_rng([seed, 1])

    def __call__(
        self, asked: list[int], drawn: Lengths, end: EarlyEnd | None
    ) -> tuple[dict[str, float], list[int]]:
        """See ``Phase``."""
        rows = []
        for prompt, lengths in zip(asked, drawn.tolist(), strict=True):
            had = self.partial.pop(prompt, [0] * len(lengths))
            rows += [self._row(length, known) for length, known in zip(lengths, had, strict=True)]
        counts = run(self.setting.engine, [request for request, _ in rows], end)
        made = [request.made + start for request, start in rows]
        for k, prompt in enumerate(asked):
            group = slice(k * self.setting.group, (k + 1) * self.setting.group)
            self.partial[prompt] = made[group]
        named = dict(zip(FEATURES, counts.tolist(), strict=True))
        seconds = sum(named[name] * cost for name, cost in SECONDS.items())
        return {"engine_steps": named["steps"], "seconds": seconds, "tokens": sum(made)}, made

    def _row(self, length: int, known: int) -> tuple[SimulatedRequest, int]:
        """A row's request, and the tokens that it has to begin with."""
        prompt, block = 200, self.setting.engine.block_size
        if self.accepted is None:
            start = min(known, length - 1)
            return SimulatedRequest(prompt + start, iter([(0, 1)] * (length - start))), start
        return SimulatedRequest(
            prompt, self._drafted(length, known), cached=prompt // block * block
        ), 0

    def _drafted(self, length: int, known: int) -> Steps:
        yield 0, 1
        done, most = 1, self.setting.engine.max_draft_tokens
        if self.accepted:
            most = min(most, int(math.log(LEAST_CHANCE) / math.log(self.accepted)))
        while done < length:
            offered = max(0, min(known - done, most)) if self.accepted else 0
            gained = 0
            if offered:
                gained = min(int(self.rng.geometric(1 - self.accepted)) - 1, offered)
            gained = min(gained, length - done - 1)
            yield offered, gained + 1
            done += gained + 1


class Real:
    """Phases on a real engine with a tiny model and lossless drafting; versions without a refit."""

    def __init__(self, setting: Setting, seed: int) -> None:
        from vllm import LLM

        from nemo_specrl import RolloutStore, SpecRLConfig, SpeculativeLLM
        from nemo_specrl.engine.drafters.method import engine_options
        from nemo_specrl.trainer.data.toy_tasks import problems

        config = SpecRLConfig(enabled=True, preset="lossless", tree={"adaptive": False})
        self.llm = LLM(
            model="examples/models/qwen3-sort",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=setting.engine.max_num_seqs,
            max_num_batched_tokens=setting.engine.max_num_batched_tokens,
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **engine_options(config),
        )
        self.folder = tempfile.TemporaryDirectory()
        self.store = RolloutStore(self.folder.name, max_bytes=2**26, tokenizer_id="benchmark")
        self.speculative = SpeculativeLLM(self.llm, self.store, config, seed=seed)
        self.prompts = [p.prompt for p in problems("sorting", setting.prompts * setting.steps, 5)]
        self.seed, self.steps = seed, 0
        step = self.llm.llm_engine.step

        def counted() -> Any:
            self.steps += 1
            return step()

        self.llm.llm_engine.step = counted

    def begin(self) -> None:
        """Forget all rollouts."""
        engine = self.llm.llm_engine
        engine.model_executor.driver_worker.worker.model_runner.drafter.__init__(engine.vllm_config)
        self.store.clear()

    def __call__(
        self, asked: list[int], drawn: Lengths, end: EarlyEnd | None
    ) -> tuple[dict[str, float], list[int]]:
        """See ``Phase``."""
        from vllm import SamplingParams

        version, self.steps = self.speculative.policy_version + 1, 0
        self.speculative.policy_version = version
        places = [(k, row) for k in range(len(asked)) for row in range(drawn.shape[1])]
        outputs = self.speculative.generate(
            [{"prompt_token_ids": self.prompts[asked[k]]} for k, _ in places],
            [
                SamplingParams(
                    max_tokens=int(drawn[k, row]),
                    temperature=1.0,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    ignore_eos=True,
                    seed=derived_seed("benchmark", self.seed, version, asked[k].to_bytes(4), row),
                )
                for k, row in places
            ],
            early_end=end,
            use_tqdm=False,
        )
        self.store.sync()
        made = [len(output.outputs[0].token_ids) for output in outputs]
        return {"engine_steps": self.steps, "tokens": sum(made)}, made


def simulated(part: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the simulator."""
    rows, setting = [], SIMULATED[part]
    for accepted in ACCEPTED:
        for case in CASES:
            if accepted != 0.0 and case[0] is None:
                continue  # there are no partial rollouts
            for seed in seeds:
                phase = Simulated(setting, accepted, seed)
                found = epoch(setting, seed, case, phase, redrawn=accepted is not None)
                how = "continued" if accepted is None else f"accepted {accepted:g}"
                place = {"part": f"simulated, {part}", "drafts": how, **named(case, seed)}
                rows.append({**place, **found})
    return rows


def real(part: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the real engine."""
    from nemo_specrl.engine.vllm.environment import local_cpu_environment

    local_cpu_environment()
    phase, rows = Real(REAL, 0), []
    for seed in seeds:
        for case in CASES[:3]:
            phase.begin()
            phase.seed = seed
            found = epoch(REAL, seed, case, phase, redrawn=True)
            rows.append({"part": part, "drafts": "its trees", **named(case, seed), **found})
    return rows


def named(case: tuple[float | None, int], seed: int) -> dict[str, Any]:
    factor, most = case
    return {"over_provision": factor, "max_put_off": most, "seed": seed}


def means(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    """Mean over seeds, and its standard error."""
    values = [row[name] for row in rows]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def cases(rows: list[dict[str, Any]]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The rows of each case, seed by seed, with those without partial rollouts."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    rows = sorted(rows, key=lambda row: row["seed"])
    for row in rows:
        place = row["part"], row["drafts"], row["over_provision"], row["max_put_off"]
        found.setdefault(place, []).append(row)
    plain = {row["part"]: [] for row in rows}
    for row in rows:
        if row["over_provision"] is None:
            plain[row["part"]].append(row)
    return [(plain[of[0]["part"]], of) for of in found.values() if of[0]["over_provision"]]


def report(rows: list[dict[str, Any]]) -> str:
    """Markdown: what is saved, and what happens to lengths."""
    lines = [
        "| | drafts of what was cut off | `over_provision` | `max_put_off` | engine steps, of those"
        " without | seconds, of those without | prompts put off | mean length | rows in the longest"
        " tenth |",
        "|---" * 9 + "|",
    ]
    for without, of in cases(rows):
        first = of[0]
        shares = []
        for name in ("engine_steps", "seconds"):
            both = [(a, b) for a, b in zip(of, without, strict=True) if name in a]
            ratios = [{"x": a[name] / b[name]} for a, b in both]
            shares.append("{:.2f} ± {:.2f}".format(*means(ratios, "x")) if ratios else "")
        put_off, length, long = (means(of, n) for n in ("put_off", "length_ratio", "long_ratio"))
        lines.append(
            f"| {first['part']} | {first['drafts']} | {first['over_provision']:g} "
            f"| {first['max_put_off']} | {shares[0]} | {shares[1]} | {put_off[0]:.0%} "
            f"| {length[0]:.2f} ± {length[1]:.2f} | {long[0]:.2f} ± {long[1]:.2f} |"
        )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Engine steps with partial rollouts, over those without."""
    groups: dict[str, dict[str, list[float]]] = {}
    for without, of in cases(rows):
        first = of[0]
        place = groups.setdefault(f"{first['part']}\n{first['drafts']}", {})
        ratios = [a["engine_steps"] / b["engine_steps"] for a, b in zip(of, without, strict=True)]
        place[f"{first['over_provision']:g}, put off {first['max_put_off']} times"] = ratios
    return Chart("Partial rollouts", "engine steps, of those without", groups)


PARTS = {**dict.fromkeys(SIMULATED, simulated), "engine": real}
KEYS = ("part", "seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["64 rows"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    outputs(parser)
    args = parser.parse_args()
    if args.report:
        result = read(args.report)
    else:
        each = (in_own_process(PARTS[part], part, args.seeds) for part in args.parts)
        rows = rounded(row for of_part in each for row in of_part)
        result = merged(args.out, rows, KEYS) if args.out else {"rows": rows}
    present(report(result["rows"]), chart(result["rows"]), args.plot)


if __name__ == "__main__":
    main()

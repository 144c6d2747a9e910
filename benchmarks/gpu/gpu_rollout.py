r"""Rollouts on a GPU, beside plain vLLM: drafts from history, their cost, and prefix reuse.

    pip install --no-deps -e . && python -m benchmarks.gpu.gpu_rollout --out results/gpu.json
    .venv/bin/python -m benchmarks.gpu.gpu_rollout --size tiny --out results/gpu_tiny.json

For a Hopper GPU of 80 GB and vLLM 0.25.1 or later. Downloads nothing: a model of the shape of
Qwen3-8B gets random weights (``model.py``). Two engines are on the GPU at once, a plain one and one
with the plug-in; each comparison is repeated with prompts of its own, the engines in another order.

- ``costs``: seconds of a step by rows, draft tokens and context, as timed and as computed.
- ``lossless/P/ROWS``: prompts whose 8 earlier responses are in the cache; P is the probability of
  a sampled token, on average.
- ``cold/ROWS``: prompts that come for the first time and never again: what the plug-in costs.
- ``reuse/DRIFT``: prefix reuse at lenience 1 of responses of a policy that was so far away.
- ``search``: search and vote of the drafts alone, without an engine.

Every point goes to the file when it is measured; started again with the same file, the script
measures what is missing, until ``--minutes`` are over. ``--size tiny`` does it on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.model import (
    SIZES,
    Size,
    empty_prefix_cache,
    give_weights,
    make_engine,
    on_gpu,
    write_config,
)
from benchmarks.shared.records import machine

GROUP = 8
"""Rows of a prompt, and earlier responses of each."""
VOCABULARY = "0" * 32
P_OF_REUSE = 0.85
MEMORY = 0.42
"""Share of the GPU's memory for each of two engines."""


class Bench:
    """Two engines of the same policy, and a cache for the one that drafts.

    Args:
        size: how much is measured.
        folder: for the model's configuration and the cache.
    """

    def __init__(self, size: Size, folder: Path) -> None:
        from nemo_specrl import RolloutStore, engine_options

        self.size = size
        write_config(size.shape, folder)
        most = max(size.rows)
        options = {
            "max_model_len": size.prompt + size.response + 16,
            "max_num_seqs": most,
            "gpu_memory_utilization": MEMORY,
        }
        drafts = engine_options(cache_dir=folder / "cache", vocabulary=VOCABULARY)
        self.plain = make_engine(folder, size.shape, **options)
        self.drafting = make_engine(folder, size.shape, **options, **drafts)
        self.store = RolloutStore(folder / "cache", vocabulary=VOCABULARY)
        self._scales: dict[float, float] = {}
        self._seed = 0
        for llm in (self.plain, self.drafting):  # what happens once, compilation among it
            prompts = self.prompts(most)
            llm.generate(prompts, sampling(16, keep=False), use_tqdm=False)

    def prompts(self, rows: int) -> list[dict[str, Any]]:
        """Random prompts that have not come before, each for a group of rows."""
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        shape = (-(-rows // GROUP), self.size.prompt)
        tokens = rng.integers(0, self.size.shape.vocabulary, shape)
        return [{"prompt_token_ids": tokens[i // GROUP].tolist()} for i in range(rows)]

    def set_policy(self, scale: float, drift: float = 0.0) -> None:
        """Give both engines the weights of a policy."""
        for llm in (self.plain, self.drafting):
            give_weights(llm, self.size.shape, scale, drift)

    def scale_of(self, p: float) -> float:
        """The scale with which sampled tokens have a probability of ``p`` on average."""
        if p not in self._scales:
            low, high = 0.0, 8.0  # logarithm to base 2
            for _ in range(8):
                middle = (low + high) / 2
                give_weights(self.plain, self.size.shape, 2**middle, 0.0)
                params = sampling(self.size.response // 4, logprobs=0)
                seen = mean_p(self.plain.generate(self.prompts(64), params, use_tqdm=False))
                low, high = (low, middle) if seen > p else (middle, high)
            self._scales[p] = 2 ** ((low + high) / 2)
        return self._scales[p]

    def remember(self, prompts: list[dict[str, Any]]) -> None:
        """Put responses of the present policy into the cache, one for each row of a group."""
        from nemo_specrl import Finish, Rollout, prompt_key

        whole = [prompt for prompt in prompts[::GROUP] for _ in range(GROUP)]
        outputs = self.plain.generate(
            whole, sampling(self.size.response, logprobs=0), use_tqdm=False
        )
        self.store.put(
            [
                Rollout(
                    prompt_key(prompt["prompt_token_ids"]),
                    output.outputs[0].token_ids,
                    Finish.LENGTH,
                    logprobs=logprobs_of(output),
                )
                for prompt, output in zip(whole, outputs, strict=True)
            ]
        )

    def compared(self, sides: Callable[[int], dict[str, Callable[[], Any]]]) -> dict[str, Any]:
        """Seconds of each side, and what it returned, by repetition."""
        found = []
        for i in range(self.size.repetitions):
            here = sides(i)
            row: dict[str, Any] = {}
            for name in list(here)[:: -1 if i % 2 else 1]:
                started = time.perf_counter()
                more = here[name]()
                row[name] = {"seconds": time.perf_counter() - started, **(more or {})}
            found.append(row)
        return {"repetitions": found}

    def lossless(self, p: float, rows: int) -> dict[str, Any]:
        """Plain decoding beside drafts from the policy's own earlier responses."""
        self.set_policy(self.scale_of(p))

        def sides(_: int) -> dict[str, Callable[[], Any]]:
            prompts = self.prompts(rows)
            self.remember(prompts)
            return self._both(prompts, keep=False)

        return self.compared(sides)

    def cold(self, rows: int) -> dict[str, Any]:
        """Plain decoding beside the plug-in, of prompts that come for the first time."""
        self.set_policy(self.scale_of(P_OF_REUSE))
        return self.compared(lambda _: self._both(self.prompts(rows), keep=True))

    def _both(self, prompts: list[dict[str, Any]], keep: bool) -> dict[str, Callable[[], Any]]:
        from nemo_specrl import counts
        from nemo_specrl.engine.counts import tokens_per_step

        params = sampling(self.size.response, keep=keep)
        for llm in (self.plain, self.drafting):
            empty_prefix_cache(llm)

        def plain() -> None:
            self.plain.generate(prompts, params, use_tqdm=False)

        def drafting() -> dict[str, Any]:
            before = counts(self.drafting)
            self.drafting.generate(prompts, params, use_tqdm=False)
            return {"tokens_per_step": tokens_per_step(counts(self.drafting), before)}

        return {"plain": plain, "drafting": drafting}

    def reuse(self, drift: float) -> dict[str, Any]:
        """Plain decoding beside prefix reuse of a policy's responses after it has moved."""
        from nemo_specrl import PrefixReuse, SpecRLConfig
        from nemo_specrl.cache import LocalCache

        scale, rows = self.scale_of(P_OF_REUSE), min(64, max(self.size.rows))
        config = SpecRLConfig(
            enabled=True, preset="reuse", reuse={"lenience": 1.0, "fresh_fraction": 0.0}
        )
        params = sampling(self.size.response, logprobs=0)

        def sides(i: int) -> dict[str, Callable[[], Any]]:
            self.set_policy(scale)
            prompts = self.prompts(rows)
            self.remember(prompts)
            self.set_policy(scale, drift)

            def reused() -> dict[str, Any]:
                wrapper = PrefixReuse(self.drafting, config, LocalCache(self.store), i, 1)
                wrapper.generate(prompts, params)
                found = wrapper.metrics
                accepted = found.accepted_tokens / max(1, found.draft_tokens)
                return {"accepted_fraction": accepted}

            def plain() -> None:
                self.plain.generate(prompts, params, use_tqdm=False)

            return {"plain": plain, "reuse": reused}

        return self.compared(sides)

    def costs(self) -> dict[str, Any]:
        """What a step costs by the layers as they were timed, and as computed."""
        from nemo_specrl.engine.step_costs import step_costs, time_layers

        (timed,) = self.drafting.collective_rpc(time_layers)
        costs = step_costs(self.drafting.llm_engine.vllm_config)
        sides = {"timed": timed, "computed": ()}

        def step(rows: int, length: int, context: int) -> dict[str, float]:
            return {
                side: float(dataclasses.replace(costs, timed=of).seconds(rows, length, context))
                for side, of in sides.items()
            }

        steps = itertools.product(self.size.rows, (0, 3, 7), (200, 3000))
        return {"repetitions": [{"/".join(map(str, s)): step(*s) for s in steps}]}

    def search(self) -> dict[str, Any]:
        """Seconds in which drafts are made for so many rows, without an engine."""
        from benchmarks.gpu.search import DraftedRows

        drafted = {str(n): DraftedRows(n, GROUP, self.size) for n in self.size.rows}
        return self.compared(lambda _: {name: rows.timed for name, rows in drafted.items()})


def sampling(max_tokens: int, *, keep: bool = True, logprobs: int | None = None) -> Any:
    """Sampling parameters of rows that run to their length limit."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=1.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        flat_logprobs=logprobs is not None,
        detokenize=False,
        extra_args={"spec_rl": {"keep": keep}},
    )


def logprobs_of(output: Any) -> Any:
    """Log-probs of an output's tokens, float32 ``[n]``, nats."""
    flat = output.outputs[0].logprobs
    return np.array([flat.logprobs[start] for start in flat.start_indices], np.float32)


def mean_p(outputs: list[Any]) -> float:
    """Probability that a sampled token had, on average."""
    return float(np.exp(np.concatenate([logprobs_of(output) for output in outputs])).mean())


def points(size: Size) -> dict[str, Callable[[Bench], dict[str, Any]]]:
    """What is measured, by name; what matters most comes first."""
    found: dict[str, Callable[[Bench], dict[str, Any]]] = {}
    if on_gpu():
        found["costs"] = lambda b: b.costs()
    for rows in size.rows:
        for p in size.mean_p:
            found[f"lossless/{p}/{rows}"] = lambda b, p=p, rows=rows: b.lossless(p, rows)
    for rows in size.rows:
        found[f"cold/{rows}"] = lambda b, rows=rows: b.cold(rows)
    for drift in size.drifts:
        found[f"reuse/{drift}"] = lambda b, drift=drift: b.reuse(drift)
    if importlib.util.find_spec("triton"):
        found["search"] = lambda b: b.search()
    return found


def run(path: Path, size_name: str, prefixes: list[str], minutes: float) -> dict[str, Any]:
    """Measure what is missing, until the time is over."""
    until = time.monotonic() + 60 * minutes
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to workers
    if not on_gpu():
        from nemo_specrl.engine.environment import local_cpu_environment

        local_cpu_environment()
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"points": {}}
    here = {"size": size_name, **machine()}
    if data.setdefault("machine", here) != here:
        sys.exit(f"--out {path}: it is of {data['machine']}, not {here}; name another file")
    size = SIZES[size_name]
    wanted = {
        name: point
        for name, point in points(size).items()
        if name not in data["points"] and name.startswith(tuple(prefixes or [""]))
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(size, Path(folder))
        for name, point in wanted.items():
            if time.monotonic() > until:
                break
            started = time.monotonic()
            found = point(bench)
            data["points"][name] = {"date": datetime.date.today().isoformat(), **found}
            path.write_text(json.dumps(data, indent=1) + "\n")
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        bench.store.close()
    return data


def report(data: dict[str, Any]) -> str:
    """A Markdown table: times faster than plain vLLM, and what else was seen."""
    lines = [
        "| point | times faster than plain: median (least to most) | besides |",
        "|---|---|---|",
    ]
    for name, point in data["points"].items():
        repetitions = point["repetitions"]
        sides = [side for side in repetitions[0] if side != "plain"]
        for side in sides:
            besides = {
                key: statistics.median(r[side][key] for r in repetitions)
                for key in repetitions[0][side]
                if key != "seconds" and repetitions[0][side][key] is not None
            }
            seen = ", ".join(f"{key} {value:.3g}" for key, value in besides.items())
            if "plain" in repetitions[0]:
                ratios = sorted(r["plain"]["seconds"] / r[side]["seconds"] for r in repetitions)
                middle = statistics.median(ratios)
                lines.append(
                    f"| {name} | {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {seen} |"
                )
            else:
                lines.append(f"| {name}, {side} rows | | {seen} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--size", choices=SIZES, default="qwen3-8b")
    parser.add_argument("--points", nargs="*", default=[], help="those whose names begin so")
    parser.add_argument("--minutes", type=float, default=7.75, help="after which it ends")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print the table of a file")
    args = parser.parse_args()
    if (args.out is None) == (args.report is None):
        parser.error("--out JSON or --report JSON is required")
    if args.report:
        data = json.loads(args.report.read_text())
    else:
        data = run(args.out, args.size, args.points, args.minutes)
    print(report(data))


if __name__ == "__main__":
    main()

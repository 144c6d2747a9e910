r"""What the V2 drafter's corpus of other prompts brings: tokens a step, with and without history.

    .venv/bin/python -m benchmarks.rollout.v2_corpus --json benchmarks/results/v2_corpus.json

Plain decoding of a shipped model's own task makes responses, the same weights in every epoch. They
are replayed in batches through the drafter's index on the host, by the numpy reference, and steps
are counted. Without history, prompts are new ones in every epoch, as where days lie between two
epochs. Needs no Triton: importing the kernels is avoided.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import merged
from nemo_specrl.engine.vllm.environment import local_cpu_environment
from nemo_specrl.trainer.data.toy_tasks import problems

MODELS = {"sorting": "qwen3-sort", "arithmetic": "qwen3-arith-small"}
K = 5
GROUP = 4
PROMPTS_AT_ONCE = 4


def responses(task: str, temperature: float, prompts: int, epochs: int) -> tuple[Any, float]:
    """Responses by epoch, prompt and row, and the mean probability of their tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        f"examples/models/{MODELS[task]}", enforce_eager=True, max_model_len=256, seed=0,
        skip_tokenizer_init=True, block_size=32, dtype="float32",
    )  # fmt: skip
    params = SamplingParams(
        n=GROUP, temperature=temperature, max_tokens=180, logprobs=0, stop_token_ids=[2],
        detokenize=False,
    )  # fmt: skip
    asked = [{"prompt_token_ids": p.prompt} for p in problems(task, prompts, 11)]
    made, p = [], []
    for _ in range(epochs):
        outputs = llm.generate(asked, params, use_tqdm=False)
        made.append([[list(c.token_ids) for c in output.outputs] for output in outputs])
        for completion in (c for output in outputs for c in output.outputs):
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            p += [float(np.exp(entry[token].logprob)) for entry, token in pairs]
    return made, float(np.mean(p))


def replay(made: Any, *, history: bool, corpus: bool) -> list[float]:
    """Tokens a step, by epoch."""
    from tests.support.v2_drafting import Rows, steps_of

    rows = Rows(rows=PROMPTS_AT_ONCE * GROUP, longest=200, length=K, max_bytes=64 << 20)
    if not corpus:
        rows.index._share = lambda page: None
    found = []
    for epoch, prompts in enumerate(made):
        steps = tokens = 0
        for first in range(0, len(prompts), PROMPTS_AT_ONCE):
            lot = [r for group in prompts[first : first + PROMPTS_AT_ONCE] for r in group]
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


def without_triton() -> None:
    """Have the numpy reference stand where the index launches kernels."""
    name = "nemo_specrl.engine.drafters.v2.kernels"
    sys.modules[name] = types.SimpleNamespace(SCATTERED=types.SimpleNamespace(value=256))  # type: ignore[assignment]
    from nemo_specrl.engine.drafters.v2 import arrays
    from tests.support import v2_numpy

    arrays.kernels = v2_numpy  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    local_cpu_environment()
    without_triton()
    rows = []
    for task in MODELS:
        for temperature in (1.0, 1.5):
            made, p = responses(task, temperature, args.prompts, args.epochs)
            for history in (True, False):
                for corpus in (False, True):
                    found = replay(made, history=history, corpus=corpus)
                    rows.append(
                        {"task": task, "mean_p": p, "history": history, "corpus": corpus}
                        | {"tokens_per_step": found}
                    )
                    cells = " | ".join(f"{value:.2f}" for value in found)
                    print(f"| {task}, {p:.3f} | {history} | {corpus} | {cells} |", flush=True)
    if args.json:
        merged(args.json, rows, ("task", "mean_p", "history", "corpus"))


if __name__ == "__main__":
    main()

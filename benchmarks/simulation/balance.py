"""Balance of whole batches over engines, against NeMo-RL's own contiguous split, simulated.

    python -m benchmarks.simulation.balance [--tokens MEAN] [--spread S ...]

A batch has 512 prompts of 16 rows; each line is of three batches. Mean lengths of prompts'
responses are lognormal with spread S; a row is another 0.3 longer or shorter, and what balance
expects is the mean of other rows. No row drafts. Engines are H100s with an 8B model: 256 rows at
once, 305,000 tokens of KV cache, and the costs that docs/evidence/measured.md has. Eight engine
steps are simulated as one.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from nemo_specrl.nemo_rl.balance import balanced_order
from nemo_specrl.simulation.simulated_engine import (
    FEATURES,
    SimulatedEngine,
    SimulatedRequest,
    run,
)

UNIT = 8
"""Tokens, and engine steps, that are simulated as one."""
COSTS = {"steps": 6.7e-3 * UNIT, "tokens": 2e-5 * UNIT, "kv_tokens": 4.4e-8 * UNIT**2}
ENGINE = SimulatedEngine(256, 8192 // UNIT, 305_000 // UNIT, block_size=16 // UNIT)
PROMPTS, GROUP, WITHIN = 512, 16, 0.3


def seconds(order: list[int], lengths: list[int], prompt: int, engines: int) -> float:
    """Seconds until the last engine has finished its share; lengths in units of ``UNIT`` tokens."""
    size, each = -(-len(order) // engines), np.array([COSTS.get(name, 0.0) for name in FEATURES])
    shared = (prompt - 1) // ENGINE.block_size
    slowest = 0.0
    for start in range(0, len(order), size):
        requests, seen = [], set()
        for row in order[start : start + size]:
            group = row // GROUP
            cached = shared * ENGINE.block_size if group in seen else 0
            seen.add(group)
            steps = itertools.repeat((0, 1), lengths[row])
            requests.append(SimulatedRequest(prompt, steps, cached, siblings=group, shared=shared))
        slowest = max(slowest, float(run(ENGINE, requests) @ each))
    return slowest


def gain(
    prompt: int, engines: int, spread: float, mean: int, prompts: int = PROMPTS, seeds: int = 3
) -> tuple[float, float]:
    """How many times faster than the contiguous split batches are, and prompts an engine sees."""
    keys = np.repeat(np.arange(prompts), GROUP).tolist()
    size = -(-len(keys) // engines)
    took, distinct = np.zeros(2), []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        means = mean * np.exp(spread * rng.standard_normal(prompts) - spread**2 / 2)
        drawn = means[:, None] * np.exp(WITHIN * rng.standard_normal((2, prompts, GROUP)))
        expected = np.repeat(drawn[0].mean(1), GROUP).tolist()
        lengths = (1 + drawn[1] // UNIT).astype(int).ravel().tolist()
        order = balanced_order(keys, expected, [prompt] * len(keys), engines)
        distinct += [len({keys[r] for r in order[i : i + size]}) for i in range(0, len(keys), size)]
        orders = (list(range(len(keys))), order)
        took += [seconds(each, lengths, prompt // UNIT, engines) for each in orders]
    return took[0] / took[1], float(np.mean(distinct))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--spread", type=float, nargs="+", default=[0.1, 0.6])
    parser.add_argument("--prompt", type=int, nargs="+", default=[200, 2000, 8000])
    parser.add_argument("--engines", type=int, nargs="+", default=[16, 32, 64])
    options = parser.parse_args()
    print("prompt engines spread times_faster prompts_an_engine")
    for prompt, engines, spread in itertools.product(
        options.prompt, options.engines, options.spread
    ):
        ratio, distinct = gain(prompt, engines, spread, options.tokens)
        print(f"{prompt:6} {engines:7} {spread:6} {ratio:12.2f} {distinct:17.1f}", flush=True)


if __name__ == "__main__":
    main()

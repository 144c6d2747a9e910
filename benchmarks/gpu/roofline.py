"""What lossless drafting can gain on H100s, computed from bytes and operations: no measurement.

    .venv/bin/python -m benchmarks.gpu.roofline

Prints the tables of docs/reference/v2_drafting.md: steps of Qwen3-8B on one H100 and of Qwen3-32B
on four, by rows and tokens drafted by each, and the best number of tokens at several chances that a
drafted token is accepted if those before it are; and a batch from its first step to its last row,
whose lengths have a heavy tail. The costs are those by which engines choose
(``nemo_specrl.speculation.uniform_length``); what ranks send each other is not in them.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from nemo_specrl.engine.vllm.model_costs import costs_of
from nemo_specrl.engine.vllm.v2_lengths import max_drafted
from nemo_specrl.speculation.uniform_length import (
    GPUS,
    LENGTHS,
    StepCosts,
    UniformLengths,
    expected_tokens,
)

CONTEXT = 3000
"""Tokens of prompt and response of a row."""
ROWS = (1, 8, 16, 32, 64, 128, 256)
CHANCES = (0.5, 0.7, 0.85, 0.95)
MEAN_LENGTH, LONGEST, SPREAD = 4000, 16_384, 0.64
"""Tokens of the responses of a batch: log-normal, with this standard deviation of the logarithm, as
in ``simulate_8b.py`` those between prompts and within groups together."""
TAIL = 0.1
"""Of a batch's rows, the last ones."""
SHARED = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
MODELS = {
    "Qwen3-8B, one H100": (
        SimpleNamespace(
            hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
            intermediate_size=12_288, **SHARED,
        ),
        1,
    ),
    "Qwen3-32B, four H100 (TP 4)": (
        SimpleNamespace(
            hidden_size=5120, num_hidden_layers=64, num_attention_heads=64,
            intermediate_size=25_600, **SHARED,
        ),
        4,
    ),
}  # fmt: skip


VLLM_CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(dtype=torch.bfloat16, get_vocab_size=lambda: SHARED["vocab_size"])
)
"""What bounds the draft tokens of a step, of vLLM's configuration."""


class Known(UniformLengths):
    """Chances that are given instead of observed."""

    def __init__(self, costs: StepCosts, chance: float) -> None:
        super().__init__(costs, LENGTHS, max(ROWS), max_drafted(VLLM_CONFIG))
        self.chance = chance

    def chances(self) -> np.ndarray:
        """The same at each position."""
        return np.full(LENGTHS[-1], self.chance)


def gain(costs: StepCosts, rows: int, chance: float) -> str:
    """The length that an engine would choose, and how much faster than plain decoding it is."""
    known = Known(costs, chance)
    length = known.table(CONTEXT)[rows]
    tokens = expected_tokens(known.chances())[length]
    plain, drafted = costs.seconds(rows, [0, length], CONTEXT)
    return f"{length}: {tokens * plain / drafted:.2f}"


def batch(costs: StepCosts, chance: float, by_rows: list[int]) -> tuple[float, float]:
    """Seconds of a batch of the most rows, and those in which only its last rows are left.

    Args:
        costs: of steps.
        chance: that a drafted token is accepted if those before it are.
        by_rows: tokens that each row drafts, by the rows of a step.
    """
    drawn = np.random.default_rng(8).lognormal(0, SPREAD, max(ROWS))
    left = np.minimum(MEAN_LENGTH * drawn / drawn.mean(), LONGEST)
    gains = expected_tokens(np.full(LENGTHS[-1], chance))
    total = tail = 0.0
    while rows := int((left > 0).sum()):
        seconds = float(costs.seconds(rows, by_rows[rows], CONTEXT))
        total += seconds
        tail += seconds * (rows <= TAIL * max(ROWS))
        left -= gains[by_rows[rows]]
    return total, tail


def print_batches() -> None:
    """Batches without drafts, with the length of the first step throughout, and by rows."""
    head = ["", "chance", "no drafts, s", "one length, s", "by rows, s"]
    head += ["of it the tail: no drafts, s", "one length, s", "by rows, s"]
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for title, (config, ranks) in MODELS.items():
        costs = costs_of(config, GPUS["H100"], ranks, weight_bytes=2, kv_bytes=2)
        for chance in CHANCES:
            table = Known(costs, chance).table(CONTEXT)
            choices = ([length] * len(table) for length in (0, table[-1]))
            found = [batch(costs, chance, by_rows) for by_rows in (*choices, table)]
            cells = [f"{total:.0f}" for total, _ in found] + [f"{tail:.0f}" for _, tail in found]
            print("| " + " | ".join([title, str(chance), *cells]) + " |")


def print_table(title: str, costs: StepCosts) -> None:
    print(
        f"{title}: {costs.weight_bytes / 1e9:.1f} GB of weights and {costs.token_flops / 1e9:.1f}"
    )
    print(f"GFLOP for a token on each GPU, {costs.kv_bytes / 1e3:.0f} kB of KV for a token\n")
    lengths = [f"K = {length}" for length in LENGTHS]
    head = ["rows", *(f"step, ms: {lengths[0]}" if i == 0 else k for i, k in enumerate(lengths))]
    head += [f"chance {chance}" for chance in CHANCES]
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for rows in ROWS:
        steps = [f"{1e3 * s:.1f}" for s in costs.seconds(rows, LENGTHS, CONTEXT)]
        cells = [str(rows), *steps, *(gain(costs, rows, chance) for chance in CHANCES)]
        print("| " + " | ".join(cells) + " |")
    print()


def main() -> None:
    for title, (config, ranks) in MODELS.items():
        print_table(title, costs_of(config, GPUS["H100"], ranks, weight_bytes=2, kv_bytes=2))
    print_batches()


if __name__ == "__main__":
    main()

"""Train the tiny Qwen3s that the recipes start from, and their tokenizer, from nothing.

    python scripts/train_tiny_model.py examples/models/qwen3-arith
    python scripts/train_tiny_model.py examples/models/qwen3-arith-small --size small --steps 1100
    python scripts/train_tiny_model.py examples/models/qwen3-sort --task sorting --size small \
        --steps 900 --error-rate 0.1

``--start`` goes on from a model. ``--any-order`` works through the letters of ``sorting`` in random
order, so that a model comes to be unsure of its next step though not of its answer
(benchmarks/shared/recording.py).

Supervised training on worked problems (nemo_specrl/trainer/data/toy_tasks.py) in which a share of
the steps is wrong, so that the model ends at 35 to 50 % accuracy when it samples at temperature 1
and reinforcement learning has something to gain. Seeded; 10 to 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nemo_specrl.trainer.data.toy_tasks import (
    BOS,
    EOS,
    PAD,
    TASKS,
    VOCABULARY,
    Sorting,
    ToyProblem,
    encode,
    solution,
)

ROWS_PER_STEP = 64
ROWS_PER_MICRO_BATCH = 8  # rows of like length together: little padding, and the caches hold them
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
SIZES = {  # 1.6 and 0.6 million parameters
    "base": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "small": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, in Hugging Face format."""
    tokenizer = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(VOCABULARY)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(size: str) -> Qwen3ForCausalLM:
    """Random weights in one of ``SIZES``."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **SIZES[size],
        )
    )


def batch_loss(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Summed cross-entropy of the solutions, in nats; prompts and padding do not count."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), width), PAD)
    targets = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(rows):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        targets[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def reordered(problem: ToyProblem, rng: random.Random) -> ToyProblem:
    """The same letters in random order: its solution is one of the problem's many right ones."""
    assert isinstance(problem, Sorting)
    return Sorting("".join(rng.sample(problem.letters, len(problem.letters))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the model and its tokenizer")
    parser.add_argument("--task", choices=TASKS, default="arithmetic")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--error-rate", type=float, default=0.05, help="share of steps that are wrong"
    )
    parser.add_argument("--start", type=Path, help="folder of a model to go on from, of any size")
    parser.add_argument(
        "--any-order", action="store_true", help="sorting: insert the letters in random order"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=PEAK_LEARNING_RATE, help="at its peak"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.any_order and args.task != "sorting":
        parser.error("--any-order: only --task sorting has an order to change")

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model, started = build_model(args.size), time.perf_counter()
    if args.start:
        model = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(args.steps):
        rows = []
        for _ in range(ROWS_PER_STEP):
            problem = TASKS[args.task].sample(rng)
            worked = reordered(problem, rng) if args.any_order else problem
            rows.append((problem.prompt, [*encode(solution(worked, rng, args.error_rate)), EOS]))
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        answer_tokens = sum(len(answer) for _, answer in rows)
        total = 0.0
        for i in range(0, len(rows), ROWS_PER_MICRO_BATCH):
            loss = batch_loss(model, rows[i : i + ROWS_PER_MICRO_BATCH]) / answer_tokens
            loss.backward()
            total += loss.item()
        decay = max(0.05, 1 - step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step + 1 == args.steps:
            print(
                f"step {step:4d}  loss {total:.4f}  {time.perf_counter() - started:6.1f} s",
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(args.out)
    build_tokenizer().save_pretrained(args.out)


if __name__ == "__main__":
    main()

"""Train the LoRA adapter that recipes on word problems start from: SmolLM2 on worked solutions.

    python scripts/smollm2.py models/smollm2
    python scripts/supervised_start.py models/smollm2 examples/models/smollm2-gsm-lora
    python scripts/smollm2.py models/smollm2-gsm --adapter examples/models/smollm2-gsm-lora

Needs ``peft``, ``accelerate`` and ``reasoning_gym`` beside torch and transformers. The problems are
``gsm_symbolic`` of reasoning_gym; a prompt is the chat template with ``examples/prompts/
gsm_system.txt`` as the system message and the question as the user's. The target, whose tokens
alone count, is the worked solution and ``<answer>N</answer>``. Seeded. ``--save-every`` also keeps
the adapter on its way, in ``OUT-STEP``.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = Path(__file__).parents[1] / "examples/prompts/gsm_system.txt"
FIRST_SEED = 10_000_019
"""Problem i has seed FIRST_SEED + i: far from the small ones that a GRPO run takes."""
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
MOST_TARGET_TOKENS = 224  # so that the model learns to end within 256
ROWS_PER_MICRO_BATCH = 4  # rows of like length together: little padding
WARMUP_STEPS = 10

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of its target."""


def target_text(entry: dict[str, Any]) -> str:
    """The worked solution of one of reasoning_gym's problems, and its result in tags."""
    solution = re.sub(r"\s*####[^\n]*\s*$", "", entry["metadata"]["answer_cot"])
    return f"{solution.strip()}\n<answer>{entry['answer']}</answer>"


def training_rows(tokenizer: Any, count: int) -> Iterator[Row]:
    """``count`` problems; those with a longer target than ``MOST_TARGET_TOKENS`` are left out."""
    import reasoning_gym

    system = SYSTEM.read_text().strip()
    # Twice as many as are taken, since some are left out.
    problems = reasoning_gym.create_dataset("gsm_symbolic", size=2 * count, seed=FIRST_SEED)
    for index in range(2 * count):
        entry = problems[index]
        prompt = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": entry["question"]},
            ],
            add_generation_prompt=True,
            return_dict=False,
        )
        target = tokenizer.encode(target_text(entry), add_special_tokens=False)
        if len(target) < MOST_TARGET_TOKENS and count > 0:
            count -= 1
            yield prompt, [*target, tokenizer.eos_token_id]


def batch_loss(model: Any, rows: list[Row], padding: int) -> torch.Tensor:
    """Summed cross-entropy of the targets, in nats; the head works at their positions alone."""
    width = max(len(prompt) + len(target) for prompt, target in rows)
    tokens = torch.full((len(rows), width), padding)
    is_target = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, (prompt, target) in enumerate(rows):
        tokens[i, : len(prompt) + len(target)] = torch.tensor(prompt + target)
        is_target[i, len(prompt) : len(prompt) + len(target)] = True
    with torch.autocast("cpu", torch.bfloat16):
        llama = model.get_base_model()
        # Padding is on the right, where causal attention does not see it.
        hidden = llama.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = llama.lm_head(hidden[:, :-1][is_target[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), tokens[is_target], reduction="sum")


def save_adapter(model: Any, folder: Path) -> None:
    """The adapter in bfloat16, without the model card that peft would write over the README."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config["inference_mode"] = True
    config["target_modules"] = sorted(config["target_modules"])  # a set, in no order
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")


def with_adapter(folder: Path, rank: int) -> Any:
    """The model in bfloat16, frozen, with a new float32 adapter on each linear layer."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base.name_or_path = BASE  # which the configuration names in place of a path
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder that scripts/smollm2.py made")
    parser.add_argument("out", type=Path, help="folder for the adapter")
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--rows", type=int, default=8, help="problems in a step, each taken once")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: at the end alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = list(training_rows(tokenizer, args.steps * args.rows))
    random.Random(args.seed).shuffle(rows)
    model = with_adapter(args.model, args.rank)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(args.steps):
        batch = rows[step * args.rows : (step + 1) * args.rows]
        batch.sort(key=lambda row: len(row[0]) + len(row[1]))
        target_tokens = sum(len(target) for _, target in batch)
        total = 0.0
        for i in range(0, len(batch), ROWS_PER_MICRO_BATCH):
            part = batch[i : i + ROWS_PER_MICRO_BATCH]
            loss = batch_loss(model, part, tokenizer.pad_token_id) / target_tokens
            loss.backward()
            total += loss.item()
        decay = max(0.1, 1 - step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        print(f"step {step + 1:4d}  loss {total:.4f} nats/token  {seconds:6.1f} s", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save_adapter(model, args.out.with_name(f"{args.out.name}-{step + 1}"))
    save_adapter(model, args.out)


if __name__ == "__main__":
    main()

"""A tiny model that calls the calculator, and conversations of the kind that it was taught."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_specrl.trainer.data.tools import calculate
from tests.support.trainer.text_models import EOS, text_model

WORDS = ("so", "now", "well", "then", "first", "right")
PROMPTS = ("17+25?", "8*12?", "90-33?", "6*7?")
LONGEST = 256


def thought(rng: random.Random) -> str:
    """Words that differ from one rollout to the next, so that no two later prompts are equal."""
    return " ".join(rng.choice(WORDS) for _ in range(3)) + ". "


def conversation(prompt: str, rng: random.Random) -> list[tuple[str, bool]]:
    """The texts behind a prompt, and for each whether it is the model's: three turns."""
    value = calculate(prompt[:-1])
    return [
        (f"{thought(rng)}<calc>{prompt[:-1]}</calc>", True),
        (f"<result>{value}</result>", False),
        (f"{thought(rng)}twice that is <calc>2*{value}</calc>", True),
        (f"<result>{calculate('2*' + value)}</result>", False),
        (f"the value of {prompt[:-1]} is {value}, answer {value}<eos>", True),
    ]


def tool_model(folder: Path, *, steps: int = 300) -> Path:
    """A model without a chat template that was trained on such conversations."""
    text_model(folder, template=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(steps):
        rows = []
        for prompt in rng.choices(PROMPTS, k=16):
            tokens, labels = tokenizer(prompt)["input_ids"], []
            labels = [-100] * len(tokens)
            for text, own in conversation(prompt, rng):
                more = tokenizer(text, add_special_tokens=False)["input_ids"]
                tokens += more
                labels += more if own else [-100] * len(more)
            rows.append((tokens, labels))
        width = max(len(tokens) for tokens, _ in rows)
        inputs = torch.tensor([t + [EOS] * (width - len(t)) for t, _ in rows])
        targets = torch.tensor([t + [-100] * (width - len(t)) for _, t in rows])
        loss = model(input_ids=inputs, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return folder

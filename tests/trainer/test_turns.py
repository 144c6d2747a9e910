"""Training on conversations with a calculator, by the command line."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from transformers import AutoTokenizer

from nemo_specrl import RolloutStore
from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.trainer.data.tools import calculate
from nemo_specrl.trainer.generation.engine import cache_config
from nemo_specrl.trainer.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.support.trainer.tool_models import LONGEST, PROMPTS
from tests.support.warm import Command

ROWS = 8
"""Of a step."""


def recipe(folder, model, block="grpo", **algorithm):
    """A recipe of four steps, two of them an epoch, as a file."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": p, "answer": calculate(p[:-1])} for p in PROMPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        block: {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": ROWS // 2,
            "max_num_epochs": 2,
            "max_rollout_turns": 4,
            "max_val_samples": 2,
            "val_at_end": False,
            **algorithm,
        },
        "env": {"tools": ["calculator"]},
        "data": {
            "dataset_name": "ResponseDataset",
            "data_path": str(data),
            "validation": {"data_path": str(data)},
            "env_name": "numeric",
        },
        "policy": {
            "model_name": str(model),
            "train_global_batch_size": ROWS,
            "optimizer": {"kwargs": {"lr": 1e-5}},
            "tokenizer": {"chat_template": None},
            "generation": {
                "max_new_tokens": 120,
                "vllm_cfg": {"max_model_len": LONGEST},
                "vllm_kwargs": {"max_num_seqs": ROWS},
                "spec_rl": {
                    "enabled": True,
                    "draft": {"adaptive": False},
                    "cache": {"max_bytes_per_node": "4MiB"},
                },
            },
        },
        "checkpointing": {"checkpoint_dir": str(folder), "save_period": 1000},
        "logger": {"log_dir": str(folder), "tensorboard_enabled": False},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train(path, *overrides):
    temporary = path.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = Command("nemo_specrl", ["train", str(path), *overrides], REPOSITORY, environment)
    assert process.wait(600) == 0, process.stderr[-3000:]
    return read_metrics(path.parent / "metrics.jsonl")


@pytest.mark.timeout(900)
def test_conversations_are_trained_on_and_draft_for_the_next_ones(calculating_model, tmp_path):
    path = recipe(tmp_path, calculating_model)
    steps = train(path)
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    for record in steps:
        assert record["decoded_tokens"] == record["response_tokens"]
        assert record["response_length"] * ROWS == pytest.approx(record["response_tokens"])
        assert record["reward"] > 0.5 and record["spec_rl/responses_dropped"] == 0
    # Second epoch: the conversations of the first one draft.
    assert steps[-1]["spec_rl/tokens_per_step"] > 2
    # What is kept of a conversation is a response to its first prompt, with the tool's answers.
    config = cache_config(load_recipe(path))
    with RolloutStore(config.dir, vocabulary=config.vocabulary, max_bytes=2**22) as store:
        found = store.get(key for key, _ in store.scan())
    assert len(found) == len(PROMPTS)
    texts = [tokenizer(calculating_model).decode(r.tokens) for rs in found.values() for r in rs]
    assert sum(text.count("<result>") == 2 for text in texts) > len(PROMPTS) * ROWS / 2


def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.timeout(900)
def test_ppo_and_evaluation_without_speculation(calculating_model, tmp_path):
    path = recipe(
        tmp_path,
        calculating_model,
        "ppo",
        adv_estimator={"name": "gae"},
        max_num_steps=2,
        val_at_end=True,
        val_kl_to_start=True,
    )
    plain = "policy.generation.spec_rl.enabled=false"
    steps = train(path, plain, "loss_fn.ratio_clip_c=3", "data.num_prompts=2")  # two are held out
    assert len(steps) == 2
    for record in steps:
        assert record["grad_norm"] > 0 and record["reward"] > 0.5
        assert record["decoded_tokens"] == record["response_tokens"]
        assert record["ratio"] == pytest.approx(1, abs=0.1)
    last = steps[-1]
    assert 60 < last["heldout_length"] < 160
    assert 0 < last["heldout_entropy"] < 2
    assert abs(last["heldout_kl_to_start"]) < 0.1

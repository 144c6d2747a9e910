"""Training on conversations with a calculator, by the command line: real engine, real SIGKILL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from nemo_specrl import RolloutStore
from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.trainer.data.tools import calculate
from nemo_specrl.trainer.generation.engine import tokenizer_identity
from tests.conftest import REPOSITORY
from tests.support.stores import restore
from tests.support.trainer.tool_models import LONGEST, PROMPTS

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
                    "tree": {"adaptive": False},
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


def command(path, *overrides):
    temporary = path.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    return {
        "args": [sys.executable, "-m", "nemo_specrl", "train", str(path), *overrides],
        "cwd": REPOSITORY,
        "env": os.environ | {"TMPDIR": str(temporary)},
        "text": True,
    }


def train(path, *overrides):
    done = subprocess.run(**command(path, *overrides), capture_output=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(path.parent / "metrics.jsonl")


@pytest.mark.timeout(900)
def test_conversations_are_trained_on_and_a_kill_loses_none(calculating_model, tmp_path):
    path = recipe(tmp_path, calculating_model)
    process = subprocess.Popen(
        **command(path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip
    while len(read_metrics(tmp_path / "metrics.jsonl")) < 2:
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = read_metrics(tmp_path / "metrics.jsonl")
    steps = train(path)
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    replayed = [r["spec_rl/replayed_rows"] for r in steps]
    assert replayed[: len(before)] == [ROWS] * len(before) and replayed[-1] == 0
    exact = ("prompts", "reward", "response_tokens", "response_length", "loss", "grad_norm")
    for name in exact:
        assert [r[name] for r in steps[: len(before)]] == [r[name] for r in before], name
    for record in (*before, *steps):
        assert record["decoded_tokens"] == record["response_tokens"]
        assert record["response_length"] * ROWS == pytest.approx(record["response_tokens"])
        assert record["spec_rl/cache_errors"] == record["spec_rl/draft_coverage"] == 0
    # Second epoch: the conversations of the first one draft.
    assert steps[-1]["spec_rl/tree_tokens_per_step"] > 2
    identity = tokenizer_identity(str(calculating_model))
    restore(tmp_path / "step_4" / "rollout_cache", tmp_path / "copy")
    with RolloutStore(tmp_path / "copy", max_bytes=2**22, tokenizer_id=identity) as store:
        stats = store.stats()
    assert (stats.prompts, stats.rollouts) == (len(PROMPTS), len(PROMPTS) * ROWS // 2)


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

"""Each algorithm and backend on the real model of the word problems, a step each.

`make test-language` makes the model and runs this; without SPECRL_LANGUAGE_MODEL, its folder,
these tests are skipped.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.conftest import REPOSITORY

MODEL = os.environ.get("SPECRL_LANGUAGE_MODEL", "")
RECIPE = "examples/configs/grpo_gsm_smollm2_cpu.yaml"
SMALL = (
    *("num_prompts_per_step=2", "num_generations_per_prompt=4", "max_num_epochs=1"),
    *("max_num_steps=1", "val_at_start=false", "val_at_end=false"),
)
DAPO = (
    *("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2"),
    *("loss_fn.ratio_clip_max=0.28", "grpo.overlong_filtering=true"),
)
PPO = ("grpo=null", "ppo.adv_estimator.name=gae", "ppo.ppo_epochs=1")
# Of nine heads and three of keys and values, which two ranks could not divide.
MEGATRON = (
    *("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.tensor_model_parallel_size=3"),
    *("policy.precision=float32", "policy.dynamic_batching.enabled=false"),
    *("policy.dtensor_cfg.lora_cfg.enabled=false", "policy.train_micro_batch_size=2"),
)

pytestmark = pytest.mark.skipif(not MODEL, reason="SPECRL_LANGUAGE_MODEL names no model's folder")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("block", "options"),
    [("grpo", DAPO), ("ppo", PPO), ("grpo", MEGATRON)],
    ids=["dapo", "ppo", "megatron"],
)
def test_a_step_on_word_problems(tmp_path, block, options):
    overrides = [
        *(f"{block}.{option}" for option in SMALL),
        *("policy.train_global_batch_size=8", "data.num_prompts=4"),
        f"policy.model_name={MODEL}",
        f"checkpointing.checkpoint_dir={tmp_path}",
        f"logger.log_dir={tmp_path}",
        *options,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "train", RECIPE, *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (step,) = read_metrics(tmp_path / "metrics.jsonl")
    assert step["response_tokens"] > 100
    assert step["spec_rl/tree_tokens_per_step"] > 1
    assert all(math.isfinite(step[name]) for name in ("reward", "loss", "grad_norm"))
    assert (tmp_path / "step_1" / "policy").is_dir()

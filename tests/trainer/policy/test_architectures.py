"""Public architectures in the embedded trainer: a step, a refit, log-probs, and a checkpoint."""

from __future__ import annotations

import json
import os

import pytest

from tests.conftest import REPOSITORY
from tests.support.trainer.text_models import text_model
from tests.support.warm import Command

BFLOAT16 = ("policy.precision=bfloat16", "policy.generation.vllm_cfg.precision=bfloat16")
LORA = ("policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4")
TOKENS = ("policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=100")
AGAIN = ("policy.dtensor_cfg.activation_checkpointing=true",)
COOL = ("policy.generation.temperature=0.7", "policy.generation.top_p=0.95")
"""Of which the temperature alone is in the log-probs of the policy."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", ()),
        ("llama", (*LORA, *TOKENS)),
        ("gemma", (*BFLOAT16, *TOKENS)),
        ("mistral", ("policy.generation.temperature=0.7", *AGAIN)),
        ("phi3", (*BFLOAT16, *LORA)),
    ],
)
def test_engine_and_policy_agree_after_a_refit(tmp_path, kind, options):
    model = text_model(tmp_path / "model", kind)
    (tmp_path / "run").mkdir()
    arguments = [str(tmp_path / "run"), str(model), *options]
    job = Command("tests.support.trainer.architecture_job", arguments, REPOSITORY, os.environ)
    assert job.wait(300) == 0, job.stderr[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["tokens"] > 100
    assert result["moved"] > 1e-4  # the step has changed the weights
    # Weights of 8 bits of mantissa, and sums of 64 products: a few hundredths of a nat.
    mean, most = (0.05, 0.5) if BFLOAT16[0] in options else (1e-4, 1e-3)
    assert result["mean_apart"] < mean and result["most_apart"] < most, result
    assert result["resumed"]
    assert result["reward_failures"] == 0

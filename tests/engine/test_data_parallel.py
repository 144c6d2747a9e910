"""Data-parallel engines of a model with experts, which step together, in a process each."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, SHIPPED_MODEL


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny Qwen3 with experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, folder)
    return folder


def test_engines_with_fewer_rows_step_along_until_all_are_done(experts):
    """Without that, the others wait in their collective operations for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    module = "tests.engine.data_parallel_rank"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(experts), str(rank), "2", port],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        reports = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for a, b in zip(*(report.values() for report in reports), strict=True):
        few, many = (a, b) if a["few"] else (b, a)
        assert few["dummies"] > many["dummies"] == 0
    assert all(report["faithful 1"]["drafts"] for report in reports)
    assert all(report["rounds 1"]["requests"] for report in reports)

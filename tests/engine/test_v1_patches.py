"""What is wrapped in vLLM's V1 model runner, beside what vLLM does without it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nemo_specrl.engine import patches, v1_patches
from nemo_specrl.errors import IncompatibleVersion
from tests.support.engines import PROMPT, VOCABULARY, needs_cpu_build, params


@pytest.fixture(autouse=True)
def installed():
    patches.install(v1_patches.PATCHES)


@needs_cpu_build
def test_vllm_still_needs_its_rejection_sampler_mended_on_a_cpu(llm):
    """When this fails, vLLM has mended it, and the patch can go."""
    values = torch.tensor([1.0, 0.5, 2.0])
    cumulative = torch.tensor([2, 5, 6], dtype=torch.int32)
    expected = [1.0, 1.0, 0.5, 0.5, 0.5, 2.0]
    mended = rejection_sampler.expand_batch_to_tokens
    assert mended.__wrapped__(values, cumulative, 6).tolist() != expected
    assert mended(values, cumulative, 6).tolist() == expected
    replaced = mended(torch.tensor([0, 3]), torch.tensor([1, 3]), 3, 0, 1)
    assert replaced.tolist() == [1, 3, 3]


def test_a_row_with_a_seed_is_sampled_by_it_whatever_runs_beside_it(llm):
    """Rows without a seed end in the first steps, so that the rows of a step have seeds in part and
    then altogether. 0.25.1 for CPUs ignores the seeds then.

    With 12 tokens a row, of 32 that a random model has, seeds that were ignored would show.
    """
    if patches.vllm_version() < (0, 29):
        pytest.skip("0.25.1 chooses its function when the engine starts, here without the patch")
    seeded = [params(12, seed=seed) for seed in range(4)]
    greedy = params(3, temperature=0.0)

    def rows(*several):
        prompts = [{"prompt_token_ids": PROMPT}] * len(several)
        outputs = llm.generate(prompts, list(several), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    torch.manual_seed(1)
    alone = rows(*seeded)
    torch.manual_seed(2)
    first, _, second, _, third, fourth = rows(
        seeded[0], greedy, seeded[1], params(6), seeded[2], seeded[3]
    )
    assert [first, second, third, fourth] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


LINEAR_LAYER = """
import sys
import torch
from vllm import _custom_ops
from nemo_specrl.engine import patches, v1_patches

if sys.argv[1] == "padded":
    for _ in range(2):  # a second time changes nothing
        patches.install(v1_patches.PATCHES)
torch.manual_seed(0)
weight, bias = torch.randn(96, 64), torch.randn(96)
handler = _custom_ops.create_onednn_mm(weight.t(), 32)
for tokens in range(25, 97):
    x = torch.randn(tokens, 64)
    y = _custom_ops.onednn_mm(handler, x, bias)
    assert y.shape == (tokens, 96) and y.is_contiguous()
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
"""


@needs_cpu_build
@pytest.mark.parametrize(("how", "kernels"), [("as it is", 72), ("padded", 8 + 4)])
def test_linear_layers_on_a_cpu_need_few_kernels(how, kernels):
    """When the first case fails, oneDNN or vLLM has mended it, and the patch can go."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create", "VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", LINEAR_LAYER, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [line for line in done.stdout.splitlines() if "create:cache_miss,cpu,matmul" in line]
    assert len(made) == kernels


@pytest.mark.parametrize("at_once", [1024, 37])
def test_logprobs_of_prompts_are_those_that_vllm_computes_one_by_one(
    cramped_engine, monkeypatch, at_once
):
    """Prompts of many lengths, some prefilled in chunks, with and without other candidates."""
    rng = np.random.default_rng(at_once)
    lengths = [2, 3, 30, 64, 65, 100, 129, 5, 17, 40]
    prompts = [
        {"prompt_token_ids": rng.integers(0, VOCABULARY, length).tolist()} for length in lengths
    ]
    wanted = [0, 0, 3, 0, 1, 0, 3, None, 0, 3]
    params = [
        SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=k, flat_logprobs=True)
        for k in wanted
    ]
    together = GPUModelRunner._get_prompt_logprobs_dict
    groups = []
    fill = v1_patches._fill_prompt_logprobs

    def counted(runner, hidden, num_logprobs, parts):
        groups.append((num_logprobs, len(parts)))
        fill(runner, hidden, num_logprobs, parts)

    monkeypatch.setattr(v1_patches, "_fill_prompt_logprobs", counted)
    monkeypatch.setattr(v1_patches, "PROMPT_TOKENS_AT_ONCE", at_once)
    found = []
    for function in (together, together.__wrapped__):
        monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", function)
        cramped_engine.reset_prefix_cache()
        found.append(cramped_engine.generate(prompts, params, use_tqdm=False))
    assert {k for k, _ in groups} == {0, 1, 3} and max(n for _, n in groups) > 2
    for new, old, length, k in zip(*found, lengths, wanted, strict=True):
        assert new.outputs[0].token_ids == old.outputs[0].token_ids
        if k is None:
            assert new.prompt_logprobs is old.prompt_logprobs is None
            continue
        assert len(new.prompt_logprobs) == length
        for name in ("start_indices", "end_indices", "token_ids", "ranks"):
            assert getattr(new.prompt_logprobs, name) == getattr(old.prompt_logprobs, name)
        np.testing.assert_allclose(
            new.prompt_logprobs.logprobs[1:], old.prompt_logprobs.logprobs[1:], atol=1e-5
        )


def test_nothing_is_wrapped_where_one_source_is_another(monkeypatch):
    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        return {}

    name = "_get_prompt_logprobs_dict"
    before = GPUModelRunner._input_fits_in_drafter.__wrapped__
    monkeypatch.setattr(GPUModelRunner, "_input_fits_in_drafter", before)
    monkeypatch.setattr(GPUModelRunner, name, _get_prompt_logprobs_dict)
    with pytest.raises(IncompatibleVersion, match=r"has a source \(\w+\) other than those of 0"):
        patches.install(v1_patches.PATCHES)
    assert GPUModelRunner._input_fits_in_drafter is before
    monkeypatch.delattr(GPUModelRunner, name)
    with pytest.raises(IncompatibleVersion, match=r"has no .*_get_prompt_logprobs_dict"):
        patches.install(v1_patches.PATCHES)

"""What is replaced in vLLM, beside what vLLM does without it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.logprobs import create_prompt_logprobs
from vllm.platforms import current_platform
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nemo_specrl.engine.vllm import patches
from nemo_specrl.engine.vllm.plugin import vllm_plugin
from nemo_specrl.errors import IncompatibleVersion
from tests.support.engines import VOCABULARY, needs_cpu_build

needs_known_runner = pytest.mark.skipif(
    not current_platform.is_cpu() or vllm.__version__.startswith("0.20."),
    reason="the plug-in leaves the log-probs of prompts as they are on a GPU and on vLLM 0.20",
)


@pytest.mark.parametrize("candidates", [0, 3, -1])
def test_logprobs_of_prompts_are_appended_as_vllm_does(llm, speculative, candidates):
    """Also where a prompt is prefilled in chunks."""
    speculative()
    extended = LogprobsProcessor._update_prompt_logprobs
    assert extended.of_nemo_specrl
    rng = torch.Generator().manual_seed(candidates)
    width = VOCABULARY + 1 if candidates == -1 else candidates + 1
    chunks = [
        LogprobsTensors(
            torch.randint(VOCABULARY, (tokens, width), generator=rng),
            torch.randn(tokens, width, generator=rng),
            torch.randint(1, VOCABULARY, (tokens,), generator=rng),
        )
        for tokens in (16, 0, 16, 1)
    ]
    made = []
    for update in (extended.__wrapped__, extended):
        processor = LogprobsProcessor(
            None, None, create_prompt_logprobs(flat_logprobs=True), None, None, candidates
        )
        for chunk in chunks:
            update(processor, chunk)
        made.append(processor.prompt_logprobs)
    assert made[0] == made[1]
    assert len(made[1]) == 1 + 33


LINEAR_LAYER = """
import sys
import torch
from vllm import _custom_ops
from nemo_specrl.engine.vllm.patches import pad_cpu_linear_layers

if sys.argv[1] == "padded":
    pad_cpu_linear_layers()
    pad_cpu_linear_layers()  # a second time changes nothing
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
    """When the first case fails, oneDNN or vLLM has fixed it: ``pad_cpu_linear_layers`` can go."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create", "VLLM_PLUGINS": ""}
    command = [sys.executable, "-c", LINEAR_LAYER, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [line for line in done.stdout.splitlines() if "create:cache_miss,cpu,matmul" in line]
    assert len(made) == kernels


@needs_cpu_build
def test_engines_on_a_cpu_have_padded_linear_layers(llm):
    """The plug-in has put them there."""
    from vllm import _custom_ops

    assert _custom_ops.onednn_mm.of_nemo_specrl


@needs_known_runner
def test_engines_on_a_cpu_compute_the_logprobs_of_prompts_together(llm):
    """The plug-in has found a source that it knows; when this fails, look at what has changed."""
    assert GPUModelRunner._get_prompt_logprobs_dict.of_nemo_specrl


@needs_known_runner
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
    fill = patches._fill_prompt_logprobs

    def counted(runner, hidden, num_logprobs, parts):
        groups.append((num_logprobs, len(parts)))
        fill(runner, hidden, num_logprobs, parts)

    monkeypatch.setattr(patches, "_fill_prompt_logprobs", counted)
    monkeypatch.setattr(patches, "PROMPT_TOKENS_AT_ONCE", at_once)
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


@needs_cpu_build
def test_logprobs_of_prompts_stay_vllms_where_their_source_is_another(monkeypatch):
    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        return {}

    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", _get_prompt_logprobs_dict)
    with pytest.raises(IncompatibleVersion, match=r"has a source \(\w+\) other than those of 0"):
        patches.batch_cpu_prompt_logprobs()
    vllm_plugin()
    assert GPUModelRunner._get_prompt_logprobs_dict is _get_prompt_logprobs_dict
    monkeypatch.delattr(GPUModelRunner, "_get_prompt_logprobs_dict")
    with pytest.raises(IncompatibleVersion, match="has no _get_prompt_logprobs_dict"):
        patches.batch_cpu_prompt_logprobs()

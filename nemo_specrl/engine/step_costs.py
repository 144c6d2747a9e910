"""What a decoding step costs on the GPU at hand, in time and memory.

The time is computed by vLLM's configuration, but for the layers of dense models, which are timed
when an engine has started (:func:`time_layers`): what kernels, graphs and all-reduces take differs
from GPU to GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

import numpy as np

from nemo_specrl.drafting.uniform_length import GPUS, Gpu, StepCosts

__all__ = ["SAMPLER_BYTES", "TIMED", "costs_of", "max_drafted", "step_costs", "time_layers"]

STATES = ("mamba", "linear_attention")
"""Names of layers that keep a state, in Hugging Face configurations."""
SAMPLER_BYTES = 2 * 2**30
"""Memory for the logits of a step's draft tokens, which vLLM's memory profile does not include
(vllm-project/vllm pull request 48037): a quarter of what ``gpu_memory_utilization`` 0.9 leaves of
80 GiB."""

TIMED = "spec_rl_timed"
"""Key in ``additional_config`` of what :func:`time_layers` returned, for the scheduler."""
POINTS, TIMES, MOST_TIMED = 16, 5, 1536
"""How many numbers of tokens are timed without and with drafts, how often, and the largest."""


def max_drafted(vllm_config: Any) -> int:
    """The most draft tokens whose logits fit into memory in a step.

    For each draft token and vocabulary entry, the V2 runner holds at once the model's logits and a
    float32 copy (v1/worker/gpu/spec_decode/rejection_sampler.py; from 0.29 on, of parts of 1 GiB at
    most), or, while tensor-parallel ranks gather the logits, these up to three times.
    """
    model = vllm_config.model_config
    logit_bytes = int(model.dtype.itemsize)
    entry_bytes = max(3 * logit_bytes, logit_bytes + 4)
    return SAMPLER_BYTES // (entry_bytes * int(model.get_vocab_size()))


def _gpu_at_hand() -> Gpu:
    """The data sheet of this machine's GPU; that of an H100 if it is not known."""
    from vllm.platforms import current_platform

    name = str(current_platform.get_device_name())
    return next((gpu for part, gpu in GPUS.items() if part in name), GPUS["H100"])


def step_costs(vllm_config: Any) -> StepCosts:
    """The costs of a step.

    Sizes come from the names that Hugging Face configurations share. If a model has others (latent
    attention), this is an estimate that errs in the size of attention; weights and operations
    dominate. A size without a known name is that of an 8B model.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = max(1, int(parallel.tensor_parallel_size))
    kv_bytes = 1 if str(vllm_config.cache_config.cache_dtype).startswith("fp8") else 2
    eight_bit = "fp8" in str(model.quantization or "")
    gpu = _gpu_at_hand()
    if eight_bit:
        gpu = Gpu(gpu.bandwidth, 2 * gpu.flops)
    costs = costs_of(model.hf_text_config, gpu, ranks, 1 if eight_bit else 2, kv_bytes)
    timed = (vllm_config.additional_config or {}).get(TIMED, ())
    return dataclasses.replace(costs, timed=timed)


def time_layers(worker: Any) -> list[tuple[int, float]]:
    """Time the layers of a model by steps as vLLM runs them for data-parallel ranks without work.

    All ranks must call it, after graphs have been captured. The output layer is not run, rows have
    no context, and all tokens are the same, so that a mixture of experts reads only some of them.

    Args:
        worker: vLLM's worker with the V2 model runner.

    Returns:
        numbers of tokens, increasing, and seconds of a step.
    """
    import torch

    runner, on_device = worker.model_runner, torch.accelerator.is_available()
    rows, each = int(runner.max_num_reqs), int(runner.decode_query_len)
    most = min(MOST_TIMED, int(runner.max_num_tokens))
    plain = {(n, False) for n in _spread(1, min(rows, most))}
    drafts = {(each * n, True) for n in _spread(rows // each + 1, min(rows, most // each))}
    found = []
    for tokens, drafted in sorted(plain | drafts):
        for repetition in range(1 + TIMES):
            if repetition <= 1:  # the first one may compile
                if on_device:
                    torch.accelerator.synchronize()
                began = time.perf_counter()
            runner._dummy_run(tokens, uniform_decode=drafted)
        if on_device:
            torch.accelerator.synchronize()
        found.append((tokens, (time.perf_counter() - began) / TIMES))
    return found


def _spread(first: int, last: int) -> list[int]:
    """Some whole numbers from the first to the last, closer together where they are small."""
    if last < first:
        return []
    return sorted({round(number) for number in np.geomspace(first, last, POINTS)})


def costs_of(config: Any, gpu: Gpu, ranks: int, weight_bytes: int, kv_bytes: int) -> StepCosts:
    """The costs of a step, from a Hugging Face configuration.

    Args:
        config: configuration of the language model.
        gpu: GPU of each rank.
        ranks: number of tensor-parallel ranks.
        weight_bytes: bytes of a weight.
        kv_bytes: bytes of an entry of the KV cache.
    """
    hidden = _first(config, "hidden_size", "n_embd", "d_model") or 4096
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers") or 32
    heads = _first(config, "num_attention_heads", "n_head", "n_heads") or max(1, hidden // 128)
    kv_heads = _first(config, "num_key_value_heads") or heads
    head = _first(config, "head_dim") or hidden // heads
    vocabulary = _first(config, "vocab_size") or 2**17
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    chosen = _first(config, "num_experts_per_tok") if experts else 0
    inner = _first(config, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    kinds = _kinds(config, layers, bool(experts))
    attention = hidden * head * (2 * heads + 2 * kv_heads)  # other layers have about as much
    matrices = 2 if getattr(config, "mlp_hidden_act", "") == "relu2" else 3  # of an MLP
    expert = matrices * hidden * int(_first(config, "moe_intermediate_size") or inner)
    dense = (kinds["attention"] + kinds["state"]) * attention + hidden * vocabulary
    dense += kinds["mlp"] * matrices * hidden * inner
    mixtures, output = kinds["moe"], hidden * vocabulary
    return StepCosts(
        gpu=gpu,
        weight_bytes=dense * weight_bytes / ranks,
        expert_bytes=mixtures * experts * expert * weight_bytes / ranks,
        expert_share=chosen / experts if experts else 0.0,
        token_flops=2 * (dense + mixtures * chosen * expert) / ranks,
        kv_bytes=2 * kinds["attention"] * max(1, kv_heads / ranks) * head * kv_bytes,
        vocabulary=vocabulary,
        head_bytes=output * weight_bytes / ranks,
        head_flops=2 * output / ranks,
        state_bytes=kinds["state"] * _state_bytes(config) / ranks,
    )


def _kinds(config: Any, layers: int, experts: bool) -> Counter[str]:
    """Count the layers that are attention, have a state, are dense or have experts.

    In Nemotron-H each layer is one of these; in other models one of the latter two follows each of
    the former two.
    """
    names = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    names = [str(name) for name in names or ["attention"] * layers]
    kinds = Counter("state" if name in STATES else name for name in names)
    kinds["attention"] = sum(kinds[name] for name in kinds if name.endswith("attention"))
    if not (kinds["mlp"] or kinds["moe"]):
        kinds["moe" if experts else "mlp"] = layers
    return kinds


def _state_bytes(config: Any) -> int:
    """Bytes of the state of one row in one Mamba-2 layer, or gated delta net, in float32."""
    heads = _first(config, "mamba_num_heads", "linear_num_value_heads")
    head = _first(config, "mamba_head_dim", "linear_value_head_dim")
    return 4 * heads * head * _first(config, "ssm_state_size", "linear_key_head_dim")


def _first(config: Any, *names: str) -> int:
    """The first of these sizes that a configuration has as an integer; 0 if none."""
    sizes = (getattr(config, name, None) for name in names)
    return next((size for size in sizes if isinstance(size, int) and size > 0), 0)

"""What a decoding step of a model costs on the GPU at hand, read from vLLM's configuration."""

from __future__ import annotations

from typing import Any

from nemo_specrl.speculation.uniform_length import GPUS, Gpu, StepCosts

__all__ = ["costs_of", "step_costs"]


def _gpu_at_hand() -> Gpu:
    """The data sheet of this machine's GPU; that of an H100 where it is not known."""
    from vllm.platforms import current_platform

    name = str(current_platform.get_device_name())
    return next((gpu for part, gpu in GPUS.items() if part in name), GPUS["H100"])


def step_costs(vllm_config: Any) -> StepCosts:
    """The costs of a step, of a model whose layers are alike.

    Sizes come from the names that configurations of Hugging Face share. Where a model has others
    (latent attention, layers of several kinds), this is an estimate, which errs in the size of
    attention; weights and operations decide. A size that has no known name is that of an 8B model.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = max(1, int(parallel.tensor_parallel_size))
    kv_bytes = 1 if str(vllm_config.cache_config.cache_dtype).startswith("fp8") else 2
    eight_bit = "fp8" in str(model.quantization or "")
    gpu = _gpu_at_hand()
    if eight_bit:
        gpu = Gpu(gpu.bandwidth, 2 * gpu.flops)
    return costs_of(model.hf_text_config, gpu, ranks, 1 if eight_bit else 2, kv_bytes)


def costs_of(config: Any, gpu: Gpu, ranks: int, weight_bytes: int, kv_bytes: int) -> StepCosts:
    """The costs of a step, from a configuration of Hugging Face.

    Args:
        config: of the language model.
        gpu: of each rank.
        ranks: of tensor parallelism.
        weight_bytes: of a weight.
        kv_bytes: of an entry of the KV cache.
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
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    expert = 3 * hidden * int(_first(config, "moe_intermediate_size") or inner)
    dense = layers * (attention + (0 if experts else 3 * hidden * inner)) + hidden * vocabulary
    return StepCosts(
        gpu=gpu,
        weight_bytes=dense * weight_bytes / ranks,
        expert_bytes=layers * experts * expert * weight_bytes / ranks,
        expert_share=chosen / experts if experts else 0.0,
        token_flops=2 * (dense + layers * chosen * expert) / ranks,
        kv_bytes=2 * layers * max(1, kv_heads / ranks) * head * kv_bytes,
        vocabulary=vocabulary // ranks,
    )


def _first(config: Any, *names: str) -> int:
    """The first of these sizes that a configuration has as a whole number; 0: none."""
    sizes = (getattr(config, name, None) for name in names)
    return next((size for size in sizes if isinstance(size, int) and size > 0), 0)

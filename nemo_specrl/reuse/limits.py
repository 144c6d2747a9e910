"""What prefix reuse must know of a running engine, and the engines that it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from nemo_specrl.errors import ConfigError

__all__ = ["EngineLimits"]


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine, and how it ends responses; lengths are in tokens."""

    max_model_len: int
    vocabulary: int
    eos: int | None
    extra_eos: frozenset[int]
    """Further tokens that end a sequence, from the model's generation config."""
    tokenizer: Any
    """None in an engine that was started without one."""
    block_size: int
    """Tokens of a block of the KV cache: prefixes are found again in whole blocks."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    dtype_bytes: int
    """Of the model's activations."""

    @classmethod
    def of(cls, engine: Any) -> EngineLimits:
        """Read the limits of an ``LLMEngine`` or ``AsyncLLM``.

        Raises:
            ConfigError: prefix reuse would be wrong, or slower than none, on this engine.
        """
        config, processor = engine.vllm_config, engine.input_processor
        _check(config)
        model, cache = config.model_config, config.cache_config
        eos = processor.renderer.get_eos_token_id()
        extra = processor.generation_config_fields.get("eos_token_id") or ()
        extra = {extra} if isinstance(extra, int) else set(extra)
        return cls(
            max_model_len=model.max_model_len,
            vocabulary=model.get_vocab_size(),
            eos=eos,
            extra_eos=frozenset(extra - {eos}),
            tokenizer=None if model.skip_tokenizer_init else processor.get_tokenizer(),
            block_size=cache.block_size,
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            dtype_bytes=model.dtype.itemsize,
        )


def _check(config: Any) -> None:
    """Refuse engines on which prefix reuse would be wrong, or slower than none."""
    model, cache, drafter = config.model_config, config.cache_config, config.speculative_config
    on_cpu = config.device_config.device_type == "cpu"
    method = getattr(drafter, "method", None)
    lossless = "or take preset: lossless"
    for wrong, problem in (
        (
            not cache.enable_prefix_caching,
            "enable_prefix_caching = False: each accepted prefix would be prefilled a second time; "
            "set True",
        ),
        (
            not str(model.logprobs_mode).endswith("logprobs"),
            f"logprobs_mode = {model.logprobs_mode}: must be raw_logprobs or processed_logprobs",
        ),
        (
            bool(model.logits_processors),
            "logits_processors: the engine samples from what they make of the policy's "
            f"distribution; leave them out, {lossless}",
        ),
        (
            config.kv_transfer_config is not None,
            "kv_transfer_config: what a KV connector keeps of the old weights would be read after "
            "a refit; build the engine without one",
        ),
        (
            model.quantization is not None or str(cache.cache_dtype).startswith("fp8"),
            f"{model.quantization or cache.cache_dtype}: prefill and decoding round differently, "
            f"which ends accepted prefixes; leave out quantization and kv_cache_dtype, {lossless}",
        ),
        (
            config.parallel_config.data_parallel_size > 1,
            f"data_parallel_size = {config.parallel_config.data_parallel_size}: a continuation "
            f"would not find the prefix that another engine has verified; set 1, {lossless}",
        ),
        (
            config.lora_config is not None and on_cpu,
            "enable_lora = True: on a CPU vLLM fails where it computes log-probs of prompts beside "
            f"other rows; merge the adapter into the weights, {lossless}",
        ),
        (
            method in ("eagle", "eagle3", "mtp", "draft_model")
            and not getattr(config, "use_v2_model_runner", False),
            f"speculative_config.method = {method}: prompt log-probs beside this drafter are wrong "
            f"on vLLM's V1 runner (vLLM pull request 53520); leave it out, {lossless}",
        ),
        (
            getattr(cache, "kv_sharing_fast_prefill", False),
            "kv_sharing_fast_prefill = True: prompt log-probs are wrong with it; set False",
        ),
    ):
        if wrong:
            raise ConfigError(problem)

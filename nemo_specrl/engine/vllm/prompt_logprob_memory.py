"""How much memory verification by prompt log-probs takes, and whether an engine has it."""

from __future__ import annotations

from typing import Any

from nemo_specrl.engine.vllm.compat import engine_of
from nemo_specrl.engine.vllm.environment import runs_v2
from nemo_specrl.errors import ConfigError

__all__ = ["check_prompt_logprob_memory", "prompt_logprob_bytes"]


def prompt_logprob_bytes(llm: Any) -> int:
    """Upper bound of the memory that verification takes in a worker besides the KV cache, bytes.

    vLLM's V1 model runner turns the scheduled tokens of one draft at a time into logits of the
    whole vocabulary, and those into float32 log-probs (v1/worker/gpu_model_runner.py,
    ``_get_prompt_logprobs_dict``). These are at most ``max_num_batched_tokens`` and
    ``max_model_len`` tokens; ``long_prefill_token_threshold`` is no bound, since vLLM 0.31 does not
    apply it to a request that is alone in the engine (v1/core/sched/scheduler.py).

    The V2 model runner has logits for all tokens of a batch in pieces of 1,024, and no full
    log-probs (v1/worker/gpu/sample/prompt_logprob.py).

    Args:
        llm: a ``vllm.LLM``, an ``LLMEngine`` or an ``AsyncLLM``.
    """
    config = engine_of(llm).vllm_config
    tokens, of_token = _prompt_logprob_tokens(config)
    return tokens * of_token


def _prompt_logprob_tokens(vllm_config: Any) -> tuple[int, int]:
    """Number of prompt tokens whose log-probs are computed at once, and bytes for each of them."""
    model, batch = vllm_config.model_config, vllm_config.scheduler_config.max_num_batched_tokens
    vocabulary, dtype_bytes = int(model.get_vocab_size()), int(model.dtype.itemsize)
    if runs_v2(vllm_config):
        return min(batch, 1024), vocabulary * dtype_bytes
    return min(batch, model.max_model_len), vocabulary * (dtype_bytes + 4)


def check_prompt_logprob_memory(llm: Any) -> None:
    """Make sure that there is the memory that verification takes besides the KV cache.

    vLLM gives the cache what ``gpu_memory_utilization`` allows, minus what a trial step took, which
    had no prompt log-probs.

    Raises:
        ConfigError: there is not enough; the message says what would be.
    """
    config = engine_of(llm).vllm_config
    free, source = _memory_left(config)
    tokens, of_token = _prompt_logprob_tokens(config)
    if free is None or tokens * of_token <= free:
        return
    gib = 2**30
    raise ConfigError(
        f"max_num_batched_tokens = {config.scheduler_config.max_num_batched_tokens}: the log-probs "
        f"that verify drafts take up to {tokens * of_token / gib:.1f} GiB beside the KV cache, and "
        f"{source} {free / gib:.1f} GiB; set it to {free // of_token} or less (in NeMo-RL: "
        "policy.generation.vllm_kwargs.max_num_batched_tokens)"
    )


def _memory_left(vllm_config: Any) -> tuple[int | None, str]:
    """Memory besides an engine, bytes, and what leaves it; None: not known for this device."""
    device = vllm_config.device_config.device_type
    if device == "cpu":
        import psutil  # vLLM needs it, too

        return int(psutil.virtual_memory().available), "this machine has free"
    if device != "cuda":
        return None, ""
    from vllm.platforms import current_platform

    used = float(vllm_config.cache_config.gpu_memory_utilization)
    total = int(current_platform.get_device_total_memory())
    return int(total * (1 - used)), f"gpu_memory_utilization = {used} leaves"

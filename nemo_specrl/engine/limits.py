"""Limits of an engine, and the distribution it samples from, read once when drafting is set up."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from nemo_specrl.engine.data_parallel import in_group
from nemo_specrl.engine.vllm.compat import engine_of, eos_token_ids, routes_shape, tokenizer_of
from nemo_specrl.engine.vllm.v2_patches import drafts_from_history

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["TREE_PROPOSER", "EngineLimits", "alterations"]


TREE_PROPOSER = "nemo_specrl.engine.drafters.v1_proposer.TreeProposer"


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine and how it ends responses; lengths are in tokens."""

    max_model_len: int
    vocabulary: int
    dtype_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos: int | None
    extra_eos: frozenset[int]
    tokenizer: Any
    logprobs_mode: str
    max_logprobs: int
    """The most candidates that a request may ask for at each position; -1: any number."""
    drafter: Literal["v2", "proposer"] | None
    """The drafter of this package that the engine was built with (``drafters.method``)."""
    steps_of_several_tokens: bool
    """The engine has a drafter, this package's or one of vLLM's."""
    adapters_on_cpu: bool
    """The engine takes LoRA adapters and runs on a CPU: there vLLM fails if a step computes the
    log-probs of a prompt together with another row, since it has an adapter for each row and not
    for each position (lora/punica_wrapper/punica_cpu.py, ``add_lora_logits``; seen in 0.32.0)."""
    in_group: bool
    """The engine is one of a data-parallel group (``data_parallel``)."""
    async_scheduling: bool
    routes: tuple[int, int] | None
    """Layers, and experts of a token in each, if the engine returns which ones were chosen."""
    alterations: tuple[str, ...]
    """What makes the engine sample from a distribution other than the policy's, in words."""

    @classmethod
    def of(cls, llm: LLM | AsyncLLM) -> EngineLimits:
        """Read the limits of a running engine."""
        engine = engine_of(llm)
        config = engine.vllm_config
        eos, extra_eos = eos_token_ids(engine)
        return cls(
            max_model_len=config.model_config.max_model_len,
            vocabulary=config.model_config.get_vocab_size(),
            dtype_bytes=config.model_config.dtype.itemsize,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            eos=eos,
            extra_eos=extra_eos,
            tokenizer=None if config.model_config.skip_tokenizer_init else tokenizer_of(engine),
            logprobs_mode=str(getattr(config.model_config, "logprobs_mode", "logprobs")),
            max_logprobs=config.model_config.max_logprobs,
            drafter=_drafter(config),
            steps_of_several_tokens=config.speculative_config is not None,
            adapters_on_cpu=config.lora_config is not None
            and config.device_config.device_type == "cpu",
            in_group=in_group(engine),
            async_scheduling=bool(config.scheduler_config.async_scheduling),
            routes=routes_shape(config),
            alterations=alterations(config),
        )


def _drafter(config: Any) -> Literal["v2", "proposer"] | None:
    if drafts_from_history(config):
        return "v2"
    model = getattr(config.speculative_config, "model", None)
    return "proposer" if model == TREE_PROPOSER else None


def alterations(config: Any) -> tuple[str, ...]:
    """What makes an engine sample from a distribution other than that of its prompt log-probs.

    Args:
        config: a ``VllmConfig``.

    Returns:
        A line for each, saying what to leave out.
    """
    model, drafter = config.model_config, config.speculative_config
    lines = []
    # With a drafter, the V1 model runner leaves out those of entry points
    # (v1/sample/logits_processor, build_logitsprocs).
    names = [_name(processor) for processor in getattr(model, "logits_processors", None) or ()]
    if drafter is None or getattr(config, "use_v2_model_runner", False):
        plugins = metadata.entry_points(group="vllm.logits_processors")
        names += [f"{plugin.name} (entry point {plugin.value})" for plugin in plugins]
    if names:
        lines.append(
            f"logits_processors = {', '.join(names)}: the engine samples from what they "
            "make of the policy's distribution; leave them out (uninstall an entry point)"
        )
    if getattr(drafter, "rejection_sample_method", None) == "synthetic":
        lines.append(
            "speculative_config.rejection_sample_method = synthetic: drafts are accepted "
            "at a fixed rate, whatever the policy says; set standard"
        )
    if getattr(config, "watermark_config", None) is not None:
        lines.append(
            "watermark_config: watermarked responses are no samples of the policy; leave it out"
        )
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        lines.append(
            "kv_sharing_fast_prefill = True: prompt log-probs, by which drafts are "
            "verified, are wrong with it; set False"
        )
    if getattr(model, "is_diffusion", False) or getattr(model, "is_encoder_decoder", False):
        lines.append(
            "the model does not decode one token after the other behind its prompt; take "
            "another one"
        )
    return tuple(lines)


def _name(processor: Any) -> str:
    return (
        processor if isinstance(processor, str) else str(getattr(processor, "__name__", processor))
    )

"""Checks that an engine, a prompt and sampling parameters allow drafting.

Whatever does not is reported in one line that says what would be right, before the engine's first
step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.errors import ConfigError, last_line

if TYPE_CHECKING:
    from vllm import SamplingParams

    from nemo_specrl.engine.limits import EngineLimits

__all__ = ["as_list", "check_engine", "check_params", "rendered_prompt"]

OFF = "or set spec_rl.enabled: false"


def check_engine(limits: EngineLimits, config: SpecRLConfig) -> None:
    """Raise if an engine does not fit the configuration.

    Raises:
        ConfigError: says what is wrong, and what would be right.
    """
    if not limits.logprobs_mode.endswith("logprobs"):
        raise ConfigError(
            f"logprobs_mode = {limits.logprobs_mode}: must be raw_logprobs or processed_logprobs"
        )
    if limits.alterations:
        raise ConfigError(f"{limits.alterations[0]}, {OFF}")
    rounds = config.tree.enabled and config.tree.method == "rounds"
    if limits.adapters_on_cpu and (rounds or config.effective_fresh_fraction < 1):
        raise ConfigError(
            "enable_lora = True: on a CPU vLLM fails where it computes log-probs of prompts, by "
            "which prefix reuse and rounds verify, beside other rows; merge the adapter into the "
            f"weights, or take preset: lossless without rounds, {OFF}"
        )
    if rounds and limits.steps_of_several_tokens:
        other = f"that of tree.method = {limits.drafter}" if limits.drafter else "one of vLLM's own"
        raise ConfigError(
            f"speculative_config: an engine has one drafter. This one has {other}, and "
            "spec_rl.tree.method = rounds asks for drafts in rounds; leave speculative_config out, "
            "or take preset: faithful without trees"
        )
    if config.run_ahead.enabled and (rounds or not config.tree.enabled):
        raise ConfigError(
            "spec_rl.run_ahead.enabled = true: needs a drafter inside the engine (spec_rl.tree."
            "method = v2 or proposer), which this one does not have; set run_ahead.enabled to false"
        )
    if limits.in_group:
        _check_group(limits, config)


def _check_group(limits: EngineLimits, config: SpecRLConfig) -> None:
    """Raise for anything that an engine of a data-parallel group would do without the others."""
    if limits.async_scheduling:
        raise ConfigError(
            "async_scheduling = True: some engine steps would then not run the model, and the "
            "other engines of the data-parallel group would wait for them forever; set False"
        )
    if config.run_ahead.enabled:
        raise ConfigError(
            "spec_rl.run_ahead.enabled = true: an engine of a data-parallel group takes no steps "
            "without the others; set run_ahead.enabled to false"
        )
    if limits.drafter == "v2" and config.tree.adaptive_verification:
        raise ConfigError(
            "spec_rl.tree.adaptive_verification = true: engines of a data-parallel group have to "
            "verify the same number of tokens of each row; set false"
        )


def check_params(engine: Any, rows: Iterable[tuple[list[int], SamplingParams]]) -> None:
    """Raise if vLLM would refuse sampling parameters, before the first row begins.

    Parameters that differ from the preceding ones only in the seed are not checked.

    Args:
        engine: an ``LLMEngine``.
        rows: tokens and parameters of each prompt of a call.

    Raises:
        ConfigError: with vLLM's reason.
    """
    seen: Any = None
    for i, (tokens, params) in enumerate(rows):
        unseeded = copy.copy(params)
        unseeded.seed = None
        if unseeded == seen:
            continue
        seen = unseeded
        try:
            engine.input_processor.process_inputs(
                "check", {"prompt_token_ids": tokens}, params, supported_tasks=("generate",)
            )
        except Exception as error:  # vLLM's own error class is not one of Python's
            line = f"sampling_params[{i}]: vLLM refuses them: {last_line(error)}"
            raise ConfigError(line) from error


def checked_tokens(tokens: Any, limits: EngineLimits, where: str) -> list[int]:
    """Return the token ids of a prompt as a list.

    Args:
        tokens: as the caller gave them.
        limits: limits of the engine.
        where: the prompt's place in the call.

    Raises:
        ConfigError: these are not token ids, there are none or too many of them, or some are
            unknown to the model.
    """
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # lists of different lengths, ...
        ids = np.empty((0, 0))
    if ids.ndim == 1 and not ids.size:
        raise ConfigError(f"{where}: has no token; a prompt needs one at least")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        kinds = ", ".join(sorted({type(t).__name__ for t in tokens})) if ids.ndim == 1 else ""
        raise ConfigError(
            f"{where}: must be token ids, one whole number after the other, got "
            f"{kinds or type(tokens).__name__}"
        )
    if len(ids) >= limits.max_model_len:
        raise ConfigError(
            f"{where}: has {len(ids)} tokens, and the model's limit for prompt and response "
            f"together is {limits.max_model_len} (max_model_len); shorten it"
        )
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= limits.vocabulary:
        raise ConfigError(
            f"{where}: has token {least if least < 0 else most}, and the model's vocabulary is "
            f"0..{limits.vocabulary - 1}"
        )
    listed: list[int] = ids.tolist()
    return listed


def as_list(prompts: Any) -> Any:
    """Return a single prompt as a list of one; leave several as they are."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):  # an array, or an iterator
        try:
            prompts = list(prompts)
        except TypeError:
            raise ConfigError(
                f"prompts: must be prompts as vllm.LLM.generate takes them, got "
                f"{type(prompts).__name__}"
            ) from None
    single = len(prompts) > 0 and isinstance(prompts[0], (int, float, np.number))
    return [prompts] if single else prompts


def rendered_prompt(prompt: Any, limits: EngineLimits, where: str) -> tuple[str | None, list[int]]:
    """Return the text of a prompt, if there is one, and its token ids.

    For a prompt with media, these are the tokens that the caller gave: vLLM inserts placeholders
    for the media.
    """
    text = None
    if isinstance(prompt, dict):
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        if limits.tokenizer is None:
            raise ConfigError(f"{where}: text prompts need an engine without skip_tokenizer_init")
        return prompt, checked_tokens(list(limits.tokenizer.encode(prompt)), limits, where)
    return text, checked_tokens(prompt, limits, where)

"""Checks of a recipe's rows: kinds of sampling, and prompts with more than text.

Each one for which drafts cannot be verified gets one line that says what to set
(``recipe_checks``).
"""

from __future__ import annotations

from typing import Any

from nemo_specrl.config import SpecRLConfig

__all__ = ["BLOCK", "RAW_TOP_K", "refused_media", "refused_sampling", "verified_by_prompts"]

BLOCK = "policy.generation.spec_rl"
RAW_TOP_K = (None, -1, 0)


def refused_sampling(generation: Any, spec_rl: SpecRLConfig) -> list[tuple[bool, str]]:
    """Kinds of sampling and values under which drafts cannot be verified.

    A proposer's drafts are verified against the distribution that is sampled from, whatever its
    temperature and top-p; drafts of prefix reuse and of rounds are verified by prompt log-probs.
    """
    by_prompt = verified_by_prompts(spec_rl)
    judge = "prefix reuse" if spec_rl.effective_fresh_fraction < 1 else "tree.method: rounds"
    why = f"{judge} verifies drafts by prompt log-probs, which are those of raw sampling"
    off = f"or {BLOCK}.enabled=false"
    way = f"or {BLOCK}.preset: lossless without rounds, {off}"
    vllm_cfg = generation.get("vllm_cfg") or {}
    precision, kv = str(vllm_cfg.get("precision")), str(vllm_cfg.get("kv_cache_dtype"))
    noise = "its numerical noise in the log-probs that verify drafts has not been measured"
    return [
        (
            by_prompt and generation["temperature"] != 1,
            f"policy.generation.temperature = {generation['temperature']}: {why}; set 1.0, {way}",
        ),
        (
            by_prompt and generation["top_p"] != 1,
            f"policy.generation.top_p = {generation['top_p']}: {why}; set 1.0, {way}",
        ),
        (
            by_prompt and generation["top_k"] not in RAW_TOP_K,
            f"policy.generation.top_k = {generation['top_k']}: {why}; set null, {way}",
        ),
        (
            by_prompt and bool(generation.get("bad_words")),
            f"policy.generation.bad_words: {why}; leave them out, {way}",
        ),
        (
            by_prompt and precision.startswith("fp8"),
            f"policy.generation.vllm_cfg.precision = {precision}: {noise}; set bfloat16, {way}",
        ),
        (
            by_prompt and kv.startswith("fp8"),
            f"policy.generation.vllm_cfg.kv_cache_dtype = {kv}: {noise}; set auto, {way}",
        ),
        (
            by_prompt and generation.get("quant_cfg") is not None,
            f"policy.generation.quant_cfg: {noise}; leave it out, {way}",
        ),
    ]


def refused_media(images: bool, spec_rl: SpecRLConfig) -> list[tuple[bool, str]]:
    """Cases in which prompts with images, sounds or videos cannot be drafted for.

    Args:
        images: whether the recipe has such prompts.
        spec_rl: its ``spec_rl:`` block.
    """
    return [
        (
            images and verified_by_prompts(spec_rl),
            f"{BLOCK}.preset = {spec_rl.preset}: this recipe uses a multimodal processor, and only "
            "vLLM itself can verify drafts after media; set preset: lossless without rounds, or "
            f"{BLOCK}.enabled=false",
        ),
        (
            images and spec_rl.run_ahead.enabled,
            f"{BLOCK}.run_ahead.enabled = True: this recipe uses a multimodal processor, and only "
            "the token ids of upcoming prompts are available; set false",
        ),
    ]


def verified_by_prompts(spec_rl: SpecRLConfig) -> bool:
    """Whether drafts are verified by prompt log-probs, as in prefix reuse or in rounds."""
    by_drafter = spec_rl.tree.enabled and spec_rl.tree.method != "rounds"
    return spec_rl.effective_fresh_fraction < 1 or not by_drafter

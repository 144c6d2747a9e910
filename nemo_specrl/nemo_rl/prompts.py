"""The prompts of NeMo-RL's batches: keys, drafts, and the engines to which upcoming ones go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.models.generation.vllm.utils import format_prompt_for_vllm_generation

from nemo_specrl.media import has_media, media_prompt_key
from nemo_specrl.rollout import prompt_key
from nemo_specrl.speculation.draft_selection import Row, assign_sample_indices, select_drafts

__all__ = ["dealt_out", "drafts_of", "prompt_keys", "text_indices", "upcoming_rows"]


def prompt_keys(data: Any) -> list[bytes]:
    """Return the key of each row's prompt in a batch for generation.

    Args:
        data: the columns ``input_ids`` and ``input_lengths``, and those of media if it has any.
    """
    if "vllm_content" not in data:
        return [
            prompt_key(ids[:length].numpy())
            for ids, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
        ]
    return [
        media_prompt_key(prompt) if has_media(prompt) else prompt_key(prompt["prompt_token_ids"])
        for prompt in format_prompt_for_vllm_generation(data)
    ]


def text_indices(prompts: Sequence[Any]) -> list[int]:
    """Return the sample index of each row of an evaluation, whose prompts have no tokens yet.

    The rows of a prompt may go to two engines, so the engines could not count them.

    Args:
        prompts: as vLLM takes them: texts, or mappings with a text and any images, sounds or
            videos.
    """

    def key(prompt: Any) -> bytes:
        if has_media(prompt):
            return media_prompt_key(prompt)
        return (prompt if isinstance(prompt, str) else prompt["prompt"]).encode()

    return assign_sample_indices([key(prompt) for prompt in prompts])


def drafts_of(
    keys: Sequence[bytes],
    sample_indices: Sequence[int],
    cached: Mapping[bytes, Any],
    seed: int,
    fresh_fraction: float,
) -> list[Any]:
    """Return the draft that each row will verify, or None, as its engine will choose it.

    Args:
        keys: keys of the rows' prompts.
        sample_indices: sample indices of the rows.
        cached: outlines of the rollouts in the cache, by prompt key.
        seed: seed of the run.
        fresh_fraction: share of rows decoded without a draft although there is one.
    """
    rows = [Row(key, index) for key, index in zip(keys, sample_indices, strict=True)]
    choices = select_drafts(
        rows, cached, policy_version=-1, seed=seed, fresh_fraction=fresh_fraction
    )
    return [choice.draft for choice in choices]


def upcoming_rows(prompts: Sequence[list[int]], group: int) -> list[bytes]:
    """Return the prompt key of each row that a batch of these prompts will have.

    Args:
        prompts: token ids.
        group: number of rows of a prompt.
    """
    return [key for prompt in prompts for key in [prompt_key(prompt)] * group]


def dealt_out(
    prompts: Sequence[list[int]], order: Sequence[int], group: int, rows: int, engines: int
) -> list[list[list[int]]]:
    """Return upcoming prompts for each engine: those of which it will get rows.

    Drafts are in the engine that made them. The rows of the next batch are distributed here as they
    will be then, by what is known now.

    Args:
        prompts: prompts of the next batch, token ids.
        order: order of its rows, as ``balanced_order`` will return it.
        group: number of rows of a prompt.
        rows: number of rows of the present batch.
        engines: number of engines.

    Returns:
        For each row of the present batch a list of prompts, which is empty except for the first row
        of an engine's share.
    """
    share, then = -(-rows // engines), -(-len(order) // engines)
    dealt: list[list[list[int]]] = [[] for _ in range(rows)]
    for engine, first in enumerate(range(0, rows, share)):
        mine = dict.fromkeys(row // group for row in order[engine * then : (engine + 1) * then])
        dealt[first] = [prompts[prompt] for prompt in mine]
    return dealt

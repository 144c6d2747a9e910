"""The clipped ratio of the loss starts from a token's birth log-prob (``clip_anchor: birth``).

NeMo-RL computes ``prev_logprobs`` with the policy before each update (algorithms/grpo.py and
ppo.py, ``policy.get_logprobs``). Here that call's answer gets the birth log-probs of reused tokens;
they are looked up in the cache, so that it does not matter which process made the rollout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nemo_specrl.cache.cluster import ClusterCache
from nemo_specrl.rollout import Rollout, prompt_key

__all__ = ["anchor_at_birth", "birth_spans", "same_tokens"]


def anchor_at_birth(policy: Any, cache: ClusterCache) -> None:
    """Have ``policy.get_logprobs`` answer with birth log-probs where a token was reused.

    Args:
        policy: NeMo-RL's policy, in the driver.
        cache: where the rollouts of the step are.
    """
    original = policy.get_logprobs

    def get_logprobs(data: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(data, *args, **kwargs)
        if "token_mask" in data:
            _anchor(result["logprobs"], data, cache)
        return result

    policy.get_logprobs = get_logprobs


def _anchor(logprobs: torch.Tensor, data: Any, cache: ClusterCache) -> None:
    """Overwrite ``logprobs``, float ``[rows, length]``, at the positions of reused tokens."""
    lengths = data["input_lengths"].tolist()
    spans: list[tuple[int, int, int, bytes]] = []
    for row, length in enumerate(lengths):
        ids = data["input_ids"][row, :length].numpy()
        mask = data["token_mask"][row, :length].numpy() > 0
        for start, end in birth_spans(mask):
            spans.append((row, start, end, prompt_key(ids[:start])))
    cached = cache.get({key for *_, key in spans})
    for row, start, end, key in spans:
        tokens = data["input_ids"][row, start:end].numpy()
        rollout = same_tokens(cached.get(key, []), tokens)
        if rollout is None:
            continue
        births = torch.from_numpy(rollout.birth_logprobs[rollout.reused])
        logprobs[row, start + np.flatnonzero(rollout.reused)] = births.to(logprobs.dtype)


def birth_spans(mask: np.ndarray) -> list[tuple[int, int]]:
    """First position and end of each response in a row, from its bool mask ``[length]``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def same_tokens(rollouts: list[Rollout], tokens: np.ndarray) -> Rollout | None:
    """The rollout that has these tokens, int ``[n]``; the newest where there are several."""
    for rollout in rollouts:
        if len(rollout) == len(tokens) and bool((rollout.tokens == tokens).all()):
            return rollout
    return None

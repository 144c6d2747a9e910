"""The clipped ratio of the loss starts from a token's birth log-prob (``clip_anchor: birth``).

NeMo-RL computes ``prev_logprobs`` with the policy before each update and hands them to
``policy.train`` (algorithms/grpo.py and ppo.py). What that call gets has the birth log-probs of
reused tokens in their place; all else that the trainers do with ``prev_logprobs`` (masking of rows
that engines and policy disagree on, a penalty on KL in PPO's rewards, what is logged) sees the
policy's own. Birth log-probs are looked up in the cache, so that it does not matter which process
made the rollout.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from nemo_specrl.cache.cluster.driver import ClusterCache
from nemo_specrl.rollout import Rollout, prompt_key

__all__ = ["anchor_at_birth", "birth_spans", "same_tokens"]


def anchor_at_birth(policy: Any, cache: ClusterCache) -> None:
    """Have ``policy.train`` start the ratios of reused tokens from their birth log-probs.

    Args:
        policy: NeMo-RL's policy, in the driver.
        cache: where the rollouts of the step are.
    """
    original = policy.train

    def train(data: Any, *args: Any, **kwargs: Any) -> Any:
        anchored = copy.copy(data)  # its columns are the trainer's
        anchored["prev_logprobs"] = _anchored(data, cache)
        return original(anchored, *args, **kwargs)

    policy.train = train


def _anchored(data: Any, cache: ClusterCache) -> torch.Tensor:
    """``prev_logprobs``, float ``[rows, length]``, with those of birth where tokens were reused."""
    logprobs: torch.Tensor = data["prev_logprobs"].clone()
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
    return logprobs


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

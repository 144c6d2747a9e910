"""Advantages and losses, as functions of numpy arrays and torch tensors.

Sources: GRPO (arXiv 2402.03300), DAPO (2503.14476) for clip-higher and token-level means, PPO
(1707.06347) with GAE (1506.02438); the clipped loss has NeMo-RL's options
(nemo_rl/algorithms/loss/loss_functions.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["clipped_value_loss", "gae", "group_advantages", "policy_loss", "token_weights"]

FloatArray = npt.NDArray[np.float64]


def group_advantages(rewards: FloatArray, *, normalize: bool, leave_one_out: bool) -> FloatArray:
    """Compute advantages relative to the mean reward of the group.

    Args:
        rewards: float64 ``[groups, n]``.
        normalize: whether to divide by the group's standard deviation.
        leave_one_out: whether the baseline of a rollout is the mean of its siblings.

    Returns:
        float64 ``[groups, n]``; 0 throughout a group whose rewards are all equal.
    """
    n = rewards.shape[1]
    mean = rewards.mean(axis=1, keepdims=True)
    if leave_one_out and n > 1:
        mean = (rewards.sum(axis=1, keepdims=True) - rewards) / (n - 1)
    advantages: FloatArray = rewards - mean
    if normalize:
        advantages = advantages / (rewards.std(axis=1, keepdims=True) + 1e-6)
    advantages[np.ptp(rewards, axis=1) == 0] = 0.0
    return advantages


def gae(
    reward: float, values: npt.NDArray[np.float32], *, gamma: float, lam: float
) -> npt.NDArray[np.float32]:
    """Compute generalized advantage estimates of a response whose reward comes with its last token.

    Args:
        reward: reward of the whole response.
        values: value before each token, float32 ``[n]``.
        gamma: discount.
        lam: GAE's lambda.

    Returns:
        float32 ``[n]``; the returns are the advantages plus the values.
    """
    advantages = np.zeros(len(values), dtype=np.float32)
    running, after = 0.0, 0.0
    for t in reversed(range(len(values))):
        earned = reward if t == len(values) - 1 else 0.0
        running = earned + gamma * after - values[t] + gamma * lam * running
        advantages[t], after = running, values[t]
    return advantages


def token_weights(lengths: list[int], *, token_level: bool) -> list[float]:
    """Return the weight of each response's tokens, so that the weighted sum over a batch is a mean.

    Args:
        lengths: number of tokens of each response of the whole optimizer step.
        token_level: whether every token counts the same; otherwise every response does.
    """
    if token_level:
        return [1.0 / max(1, sum(lengths))] * len(lengths)
    return [1.0 / (len(lengths) * max(1, n)) for n in lengths]


def policy_loss(
    logprobs: torch.Tensor,
    anchor: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    config: LossConfig,
    *,
    importance: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy-gradient loss, summed with ``weights``.

    Args:
        logprobs: log-probs under the policy in training, ``[b, t]``, nats.
        anchor: log-probs in the ratio's denominator, those before the update, ``[b, t]``, nats.
        advantages: advantage of each token, ``[b, t]``.
        weights: weight of each token, ``[b, t]``; 0 at prompts and padding.
        config: the ``loss_fn:`` block.
        importance: truncated importance weights, ``[b, t]``.
        reference: log-probs under the reference policy, ``[b, t]``, nats.

    Returns:
        the loss; and for the log, weighted sums of clip fraction, ratio and KL.
    """
    inside = weights > 0
    log_ratio = torch.where(inside, logprobs - anchor, torch.zeros_like(logprobs))
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if config.ratio_clip_c is not None:
        bound = -advantages * config.ratio_clip_c
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    stopped = (ratio * advantages > clipped * advantages) & inside
    if importance is not None:
        loss = loss * importance
    sums = {metric.CLIP_FRACTION: (stopped * weights).sum(), metric.RATIO: (ratio * weights).sum()}
    if reference is not None:
        # k3 (http://joschu.net/blog/kl-approx.html), as NeMo-RL's reference_policy_kl_type.
        difference = torch.where(inside, reference - logprobs, torch.zeros_like(logprobs))
        kl = difference.exp() - difference - 1
        loss = loss + config.reference_policy_kl_penalty * kl
        sums[metric.KL] = (kl * weights).sum()
    return (loss * weights).sum(), {name: value.detach() for name, value in sums.items()}


def clipped_value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    clip: float,
) -> torch.Tensor:
    """PPO's clipped squared error of the value model, summed with ``weights``; all ``[b, t]``."""
    held = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns) ** 2, (held - returns) ** 2)
    return 0.5 * (error * weights).sum()

"""The rollouts of a step: their metrics, fresh and reused ones compared, samples for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.data.dataset import Problem
from nemo_specrl.trainer.generation.rows import Response
from nemo_specrl.trainer.losses import gae, group_advantages
from nemo_specrl.trainer.policy.base import Sample
from nemo_specrl.trainer.recipe import AdvEstimatorConfig, Recipe

__all__ = ["Batch", "Group"]

FloatArray = npt.NDArray[np.float64]


@dataclass
class Group:
    """The ``n`` rollouts of one prompt in a step.

    Args:
        problem: the prompt's problem.
        generated: the rollouts, by sample index.
        rewards: float64 ``[n]``.
    """

    problem: Problem
    generated: list[Response]
    rewards: FloatArray


@dataclass
class Batch:
    """The groups on which a step trains.

    Args:
        epoch: epoch of the step's first prompts, counted from 0.
        drawn: indices of all prompts that were rolled out, in order; with partial rollouts, only of
            those trained on.
        groups: the groups to train on; with dynamic sampling, fewer than were rolled out.
        put_off: the available part of the groups that the step put off; None without partial
            rollouts.
    """

    epoch: int
    drawn: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    put_off: list[list[Response]] | None = None

    @property
    def rewards(self) -> FloatArray:
        """Rewards, float64 ``[groups, n]``."""
        return np.stack([group.rewards for group in self.groups])

    @property
    def rows(self) -> list[Response]:
        """The rollouts of all groups, one group after the other."""
        return [row for group in self.groups for row in group.generated]

    def metrics(self) -> dict[str, Any]:
        """Rewards, lengths and diversity, by metric name (docs/reference/metrics.md)."""
        rewards, rows = self.rewards, self.rows
        metrics: dict[str, Any] = {
            metric.REWARD: float(rewards.mean()),
            metric.REWARD_STD_IN_GROUP: float(rewards.std(axis=1).mean()),
            metric.GROUPS_WITHOUT_ADVANTAGE: float((np.ptp(rewards, axis=1) == 0).mean()),
            metric.DISTINCT_IN_GROUP: float(
                np.mean([len({tuple(r.tokens) for r in group.generated}) for group in self.groups])
            ),
            metric.TRUNCATED_FRACTION: float(np.mean([row.truncated for row in rows])),
            metric.RESPONSE_LENGTH: float(np.mean([row.length for row in rows])),
        }
        if not self.fresh.all():
            flat = rewards.ravel()
            metrics[metric.FRESH_ROWS] = int(self.fresh.sum())
            metrics[metric.REUSED_REWARD] = float(flat[~self.fresh].mean())
            metrics[metric.FRESH_REWARD] = (
                float(flat[self.fresh].mean()) if self.fresh.any() else None
            )
        if self.put_off is not None:
            metrics[metric.PUT_OFF_PROMPTS] = len(self.put_off)
            metrics[metric.PUT_OFF_TOKENS] = sum(r.length for group in self.put_off for r in group)
        return metrics

    @property
    def fresh(self) -> npt.NDArray[np.bool_]:
        """Which of the ``rows`` were decoded without a reused prefix, bool ``[rows]``."""
        return np.array([row.fresh for row in self.rows])

    def samples(self, recipe: Recipe) -> list[Sample]:
        """Make samples for training, one for each rollout, in the order of ``rows``."""
        algorithm = recipe.algorithm
        advantages = group_advantages(
            self.rewards,
            normalize=algorithm.normalize_rewards,
            leave_one_out=algorithm.use_leave_one_out_baseline,
        )
        samples = []
        for group, row in zip(self.groups, advantages, strict=True):
            for generated, advantage in zip(group.generated, row, strict=True):
                trained = None if generated.made.all() else generated.made.astype(np.float32)
                if algorithm.overlong_filtering and generated.truncated:
                    trained = np.zeros(len(generated.tokens), dtype=np.float32)
                samples.append(
                    Sample(
                        prompt=group.problem.prompt,
                        response=generated.tokens,
                        advantages=np.where(generated.made, advantage, 0).astype(np.float32),
                        reported=generated.logprobs,
                        trained=trained,
                    )
                )
        return samples

    def set_gae_advantages(self, samples: Sequence[Sample], config: AdvEstimatorConfig) -> None:
        """Set the returns and advantages of PPO's samples from the value model's predictions.

        Tokens of an environment are not actions: the estimates skip them, from the policy's last
        token before them to its first one after them, and both are 0 in between.

        Args:
            samples: those of :meth:`samples`, with ``old_values``.
            config: the ``adv_estimator:`` block.
        """
        made = [row.made for row in self.rows]
        for sample, reward, own in zip(samples, self.rewards.ravel(), made, strict=True):
            values = sample.old_values[own]
            estimates = gae(float(reward), values, gamma=config.gae_gamma, lam=config.gae_lambda)
            sample.advantages, sample.returns = np.zeros((2, len(own)), dtype=np.float32)
            sample.advantages[own] = estimates
            sample.returns[own] = estimates + values
        if config.normalize_advantages:
            pairs = list(zip(samples, made, strict=True))
            everything = np.concatenate([sample.advantages[own] for sample, own in pairs])
            mean, std = everything.mean(), everything.std() + 1e-6
            for sample, own in pairs:
                sample.advantages[own] = (sample.advantages[own] - mean) / std

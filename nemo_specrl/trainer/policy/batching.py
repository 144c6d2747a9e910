"""The groups of a step: what is logged of them, what is compared, and what the losses need.

Knows rollouts and rewards; no engine, no gradients, no disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.trainer.generation import Generated
from nemo_specrl.trainer.losses import group_advantages
from nemo_specrl.trainer.policy.torch_policy import Sample
from nemo_specrl.trainer.recipe import Recipe
from nemo_specrl.trainer.task import Problem

__all__ = ["Batch", "Group"]

FloatArray = npt.NDArray[np.float64]


@dataclass
class Group:
    """The rollouts of one prompt in a step, and their rewards, float64 ``[n]``."""

    problem: Problem
    generated: list[Generated]
    rewards: FloatArray


@dataclass
class Batch:
    """What a step trains on.

    Args:
        epoch: of the step's first prompts.
        drawn: indices of all prompts that were rolled out, in order.
        groups: that are trained on; with dynamic sampling fewer than were rolled out.
    """

    epoch: int
    drawn: list[int] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def rewards(self) -> FloatArray:
        """float64 ``[groups, n]``."""
        return np.stack([group.rewards for group in self.groups])

    @property
    def rows(self) -> list[Generated]:
        """Of all groups, one after the other."""
        return [row for group in self.groups for row in group.generated]

    def metrics(self) -> dict[str, Any]:
        """What docs/local.md lists of rewards, lengths and diversity."""
        rewards, rows = self.rewards, self.rows
        fresh = np.array([row.fresh for row in rows])
        flat = rewards.ravel()
        return {
            "reward": float(flat.mean()),
            "fresh_reward": float(flat[fresh].mean()) if fresh.any() else None,
            "reused_reward": float(flat[~fresh].mean()) if not fresh.all() else None,
            "fresh_rows": int(fresh.sum()),
            "reward_std_in_group": float(rewards.std(axis=1).mean()),
            "groups_without_advantage": float((np.ptp(rewards, axis=1) == 0).mean()),
            "distinct_in_group": float(
                np.mean([len({tuple(r.tokens) for r in group.generated}) for group in self.groups])
            ),
            "response_length": float(np.mean([len(row.tokens) for row in rows])),
        }

    def rows_to_compare(
        self,
    ) -> tuple[list[int], npt.NDArray[np.bool_], dict[str, FloatArray], FloatArray]:
        """Arguments of :meth:`nemo_specrl.speculation.drift.DriftMonitor.update`."""
        rows = self.rows
        return (
            [i for i, group in enumerate(self.groups) for _ in group.generated],
            np.array([row.fresh for row in rows]),
            {
                "reward": self.rewards.ravel(),
                "length": np.array([len(row.tokens) for row in rows], dtype=np.float64),
                "logprob": np.array([row.policy_logprobs.mean() for row in rows], dtype=np.float64),
            },
            np.array(
                [
                    float((row.birth_logprobs - row.policy_logprobs)[row.reused].sum())
                    for row in rows
                    if row.reused.any()
                ]
            ),
        )

    def samples(self, recipe: Recipe) -> list[Sample]:
        """Rollouts and rewards as what the losses need."""
        algorithm, spec_rl, loss = recipe.algorithm, recipe.spec_rl, recipe.loss_fn
        advantages = group_advantages(
            self.rewards,
            normalize=algorithm.normalize_rewards,
            leave_one_out=algorithm.use_leave_one_out_baseline,
        )
        samples = []
        for group, row in zip(self.groups, advantages, strict=True):
            for generated, advantage in zip(group.generated, row, strict=True):
                length = len(generated.tokens)
                anchor = np.full(length, np.nan, dtype=np.float32)
                if spec_rl.enabled and spec_rl.clip_anchor == "birth":
                    anchor[generated.reused] = generated.birth_logprobs[generated.reused]
                importance = None
                if loss.use_importance_sampling_correction:
                    importance = np.exp(generated.policy_logprobs - generated.reported_logprobs)
                    if loss.truncated_importance_sampling_ratio is not None:
                        np.minimum(importance, loss.truncated_importance_sampling_ratio, importance)
                samples.append(
                    Sample(
                        prompt=group.problem.prompt,
                        response=generated.tokens,
                        advantages=np.full(length, advantage, dtype=np.float32),
                        anchor=anchor,
                        importance=importance,
                    )
                )
        return samples

"""The optimizer steps of a training step: which samples share one, and how they are weighted.

Both backends take their steps in this order, so that they train on the same data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_specrl.trainer.losses import token_weights
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["SteppingPolicy"]


class SteppingPolicy:
    """The part of a :class:`~nemo_specrl.trainer.policy.Policy` that orders optimizer steps.

    Args:
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
        seed: decides which samples share an optimizer step.

    Attributes:
        updates: number of optimizer steps made so far.
    """

    def __init__(self, config: PolicyConfig, loss: LossConfig, seed: int) -> None:
        self.config, self.loss, self.seed = config, loss, seed
        self.updates = 0

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """See :meth:`.Policy.logprobs`."""
        raise NotImplementedError

    def optimizer_step(self, samples: list[Sample], weights: list[float]) -> dict[str, float]:
        """Take an optimizer step.

        Args:
            samples: samples of the step that have a gradient; may be empty.
            weights: weight of each sample's tokens in the step's loss.

        Returns:
            metrics by name, even if ``samples`` is empty.
        """
        raise NotImplementedError

    def train(self, samples: Sequence[Sample], *, epochs: int) -> dict[str, float]:
        """Train on a step's samples, ``train_global_batch_size`` of them in an optimizer step.

        With several optimizer steps, seed and ``updates`` decide which samples share one.

        Args:
            samples: all samples of the training step.
            epochs: number of passes over them.

        Returns:
            metrics by name, averaged over the optimizer steps.
        """
        size = self.config.train_global_batch_size
        several = epochs > 1 or len(samples) > size
        if several or self.loss.use_importance_sampling_correction:
            # Ratios of later optimizer steps are relative to the policy before the first one.
            for sample, current in zip(samples, self.logprobs(samples), strict=True):
                sample.anchor = current
                sample.importance = self._importance(sample)
        totals: dict[str, float] = {}
        before = self.updates
        for _ in range(epochs):
            order = np.arange(len(samples))
            if several:
                philox = np.random.Philox(key=[self.seed, self.updates])
                order = np.random.Generator(philox).permutation(len(samples))
            for i in range(0, len(samples), size):
                for name, value in self._step([samples[j] for j in order[i : i + size]]).items():
                    totals[name] = totals.get(name, 0.0) + value
        return {name: value / (self.updates - before) for name, value in totals.items()}

    def _importance(self, sample: Sample) -> Float32Array | None:
        """Probability of each token under the policy before the update, over the engine's."""
        if not self.loss.use_importance_sampling_correction or sample.reported is None:
            return None
        assert sample.anchor is not None
        most = self.loss.truncated_importance_sampling_ratio
        importance: Float32Array = np.exp(sample.anchor - sample.reported)
        return importance if most is None else np.minimum(importance, np.float32(most))

    def _step(self, samples: list[Sample]) -> dict[str, float]:
        weights = token_weights(
            [int(s.mask.sum()) for s in samples], token_level=self.loss.token_level_loss
        )
        # A response without an advantage has no gradient, and only counts in the means.
        penalty = self.loss.reference_policy_kl_penalty > 0
        live = [
            i for i, s in enumerate(samples) if np.any(s.mask) and (penalty or np.any(s.advantages))
        ]
        metrics = self.optimizer_step([samples[i] for i in live], [weights[i] for i in live])
        self.updates += 1
        return metrics

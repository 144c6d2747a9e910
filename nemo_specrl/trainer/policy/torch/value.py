"""PPO's value model in the torch backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.losses import clipped_value_loss
from nemo_specrl.trainer.policy.base import Sample
from nemo_specrl.trainer.policy.torch.model import MicroBatch, TorchModel, arithmetic, load_model
from nemo_specrl.trainer.policy_config import PolicyConfig, ValueConfig

__all__ = ["TorchValueModel"]


class TorchValueModel(TorchModel):
    """The policy's architecture and first weights under a scalar head that starts at 0.

    Args:
        policy: the ``policy:`` block.
        config: the ``value:`` block.
    """

    def __init__(self, policy: PolicyConfig, config: ValueConfig) -> None:
        self.config = config
        backbone: Any = load_model(policy.model_name)
        head = torch.nn.Linear(backbone.config.hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        model = torch.nn.ModuleDict({"backbone": backbone.base_model, "head": head})
        super().__init__(model, config.optimizer, policy)

    def _values(self, batch: MicroBatch) -> torch.Tensor:
        parts: Any = self.model
        with arithmetic(self.precision):
            hidden = parts["backbone"](input_ids=batch.tokens).last_hidden_state
        values: torch.Tensor = parts["head"](hidden.float())[:, :-1, 0]
        return values

    @torch.no_grad()
    def predict(self, samples: Sequence[Sample]) -> None:
        """Set ``old_values`` of each sample, the value before each response token."""
        for batch in self.micro_batches(samples):
            values = batch.gather(self._values(batch))
            for sample, row in zip(batch.samples, values, strict=True):
                sample.old_values = row

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step towards the samples' ``returns``."""
        total = max(1, int(sum(s.mask.sum() for s in samples)))
        loss_sum = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self.micro_batches(samples):
            loss = clipped_value_loss(
                self._values(batch),
                batch.scatter(lambda s: s.old_values),
                batch.scatter(lambda s: s.returns),
                batch.scatter(lambda s: s.mask / np.float32(total)),
                self.config.value_clip,
            )
            torch.autograd.backward(loss)
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {metric.VALUE_LOSS: loss_sum}

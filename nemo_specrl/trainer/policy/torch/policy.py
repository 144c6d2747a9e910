"""The torch backend: plain torch + transformers in float32, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.divergence import first_not_finite
from nemo_specrl.trainer.losses import token_weights
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy.torch.model import (
    MicroBatch,
    build_optimizer,
    load_model,
    load_state,
    save_state,
    train_in_steps,
)
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["TorchPolicy"]


class TorchPolicy:
    """A :class:`~nemo_specrl.trainer.policy.Policy` in float32 on the CPU.

    Args:
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
        seed: decides which samples share an optimizer step.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: PolicyConfig, loss: LossConfig, seed: int) -> None:
        self.config, self.loss, self.seed = config, loss, seed
        self.model = load_model(config.model_name)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.updates = 0
        self.reference: torch.nn.Module | None = None
        if loss.reference_policy_kl_penalty > 0:
            self.reference = load_model(config.model_name).requires_grad_(False)

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs of the response tokens; see :meth:`Policy.logprobs`."""
        return self._logprobs(self.model, samples)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs under the run's first weights; see :meth:`Policy.reference_logprobs`.

        Without a KL penalty the first weights are read from disk at each call, so that training
        holds one copy of the model.
        """
        return self._logprobs(self.reference or load_model(self.config.model_name), samples)

    @torch.no_grad()
    def _logprobs(self, model: torch.nn.Module, samples: Sequence[Sample]) -> list[Float32Array]:
        found: dict[int, Float32Array] = {}
        for batch in MicroBatch.split(samples, self.config.train_micro_batch_size):
            values = batch.gather(batch.logprobs(model))
            found |= {id(s): v for s, v in zip(batch.samples, values, strict=True)}
        return [found[id(sample)] for sample in samples]

    def train(self, samples: Sequence[Sample], *, epochs: int) -> dict[str, float]:
        """Train on a step's samples; see :meth:`Policy.train`.

        An optimizer step takes ``train_global_batch_size`` samples.
        """
        return train_in_steps(
            samples,
            epochs=epochs,
            size=self.config.train_global_batch_size,
            key=(self.seed, self.updates),
            logprobs=self.logprobs,
            step=self._optimizer_step,
        )

    def _optimizer_step(self, samples: list[Sample]) -> dict[str, float]:
        weights = token_weights(
            [len(s.response) for s in samples], token_level=self.loss.token_level_loss
        )
        weight = {id(s): w for s, w in zip(samples, weights, strict=True)}
        # A response without advantage has no gradient: it only counts in the means.
        live = [s for s in samples if self.reference is not None or np.any(s.advantages)]
        sums: dict[str, float] = {metric.LOSS: 0.0, metric.CLIP_FRACTION: 0.0, metric.RATIO: 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        for batch in MicroBatch.split(live, self.config.train_micro_batch_size):
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference = batch.logprobs(self.reference)
            loss, logged = batch.loss(batch.logprobs(self.model), weight, self.loss, reference)
            torch.autograd.backward(loss)
            for name, value in logged.items():
                sums[name] = sums.get(name, 0.0) + value
        sums[metric.GRAD_NORM] = 0.0
        if live:
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.config.max_grad_norm
            )
            sums[metric.GRAD_NORM] = norm.item()
            self.optimizer.step()
        self.updates += 1
        return sums

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; see :meth:`Policy.not_finite`."""
        return first_not_finite(self.model.named_parameters())

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, copied if they are cast; see :meth:`Policy.stream_weights`."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(dtype or parameter.dtype)

    def offload(self) -> None:
        """Free the gradients. Weights and optimizer state are in host memory anyway."""
        self.optimizer.zero_grad(set_to_none=True)

    def reload(self) -> None:
        """Nothing to bring back: the next backward pass makes the gradients anew."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and the count of updates; see :meth:`Policy.save`."""
        save_state(folder, self.model, self.optimizer)
        (folder / "updates").write_text(str(self.updates))

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        load_state(folder, self.model, self.optimizer)
        self.updates = int((folder / "updates").read_text())

    def shutdown(self) -> None:
        """Free the weights and the optimizer state; see :meth:`Policy.shutdown`."""
        self.model = torch.nn.Module()
        self.reference = None
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()

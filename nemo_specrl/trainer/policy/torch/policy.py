"""The torch backend: plain torch + transformers in float32, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy.steps import SteppingPolicy
from nemo_specrl.trainer.policy.torch.lora import add_adapters, merged_weights
from nemo_specrl.trainer.policy.torch.model import (
    MicroBatch,
    TorchModel,
    check_names,
    load_model,
)
from nemo_specrl.trainer.policy_config import PolicyConfig
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["TorchPolicy"]


class TorchPolicy(SteppingPolicy, TorchModel):
    """A :class:`~nemo_specrl.trainer.policy.Policy` in float32 on the CPU.

    Args:
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
        seed: decides which samples share an optimizer step.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: PolicyConfig, loss: LossConfig, seed: int) -> None:
        SteppingPolicy.__init__(self, config, loss, seed)
        model: Any = load_model(config.model_name)
        check_names(config.model_name, model)
        if config.dtensor_cfg.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.dtensor_cfg.lora_cfg.enabled:
            model = add_adapters(model, config.dtensor_cfg.lora_cfg)
        TorchModel.__init__(self, model, config.optimizer, config)
        self.reference: torch.nn.Module | None = None
        if loss.reference_policy_kl_penalty > 0:
            self.reference = load_model(config.model_name).requires_grad_(False)

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs of the response tokens; see :meth:`Policy.logprobs`."""
        return self._logprobs(self.model, samples)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs under the run's first weights; see :meth:`Policy.reference_logprobs`.

        Without a KL penalty, the first weights are read from disk at each call, so that training
        holds only one copy of the model.
        """
        return self._logprobs(self.reference or load_model(self.config.model_name), samples)

    def _batch_logprobs(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        temperature = self.config.generation.training_temperature
        return batch.logprobs(model, self.precision, temperature)

    @torch.no_grad()
    def _logprobs(self, model: torch.nn.Module, samples: Sequence[Sample]) -> list[Float32Array]:
        found: dict[int, Float32Array] = {}
        for batch in self.micro_batches(samples):
            values = batch.gather(self._batch_logprobs(model, batch))
            found |= {id(s): v for s, v in zip(batch.samples, values, strict=True)}
        return [found[id(sample)] for sample in samples]

    def optimizer_step(self, samples: list[Sample], weights: list[float]) -> dict[str, float]:
        """Take an optimizer step; see :meth:`SteppingPolicy.optimizer_step`."""
        weight = {id(s): w for s, w in zip(samples, weights, strict=True)}
        sums: dict[str, float] = {metric.LOSS: 0.0, metric.CLIP_FRACTION: 0.0, metric.RATIO: 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self.micro_batches(samples):
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference = self._batch_logprobs(self.reference, batch)
            logprobs = self._batch_logprobs(self.model, batch)
            loss, logged = batch.loss(logprobs, weight, self.loss, reference)
            torch.autograd.backward(loss)
            for name, value in logged.items():
                sums[name] = sums.get(name, 0.0) + value
        sums[metric.GRAD_NORM] = 0.0
        if samples:
            norm = torch.nn.utils.clip_grad_norm_(
                [p for _, p in self.trained_parameters()], self.config.max_grad_norm
            )
            sums[metric.GRAD_NORM] = norm.item()
            self.optimizer.step()
        return sums

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, copied if they are cast; see :meth:`Policy.stream_weights`."""
        if self.config.dtensor_cfg.lora_cfg.enabled:
            weights = merged_weights(self.model)
        else:
            weights = ((name, p.detach()) for name, p in self.model.named_parameters())
        for name, weight in weights:
            yield name, weight.to(dtype or weight.dtype)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and the count of updates; see :meth:`Policy.save`."""
        super().save(folder)
        (folder / "updates").write_text(str(self.updates))

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        super().load(folder)
        self.updates = int((folder / "updates").read_text())

    def shutdown(self) -> None:
        """Free the weights and the optimizer state; see :meth:`Policy.shutdown`."""
        super().shutdown()
        self.reference = None

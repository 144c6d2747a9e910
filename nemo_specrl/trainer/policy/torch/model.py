"""Building blocks of the torch backend: models, optimizers, their files, micro-batches and steps.

The Megatron backend has the micro-batches, the loss and the order of steps from here, so that both
train on the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.losses import policy_loss
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy_config import OptimizerConfig, model_folder
from nemo_specrl.trainer.recipe import LossConfig

__all__ = [
    "MicroBatch",
    "build_optimizer",
    "load_model",
    "load_state",
    "ones",
    "save_state",
    "train_in_steps",
]


def load_model(model_name: str) -> torch.nn.Module:
    """A causal language model in float32, ready to train.

    Raises:
        ConfigError: ``model_name`` is not the folder of a model, or transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    folder = model_folder(model_name)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=False,  # else the terminal is asked whether to run the folder's code
        )
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"policy.model_name = {model_name!r}: transformers cannot load it: {first_line}"
        ) from None
    return model.train()


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer that a recipe's ``optimizer:`` block describes."""
    kwargs = config.kwargs
    return torch.optim.AdamW(
        model.parameters(),
        lr=kwargs.lr,
        betas=kwargs.betas,
        eps=kwargs.eps,
        weight_decay=kwargs.weight_decay,
    )


def save_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer state into ``folder``, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(state, folder / "weights.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def load_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore what :func:`save_state` wrote."""
    state = load_file(folder / "weights.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


def ones(sample: Sample) -> Float32Array:
    """1 for each response token, float32 ``[n]``."""
    return np.ones(len(sample.response), dtype=np.float32)


@dataclass(eq=False)
class MicroBatch:
    """Samples of similar length, padded on the right.

    Args:
        samples: the ``b`` samples.
        tokens: prompts and responses, int64 ``[b, t + 1]``.

    Per-token arrays are ``[b, t]``; position ``i`` belongs to token ``i + 1``.
    """

    samples: list[Sample]
    tokens: torch.Tensor

    @classmethod
    def split(cls, samples: Sequence[Sample], size: int) -> list[MicroBatch]:
        """Split samples into micro-batches of at most ``size``, sorted by length to save padding.

        The order of the samples is lost; :meth:`gather` returns values in a micro-batch's order.
        """
        ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.response))
        batches = []
        for i in range(0, len(ordered), size):
            piece = ordered[i : i + size]
            width = max(len(s.prompt) + len(s.response) for s in piece)
            tokens = torch.zeros(len(piece), width, dtype=torch.long)
            for row, sample in zip(tokens, piece, strict=True):
                row[: len(sample.prompt) + len(sample.response)] = torch.tensor(
                    sample.prompt + sample.response
                )
            batches.append(cls(piece, tokens))
        return batches

    def scatter(self, values: Callable[[Sample], Float32Array]) -> torch.Tensor:
        """Put per-token values at their tokens' positions, float32 ``[b, t]``, 0 elsewhere."""
        out = torch.zeros(self.tokens.shape[0], self.tokens.shape[1] - 1)
        for row, sample in zip(out, self.samples, strict=True):
            start = len(sample.prompt) - 1
            row[start : start + len(sample.response)] = torch.from_numpy(
                np.asarray(values(sample), dtype=np.float32)
            )
        return out

    def gather(self, values: torch.Tensor) -> list[Float32Array]:
        """The values of each sample's response tokens, float32 ``[n]``, from ``[b, t]``."""
        rows = []
        for row, sample in zip(values.numpy(), self.samples, strict=True):
            start = len(sample.prompt) - 1
            rows.append(row[start : start + len(sample.response)].copy())
        return rows

    def logprobs(self, model: torch.nn.Module) -> torch.Tensor:
        """Log-prob of each token, float32 ``[b, t]``, nats.

        Padding is on the right, where causal attention never looks, so that no mask is needed.
        """
        logits = model(input_ids=self.tokens).logits[:, :-1].float()
        chosen: torch.Tensor = logits.gather(-1, self.tokens[:, 1:, None])[..., 0]
        return chosen - torch.logsumexp(logits, -1)

    def loss(
        self,
        logprobs: torch.Tensor,
        weights: dict[int, float],
        config: LossConfig,
        reference: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The clipped loss of these samples, weighted.

        Args:
            logprobs: under the policy in training, float32 ``[b, t]``, nats.
            weights: of each token, by the ``id`` of its sample.
            config: the ``loss_fn:`` block.
            reference: log-probs under the reference policy, float32 ``[b, t]``, nats.

        Returns:
            the loss, and it and weighted sums for the log by name.
        """
        device = logprobs.device
        anchor = self.scatter(lambda s: s.anchor).to(device)
        anchor = torch.where(torch.isnan(anchor), logprobs.detach(), anchor)
        importance = None
        if config.use_importance_sampling_correction:
            importance = self.scatter(
                lambda s: ones(s) if s.importance is None else s.importance
            ).to(device)
        loss, logged = policy_loss(
            logprobs,
            anchor,
            self.scatter(lambda s: s.advantages).to(device),
            self.scatter(lambda s: ones(s) * np.float32(weights[id(s)])).to(device),
            config,
            importance=importance,
            reference=reference,
        )
        return loss, {metric.LOSS: loss.item()} | {name: v.item() for name, v in logged.items()}


def train_in_steps(
    samples: Sequence[Sample],
    *,
    epochs: int,
    size: int,
    key: tuple[int, int],
    logprobs: Callable[[Sequence[Sample]], list[Float32Array]],
    step: Callable[[list[Sample]], dict[str, float]],
) -> dict[str, float]:
    """Make the optimizer steps of :meth:`.Policy.train`.

    Args:
        samples: all samples of the training step.
        epochs: passes over them.
        size: samples in an optimizer step.
        key: seed, and optimizer steps made before; with several steps they decide which samples
            share one.
        logprobs: :meth:`.Policy.logprobs`.
        step: takes an optimizer step and returns metrics by name.

    Returns:
        metrics averaged over the optimizer steps.
    """
    several = epochs > 1 or len(samples) > size
    if several:
        # The later updates of a step have their ratios against the policy before the first.
        for sample, current in zip(samples, logprobs(samples), strict=True):
            sample.anchor = np.where(np.isnan(sample.anchor), current, sample.anchor)
    seed, updates = key
    totals: dict[str, float] = {}
    count = 0
    for _ in range(epochs):
        order = np.arange(len(samples))
        if several:
            philox = np.random.Philox(key=[seed, updates + count])
            order = np.random.Generator(philox).permutation(len(samples))
        for i in range(0, len(samples), size):
            metrics = step([samples[j] for j in order[i : i + size]])
            count += 1
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
    return {name: value / count for name, value in totals.items()}

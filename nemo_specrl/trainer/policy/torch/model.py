"""Building blocks of the torch backend: models with their optimizers, and micro-batches.

The Megatron backend takes the micro-batches and their loss from here, so that both train on the
same.
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
from nemo_specrl.trainer.divergence import first_not_finite
from nemo_specrl.trainer.losses import policy_loss
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy_config import OptimizerConfig, model_folder
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["MicroBatch", "TorchModel", "build_optimizer", "load_model", "ones"]


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
            trust_remote_code=False,  # None would ask on the terminal whether to run its code
        )
    except Exception as error:  # transformers raises many kinds without a common base
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


class TorchModel:
    """A model in float32 in host memory with its optimizer: what policy and value model share.

    Args:
        model: the module.
        optimizer: the ``optimizer:`` block.
    """

    def __init__(self, model: torch.nn.Module, optimizer: OptimizerConfig) -> None:
        self.model = model
        self.optimizer = build_optimizer(model, optimizer)

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; None where all are."""
        return first_not_finite(self.model.named_parameters())

    def offload(self) -> None:
        """Free the gradients. Weights and optimizer state are in host memory anyway."""
        self.optimizer.zero_grad(set_to_none=True)

    def reload(self) -> None:
        """Do nothing: the next backward pass allocates the gradients."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into ``folder``, which is created if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: p.detach().contiguous() for name, p in self.model.named_parameters()}
        save_file(state, folder / "weights.safetensors")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        state = load_file(folder / "weights.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    def shutdown(self) -> None:
        """Free the weights and the optimizer state."""
        self.model = torch.nn.Module()
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()


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

        :meth:`gather` returns values in the order of a micro-batch's samples, not of the input.
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

        Padding is on the right, which causal attention does not see, so no mask is needed.
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
            logprobs: log-probs under the policy in training, float32 ``[b, t]``, nats.
            weights: weight of each token of a sample, by the sample's ``id``.
            config: the ``loss_fn:`` block.
            reference: log-probs under the reference policy, float32 ``[b, t]``, nats.

        Returns:
            the loss; and for the log, by name, the loss and other weighted sums.
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

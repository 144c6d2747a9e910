"""Building blocks of the torch backend: models with their optimizers, and micro-batches.

The Megatron backend takes the micro-batches and their loss from here, so that both train on the
same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nemo_specrl.errors import ConfigError, first_line
from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.divergence import first_not_finite
from nemo_specrl.trainer.losses import policy_loss
from nemo_specrl.trainer.policy.base import Float32Array, Sample
from nemo_specrl.trainer.policy_config import OptimizerConfig, PolicyConfig, model_folder
from nemo_specrl.trainer.recipe import LossConfig

__all__ = ["MicroBatch", "TorchModel", "arithmetic", "check_names", "load_model"]


def load_model(model_name: str) -> torch.nn.Module:
    """Load a causal language model in float32, ready to train.

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
        raise ConfigError(
            f"policy.model_name = {model_name!r}: transformers cannot load it: {first_line(error)}"
        ) from None
    return model.train()


def check_names(model_name: str, model: torch.nn.Module) -> None:
    """Refuse a model whose parameters have other names in its files, by which engines load them.

    Mixtures of experts are such models: transformers puts their experts into one parameter.

    Raises:
        ConfigError: names one of them.
    """
    files = sorted(model_folder(model_name).glob("*.safetensors"))
    names: set[str] = set()
    for path in files:
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    missing = [name for name, _ in model.named_parameters() if name not in names]
    if files and missing:
        raise ConfigError(
            f"policy.model_name = {model_name!r}: its files do not have {missing[0]!r}, which is "
            "trained, by that name, so that no engine could be given it; such models need NeMo-RL"
        )


def arithmetic(precision: torch.dtype) -> torch.autocast:
    """Return a context in which matrix products are computed in ``precision``."""
    return torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32)


class TorchModel:
    """A model in float32 in host memory with its optimizer: what policy and value model share.

    Args:
        model: the module.
        optimizer: the ``optimizer:`` block.
        policy: the ``policy:`` block, for precision and micro-batches.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: OptimizerConfig, policy: PolicyConfig
    ) -> None:
        self.model, self._policy = model, policy
        trained = [p for _, p in self.trained_parameters()]
        self.optimizer = torch.optim.AdamW(trained, **optimizer.kwargs.model_dump())
        self.precision: torch.dtype = getattr(torch, policy.precision)

    def micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Split the samples into micro-batches, as bounded by the recipe."""
        policy = self._policy
        return MicroBatch.split(samples, policy.train_micro_batch_size, policy.micro_batch_tokens)

    def trained_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters that are trained, with their names: all, or those of adapters."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; None if all are."""
        return first_not_finite(self.model.named_parameters())

    def offload(self) -> None:
        """Free the gradients. Weights and optimizer state are in host memory anyway."""
        self.optimizer.zero_grad(set_to_none=True)

    def reload(self) -> None:
        """Do nothing: the next backward pass allocates the gradients."""

    def save(self, folder: Path) -> None:
        """Write the trained weights and the optimizer state into ``folder``, created if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: p.detach().contiguous() for name, p in self.trained_parameters()}
        save_file(state, folder / "weights.safetensors")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        state = load_file(folder / "weights.safetensors")
        with torch.no_grad():
            for name, parameter in self.trained_parameters():
                parameter.copy_(state[name])
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    def shutdown(self) -> None:
        """Free the weights and the optimizer state."""
        self.model = torch.nn.Module()
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()


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
    def split(
        cls, samples: Sequence[Sample], size: int, most_tokens: int | None = None
    ) -> list[MicroBatch]:
        """Split samples into micro-batches, sorted by length to save padding.

        :meth:`gather` returns values in the order of a micro-batch's samples, not of the input.

        Args:
            samples: the samples.
            size: most samples of a micro-batch; ignored if ``most_tokens`` is given.
            most_tokens: most tokens of a micro-batch, padding included. A longer sample gets its
                own micro-batch.
        """
        ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.response))
        pieces: list[list[Sample]] = []
        for sample in ordered:
            width = len(sample.prompt) + len(sample.response)
            room = size if most_tokens is None else most_tokens // width
            if not pieces or len(pieces[-1]) >= room:
                pieces.append([])
            pieces[-1].append(sample)
        batches = []
        for piece in pieces:
            width = len(piece[-1].prompt) + len(piece[-1].response)
            tokens = torch.zeros(len(piece), width, dtype=torch.long)
            for row, sample in zip(tokens, piece, strict=True):
                row[: len(sample.prompt) + len(sample.response)] = torch.tensor(
                    sample.prompt + sample.response
                )
            batches.append(cls(piece, tokens))
        return batches

    def scatter(self, values: Callable[[Sample], Float32Array | None]) -> torch.Tensor:
        """Put per-token values at their tokens' positions, float32 ``[b, t]``, 0 elsewhere."""
        out = torch.zeros(self.tokens.shape[0], self.tokens.shape[1] - 1)
        for row, sample in zip(out, self.samples, strict=True):
            start = len(sample.prompt) - 1
            row[start : start + len(sample.response)] = torch.from_numpy(
                np.asarray(values(sample), dtype=np.float32)
            )
        return out

    def gather(self, values: torch.Tensor) -> list[Float32Array]:
        """Return the values of each sample's response tokens, float32 ``[n]``, from ``[b, t]``."""
        rows = []
        for row, sample in zip(values.numpy(), self.samples, strict=True):
            start = len(sample.prompt) - 1
            rows.append(row[start : start + len(sample.response)].copy())
        return rows

    def logprobs(
        self,
        model: torch.nn.Module,
        precision: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ) -> torch.Tensor:
        """Compute the log-prob of each token, float32 ``[b, t]``, nats.

        Padding is on the right, which causal attention does not see, so no mask is needed.

        Args:
            model: a causal language model.
            precision: data type of its matrix products.
            temperature: divides the logits.
        """
        with arithmetic(precision):
            logits = model(input_ids=self.tokens).logits[:, :-1].float()
        if temperature != 1:
            logits = logits / temperature
        chosen: torch.Tensor = logits.gather(-1, self.tokens[:, 1:, None])[..., 0]
        return chosen - torch.logsumexp(logits, -1)

    def loss(
        self,
        logprobs: torch.Tensor,
        weights: dict[int, float],
        config: LossConfig,
        reference: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the clipped loss of these samples, weighted.

        Args:
            logprobs: log-probs under the policy in training, float32 ``[b, t]``, nats.
            weights: weight of each token of a sample, by the sample's ``id``.
            config: the ``loss_fn:`` block.
            reference: log-probs under the reference policy, float32 ``[b, t]``, nats.

        Returns:
            the loss; and for the log, by name, the loss and other weighted sums.
        """
        device = logprobs.device
        anchor = logprobs.detach()
        if all(s.anchor is not None for s in self.samples):
            anchor = self.scatter(lambda s: s.anchor).to(device)
        importance = None
        if all(s.importance is not None for s in self.samples):
            importance = self.scatter(lambda s: s.importance).to(device)
        loss, logged = policy_loss(
            logprobs,
            anchor,
            self.scatter(lambda s: s.advantages).to(device),
            self.scatter(lambda s: s.mask * np.float32(weights[id(s)])).to(device),
            config,
            importance=importance,
            reference=reference,
        )
        return loss, {metric.LOSS: loss.item()} | {name: v.item() for name, v in logged.items()}

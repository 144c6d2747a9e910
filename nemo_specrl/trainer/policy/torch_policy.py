"""The policy in training: a small interface, and plain torch + transformers behind it.

A policy turns samples into gradients and hands its weights to a refit. It knows nothing of
rollouts, rewards or the cache. Other backends (Megatron) implement :class:`Policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.losses import clipped_value_loss, policy_loss, token_weights
from nemo_specrl.trainer.recipe import LossConfig, OptimizerConfig, PolicyConfig, ValueConfig

__all__ = ["Policy", "Sample", "TorchPolicy", "ValueModel", "load_model", "model_folder"]

Float32Array = npt.NDArray[np.float32]


@dataclass(eq=False)
class Sample:
    """A rollout as the losses see it.

    Args:
        prompt: token ids.
        response: token ids, ``[n]``.
        advantages: float32 ``[n]``.
        anchor: log-probs that the clipped ratio starts from, float32 ``[n]``, nats; NaN where it
            starts from the policy as it is before the step's first update.
        importance: importance weights, float32 ``[n]``, or None for 1 throughout.
        old_values: value before each token, float32 ``[n]`` (PPO).
        returns: what the value model is to predict, float32 ``[n]`` (PPO).
    """

    prompt: list[int]
    response: list[int]
    advantages: Float32Array
    anchor: Float32Array
    importance: Float32Array | None = None
    old_values: Float32Array | None = None
    returns: Float32Array | None = None

    @classmethod
    def to_score(cls, prompt: list[int], response: list[int]) -> Sample:
        """A response that is not trained on."""
        nothing = np.zeros(len(response), dtype=np.float32)
        return cls(prompt, response, nothing, nothing)


class Policy(Protocol):
    """What the trainer asks of a policy."""

    def update(self, samples: list[Sample], *, epochs: int) -> dict[str, float]:
        """Train on the step's samples; metrics averaged over the optimizer steps."""
        ...

    def divergence_from_start(self, samples: list[Sample]) -> float:
        """KL divergence of this policy from the one the run began with, nats per token.

        Args:
            samples: drawn from this policy; the mean is over their tokens.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as in a Hugging Face checkpoint, for a refit."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state, to be loaded again exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote."""
        ...


def model_folder(model_name: str) -> Path:
    """The folder of a model in Hugging Face format.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(model_name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.model_name = {model_name!r}: must be a folder with a config.json and weights "
            "in Hugging Face format"
        )
    return folder


def load_model(model_name: str) -> torch.nn.Module:
    """A causal language model in float32.

    Raises:
        ConfigError: no folder of a model, or one that transformers cannot load.
    """
    from transformers import AutoModelForCausalLM

    folder = model_folder(model_name)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"policy.model_name = {model_name!r}: transformers cannot load it: {first_line}"
        ) from None
    return model.train()


def optimizer_of(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer that a recipe asks for."""
    kwargs = config.kwargs
    return torch.optim.AdamW(
        model.parameters(),
        lr=kwargs.lr,
        betas=kwargs.betas,
        eps=kwargs.eps,
        weight_decay=kwargs.weight_decay,
    )


def save_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and optimizer state into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(state, folder / "weights.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def load_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The counterpart of :func:`save_state`."""
    state = load_file(folder / "weights.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


def ones(sample: Sample) -> Float32Array:
    """1 for each token of a response, float32 ``[n]``."""
    return np.ones(len(sample.response), dtype=np.float32)


@dataclass(eq=False)
class MicroBatch:
    """Samples of like length, right-padded; position t of an array belongs to token t + 1."""

    samples: list[Sample]
    tokens: torch.Tensor  # int64 [b, t + 1]

    @classmethod
    def of(cls, samples: list[Sample], size: int) -> list[MicroBatch]:
        """Cut samples into micro-batches of at most ``size``, by length: little padding."""
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

    def spread(self, values: Callable[[Sample], Float32Array]) -> torch.Tensor:
        """Per-token values at the positions of their tokens, float32 ``[b, t]``, 0 elsewhere."""
        out = torch.zeros(self.tokens.shape[0], self.tokens.shape[1] - 1)
        for row, sample in zip(out, self.samples, strict=True):
            start = len(sample.prompt) - 1
            row[start : start + len(sample.response)] = torch.from_numpy(
                np.asarray(values(sample), dtype=np.float32)
            )
        return out

    def logprobs(self, model: torch.nn.Module) -> torch.Tensor:
        """Log-prob of each token, float32 ``[b, t]``, nats.

        Padding is on the right, where causal attention never looks: no mask is needed.
        """
        logits = model(input_ids=self.tokens).logits[:, :-1].float()
        chosen = logits.gather(-1, self.tokens[:, 1:, None])[..., 0]
        return chosen - torch.logsumexp(logits, -1)


class TorchPolicy:
    """Plain torch + transformers in float32 on one CPU or GPU-less machine.

    Args:
        config: the ``policy:`` block.
        loss: the ``loss_fn:`` block.
        seed: which samples share an optimizer step is drawn from it.
    """

    def __init__(self, config: PolicyConfig, loss: LossConfig, seed: int) -> None:
        self.config, self.loss, self.seed = config, loss, seed
        self.model = load_model(config.model_name)
        self.optimizer = optimizer_of(self.model, config.optimizer)
        self.updates = 0
        self.reference: torch.nn.Module | None = None
        if loss.reference_policy_kl_penalty > 0:
            self.reference = load_model(config.model_name).requires_grad_(False)

    def update(self, samples: list[Sample], *, epochs: int) -> dict[str, float]:
        """One pass of optimizer steps over ``samples`` for each epoch; see :class:`Policy`."""
        size = self.config.train_global_batch_size
        several = epochs > 1 or len(samples) > size
        if several:
            # The ratio of the second update and after is against the policy before the first.
            self._fix_anchors(samples)
        totals: dict[str, float] = {}
        count = 0
        for _ in range(epochs):
            order = np.arange(len(samples))
            if several:
                order = np.random.Generator(
                    np.random.Philox(key=[self.seed, self.updates])
                ).permutation(len(samples))
            for i in range(0, len(samples), size):
                metrics = self._optimizer_step([samples[j] for j in order[i : i + size]])
                count += 1
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
        return {name: value / count for name, value in totals.items()}

    def _fix_anchors(self, samples: list[Sample]) -> None:
        with torch.no_grad():
            for batch in MicroBatch.of(samples, self.config.train_micro_batch_size):
                logprobs = batch.logprobs(self.model).numpy()
                for row, sample in zip(logprobs, batch.samples, strict=True):
                    start = len(sample.prompt) - 1
                    current = row[start : start + len(sample.response)]
                    sample.anchor = np.where(np.isnan(sample.anchor), current, sample.anchor)

    def _optimizer_step(self, samples: list[Sample]) -> dict[str, float]:
        lengths = [len(s.response) for s in samples]
        weight = {
            id(s): w
            for s, w in zip(
                samples, token_weights(lengths, token_level=self.loss.token_level_loss), strict=True
            )
        }
        # A response without advantage has no gradient: it counts in the means, and that is all.
        live = [s for s in samples if self.reference is not None or np.any(s.advantages)]
        sums: dict[str, float] = {"loss": 0.0, "clip_fraction": 0.0, "ratio": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        for batch in MicroBatch.of(live, self.config.train_micro_batch_size):
            logprobs = batch.logprobs(self.model)
            anchor = batch.spread(lambda s: s.anchor)
            anchor = torch.where(torch.isnan(anchor), logprobs.detach(), anchor)
            importance = None
            if self.loss.use_importance_sampling_correction:
                importance = batch.spread(
                    lambda s: ones(s) if s.importance is None else s.importance
                )
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference = batch.logprobs(self.reference)
            loss, logged = policy_loss(
                logprobs,
                anchor,
                batch.spread(lambda s: s.advantages),
                batch.spread(lambda s: ones(s) * np.float32(weight[id(s)])),
                self.loss,
                importance=importance,
                reference=reference,
            )
            torch.autograd.backward(loss)
            sums["loss"] += loss.item()
            for name, value in logged.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        if live:
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.config.max_grad_norm
            )
            sums["grad_norm"] = norm.item()
            self.optimizer.step()
        else:
            sums["grad_norm"] = 0.0
        self.updates += 1
        return sums

    def divergence_from_start(self, samples: list[Sample]) -> float:
        """See :class:`Policy`; the first weights are read again: training holds one copy."""
        start = self.reference or load_model(self.config.model_name)
        total = 0.0
        with torch.no_grad():
            for batch in MicroBatch.of(samples, self.config.train_micro_batch_size):
                difference = batch.logprobs(self.model) - batch.logprobs(start)
                total += float((difference * batch.spread(ones)).sum())
        return total / sum(len(s.response) for s in samples)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`Policy`; tied output weights are left out."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """See :class:`Policy`."""
        save_state(folder, self.model, self.optimizer)
        (folder / "updates").write_text(str(self.updates))

    def load(self, folder: Path) -> None:
        """See :class:`Policy`."""
        load_state(folder, self.model, self.optimizer)
        self.updates = int((folder / "updates").read_text())


class ValueModel:
    """PPO's value model: the policy's architecture and first weights under a scalar head."""

    def __init__(self, policy: PolicyConfig, config: ValueConfig) -> None:
        self.config, self.micro = config, policy.train_micro_batch_size
        backbone: Any = load_model(policy.model_name)
        head = torch.nn.Linear(backbone.config.hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.model = torch.nn.ModuleDict({"backbone": backbone.model, "head": head})
        self.optimizer = optimizer_of(self.model, config.optimizer)

    def _values(self, batch: MicroBatch) -> torch.Tensor:
        hidden = self.model["backbone"](input_ids=batch.tokens).last_hidden_state
        values: torch.Tensor = self.model["head"](hidden)[:, :-1, 0]
        return values

    def predict(self, samples: list[Sample]) -> None:
        """Set ``old_values`` of each sample."""
        with torch.no_grad():
            for batch in MicroBatch.of(samples, self.micro):
                for row, sample in zip(self._values(batch).numpy(), batch.samples, strict=True):
                    start = len(sample.prompt) - 1
                    sample.old_values = row[start : start + len(sample.response)].copy()

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """One optimizer step towards the samples' ``returns``."""
        total = max(1, sum(len(s.response) for s in samples))
        loss_sum = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in MicroBatch.of(samples, self.micro):
            loss = clipped_value_loss(
                self._values(batch),
                batch.spread(lambda s: s.old_values),  # type: ignore[arg-type, return-value]
                batch.spread(lambda s: s.returns),  # type: ignore[arg-type, return-value]
                batch.spread(lambda s: ones(s) / np.float32(total)),
                self.config.value_clip,
            )
            torch.autograd.backward(loss)
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"value_loss": loss_sum}

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state."""
        save_state(folder, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote."""
        load_state(folder, self.model, self.optimizer)

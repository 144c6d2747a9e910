"""The interface between the training loop and a policy, whichever backend holds its weights.

A policy turns samples into gradients and streams its weights to the engines. It knows nothing of
rollouts, rewards or the cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["Float32Array", "Policy", "Sample", "ValueModel", "to_array", "to_tensor"]

Float32Array = npt.NDArray[np.float32]


def to_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values of a tensor on the CPU, for another process.

    Those of the 16-bit types come as int16 with their bits, since numpy has no bfloat16.
    """
    import torch

    return (tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor).numpy()


def to_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of ``dtype`` of which :func:`to_array` made an array, on the array's memory.

    Ray's arrays lie in shared memory, and must not be written to.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype)


@dataclass(eq=False)
class Sample:
    """A prompt and a response with what the losses need to know about it.

    Args:
        prompt: token ids.
        response: token ids, ``[n]``.
        advantages: float32 ``[n]``.
        anchor: log-probs from which the clipped ratio starts, float32 ``[n]``, nats; NaN where it
            starts from the policy as it is before the step's first update.
        importance: importance weights, float32 ``[n]``, or None for 1 throughout.
        old_values: value before each token, float32 ``[n]`` (PPO).
        returns: target of the value model, float32 ``[n]`` (PPO).
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
        """A response whose log-probs are wanted and that is not trained on."""
        zeros = np.zeros(len(response), dtype=np.float32)
        return cls(prompt, response, zeros, zeros)


class Policy(Protocol):
    """A policy in training.

    Between training steps it may be *offloaded*, so that the engines have the device's memory. An
    offloaded policy can be saved, loaded and shut down; everything else needs :meth:`reload` first.
    """

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Log-probs of each sample's response tokens under the current weights.

        Returns:
            float32 ``[n]`` for each sample, nats, at temperature 1.
        """
        ...

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """The same as :meth:`logprobs` under the weights with which the run began."""
        ...

    def train(self, samples: Sequence[Sample], *, epochs: int) -> dict[str, float]:
        """Train on a step's samples.

        Args:
            samples: all samples of the step.
            epochs: passes over them.

        Returns:
            metrics by name, averaged over the optimizer steps.
        """
        ...

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; None where all are.

        See :func:`~nemo_specrl.trainer.divergence.first_not_finite`.
        """
        ...

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights one tensor at a time, for a refit.

        No more than one full tensor has to exist beside the policy's own copy: a backend that
        holds shards casts them and gathers each tensor when it is asked for.

        Args:
            dtype: of the tensors; None for the policy's own.

        Yields:
            name as in a Hugging Face checkpoint, and tensor. The tensor is valid until the next
            one is asked for. A tied output layer is left out.
        """
        ...

    def offload(self) -> None:
        """Free the device memory that is needed for training only."""
        ...

    def reload(self) -> None:
        """Undo :meth:`offload`. Does nothing where the policy is not offloaded."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state so that :meth:`load` restores them exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        ...

    def shutdown(self) -> None:
        """Free everything. The policy cannot be used afterwards; shutting down twice is fine."""
        ...


class ValueModel(Protocol):
    """PPO's value model. Offloading, saving and shutting down work as in :class:`Policy`."""

    def predict(self, samples: Sequence[Sample]) -> None:
        """Set ``old_values`` of each sample."""
        ...

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step towards the samples' ``returns``; returns metrics by name."""
        ...

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; None where all are."""
        ...

    def offload(self) -> None:
        """Free the device memory that is needed for training only."""
        ...

    def reload(self) -> None:
        """Undo :meth:`offload`."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state so that :meth:`load` restores them exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""
        ...

    def shutdown(self) -> None:
        """Free everything. The model cannot be used afterwards."""
        ...

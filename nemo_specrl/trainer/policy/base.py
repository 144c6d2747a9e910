"""The interface between the training loop and a policy, independent of the backend.

A policy trains on samples and streams its weights to the engines. It knows nothing of rollouts,
rewards or the cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["Float32Array", "Policy", "Sample", "to_array", "to_tensor"]

Float32Array = npt.NDArray[np.float32]


def to_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the values of a CPU tensor as a numpy array, to send to another process.

    The bits of 16-bit types are returned as int16, since numpy has no bfloat16.
    """
    import torch

    return (tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor).numpy()


def to_tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Undo :func:`to_array`: a tensor of ``dtype`` that shares the array's memory.

    Arrays from Ray are in shared memory and must not be written to.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype)


@dataclass(eq=False)
class Sample:
    """A prompt and a response, with the per-token values that the losses need.

    Args:
        prompt: token ids.
        response: token ids, ``[n]``.
        advantages: advantage of each token, float32 ``[n]``.
        reported: log-probs that the engine reported, float32 ``[n]``, nats; the importance
            correction alone needs them.
        trained: 1 for each token that is trained on and 0 for the others, float32 ``[n]``, or None
            for all.
        anchor: log-probs in the denominator of the clipped ratio, those of the policy before the
            step's first update, float32 ``[n]``, nats; None while the present ones are.
        importance: importance weights, float32 ``[n]``, or None for 1 throughout.
        old_values: value before each token, float32 ``[n]``; set by the value model.
        returns: target of the value model, float32 ``[n]``; set with PPO's advantages.
    """

    prompt: list[int]
    response: list[int]
    advantages: Float32Array
    reported: Float32Array | None = None
    trained: Float32Array | None = None
    anchor: Float32Array | None = None
    importance: Float32Array | None = None
    old_values: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))
    returns: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def mask(self) -> Float32Array:
        """``trained`` as float32 ``[n]``, even if it is None."""
        if self.trained is None:
            return np.ones(len(self.response), dtype=np.float32)
        return self.trained

    @classmethod
    def to_score(cls, prompt: list[int], response: list[int]) -> Sample:
        """Make a sample that is only scored by ``logprobs``, not trained on."""
        return cls(prompt, response, np.zeros(len(response), dtype=np.float32))


class Policy(Protocol):
    """A policy in training.

    Between updates it may be *offloaded*, so that the engines can use the device's memory. An
    offloaded policy can be saved, loaded and shut down; everything else needs :meth:`reload` first.
    """

    def logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Return log-probs of each sample's response tokens under the current weights.

        Returns:
            float32 ``[n]`` for each sample, nats, at temperature 1.
        """

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """Return log-probs like :meth:`logprobs`, but under the run's first weights."""

    def train(self, samples: Sequence[Sample], *, epochs: int) -> dict[str, float]:
        """Train on a step's samples.

        Args:
            samples: all samples of the step.
            epochs: number of passes over them.

        Returns:
            metrics by name, averaged over the optimizer steps.
        """

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights one tensor at a time, for a refit.

        Only one full tensor exists at a time in addition to the policy's own copy: a backend that
        holds shards casts and gathers each tensor when it is requested.

        Args:
            dtype: data type of the tensors; None for the policy's own.

        Yields:
            name as in a Hugging Face checkpoint, and tensor. The tensor is valid until the next
            one is requested. A tied output layer is left out.
        """

    def not_finite(self) -> str | None:
        """Return the name of a parameter that is not finite; None if all are.

        See :func:`~nemo_specrl.trainer.divergence.first_not_finite`.
        """

    def offload(self) -> None:
        """Free the device memory that is needed only for training."""

    def reload(self) -> None:
        """Undo :meth:`offload`. Does nothing if the policy is not offloaded."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state so that :meth:`load` restores them exactly."""

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote."""

    def shutdown(self) -> None:
        """Free everything. The policy cannot be used afterwards; shutting down twice is fine."""

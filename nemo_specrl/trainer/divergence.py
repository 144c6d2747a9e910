"""Whether a training has diverged: its loss, its gradients and its weights are finite, or it ends.

Weights that are not finite must reach neither an engine, where they would end in an error that says
nothing of them, nor a checkpoint, which would push out the last good one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_specrl.errors import Diverged

if TYPE_CHECKING:
    import torch

__all__ = ["check_finite", "first_not_finite"]


class Model(Protocol):
    """A policy or a value model."""

    def not_finite(self) -> str | None:
        """Name of a parameter that is not finite; see :func:`first_not_finite`."""
        ...


def first_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Name of the first tensor that has no finite norm; None where all have one.

    A norm is infinite too where squares of weights exceed float32, as the model's own norms do.
    """
    import torch

    for name, tensor in weights:
        if not torch.isfinite(torch.linalg.vector_norm(tensor.detach().float())):
            return name
    return None


def check_finite(
    step: int, metrics: Mapping[str, float], models: Mapping[str, Model | None], last: Path | None
) -> None:
    """End a training that has diverged.

    Args:
        step: the training step that was just made.
        metrics: of its training, by name.
        models: that it trained, by what they are called.
        last: the newest checkpoint, for the message; None where there is none.

    Raises:
        Diverged: a metric or a weight is not finite.
    """
    causes = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    for kind, model in models.items():
        if model is not None and (weight := model.not_finite()) is not None:
            causes.append(f"the {kind}'s weights are not finite, such as {weight}")
    if not causes:
        return
    kept = "there is no checkpoint" if last is None else f"the last checkpoint is {last}"
    raise Diverged(
        f"step {step}: the training has diverged ({'; '.join(causes)}); {kept}; begin again with "
        "a smaller policy.optimizer.kwargs.lr or policy.max_grad_norm"
    )

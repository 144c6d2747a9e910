"""Ends a training that has diverged: one whose loss, gradients or weights are not finite.

Weights that are not finite must not reach an engine, which would fail with an unrelated error, nor
a checkpoint, which would replace the last good one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_specrl.errors import Diverged

if TYPE_CHECKING:
    import torch

__all__ = ["check_finite", "first_not_finite"]


def first_not_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor without a finite norm; None if there is none.

    A norm is also infinite if squares of weights overflow float32, as they would in the model.
    """
    import torch

    for name, tensor in weights:
        if not torch.isfinite(torch.linalg.vector_norm(tensor.detach().float())):
            return name
    return None


def check_finite(
    step: int, metrics: Mapping[str, float], weights: Mapping[str, str | None], last: Path | None
) -> None:
    """End a training that has diverged.

    Args:
        step: number of the training step that was just made.
        metrics: metrics of its update, by name.
        weights: for each model that was trained, by its name in messages, the name of a parameter
            that is not finite (:func:`first_not_finite`).
        last: the newest checkpoint, for the message; None if there is none.

    Raises:
        Diverged: a metric or a weight is not finite.
    """
    causes = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    for kind, name in weights.items():
        if name is not None:
            causes.append(f"the {kind}'s weights are not finite, such as {name}")
    if not causes:
        return
    kept = "there is no checkpoint" if last is None else f"the last checkpoint is {last}"
    raise Diverged(
        f"step {step}: the training has diverged ({'; '.join(causes)}); {kept}; begin again with "
        "a smaller policy.optimizer.kwargs.lr or policy.max_grad_norm"
    )

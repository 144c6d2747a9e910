"""A number that stands for the weights that generate: the same weights, the same number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch

__all__ = ["fingerprint"]

SAMPLED = 2**18


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """xxh3-64 of weights by name, dtype, shape and value, never 0.

    Of a tensor with more than 262,144 elements, evenly spaced ones stand for the rest: an optimizer
    moves them all, so that two versions of a policy cannot be alike in each of them; and 8B
    parameters take 0.15 GB from the device instead of 16. Weights that were edited in a few places
    by hand may be taken for one another.

    Args:
        weights: as the engine gets them, after the cast to its dtype. Order does not count.
    """
    import torch

    hasher = xxhash.xxh3_64()
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: -(-len(flat) // SAMPLED) or 1].contiguous().cpu()
        hasher.update(sample.view(torch.uint8).numpy().data)
    return hasher.intdigest() or 1  # 0 is that of weights that nobody knows

"""Fingerprint of the weights in an engine: equal weights have equal fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch

__all__ = ["SAMPLED", "FingerprintedWeights", "fingerprint"]

SAMPLED = 2**18  # at most this many elements of a tensor are hashed


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return the xxh3-64 hash of weights by name, dtype, shape and value; never 0.

    In a tensor with more than 262,144 elements, that many evenly spaced ones are hashed. An
    optimizer step changes all elements, so two versions of a policy differ in some of these, and
    0.15 GB instead of 16 are copied from the device for 8B parameters. Weights that were edited in
    a few places by hand may get the same fingerprint.

    Args:
        weights: name and tensor of each parameter as the engine gets them, after the cast to its
            dtype, in any order.
    """
    import torch

    hasher = xxhash.xxh3_64()
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: -(-len(flat) // SAMPLED) or 1].contiguous().cpu()
        hasher.update(sample.view(torch.uint8).numpy().data)
    return hasher.intdigest() or 1  # 0 means unknown


class FingerprintedWeights:
    """Weights on their way to the engine, with a fingerprint of all of them.

    The fingerprint is the sum of the tensors' own: it depends neither on their order nor on a
    second pass.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        self._sum = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self._sum += fingerprint([(name, tensor)])
            yield name, tensor

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the weights that have passed, 64 bits and never 0."""
        return self._sum % 2**64 or 1

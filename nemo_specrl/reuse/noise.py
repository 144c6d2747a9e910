"""Rounding between decoding and prefill, which ends accepted prefixes for no reason."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RoundingNoise"]

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.floating[Any]]


class RoundingNoise:
    """How far decoding and prefill disagree about the same tokens under the same weights.

    In bfloat16 they round differently, which looks to verification as if the policy had changed: a
    token is rejected with probability ``max(0, 1 - lenience * p_prefill / p_decoded)`` although
    nothing has changed. It is measured once, on the first rows that an engine decodes without a
    draft, and one warning says so where it ends most prefixes.

    Args:
        lenience: of the acceptance test.
        dtype_bytes: of the model's activations. In float32 nothing is measured: the noise is too
            small to end a prefix.

    Attributes:
        prefix_tokens: length of an accepted prefix that rounding alone allows, tokens; None before
            it was measured, infinite if there is no noise.
    """

    ROWS = 8
    """Rows that are measured."""

    def __init__(self, lenience: float, dtype_bytes: int) -> None:
        self.prefix_tokens: float | None = None
        self._lenience = lenience
        self._to_begin = self._to_add = self.ROWS if dtype_bytes < 4 else 0
        self._tokens = 0
        self._rejected = 0.0

    def take(self) -> bool:
        """Whether one more row is to be measured, which the caller then prefills."""
        self._to_begin -= 1
        return self._to_begin >= 0

    def add(self, prefilled: FloatArray, decoded: FloatArray) -> None:
        """Add the log-probs of a row's tokens, float ``[n]`` each, nats."""
        ratio = np.subtract(prefilled, decoded, dtype=np.float64) + math.log(self._lenience)
        self._rejected += float(-np.expm1(np.minimum(ratio, 0)).sum())
        self._tokens += len(decoded)
        self._to_add -= 1
        if self._to_add:
            return
        self.prefix_tokens = self._tokens / self._rejected if self._rejected else math.inf
        mean = self._tokens / self.ROWS
        if math.exp(-mean / self.prefix_tokens) < 0.5:  # of a prefix of the mean length
            logger.warning(
                "at lenience %.3g, rounding alone ends an accepted prefix after about %.3g tokens, "
                "and the mean response has %.3g: prefix reuse will not pay; raise "
                "spec_rl.reuse.lenience, or take preset: lossless",
                self._lenience,
                self.prefix_tokens,
                mean,
            )

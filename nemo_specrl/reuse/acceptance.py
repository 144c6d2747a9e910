"""SPEC-RL's acceptance test, its random numbers, and the log-probs of what it produces.

Source: SPEC-RL, arXiv 2509.23232, section 3.2 and Algorithm 1. Unlike in its reference
implementation, uniforms are drawn anew at every verification, and a token with ratio 0 is never
accepted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import ConfigError

__all__ = ["accepted_length", "behaviour_logprobs", "random_stream"]

FloatArray = npt.NDArray[np.floating[Any]]


def random_stream(*names: str | int | bytes) -> np.random.Generator:
    """Return the generator of random numbers of a purpose: equal names, equal numbers.

    Philox, keyed by a hash of the names, so that a stream does not depend on the order in which
    others are drawn from.
    """
    parts = [name if isinstance(name, bytes) else str(name).encode() for name in names]
    message = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    return np.random.Generator(np.random.Philox(key=xxhash.xxh3_128_intdigest(message)))


def accepted_length(
    new_logprobs: FloatArray, old_logprobs: FloatArray, uniforms: FloatArray, lenience: float
) -> int:
    """Return the length of the accepted prefix of a draft, or of a piece of it.

    Token i is accepted if ``u_i <= min(1, lenience * p_new / p_old)``; the prefix ends before the
    first token that is not. A token whose log-prob is NaN is rejected.

    Args:
        new_logprobs: log-probs under the policy that verifies, float ``[n]``, nats.
        old_logprobs: log-probs under the policy that made the draft, float ``[n]``, nats.
        uniforms: float ``[n]`` in (0, 1].
        lenience: greater than 0; 1 is the strict test, infinity accepts all that can occur.

    Returns:
        Number of accepted tokens, 0 to ``n``.

    Raises:
        ConfigError: ``lenience`` is not a positive number, or the lengths differ.
    """
    if not lenience > 0:
        raise ConfigError(f"lenience = {lenience}: must be a number greater than 0")
    if not len(new_logprobs) == len(old_logprobs) == len(uniforms):
        raise ConfigError(
            f"new_logprobs, old_logprobs and uniforms must have as many entries, got "
            f"{len(new_logprobs)}, {len(old_logprobs)} and {len(uniforms)}"
        )
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and NaN accepts nothing
        log_ratio = np.subtract(new_logprobs, old_logprobs, dtype=np.float64) + math.log(lenience)
    rejected = np.flatnonzero(~(np.log(uniforms) <= log_ratio))
    return int(rejected[0]) if len(rejected) else len(uniforms)


def behaviour_logprobs(
    new_logprobs: FloatArray, old_logprobs: FloatArray, lenience: float
) -> FloatArray:
    """Return the log-probs with which accepted tokens were really produced, nats.

    A token is drafted and accepted with probability ``min(p_old, lenience * p_new)``. The same
    token can also be sampled after a rejection; that small probability is left out.

    Args:
        new_logprobs: log-probs under the policy that verified, float ``[n]``, nats.
        old_logprobs: log-probs under the policy that made the draft, float ``[n]``, nats.
        lenience: greater than 0, as in the acceptance test.
    """
    produced: FloatArray = np.minimum(old_logprobs, np.add(new_logprobs, math.log(lenience)))
    return produced

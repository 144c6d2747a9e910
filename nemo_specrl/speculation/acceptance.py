"""The acceptance test, its uniforms, and the log-probs under which accepted tokens were sampled.

Batches are ragged: the drafts of a batch are concatenated in flat arrays, and ``offsets`` (int64
``[b + 1]``) says where each begins and ends. ``draft_selection`` decides which draft a request
gets.

Source: SPEC-RL, arXiv 2509.23232, section 3.2. Unlike in its reference implementation, the uniforms
are redrawn at every verification, and a token with ratio 0 is never accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import ConfigError

__all__ = [
    "accepted_length",
    "accepted_lengths",
    "behaviour_logprobs",
    "derived_seed",
    "draft_uniforms",
    "offsets_of",
    "row_uniform",
    "row_uniforms",
]

FloatArray = npt.NDArray[np.floating[Any]]
Int64Array = npt.NDArray[np.int64]


def _digest(purpose: str, seed: int, policy_version: int, key: bytes, sample_index: int) -> int:
    """Hash a purpose, run, policy version, prompt and sample index to 128 bits."""
    message = b"%s\0%d\0%d\0%d\0%s" % (purpose.encode(), seed, policy_version, sample_index, key)
    return xxhash.xxh3_128_intdigest(message)


def derived_seed(
    purpose: str, seed: int, policy_version: int, key: bytes, sample_index: int
) -> int:
    """Return a seed in ``0 .. 2**31 - 1`` for a purpose, version, prompt and sample index."""
    return _digest(purpose, seed, policy_version, key, sample_index) & 0x7FFFFFFF


def row_uniform(
    purpose: str, seed: int, policy_version: int, key: bytes, sample_index: int
) -> float:
    """Return a uniform in [0, 1) for a purpose, policy version, prompt and sample index."""
    return (_digest(purpose, seed, policy_version, key, sample_index) >> 75) * 2.0**-53


def row_uniforms(
    purpose: str, seed: int, policy_version: int, key: bytes, sample_index: int
) -> np.random.Generator:
    """Return a stream of uniforms in [0, 1) for a purpose, version, prompt and sample index."""
    digest = _digest(purpose, seed, policy_version, key, sample_index)
    return np.random.Generator(np.random.Philox(key=digest))


def offsets_of(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Return where drafts of these lengths begin and end in a flat array, int64 ``[b + 1]``."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def draft_uniforms(
    seed: int,
    policy_version: int,
    keys: Sequence[bytes],
    sample_indices: Sequence[int],
    offsets: Int64Array,
) -> npt.NDArray[np.float64]:
    """Draw a uniform in (0, 1] for each draft token: new ones at every verification.

    The Philox generator is keyed by (seed, policy version, prompt key, sample index). Token i of a
    draft has the same uniform whatever else is in the batch and wherever the draft is in it, and a
    replay of the step draws the same uniforms.

    Args:
        seed: seed of the run.
        policy_version: version of the weights that verify the drafts.
        keys: prompt key of each draft, ``b`` of them.
        sample_indices: sample index of each draft, int ``[b]``.
        offsets: see :func:`offsets_of`, int64 ``[b + 1]``.

    Returns:
        float64 ``[offsets[-1]]``.
    """
    uniforms = np.empty(int(offsets[-1]), dtype=np.float64)
    for i, (key, sample_index) in enumerate(zip(keys, sample_indices, strict=True)):
        stream = row_uniforms("accept", seed, policy_version, key, sample_index)
        stream.random(out=uniforms[offsets[i] : offsets[i + 1]])
    # From [0, 1) to (0, 1]: a ratio of 0 never accepts, a ratio of 1 always does.
    return np.subtract(1.0, uniforms, out=uniforms)


def accepted_lengths(
    new_logprobs: FloatArray,
    old_logprobs: FloatArray,
    uniforms: FloatArray,
    offsets: Int64Array,
    lenience: float,
) -> Int64Array:
    """Return the length of the accepted prefix of each draft.

    Token i is accepted if ``u_i <= min(1, lenience * p_new / p_old)``; the prefix ends before the
    first token that is not. A token whose log-prob is NaN is rejected.

    Args:
        new_logprobs: log-probs under the policy that verifies, float ``[t]``, nats.
        old_logprobs: log-probs under the reference policy, float ``[t]``, nats.
        uniforms: :func:`draft_uniforms`, float ``[t]`` in (0, 1].
        offsets: see :func:`offsets_of`, int64 ``[b + 1]`` with ``offsets[-1] == t``.
        lenience: greater than 0; 1 is strict.

    Returns:
        int64 ``[b]``. For example, two drafts of two tokens each, with p_new / p_old of 1 and 0.5,
        and of 0.3 and 1::

            >>> import numpy as np
            >>> new = np.log([0.5, 0.2, 0.3, 0.9])
            >>> old = np.log([0.5, 0.4, 1.0, 0.9])
            >>> uniforms = np.array([0.9, 0.4, 0.8, 0.1])
            >>> accepted_lengths(new, old, uniforms, offsets_of([2, 2]), lenience=1.0).tolist()
            [2, 0]

    Raises:
        ConfigError: lenience is not a positive number, or lengths differ.
    """
    if not (lenience > 0 and math.isfinite(lenience)):
        raise ConfigError(f"lenience = {lenience}: must be a finite number greater than 0")
    total = int(offsets[-1])
    if not len(new_logprobs) == len(old_logprobs) == len(uniforms) == total:
        raise ConfigError(
            f"new_logprobs, old_logprobs and uniforms must have {total} entries, "
            f"got {len(new_logprobs)}, {len(old_logprobs)} and {len(uniforms)}"
        )
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and NaN accepts nothing
        log_ratio = np.subtract(new_logprobs, old_logprobs, dtype=np.float64)
    log_ratio += math.log(lenience)
    rejected = np.flatnonzero(~(np.log(uniforms) <= log_ratio))
    starts, ends = offsets[:-1], offsets[1:]
    first = np.searchsorted(rejected, starts)
    # After the last rejection comes the end of the batch, which is beyond every draft's end.
    position = np.append(rejected, total)[first]
    lengths: Int64Array = np.minimum(position, ends) - starts
    return lengths


def accepted_length(
    new_logprobs: FloatArray, old_logprobs: FloatArray, uniforms: FloatArray, lenience: float
) -> int:
    """Return the length of the accepted prefix of one draft (SPEC-RL, arXiv 2509.23232).

    Token i is accepted if ``u_i <= min(1, lenience * p_new / p_old)``; the prefix ends before the
    first token that is not.

    Args:
        new_logprobs: log-probs of the draft under the current policy, float ``[n]``, nats.
        old_logprobs: log-probs under the reference policy, float ``[n]``, nats.
        uniforms: float ``[n]`` in (0, 1].
        lenience: greater than 0; 1 is the strict test.

    Returns:
        Number of accepted tokens, 0 to ``n``.

    Raises:
        ConfigError: ``lenience`` is not a positive finite number, or the lengths differ.
    """
    offsets = np.array([0, len(new_logprobs)], dtype=np.int64)
    return int(accepted_lengths(new_logprobs, old_logprobs, uniforms, offsets, lenience)[0])


def behaviour_logprobs(
    new_logprobs: FloatArray, old_logprobs: FloatArray, lenience: float
) -> FloatArray:
    """Return the log-probs with which accepted tokens were really produced, nats.

    A token is drafted and accepted with probability ``min(p_old, lenience * p_new)``. The same
    token can also be sampled after a rejection; that small probability is left out.

    Args:
        new_logprobs: log-probs under the policy that verified, float ``[n]``, nats.
        old_logprobs: log-probs under the reference policy, float ``[n]``, nats.
        lenience: greater than 0, as in the acceptance test.
    """
    produced: FloatArray = np.minimum(old_logprobs, np.add(new_logprobs, math.log(lenience)))
    return produced

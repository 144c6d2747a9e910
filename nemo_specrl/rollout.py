"""A response to a prompt, and the key of its prompt, which every other layer uses.

This module needs only numpy and xxhash. Drafting, storing and decoding responses is done elsewhere.
"""

from __future__ import annotations

import enum
import operator
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import InvalidRollout

__all__ = [
    "KEY_BYTES",
    "Finish",
    "Rollout",
    "new_identity",
    "prompt_key",
    "vocabulary_hash",
    "whole_number",
]

KEY_BYTES = 16
_KEY_SEED = 0x53504543  # "SPEC": keeps the keys apart from other xxh3 hashes of the same tokens

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Finish(enum.IntEnum):
    """How a response ended. Recorded when it ends, never inferred from its tokens."""

    STOP = 1
    """Ended by an end-of-sequence or stop token, which is its last token."""
    STOP_STRING = 2
    """Ended by a stop string, which the last token completes."""
    LENGTH = 3
    """Cut off at the token budget or the model's length limit."""
    PARTIAL = 4
    """Not complete: its request was aborted, or its engine was shut down."""


def prompt_key(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Return the 16-byte key of a prompt, equal in every process, machine and release.

    It is the xxh3-128 hash of the tokens as little-endian int32, so two prompts with the same text
    but different tokens are two prompts. Placeholders of images, audio or video are first replaced
    by numbers for their content (``nemo_specrl.media.content_tokens``).

    Args:
        token_ids: integers of any dtype, ``[n]``, each in ``0 .. 2**31 - 1``; ``n`` may be 0.

    Returns:
        16 bytes.

    Raises:
        InvalidRollout: not one-dimensional, not integers, or out of range.
    """
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise InvalidRollout(
            f"prompt tokens must be a one-dimensional sequence of integers, "
            f"got {tokens.ndim} dimensions of {tokens.dtype}"
        )
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 2**31):
        raise InvalidRollout(
            f"prompt tokens must be in 0..2^31-1, got {int(tokens.min())}..{int(tokens.max())}"
        )
    return xxhash.xxh3_128_digest(tokens.astype("<i4").tobytes(), seed=_KEY_SEED)


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """Return the identity of a tokenizer's vocabulary, 32 hexadecimal digits.

    Stores of responses are kept apart by it: the same tokenizer under another path has the same
    identity, another vocabulary under the same path has not.

    Args:
        vocabulary: ids by token, as ``tokenizer.get_vocab()`` of transformers returns them.
    """
    hasher = xxhash.xxh3_128()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        hasher.update(f"{number} {len(token)} {token}\n".encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def new_identity() -> int:
    """Return a random identity of a response, ``1 .. 2**63 - 1``."""
    return secrets.randbelow(2**63 - 1) + 1


@dataclass(frozen=True, eq=False)
class Rollout:
    """A response to a prompt.

    For example::

        Rollout(prompt_key([1, 2, 3]), [5, 6, 2], Finish.STOP)

    Args:
        key: the prompt's key, 16 bytes (:func:`prompt_key`).
        tokens: response tokens, int32 ``[n]``; ``n`` may be 0.
        finish: how the response ended.
        policy_version: version of the policy that made it, or verified it last, ``0 .. 2**63 - 1``.
        logprobs: log-prob of each token under that policy, float32 ``[n]``, nats. None: not known;
            only prefix reuse needs them.
        identity: names the response, ``1 .. 2**63 - 1``; random if left out. A cache that gets a
            second response of the same identity keeps that one alone.

    Raises:
        InvalidRollout: lengths differ, or a value is out of its range.
    """

    key: bytes
    tokens: Int32Array
    finish: Finish
    policy_version: int = 0
    logprobs: Float32Array | None = None
    identity: int = field(default_factory=new_identity)

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise InvalidRollout(f"key must be {KEY_BYTES} bytes, got {self.key!r}")
        object.__setattr__(self, "tokens", _tokens(self.tokens))
        try:
            object.__setattr__(self, "finish", Finish(self.finish))
        except ValueError:
            raise InvalidRollout(f"finish must be a Finish, got {self.finish!r}") from None
        for name, least in (("policy_version", 0), ("identity", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.logprobs is not None:
            logprobs = np.ascontiguousarray(self.logprobs, np.float32)
            if logprobs.shape != self.tokens.shape:
                raise InvalidRollout(
                    f"logprobs must have the shape of tokens, {self.tokens.shape}, "
                    f"got {logprobs.shape}"
                )
            if np.isnan(logprobs).any():
                raise InvalidRollout("logprobs must be numbers, got NaN")
            object.__setattr__(self, "logprobs", logprobs)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        if self.logprobs is None or other.logprobs is None:
            same = self.logprobs is other.logprobs
        else:
            same = np.array_equal(self.logprobs, other.logprobs)
        return (
            same
            and (self.key, self.finish, self.policy_version, self.identity)
            == (other.key, other.finish, other.policy_version, other.identity)
            and np.array_equal(self.tokens, other.tokens)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays can change


def _tokens(values: Any) -> Int32Array:
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidRollout(f"tokens must have one dimension, got {array.ndim}")
    if array.size and (array.dtype.kind not in "iu" or array.max() >= 2**31 or array.min() < 0):
        raise InvalidRollout(f"tokens must be whole numbers of 0..2^31-1, got {values!r:.80}")
    return np.ascontiguousarray(array, np.int32)


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a value, of numpy or torch as well, as an int.

    Raises:
        InvalidRollout: it is no whole number, or not in ``least .. 2**63 - 1``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRollout(f"{name} must be a whole number, got {value!r}") from None
    if not least <= number < 2**63:
        raise InvalidRollout(f"{name} must be in {least}..2^63-1, got {number}")
    return number

"""A rollout and the key of its prompt, which every other layer uses.

This module needs only numpy and xxhash. Drafting, storing and decoding rollouts is done elsewhere.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import InvalidRollout

__all__ = [
    "KEY_BYTES",
    "MAX_SAMPLE_INDEX",
    "Claim",
    "Finish",
    "Rollout",
    "RolloutSummary",
    "prompt_key",
]

KEY_BYTES = 16
MAX_SAMPLE_INDEX = 2**16 - 1
_KEY_SEED = 0x53504543  # "SPEC": keeps the keys apart from other xxh3 hashes of the same tokens

_BITS = {
    "sample_index": 16,
    "policy_version": 63,
    "occurrence": 32,
    "fingerprint": 64,
    "incarnation": 64,
}
"""Size of each integer of a rollout, as records store it."""
_SCALARS = (*_BITS, "key", "finish", "fresh", "raw")
_ARRAYS = ("tokens", "logprobs", "birth_logprobs", "birth_versions")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Finish(enum.IntEnum):
    """How a rollout ended. Recorded when it ends, never inferred from padding."""

    STOP = 1
    """Ended by an end-of-sequence or stop token, which is its last token."""
    STOP_STRING = 2
    """Ended by a stop string, which the last token completes."""
    LENGTH = 3
    """Cut off at the token budget or the model's length limit."""
    PARTIAL = 4
    """Not complete: stored while it was being decoded."""


def prompt_key(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Return the 16-byte key of a prompt, equal in every process, machine and release.

    It is the xxh3-128 hash of the tokens as little-endian int32, so two prompts with the same text
    but different tokens are two prompts.

    Prompts with images, audio or video have a different key, which also covers their content
    (``nemo_specrl.media.media_prompt_key``).

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


@dataclass(frozen=True)
class RolloutSummary:
    """The part of a rollout that decides whether it becomes a draft, and its length: no arrays."""

    sample_index: int
    finish: Finish
    policy_version: int
    incarnation: int
    occurrence: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens


@dataclass(frozen=True, eq=False)
class Rollout:
    """A response to a prompt, the log-probability of each of its tokens, and its origin.

    For example::

        key = prompt_key([1, 2, 3])
        Rollout(key, 0, [5, 6, 2], [-0.1, -1.2, -0.3], Finish.STOP, policy_version=4)

    Args:
        key: the prompt's key, 16 bytes (:func:`prompt_key`).
        sample_index: index of the rollout in its group, ``0 .. 65535``.
        tokens: response tokens, int32 ``[n]``; ``n`` may be 0.
        logprobs: *last* log-prob of each token, float32 ``[n]``, nats: under the policy that
            verified or sampled it last.
        finish: how the response ended.
        policy_version: version of that policy. If the weights changed while the response was
            decoded, that of its last token.
        birth_logprobs: log-prob of each token under the policy that sampled it, float32 ``[n]``,
            nats. None: sampled now, equal to ``logprobs``.
        birth_versions: version of the policy that sampled each token, int64 ``[n]``. None: sampled
            now.
        occurrence: how many rollouts the sample index had before this one.
        fingerprint: fingerprint of the weights of ``policy_version``, ``0 .. 2**64 - 1``; 0: not
            known.
        fresh: whether it was decoded without a draft, so that given its weights it is an ordinary
            sample of the policy. False if a draft was verified, even if no token was accepted,
            unless the draft was itself a fresh rollout of the same weights, cut off by an
            interrupt.
        incarnation: incarnation of the run that made it, ``0 .. 2**64 - 1``. It is larger each time
            a run starts or resumes on a cluster's cache, so that rollouts are ordered although a
            resume sets the policy version back. 0: not known.
        raw: whether its tokens were drawn from the raw distribution (temperature 1, nothing cut
            off). If not, its log-probs need not be those of the distribution it was drawn from: a
            tree may draft from it, but prefix reuse may not.

    Raises:
        InvalidRollout: lengths differ, or a value is out of its range.
    """

    key: bytes
    sample_index: int
    tokens: Int32Array
    logprobs: Float32Array
    finish: Finish
    policy_version: int
    birth_logprobs: Float32Array = None  # type: ignore[assignment]  # filled in below
    birth_versions: npt.NDArray[np.int64] = None  # type: ignore[assignment]
    occurrence: int = 0
    fingerprint: int = 0
    fresh: bool = True
    incarnation: int = 0
    raw: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise InvalidRollout(f"key must be {KEY_BYTES} bytes, got {self.key!r}")
        values: dict[str, Any] = {name: self._whole_number(name) for name in _BITS}
        values |= self._arrays(values["policy_version"])
        values |= {"finish": self._ended(), "fresh": bool(self.fresh), "raw": bool(self.raw)}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _whole_number(self, name: str) -> int:
        value = getattr(self, name)
        try:
            number = operator.index(value)
        except TypeError:
            raise InvalidRollout(f"{name} must be a whole number, got {value!r}") from None
        if not 0 <= number < 2 ** _BITS[name]:
            raise InvalidRollout(f"{name} must be in 0..2^{_BITS[name]}-1, got {number}")
        return number

    def _ended(self) -> Finish:
        try:
            return Finish(self.finish)
        except ValueError:
            raise InvalidRollout(f"finish must be a Finish, got {self.finish!r}") from None

    def _arrays(self, policy_version: int) -> dict[str, npt.NDArray[Any]]:
        """The per-token arrays, checked, in their dtypes and with the births filled in."""
        tokens = _whole_numbers("tokens", self.tokens, np.int32)
        logprobs = births = np.ascontiguousarray(self.logprobs, dtype=np.float32)
        if self.birth_logprobs is not None:
            births = np.ascontiguousarray(self.birth_logprobs, dtype=np.float32)
        versions = np.full(len(tokens), policy_version, dtype=np.int64)
        if self.birth_versions is not None:
            versions = _whole_numbers("birth_versions", self.birth_versions, np.int64)
        values = tokens, logprobs, births, versions
        arrays: dict[str, npt.NDArray[Any]] = dict(zip(_ARRAYS, values, strict=True))
        for name, array in arrays.items():
            if array.shape != tokens.shape or array.ndim != 1:
                raise InvalidRollout(
                    f"{name} must have the shape of tokens, {tokens.shape[:1]}, got {array.shape}"
                )
        for name in ("tokens", "birth_versions"):
            if tokens.size and (least := int(arrays[name].min())) < 0:
                raise InvalidRollout(f"{name} must not be negative, got {least}")
        for name in ("logprobs", "birth_logprobs"):
            if np.isnan(arrays[name]).any():
                raise InvalidRollout(f"{name} must be numbers, got NaN")
        return arrays

    @property
    def reused(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that a policy other than ``policy_version`` sampled, bool ``[n]``.

        A resume sets the policy version back: a token sampled in a lost step has a higher one.
        """
        mask: npt.NDArray[np.bool_] = self.birth_versions != self.policy_version
        return mask

    @property
    def outline(self) -> RolloutSummary:
        """Return the rollout without its arrays."""
        return RolloutSummary(
            self.sample_index,
            self.finish,
            self.policy_version,
            self.incarnation,
            self.occurrence,
            len(self),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _SCALARS) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS
        )

    __hash__ = None  # type: ignore[assignment]  # arrays can change

    def prefix(self, length: int) -> Rollout:
        """Return the first ``length`` tokens as a rollout, PARTIAL if any were cut off."""
        if length >= len(self):
            return self
        cut = {name: getattr(self, name)[:length] for name in _ARRAYS}
        return self.changed(**cut, finish=Finish.PARTIAL)

    def changed(self, **values: Any) -> Rollout:
        """Return a rollout with other values of some fields."""
        # Not dataclasses.replace, which would make another rollout of a subclass.
        fields = {name: getattr(self, name) for name in (*_SCALARS, *_ARRAYS)}
        return Rollout(**fields | values)


def _whole_numbers(name: str, values: Any, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """Return integers of a rollout's tokens in their dtype.

    Raises:
        InvalidRollout: one is a fraction, or too large for the dtype; numpy would cut or wrap it.
    """
    array, most = np.asarray(values), np.iinfo(dtype).max
    if array.size and (array.dtype.kind not in "iu" or array.max() > most):
        raise InvalidRollout(f"{name} must be whole numbers up to {most}, got {values!r:.80}")
    return np.ascontiguousarray(array, dtype=dtype)


class Claim(NamedTuple):
    """A sample index reserved for a row, and the cached rollouts of the row's prompt.

    Args:
        sample_index: sample index, which no other row gets in the meantime.
        rollouts: those of the whole group, or of this sample index only, newest first within one.
        group: outlines of the whole group.
    """

    sample_index: int
    rollouts: list[Rollout]
    group: list[RolloutSummary]

    @property
    def whole(self) -> bool:
        """Whether the rollouts are those of the whole group."""
        return len(self.rollouts) == len(self.group)

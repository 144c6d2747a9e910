"""A rollout and the key of its prompt, which every other layer uses.

Numpy and xxhash only. What is done with rollouts (drafting, storing, decoding) lives elsewhere.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import InvalidRollout

__all__ = ["KEY_BYTES", "MAX_SAMPLE_INDEX", "Finish", "Rollout", "RolloutSummary", "prompt_key"]

KEY_BYTES = 16
MAX_SAMPLE_INDEX = 2**16 - 1
_KEY_SEED = 0x53504543  # "SPEC": keeps the keys apart from other xxh3 hashes of the same tokens

_SCALARS = (
    "key",
    "sample_index",
    "finish",
    "policy_version",
    "occurrence",
    "fingerprint",
    "fresh",
    "incarnation",
    "raw",
)
_ARRAYS = ("tokens", "logprobs", "birth_logprobs", "birth_versions")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Finish(enum.IntEnum):
    """How a rollout ended. Recorded when it ends, never inferred from padding."""

    STOP = 1
    """Ended by an end-of-sequence or stop token, which is its last token."""
    STOP_STRING = 2
    """Ended by a stop string, which its last token completes."""
    LENGTH = 3
    """Cut off at the token budget or the model's length limit."""
    PARTIAL = 4
    """Has not ended: it was stored while it was being decoded."""


def prompt_key(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Return the 16-byte key of a prompt, equal in every process, machine and release.

    It is the xxh3-128 hash of the tokens as little-endian int32, so that two prompts with the
    same text but other tokens are two prompts.

    Args:
        token_ids: one-dimensional, each in ``0 .. 2**31 - 1``.

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
    """The part of a rollout that decides whether it is drafted, and its length: no arrays."""

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
    """A response to a prompt, the log-probability of each of its tokens, and how it came to be.

    Args:
        key: the prompt's key, 16 bytes (:func:`prompt_key`).
        sample_index: index of the rollout in its group, ``0 .. 65535``.
        tokens: response tokens, int32 ``[n]``; ``n`` may be 0.
        logprobs: *last* log-prob of each token, float32 ``[n]``, nats: under the policy that
            judged it last.
        finish: how the response ended.
        policy_version: of the policy that judged it last.
        birth_logprobs: float32 ``[n]``, nats: under the policy that sampled each token. None: born
            now, equal to ``logprobs``.
        birth_versions: int64 ``[n]``: of the policy that sampled each token. None: born now.
        occurrence: how many rollouts the sample index had before this one.
        fingerprint: of the weights that judged it last, ``0 .. 2**64 - 1``; 0: not known.
        fresh: whether it was decoded without a draft, so that given its weights it is an ordinary
            sample of the policy. False where a draft was verified, even if no token was accepted,
            unless the draft was itself a fresh rollout of the same weights, cut off by an
            interrupt.
        incarnation: of the run that made it, ``0 .. 2**64 - 1``: larger each time that a run starts
            or resumes on a cluster's cache, so that policy versions that run back after a resume
            still order rollouts. 0: not known.
        raw: whether its tokens were drawn from the raw distribution (temperature 1, nothing cut
            off). Where they were not, log-probs need not be those of the drawing, so that it may
            be drafted by a tree, but is no draft for reuse of a prefix.

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
        for name in (
            "sample_index",
            "policy_version",
            "occurrence",
            "fingerprint",
            "incarnation",
        ):
            try:
                object.__setattr__(self, name, operator.index(getattr(self, name)))
            except TypeError:
                raise InvalidRollout(
                    f"{name} must be a whole number, got {getattr(self, name)!r}"
                ) from None
        if not 0 <= self.sample_index <= MAX_SAMPLE_INDEX:
            raise InvalidRollout(
                f"sample_index must be in 0..{MAX_SAMPLE_INDEX}, got {self.sample_index}"
            )
        if not 0 <= self.policy_version < 2**63:
            raise InvalidRollout(f"policy_version must be in 0..2^63-1, got {self.policy_version}")
        if not 0 <= self.occurrence < 2**32:
            raise InvalidRollout(f"occurrence must be in 0..2^32-1, got {self.occurrence}")
        if not 0 <= self.fingerprint < 2**64:
            raise InvalidRollout(f"fingerprint must be in 0..2^64-1, got {self.fingerprint}")
        if not 0 <= self.incarnation < 2**64:
            raise InvalidRollout(f"incarnation must be in 0..2^64-1, got {self.incarnation}")
        tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        logprobs = np.ascontiguousarray(self.logprobs, dtype=np.float32)
        birth_logprobs = (
            logprobs
            if self.birth_logprobs is None
            else np.ascontiguousarray(self.birth_logprobs, dtype=np.float32)
        )
        birth_versions = (
            np.full(len(tokens), self.policy_version, dtype=np.int64)
            if self.birth_versions is None
            else np.ascontiguousarray(self.birth_versions, dtype=np.int64)
        )
        for name, array in (
            ("tokens", tokens),
            ("logprobs", logprobs),
            ("birth_logprobs", birth_logprobs),
            ("birth_versions", birth_versions),
        ):
            if array.shape != tokens.shape or array.ndim != 1:
                raise InvalidRollout(
                    f"{name} must have the shape of tokens, {tokens.shape[:1]}, got {array.shape}"
                )
        if tokens.size and int(tokens.min()) < 0:
            raise InvalidRollout(f"tokens must not be negative, got {int(tokens.min())}")
        for name, array in (("logprobs", logprobs), ("birth_logprobs", birth_logprobs)):
            if np.isnan(array).any():
                raise InvalidRollout(f"{name} must be numbers, got NaN")
        if birth_versions.size and int(birth_versions.min()) < 0:
            raise InvalidRollout(f"birth_versions must not be negative, got {birth_versions.min()}")
        for name, value in (
            ("finish", Finish(self.finish)),
            ("fresh", bool(self.fresh)),
            ("raw", bool(self.raw)),
            ("tokens", tokens),
            ("logprobs", logprobs),
            ("birth_logprobs", birth_logprobs),
            ("birth_versions", birth_versions),
        ):
            object.__setattr__(self, name, value)

    @property
    def reused(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that another policy than ``policy_version`` sampled, bool ``[n]``.

        After a resume, versions run back: a token that was born in a lost step has a higher one.
        """
        mask: npt.NDArray[np.bool_] = self.birth_versions != self.policy_version
        return mask

    @property
    def outline(self) -> RolloutSummary:
        """The rollout without its arrays."""
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

    __hash__ = None  # type: ignore[assignment]  # arrays can change; a rollout is no key

    def prefix(self, length: int) -> Rollout:
        """Return the first ``length`` tokens as a rollout, PARTIAL if any were cut off."""
        if length >= len(self):
            return self
        return Rollout(
            self.key,
            self.sample_index,
            self.tokens[:length],
            self.logprobs[:length],
            Finish.PARTIAL,
            self.policy_version,
            self.birth_logprobs[:length],
            self.birth_versions[:length],
            self.occurrence,
            self.fingerprint,
            self.fresh,
            self.incarnation,
            self.raw,
        )

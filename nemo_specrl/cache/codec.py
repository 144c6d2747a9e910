"""Rollouts as bytes and back: versioned, checksummed, ragged and compact.

A record, little-endian, of a rollout with ``n`` tokens::

    u8 version, u8 finish, u8 flags, u16 sample index, u32 occurrence, u64 policy_version, u64
    fingerprint, u64 incarnation, u32 n, u32 runs
    tokens           u16[n], their low halves; then the high ones, u8[n] with flag TOKENS_24, u16[n]
                     with flag TOKENS_32
    logprobs         u16[n], -logprob in steps of STEP; f32[n] with flag EXACT
    birth_logprobs   likewise, only with flag OWN_BIRTH_LOGPROBS; without it, they equal logprobs
    run lengths      u32[runs], then birth versions u64[runs]; no runs: all at policy_version
    checksum         u64, xxh3-64 of the key in the database and everything above

Everything is exact except the log-probs, which come back as the nearest multiple of ``STEP``
between ``-65535 * STEP`` and 0. Acceptance compares log-probs by their difference, so equal steps
cost the same everywhere: a token's chance of another verdict is at most ``STEP / 2``.

The prompt's key is not in the record: it is the beginning of the key in the database. Many rollouts
are encoded at once, since a call to numpy costs as much as encoding a few hundred tokens. A record
is checked from end to end when it is decoded, but its columns become arrays only when they are
first used: looking up, copying and sending rollouts would otherwise take four times the memory.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.cache.record_columns import (
    EXACT,
    FRESH,
    HEADER,
    NOT_RAW,
    OWN_BIRTH_LOGPROBS,
    RECORD_VERSION,
    STEP,
    TOKENS_24,
    TOKENS_32,
    BytesLike,
    encode_columns,
)
from nemo_specrl.errors import CorruptRecord, InvalidRollout
from nemo_specrl.rollout import KEY_BYTES, Finish, Rollout

__all__ = [
    "EXACT",
    "RECORD_VERSION",
    "STEP",
    "TOKENS_32",
    "decode",
    "encode_all",
    "encode_for_transfer",
]

_INCARNATION = struct.Struct("<Q")
_INCARNATION_AT = struct.calcsize("<BBBHIQQ")  # its offset in the header
_CHECKSUM = struct.Struct("<Q")
_KNOWN_FLAGS = TOKENS_24 | TOKENS_32 | OWN_BIRTH_LOGPROBS | EXACT | FRESH | NOT_RAW
_FINISHES = {int(finish): finish for finish in Finish}

Array = npt.NDArray[Any]
T = TypeVar("T")


def encode_all(
    rollouts: Sequence[Rollout], db_keys: Sequence[bytes], *, exact: bool = False
) -> list[bytes]:
    """Encode rollouts as the records that are stored under ``db_keys``.

    Args:
        rollouts: with ``n`` tokens a record has 49 bytes, 4 per token (5 if a token id is above
            65,535, 6 if one is above 2^24 - 1; 2 more if a birth log-prob is not the last one), and
            12 per run of equal birth versions.
        db_keys: keys in the database; the first 16 bytes are the prompt's key. The checksum covers
            them, so that a record found under another key is refused.
        exact: whether to keep log-probs as they are, at 4 bytes each instead of 2.

    Raises:
        InvalidRollout: a key does not begin with its prompt's key.
    """
    known: list[tuple[BytesLike, ...] | None] = [
        (rollout.body,) if isinstance(rollout, EncodedRollout) and rollout.exact == exact else None
        for rollout in rollouts
    ]
    new = iter(
        encode_columns([r for r, parts in zip(rollouts, known, strict=True) if not parts], exact)
    )
    records = []
    for rollout, name, there in zip(rollouts, db_keys, known, strict=True):
        if name[:KEY_BYTES] != rollout.key:
            raise InvalidRollout(f"a record of prompt {rollout.key.hex()} cannot be under {name!r}")
        parts = there or next(new)
        hasher = xxhash.xxh3_64(name)
        for part in parts:
            hasher.update(part)
        records.append(b"".join((*parts, _CHECKSUM.pack(hasher.intdigest()))))
    return records


class Header(NamedTuple):
    """The fields at the beginning of a record."""

    finish: int
    flags: int
    sample_index: int
    occurrence: int
    policy_version: int
    fingerprint: int
    incarnation: int
    tokens: int
    runs: int


class _Column(Generic[T]):
    """A ``functools.cached_property`` without the lock, which costs as much again before 3.12."""

    def __init__(self, made: Callable[[Any], T]) -> None:
        self._made = made
        self._name = made.__name__
        self.__doc__ = made.__doc__

    def __get__(self, rollout: Any, owner: type) -> T:
        value = rollout.__dict__[self._name] = self._made(rollout)
        return value


class EncodedRollout(Rollout):
    """A rollout that came out of a record; made by :func:`decode`.

    Its arrays can be read but not written to. It is pickled as its record.
    """

    _record: bytes
    _flags: int
    _length: int
    _runs: int

    @_Column
    def tokens(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 ``[n]``."""
        flags, n = self._flags, self._length
        low = np.frombuffer(self._record, "<u2", n, HEADER.size)
        if flags & (TOKENS_24 | TOKENS_32):
            high = np.frombuffer(
                self._record, "u1" if flags & TOKENS_24 else "<u2", n, HEADER.size + 2 * n
            )
            tokens = high.astype(np.int32)
            np.left_shift(tokens, 16, out=tokens)
            np.bitwise_or(tokens, low, out=tokens)
        else:
            tokens = low.astype(np.int32)
        return _fixed(tokens)

    @_Column
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Last log-prob of each token, nats, float32 ``[n]``."""
        return self._nats(0)

    @_Column
    def birth_logprobs(self) -> npt.NDArray[np.float32]:
        """Log-prob of each token under the policy that sampled it, nats, float32 ``[n]``."""
        return self._nats(1) if self._flags & OWN_BIRTH_LOGPROBS else self.logprobs

    @_Column
    def birth_versions(self) -> npt.NDArray[np.int64]:
        """Version of the policy that sampled each token, int64 ``[n]``."""
        if not self._runs:
            return _fixed(np.full(self._length, self.policy_version, np.int64))
        lengths, versions = _runs_of(self._record, self._runs)
        return _fixed(np.repeat(np.array(versions, np.int64), lengths))

    @property
    def body(self) -> memoryview:
        """The record without its checksum."""
        return memoryview(self._record)[: -_CHECKSUM.size]

    @property
    def exact(self) -> bool:
        """Whether the record keeps every bit of the log-probs."""
        return bool(self._flags & EXACT)

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return _encoded, (self.key, self._record)

    def _nats(self, column: int) -> npt.NDArray[np.float32]:
        """Decode log-probs: the last ones (0) or those at birth (1)."""
        flags, n = self._flags, self._length
        width = 4 if flags & EXACT else 2
        at = HEADER.size + n * (_token_bytes(flags) + column * width)
        if flags & EXACT:
            return _fixed(np.frombuffer(self._record, "<f4", n, at).astype(np.float32))
        nats = np.frombuffer(self._record, "<u2", n, at).astype(np.float32)
        np.multiply(nats, np.float32(STEP), out=nats)
        return _fixed(np.subtract(0, nats, out=nats))  # 0 rather than -0 if there are none


def _fixed(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _token_bytes(flags: int) -> int:
    return 2 + bool(flags & TOKENS_24) + 2 * bool(flags & TOKENS_32)


def _encoded(key: bytes, record: bytes, header: Header | None = None) -> EncodedRollout:
    """Make the rollout of a record that has been checked."""
    if header is None:
        header = Header._make(HEADER.unpack_from(record)[1:])
    rollout: EncodedRollout = object.__new__(EncodedRollout)
    rollout.__dict__.update(
        key=key,
        sample_index=header.sample_index,
        finish=_FINISHES[header.finish],
        policy_version=header.policy_version,
        occurrence=header.occurrence,
        fingerprint=header.fingerprint,
        fresh=bool(header.flags & FRESH),
        raw=not header.flags & NOT_RAW,
        incarnation=header.incarnation,
        _record=record,
        _flags=header.flags,
        _length=header.tokens,
        _runs=header.runs,
    )
    return rollout


def encode_for_transfer(
    rollouts: Sequence[Rollout], incarnation: int | None = None
) -> list[EncodedRollout]:
    """Encode rollouts that will be sent to a store, as the store would return them.

    A record takes a quarter of the bytes of the arrays.

    Args:
        rollouts: rollouts of any origin.
        incarnation: recorded in place of the rollouts' own. None: they keep theirs.
    """
    keys = [rollout.key for rollout in rollouts]
    records = encode_all(rollouts, keys)
    if incarnation is not None:
        records = [_restamped(*named, incarnation) for named in zip(keys, records, strict=True)]
    return [_encoded(key, record) for key, record in zip(keys, records, strict=True)]


def _restamped(db_key: bytes, record: bytes, incarnation: int) -> bytes:
    """Return a record with another incarnation and a matching checksum."""
    body = bytearray(memoryview(record)[: -_CHECKSUM.size])
    _INCARNATION.pack_into(body, _INCARNATION_AT, incarnation)
    hasher = xxhash.xxh3_64(db_key)
    hasher.update(body)
    return bytes(body) + _CHECKSUM.pack(hasher.intdigest())


def decode(db_key: bytes, record: bytes) -> EncodedRollout:
    """Decode the record found under ``db_key``, after checking it from end to end.

    Raises:
        CorruptRecord: the record is damaged, cut off, of an unknown version, was stored under
            another key, or contradicts itself.
    """
    if not record or record[0] != RECORD_VERSION:
        raise CorruptRecord(
            f"record {db_key.hex()}: version {record[0] if record else 'missing'}, "
            f"this release reads version {RECORD_VERSION}"
        )
    size = len(record) - _CHECKSUM.size
    if size < HEADER.size:
        raise CorruptRecord(f"record {db_key.hex()}: cut off after {len(record)} bytes")
    hasher = xxhash.xxh3_64(db_key)
    hasher.update(memoryview(record)[:size])  # without a copy
    if _CHECKSUM.unpack_from(record, size)[0] != hasher.intdigest():
        raise CorruptRecord(f"record {db_key.hex()}: checksum does not match")
    header = Header._make(HEADER.unpack_from(record)[1:])
    problem = _problem(header, size - HEADER.size) or _contradiction(record, header)
    if problem:
        raise CorruptRecord(f"record {db_key.hex()}: {problem}")
    return _encoded(db_key[:KEY_BYTES], record, header)


def _contradiction(record: bytes, header: Header) -> str:
    """Describe what is wrong with the columns of a record whose size is right; empty: nothing."""
    if header.runs:
        lengths, versions = _runs_of(record, header.runs)
        if sum(lengths) != header.tokens:
            return f"runs of {sum(lengths)} birth versions for {header.tokens} tokens"
        if max(versions) >= 2**63:
            return f"birth version {max(versions)} is above 2^63-1"
    if header.tokens and header.flags & (TOKENS_32 | EXACT):  # otherwise nothing else can be held
        columns = _encoded(b"", record, header)
        if int(columns.tokens.min()) < 0:
            return f"tokens must not be negative, got {columns.tokens.min()}"
        if np.isnan(columns.logprobs).any() or np.isnan(columns.birth_logprobs).any():
            return "log-probs must be numbers, got NaN"
    return ""


def _runs_of(record: bytes, runs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths and values of the runs of equal birth versions."""
    numbers = _runs_struct(runs).unpack_from(record, len(record) - _CHECKSUM.size - 12 * runs)
    return numbers[:runs], numbers[runs:]


def _problem(header: Header, size: int) -> str:
    """Describe what is wrong with a header before ``size`` bytes; empty if nothing is."""
    flags = header.flags
    if flags & ~_KNOWN_FLAGS or (flags & TOKENS_24 and flags & TOKENS_32):
        return f"unknown flags {flags:#x}"
    if header.finish not in _FINISHES:
        return f"{header.finish} is not a valid Finish"
    if header.policy_version >= 2**63:
        return f"policy_version {header.policy_version} is above 2^63-1"
    a_token = _token_bytes(flags)
    a_token += (4 if flags & EXACT else 2) * (2 if flags & OWN_BIRTH_LOGPROBS else 1)
    surplus = size - header.tokens * a_token - 12 * header.runs
    if surplus:
        return f"{abs(surplus)} bytes too {'many' if surplus > 0 else 'few'}"
    return ""


@functools.lru_cache(64)
def _runs_struct(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I{count}Q")

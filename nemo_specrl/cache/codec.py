"""A rollout as bytes and back: versioned, checksummed, ragged and exact.

A record, little-endian, of a rollout with ``n`` tokens::

    u8 version, u8 finish, u8 flags, u16 slot, u64 policy_version, u32 n, u32 runs
    tokens           u16[n], or u32[n] with flag WIDE_TOKENS
    logprobs         f32[n]
    birth_logprobs   f32[n], only with flag OWN_BIRTH_LOGPROBS; else they equal logprobs
    run lengths      u32[runs], then birth versions u64[runs]; no runs: all at policy_version
    checksum         u64, xxh3-64 of the key in the database and everything above

The prompt's key is not in the record: it is the beginning of the key in the database.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import CorruptRecord, InvalidRollout
from nemo_specrl.rollout import KEY_BYTES, Finish, Rollout

__all__ = ["RECORD_VERSION", "decode", "encode"]

RECORD_VERSION = 1
WIDE_TOKENS = 1
OWN_BIRTH_LOGPROBS = 2

_HEADER = struct.Struct("<BBBHQII")
_CHECKSUM = struct.Struct("<Q")


def encode(rollout: Rollout, db_key: bytes) -> bytes:
    """The record of a rollout that is stored under ``db_key``.

    Args:
        rollout: with ``n`` tokens; a record has 29 bytes, 6 or 8 per token (4 more where a birth
            log-prob is not the last one), and 12 per run of equal birth versions.
        db_key: key in the database; its first 16 bytes are the prompt's key. The checksum covers
            it, so that a record found under another key is refused.

    Raises:
        InvalidRollout: ``db_key`` does not begin with the prompt's key.
    """
    if db_key[:KEY_BYTES] != rollout.key:
        raise InvalidRollout(f"a record of prompt {rollout.key.hex()} cannot be under {db_key!r}")
    flags = 0
    # As uint32, a negative token (arrays can change after they were checked) is wide and comes
    # back as it was, to be refused then, instead of wrapping around to a valid one.
    tokens = rollout.tokens.astype("<i4").view("<u4")
    if tokens.size and int(tokens.max()) > 0xFFFF:
        flags |= WIDE_TOKENS
        token_bytes = tokens.tobytes()
    else:
        token_bytes = tokens.astype("<u2").tobytes()
    logprobs = rollout.logprobs.astype("<f4").tobytes()
    birth_logprobs = rollout.birth_logprobs.astype("<f4").tobytes()
    if birth_logprobs == logprobs:
        birth_logprobs = b""
    else:
        flags |= OWN_BIRTH_LOGPROBS
    lengths, versions = _runs(rollout)
    body = b"".join(
        (
            _HEADER.pack(
                RECORD_VERSION,
                rollout.finish,
                flags,
                rollout.slot,
                rollout.policy_version,
                len(rollout),
                len(lengths),
            ),
            token_bytes,
            logprobs,
            birth_logprobs,
            lengths.astype("<u4").tobytes(),
            versions.astype("<u8").tobytes(),
        )
    )
    return body + _CHECKSUM.pack(_digest(db_key, body))


def decode(db_key: bytes, record: bytes) -> Rollout:
    """The rollout of a record found under ``db_key``; its arrays are its own.

    Raises:
        CorruptRecord: the record is damaged, cut off, of an unknown version, or was stored under
            another key.
    """
    if not record or record[0] != RECORD_VERSION:
        raise CorruptRecord(
            f"record {db_key.hex()}: version {record[0] if record else 'missing'}, "
            f"this release reads version {RECORD_VERSION}"
        )
    size = len(record) - _CHECKSUM.size
    if size < _HEADER.size:
        raise CorruptRecord(f"record {db_key.hex()}: cut off after {len(record)} bytes")
    body = record[:size]
    if _CHECKSUM.unpack_from(record, size)[0] != _digest(db_key, body):
        raise CorruptRecord(f"record {db_key.hex()}: checksum does not match")
    try:
        return _parse(db_key, body)
    except (ValueError, OverflowError) as error:  # InvalidRollout is a ValueError
        raise CorruptRecord(f"record {db_key.hex()}: {error}") from None


def _parse(db_key: bytes, body: bytes) -> Rollout:
    _, finish, flags, slot, policy_version, n, n_runs = _HEADER.unpack_from(body)
    if flags & ~(WIDE_TOKENS | OWN_BIRTH_LOGPROBS):
        raise ValueError(f"unknown flags {flags:#x}")
    offset = _HEADER.size

    def take(dtype: str, count: int) -> npt.NDArray[np.generic]:
        nonlocal offset
        array = np.frombuffer(body, dtype, count, offset)
        offset += array.nbytes
        return array

    tokens = take("<u4" if flags & WIDE_TOKENS else "<u2", n).astype(np.int32)
    logprobs = take("<f4", n).astype(np.float32)
    birth_logprobs = take("<f4", n).astype(np.float32) if flags & OWN_BIRTH_LOGPROBS else None
    birth_versions = None
    if n_runs:
        lengths = take("<u4", n_runs).astype(np.int64)
        if int(lengths.sum()) != n:
            raise ValueError(f"runs of {int(lengths.sum())} birth versions for {n} tokens")
        birth_versions = np.repeat(take("<u8", n_runs).astype(np.int64), lengths)
    if offset != len(body):
        raise ValueError(f"{len(body) - offset} bytes too many")
    return Rollout(
        db_key[:KEY_BYTES],
        slot,
        tokens,
        logprobs,
        Finish(finish),
        policy_version,
        birth_logprobs,  # type: ignore[arg-type]  # None: equal to logprobs
        birth_versions,  # type: ignore[arg-type]
    )


def _runs(rollout: Rollout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Lengths and values of the runs of equal birth versions; none if all were born now."""
    versions = rollout.birth_versions
    if (versions == rollout.policy_version).all():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(versions)) + 1))
    return np.diff(starts, append=len(versions)), versions[starts]


def _digest(db_key: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(db_key + body)

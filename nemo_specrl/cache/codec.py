"""A rollout as bytes and back: versioned, checksummed, ragged and compact.

A record, little-endian, of a rollout with ``n`` tokens::

    u8 version, u8 finish, u8 flags, u16 slot, u32 visit, u64 policy_version, u32 n, u32 runs
    tokens           u16[n]; u24[n] with flag TOKENS_24, u32[n] with flag TOKENS_32
    logprobs         u16[n], -logprob in steps of STEP
    birth_logprobs   u16[n], only with flag OWN_BIRTH_LOGPROBS; else they equal logprobs
    run lengths      u32[runs], then birth versions u64[runs]; no runs: all at policy_version
    checksum         u64, xxh3-64 of the key in the database and everything above

Everything is exact but the log-probs, which come back as the nearest multiple of ``STEP`` between
``-65535 * STEP`` and 0. Acceptance compares log-probs by their difference, so that equal steps cost
the same everywhere: a token's chance of another verdict is at most ``STEP / 2``.

The prompt's key is not in the record: it is the beginning of the key in the database.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import CorruptRecord, InvalidRollout
from nemo_specrl.rollout import KEY_BYTES, Finish, Rollout

__all__ = ["RECORD_VERSION", "STEP", "decode", "encode"]

RECORD_VERSION = 2
STEP = 2.0**-10
"""Nats."""
TOKENS_24 = 1
TOKENS_32 = 2
OWN_BIRTH_LOGPROBS = 4

_HEADER = struct.Struct("<BBBHIQII")
_CHECKSUM = struct.Struct("<Q")


def encode(rollout: Rollout, db_key: bytes) -> bytes:
    """The record of a rollout that is stored under ``db_key``.

    Args:
        rollout: with ``n`` tokens; a record has 33 bytes, 4 per token (5 where a token id is above
            65,535, 6 where one is above 2^24 - 1; 2 more where a birth log-prob is not the last
            one), and 12 per run of equal birth versions.
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
    top = int(tokens.max()) if tokens.size else 0
    if top <= 0xFFFF:
        token_bytes = tokens.astype("<u2").tobytes()
    elif top <= 0xFFFFFF:
        flags |= TOKENS_24
        token_bytes = tokens.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    else:
        flags |= TOKENS_32
        token_bytes = tokens.tobytes()
    logprobs = _steps(rollout.logprobs)
    birth_logprobs = _steps(rollout.birth_logprobs)
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
                rollout.visit,
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
    _, finish, flags, slot, visit, policy_version, n, n_runs = _HEADER.unpack_from(body)
    if flags & ~(TOKENS_24 | TOKENS_32 | OWN_BIRTH_LOGPROBS) or (
        flags & TOKENS_24 and flags & TOKENS_32
    ):
        raise ValueError(f"unknown flags {flags:#x}")
    offset = _HEADER.size

    def take(dtype: str, count: int) -> npt.NDArray[np.generic]:
        nonlocal offset
        array = np.frombuffer(body, dtype, count, offset)
        offset += array.nbytes
        return array

    if flags & TOKENS_24:
        wide = np.zeros((n, 4), np.uint8)
        wide[:, :3] = take("u1", 3 * n).reshape(n, 3)
        tokens = wide.view("<u4")[:, 0].astype(np.int32)
    else:
        tokens = take("<u4" if flags & TOKENS_32 else "<u2", n).astype(np.int32)
    logprobs = _nats(take("<u2", n))
    birth_logprobs = _nats(take("<u2", n)) if flags & OWN_BIRTH_LOGPROBS else None
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
        visit,
    )


def _steps(logprobs: npt.NDArray[np.float32]) -> bytes:
    """Log-probs as whole numbers of ``STEP``."""
    kept = np.clip(logprobs, np.float32(-0xFFFF * STEP), 0)
    steps: npt.NDArray[np.uint16] = np.rint(kept * np.float32(-1 / STEP)).astype("<u2")
    return steps.tobytes()


def _nats(steps: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """The counterpart of :func:`_steps`."""
    return 0 - steps.astype(np.float32) * np.float32(STEP)  # 0, and not -0, where there are none


def _runs(rollout: Rollout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Lengths and values of the runs of equal birth versions; none if all were born now."""
    versions = rollout.birth_versions
    if (versions == rollout.policy_version).all():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(versions)) + 1))
    return np.diff(starts, append=len(versions)), versions[starts]


def _digest(db_key: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(db_key + body)

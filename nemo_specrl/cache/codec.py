"""Responses as bytes and back: ragged, compact, checksummed.

A record, little-endian, of a response with ``n`` tokens::

    u8 version, u8 finish, u8 flags, u8 zero, u32 n, u64 policy version, u64 identity
    tokens      their low halves u16[n]; then the high ones, u8[n] with WIDE, u16[n] with WIDEST
    log-probs   u16[n] with LOGPROBS: -logprob in multiples of STEP
    checksum    u64, xxh3-64 of the prompt's key and of everything above

The key is not in the record, but the checksum covers it: a record found under another key is
damaged. Everything is exact but the log-probs, which come back as the nearest multiple of ``STEP``
in ``-65535 * STEP .. 0``; a token's chance of another verdict in prefix reuse is at most
``STEP / 2``.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash

from nemo_specrl.errors import CorruptRecord
from nemo_specrl.rollout import Finish, Rollout

__all__ = ["STEP", "decode", "encode", "is_sound", "without_tokens"]

STEP = 2.0**-10
"""Resolution of the log-probs, nats."""
_VERSION = 5
_WIDE, _WIDEST, _LOGPROBS = 1, 2, 4
_HEADER = struct.Struct("<BBBxIQQ")
_CHECKSUM = struct.Struct("<Q")
_NO_TOKENS = np.zeros(0, np.int32)
_FINISHES = {int(finish): finish for finish in Finish}


def encode(rollout: Rollout) -> bytes:
    """Return the record of a response: 32 bytes, and 2 to 4 a token (3 where an id is above 65,535,
    4 above 2^24), 2 more with log-probs.
    """
    tokens = rollout.tokens
    top = int(tokens.max()) if len(tokens) else 0
    flags = _WIDEST if top > 0xFFFFFF else _WIDE if top > 0xFFFF else 0
    columns = [tokens.astype("<u2")]
    if flags:
        columns.append((tokens >> 16).astype("<u2" if flags == _WIDEST else "u1"))
    if rollout.logprobs is not None:
        flags |= _LOGPROBS
        steps = np.clip(rollout.logprobs, np.float32(-0xFFFF * STEP), np.float32(0))
        columns.append(np.rint(steps * np.float32(-1 / STEP)).astype("<u2"))
    header = _HEADER.pack(
        _VERSION, rollout.finish, flags, len(tokens), rollout.policy_version, rollout.identity
    )
    body = b"".join([header, *(column.tobytes() for column in columns)])
    return body + _CHECKSUM.pack(_hash(rollout.key, body))


def is_sound(key: bytes, record: object) -> bool:
    """Whether a record of a prompt is whole: its checksum is right."""
    if not isinstance(record, bytes):  # what a damaged file has in its place
        return False
    end = len(record) - _CHECKSUM.size
    return end >= _HEADER.size and _CHECKSUM.unpack_from(record, end)[0] == _hash(
        key, memoryview(record)[:end]
    )


def decode(key: bytes, record: bytes) -> Rollout:
    """Return the response whose record was kept for a prompt.

    Raises:
        CorruptRecord: the record is damaged, cut off, of another version or another prompt.
    """
    if not is_sound(key, record):
        raise CorruptRecord(f"a response to prompt {key.hex()} is damaged: wrong checksum")
    version, finish, flags, n, policy_version, identity = _HEADER.unpack_from(record)
    high = 2 if flags & _WIDEST else 1 if flags & _WIDE else 0
    size = n * (2 + high + (2 if flags & _LOGPROBS else 0))
    if (
        version != _VERSION
        or finish not in _FINISHES
        or len(record) != _HEADER.size + size + _CHECKSUM.size
    ):
        raise CorruptRecord(f"a response to prompt {key.hex()} is damaged: version {version}")
    at = _HEADER.size
    tokens = np.frombuffer(record, "<u2", n, at).astype(np.int32)
    at += 2 * n
    if high:
        halves = np.frombuffer(record, "<u2" if high == 2 else "u1", n, at)
        tokens |= halves.astype(np.int32) << 16
        at += high * n
    logprobs = None
    if flags & _LOGPROBS:
        logprobs = np.frombuffer(record, "<u2", n, at) * np.float32(-STEP)
        logprobs += np.float32(0)  # 0 rather than -0
    return _unchecked(  # it was checked before it was encoded
        key=key,
        tokens=tokens,
        finish=_FINISHES[finish],
        policy_version=policy_version,
        logprobs=logprobs,
        identity=identity,
    )


def without_tokens(key: bytes, identity: int) -> Rollout:
    """Return a response of which no more is wanted than that there is one."""
    return _unchecked(
        key=key,
        tokens=_NO_TOKENS,
        finish=Finish.PARTIAL,
        policy_version=0,
        logprobs=None,
        identity=identity,
    )


def _unchecked(**fields: Any) -> Rollout:
    rollout: Rollout = object.__new__(Rollout)
    rollout.__dict__.update(fields)
    return rollout


def _hash(key: bytes, body: bytes | memoryview) -> int:
    hasher = xxhash.xxh3_64(key)
    hasher.update(body)
    return hasher.intdigest()

"""Rollouts as bytes and back: versioned, checksummed, ragged and compact.

A record, little-endian, of a rollout with ``n`` tokens::

    u8 version, u8 finish, u8 flags, u16 slot, u32 visit, u64 policy_version, u64 fingerprint,
    u32 n, u32 runs
    tokens           u16[n], their low halves; then the high ones, u8[n] with flag TOKENS_24, u16[n]
                     with flag TOKENS_32
    logprobs         u16[n], -logprob in steps of STEP; f32[n] with flag EXACT
    birth_logprobs   likewise, only with flag OWN_BIRTH_LOGPROBS; else they equal logprobs
    run lengths      u32[runs], then birth versions u64[runs]; no runs: all at policy_version
    checksum         u64, xxh3-64 of the key in the database and everything above

Everything is exact but the log-probs, which come back as the nearest multiple of ``STEP`` between
``-65535 * STEP`` and 0. Acceptance compares log-probs by their difference, so that equal steps cost
the same everywhere: a token's chance of another verdict is at most ``STEP / 2``.

The prompt's key is not in the record: it is the beginning of the key in the database. Many records
are done at once: numpy's time for a call is that of some hundred tokens.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from nemo_specrl.errors import CorruptRecord, InvalidRollout
from nemo_specrl.rollout import KEY_BYTES, Finish, Rollout

__all__ = ["RECORD_VERSION", "STEP", "decode", "decode_all", "encode", "encode_all", "header_of"]

RECORD_VERSION = 3
STEP = 2.0**-10
"""Nats."""
TOKENS_24 = 1
TOKENS_32 = 2
OWN_BIRTH_LOGPROBS = 4
EXACT = 8

_HEADER = struct.Struct("<BBBHIQQII")
_CHECKSUM = struct.Struct("<Q")
_KNOWN_FLAGS = TOKENS_24 | TOKENS_32 | OWN_BIRTH_LOGPROBS | EXACT
_FINISHES = {int(finish): finish for finish in Finish}

Array = npt.NDArray[Any]


def encode(rollout: Rollout, db_key: bytes, *, exact: bool = False) -> bytes:
    """The record of one rollout: see :func:`encode_all`."""
    return encode_all([rollout], [db_key], exact=exact)[0]


def encode_all(
    rollouts: Sequence[Rollout], db_keys: Sequence[bytes], *, exact: bool = False
) -> list[bytes]:
    """The records of rollouts that are stored under ``db_keys``.

    Args:
        rollouts: with ``n`` tokens a record has 41 bytes, 4 per token (5 where a token id is above
            65,535, 6 where one is above 2^24 - 1; 2 more where a birth log-prob is not the last
            one), and 12 per run of equal birth versions.
        db_keys: keys in the database; the first 16 bytes are the prompt's key. The checksum covers
            them, so that a record found under another key is refused.
        exact: keep log-probs as they are, at 4 bytes each instead of 2.

    Raises:
        InvalidRollout: a key does not begin with its prompt's key.
    """
    if not rollouts:
        return []
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    ends = np.cumsum(lengths)
    starts, filled = ends - lengths, lengths > 0
    # As uint32, a negative token (arrays can change after they were checked) is wide and comes
    # back as it was, to be refused then, instead of wrapping around to a valid one.
    tokens = np.concatenate([rollout.tokens for rollout in rollouts]).astype("<i4", copy=False)
    tops = np.zeros(len(rollouts), np.uint32)
    if filled.any():
        tops[filled] = np.maximum.reduceat(tokens.view("<u4"), starts[filled])
    low = _bytes(tokens.astype("<u2"))
    high = tokens.view("<u4") >> 16 if int(tops.max()) > 0xFFFF else np.empty(0, np.uint32)
    high_1, high_2 = _bytes(high.astype("u1")), _bytes(high.astype("<u2"))
    width = 4 if exact else 2
    column = _floats if exact else _steps
    last = column([rollout.logprobs for rollout in rollouts])
    birth = column([rollout.birth_logprobs for rollout in rollouts])
    run_lengths, run_versions, first_run = _runs(rollouts, starts[filled], int(ends[-1]), ends)
    records = []
    for i, (rollout, name, a, b, top) in enumerate(
        zip(rollouts, db_keys, starts.tolist(), ends.tolist(), tops.tolist(), strict=True)
    ):
        if name[:KEY_BYTES] != rollout.key:
            raise InvalidRollout(f"a record of prompt {rollout.key.hex()} cannot be under {name!r}")
        flags = EXACT if exact else 0
        wide: memoryview | bytes = b""
        if top > 0xFFFFFF:
            flags |= TOKENS_32
            wide = high_2[2 * a : 2 * b]
        elif top > 0xFFFF:
            flags |= TOKENS_24
            wide = high_1[a:b]
        own: memoryview | bytes = b""
        if rollout.birth_logprobs is not rollout.logprobs:
            own = birth[width * a : width * b]
            if own == last[width * a : width * b]:
                own = b""
            else:
                flags |= OWN_BIRTH_LOGPROBS
        c, d = first_run[i], first_run[i + 1]
        if d == c + 1 and int(rollout.birth_versions[0]) == rollout.policy_version:
            c = d  # all were born now
        body = b"".join(
            (
                _HEADER.pack(
                    RECORD_VERSION,
                    rollout.finish,
                    flags,
                    rollout.slot,
                    rollout.visit,
                    rollout.policy_version,
                    rollout.fingerprint,
                    b - a,
                    d - c,
                ),
                low[2 * a : 2 * b],
                wide,
                last[width * a : width * b],
                own,
                run_lengths[4 * c : 4 * d],
                run_versions[8 * c : 8 * d],
            )
        )
        records.append(body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(name + body)))
    return records


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data


def _floats(columns: list[npt.NDArray[np.float32]]) -> memoryview:
    return _bytes(np.concatenate(columns).astype("<f4", copy=False))


def _steps(columns: list[npt.NDArray[np.float32]]) -> memoryview:
    """Log-probs as whole numbers of ``STEP``."""
    values = np.concatenate(columns)
    np.maximum(values, np.float32(-0xFFFF * STEP), out=values)
    np.minimum(values, 0, out=values)
    np.multiply(values, np.float32(-1 / STEP), out=values)
    np.rint(values, out=values)
    return _bytes(values.astype("<u2"))


def _runs(
    rollouts: Sequence[Rollout], starts: Array, total: int, ends: Array
) -> tuple[memoryview, memoryview, list[int]]:
    """Lengths and values of the runs of equal birth versions, and the first run of each rollout.

    Args:
        rollouts: with ``total`` tokens together.
        starts: where those begin that have tokens.
        total: of their lengths.
        ends: where all of them end.
    """
    versions = np.concatenate([rollout.birth_versions for rollout in rollouts])
    begins = np.empty(total, np.bool_)
    np.not_equal(versions[1:], versions[:-1], out=begins[1:])
    begins[starts] = True
    positions = np.flatnonzero(begins)
    lengths = np.diff(positions, append=total)
    first = [0, *np.searchsorted(positions, ends).tolist()]
    return _bytes(lengths.astype("<u4")), _bytes(versions[positions].astype("<u8")), first


class Header(NamedTuple):
    """What stands in front of a record."""

    finish: int
    flags: int
    slot: int
    visit: int
    policy_version: int
    fingerprint: int
    tokens: int
    runs: int


def header_of(db_key: bytes, record: bytes) -> Header:
    """The header of a record found under ``db_key``, which is checked from end to end.

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
    hasher = xxhash.xxh3_64(db_key)
    hasher.update(memoryview(record)[:size])  # without a copy
    if _CHECKSUM.unpack_from(record, size)[0] != hasher.intdigest():
        raise CorruptRecord(f"record {db_key.hex()}: checksum does not match")
    header = Header._make(_HEADER.unpack_from(record)[1:])
    if problem := _problem(header, size - _HEADER.size):
        raise CorruptRecord(f"record {db_key.hex()}: {problem}")
    return header


def _problem(header: Header, size: int) -> str:
    """What contradicts itself in a header that stands before ``size`` bytes."""
    flags = header.flags
    if flags & ~_KNOWN_FLAGS or (flags & TOKENS_24 and flags & TOKENS_32):
        return f"unknown flags {flags:#x}"
    if header.finish not in _FINISHES:
        return f"{header.finish} is not a valid Finish"
    if header.policy_version >= 2**63:
        return f"policy_version {header.policy_version} is above 2^63-1"
    a_token = 2 + bool(flags & TOKENS_24) + 2 * bool(flags & TOKENS_32)
    a_token += (4 if flags & EXACT else 2) * (2 if flags & OWN_BIRTH_LOGPROBS else 1)
    surplus = size - header.tokens * a_token - 12 * header.runs
    if surplus:
        return f"{abs(surplus)} bytes too {'many' if surplus > 0 else 'few'}"
    return ""


def decode(db_key: bytes, record: bytes) -> Rollout:
    """The rollout of a record found under ``db_key``; its arrays are its own.

    Raises:
        CorruptRecord: as :func:`header_of`, or it contradicts itself.
    """
    (result,) = decode_all([(db_key, record)])
    if isinstance(result, CorruptRecord):
        raise result
    return result


def decode_all(records: Sequence[tuple[bytes, bytes]]) -> list[Rollout | CorruptRecord]:
    """The rollouts of records, each of which is found under its db key.

    Returns:
        For each record its rollout, or why there is none. Arrays of one call share memory, no two
        of them the same part of it.
    """
    results: list[Rollout | CorruptRecord | None] = [None] * len(records)
    alike: dict[int, list[tuple[int, Header]]] = defaultdict(list)
    for i, (name, record) in enumerate(records):
        try:
            header = header_of(name, record)
            alike[header.flags].append((i, header))
        except CorruptRecord as error:
            results[i] = error
    for flags, some in alike.items():
        for (i, _), result in zip(some, _decode_alike(records, flags, some), strict=True):
            results[i] = result
    return results  # type: ignore[return-value]  # none is None any more


def _decode_alike(
    records: Sequence[tuple[bytes, bytes]], flags: int, some: list[tuple[int, Header]]
) -> list[Rollout | CorruptRecord]:
    """Rollouts of records that are laid out alike: column by column, all records at once."""
    own, exact = bool(flags & OWN_BIRTH_LOGPROBS), bool(flags & EXACT)
    high_width = 1 if flags & TOKENS_24 else 2 if flags & TOKENS_32 else 0
    width = 4 if exact else 2
    low_parts, high_parts, last_parts, birth_parts = [], [], [], []
    run_lengths: list[int] = []
    run_versions: list[int] = []
    contradictions: dict[int, str] = {}
    ends, end = [0], 0
    for place, (i, header) in enumerate(some):
        record, n, runs = memoryview(records[i][1]), header.tokens, header.runs
        at = _HEADER.size
        low_parts.append(record[at : (at := at + 2 * n)])
        if high_width:
            high_parts.append(record[at : (at := at + high_width * n)])
        last_parts.append(record[at : (at := at + width * n)])
        if own:
            birth_parts.append(record[at : (at := at + width * n)])
        lengths: tuple[int, ...] = (n,)
        versions: tuple[int, ...] = (header.policy_version,)
        if runs:
            numbers = _runs_of(runs).unpack_from(record, at)
            lengths, versions = numbers[:runs], numbers[runs:]
            if sum(lengths) != n:
                contradictions[place] = f"runs of {sum(lengths)} birth versions for {n} tokens"
            elif max(versions) >= 2**63:
                contradictions[place] = f"birth version {max(versions)} is above 2^63-1"
            if place in contradictions:
                lengths, versions = (n,), (0,)
        run_lengths += lengths
        run_versions += versions
        ends.append(end := end + n)
    tokens = np.frombuffer(b"".join(low_parts), "<u2").astype(np.int32)
    if high_width:
        high = np.frombuffer(b"".join(high_parts), f"<u{high_width}").astype(np.int32)
        np.left_shift(high, 16, out=high)
        np.bitwise_or(tokens, high, out=tokens)
    last = _nats(last_parts, exact)
    birth = _nats(birth_parts, exact) if own else last
    births = np.repeat(np.array(run_versions, np.int64), run_lengths)
    if flags & (TOKENS_32 | EXACT):  # the others cannot hold anything else
        for place, (a, b) in enumerate(itertools.pairwise(ends)):
            if (tokens[a:b] < 0).any():
                contradictions[place] = f"tokens must not be negative, got {tokens[a:b].min()}"
            elif np.isnan(last[a:b]).any() or np.isnan(birth[a:b]).any():
                contradictions[place] = "log-probs must be numbers, got NaN"
    results: list[Rollout | CorruptRecord] = []
    for place, (i, header) in enumerate(some):
        name = records[i][0]
        if place in contradictions:
            results.append(CorruptRecord(f"record {name.hex()}: {contradictions[place]}"))
            continue
        a, b = ends[place], ends[place + 1]
        logprobs = last[a:b]
        results.append(
            Rollout.trusted(
                key=name[:KEY_BYTES],
                slot=header.slot,
                tokens=tokens[a:b],
                logprobs=logprobs,
                finish=_FINISHES[header.finish],
                policy_version=header.policy_version,
                birth_logprobs=birth[a:b] if own else logprobs,
                birth_versions=births[a:b],
                visit=header.visit,
                fingerprint=header.fingerprint,
            )
        )
    return results


@functools.lru_cache(64)
def _runs_of(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I{count}Q")


def _nats(parts: list[memoryview], exact: bool) -> npt.NDArray[np.float32]:
    """The counterpart of :func:`_steps` and :func:`_floats`."""
    data = b"".join(parts)
    if exact:
        return np.frombuffer(data, "<f4").astype(np.float32)
    nats = np.frombuffer(data, "<u2").astype(np.float32)
    np.multiply(nats, np.float32(STEP), out=nats)
    return np.subtract(0, nats, out=nats)  # 0, and not -0, where there are none

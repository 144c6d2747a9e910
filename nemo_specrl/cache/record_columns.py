"""The columns of records, many rollouts at a time; ``codec`` describes the format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.rollout import Rollout

__all__ = [
    "EXACT",
    "FRESH",
    "HEADER",
    "NOT_RAW",
    "OWN_BIRTH_LOGPROBS",
    "RECORD_VERSION",
    "STEP",
    "TOKENS_24",
    "TOKENS_32",
    "BytesLike",
    "encode_columns",
]

RECORD_VERSION = 4
STEP = 2.0**-10
"""Nats."""
TOKENS_24 = 1
TOKENS_32 = 2
OWN_BIRTH_LOGPROBS = 4
EXACT = 8
FRESH = 16
NOT_RAW = 32

HEADER = struct.Struct("<BBBHIQQQII")

Array = npt.NDArray[Any]
BytesLike = bytes | memoryview


def encode_columns(rollouts: Sequence[Rollout], exact: bool) -> list[tuple[BytesLike, ...]]:
    """Encode rollouts, each as the parts of its record without the checksum."""
    if not rollouts:
        return []
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    ends = np.cumsum(lengths)
    starts, filled = ends - lengths, lengths > 0
    tops, low, high_1, high_2 = _tokens(rollouts, starts, filled)
    width = 4 if exact else 2
    column = _floats if exact else _steps
    last = column([rollout.logprobs for rollout in rollouts])
    birth = column([rollout.birth_logprobs for rollout in rollouts])
    run_lengths, run_versions, first_run = _runs(rollouts, starts[filled], int(ends[-1]), ends)
    records: list[tuple[BytesLike, ...]] = []
    for i, (rollout, a, b, top) in enumerate(
        zip(rollouts, starts.tolist(), ends.tolist(), tops.tolist(), strict=True)
    ):
        flags = (EXACT if exact else 0) | (FRESH if rollout.fresh else 0)
        flags |= 0 if rollout.raw else NOT_RAW
        wide: BytesLike = b""
        if top > 0xFFFFFF:
            flags |= TOKENS_32
            wide = high_2[2 * a : 2 * b]
        elif top > 0xFFFF:
            flags |= TOKENS_24
            wide = high_1[a:b]
        own: BytesLike = b""
        if rollout.birth_logprobs is not rollout.logprobs:
            own = birth[width * a : width * b]
            if own == last[width * a : width * b]:
                own = b""
            else:
                flags |= OWN_BIRTH_LOGPROBS
        c, d = first_run[i], first_run[i + 1]
        if d == c + 1 and int(rollout.birth_versions[0]) == rollout.policy_version:
            c = d  # all were born now
        header = HEADER.pack(
            RECORD_VERSION,
            rollout.finish,
            flags,
            rollout.sample_index,
            rollout.occurrence,
            rollout.policy_version,
            rollout.fingerprint,
            rollout.incarnation,
            b - a,
            d - c,
        )
        runs = run_lengths[4 * c : 4 * d], run_versions[8 * c : 8 * d]
        logprobs = last[width * a : width * b]
        records.append((header, low[2 * a : 2 * b], wide, logprobs, own, *runs))
    return records


def _tokens(
    rollouts: Sequence[Rollout], starts: Array, filled: Array
) -> tuple[Array, memoryview, memoryview, BytesLike]:
    """Encode the tokens of all rollouts.

    Returns:
        The largest token of each rollout as uint32, and of all tokens the low two bytes, and the
        high ones in one and in two bytes; empty if no token needs them.
    """
    # As uint32, a negative token (arrays can change after they were checked) is wide and comes back
    # unchanged, to be refused then, instead of wrapping around to a valid one.
    tokens = np.concatenate([rollout.tokens for rollout in rollouts]).astype("<i4", copy=False)
    tops = np.zeros(len(rollouts), np.uint32)
    if filled.any():
        tops[filled] = np.maximum.reduceat(tokens.view("<u4"), starts[filled])
    high = tokens.view("<u4") >> 16 if int(tops.max()) > 0xFFFF else np.empty(0, np.uint32)
    high_2 = _bytes(high.astype("<u2")) if int(tops.max()) > 0xFFFFFF else b""
    return tops, _bytes(tokens.astype("<u2")), _bytes(high.astype("u1")), high_2


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data


def _floats(columns: list[npt.NDArray[np.float32]]) -> memoryview:
    return _bytes(np.concatenate(columns).astype("<f4", copy=False))


def _steps(columns: list[npt.NDArray[np.float32]]) -> memoryview:
    """Encode log-probs as whole numbers of ``STEP``."""
    values = np.concatenate(columns)
    np.clip(values, np.float32(-0xFFFF * STEP), np.float32(0), out=values)
    np.multiply(values, np.float32(-1 / STEP), out=values)
    np.rint(values, out=values)
    return _bytes(values.astype("<u2"))


def _runs(
    rollouts: Sequence[Rollout], starts: Array, total: int, ends: Array
) -> tuple[memoryview, memoryview, list[int]]:
    """Return lengths and values of the runs of equal birth versions, and each rollout's first run.

    Args:
        rollouts: rollouts with ``total`` tokens together.
        starts: where those that have tokens begin.
        total: sum of their lengths.
        ends: where all of them end.
    """
    versions = np.concatenate([rollout.birth_versions for rollout in rollouts])
    begins = np.empty(total, np.bool_)
    np.not_equal(versions[1:], versions[:-1], out=begins[1:])
    begins[starts] = True
    positions = np.flatnonzero(begins)
    lengths = np.empty(len(positions), "<u4")
    np.subtract(positions[1:], positions[:-1], out=lengths[:-1], casting="unsafe")
    lengths[-1:] = total - positions[-1:]
    first = [0, *np.searchsorted(positions, ends).tolist()]
    return _bytes(lengths), _bytes(versions[positions].astype("<u8")), first

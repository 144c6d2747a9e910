"""Records: exact for every rollout, compact, and refused after any damage."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrl.cache.codec import RECORD_VERSION, decode, encode
from nemo_specrl.errors import CorruptRecord, InvalidRollout
from nemo_specrl.rollout import MAX_SLOT, Finish, Rollout, prompt_key

KEY = prompt_key([1, 2, 3])
DB_KEY = KEY + b"\0\7" + bytes(8)
HEADER = struct.Struct("<BBBHQII")


def rollout(n=5, *, token=7, version=3, **births):
    tokens = np.full(n, token, np.int32)
    logprobs = -np.arange(1, n + 1, dtype=np.float32) / 7
    return Rollout(KEY, 7, tokens, logprobs, Finish.STOP, version, **births)


def sealed(body, db_key=DB_KEY):
    """A record with a checksum that holds, whatever the body says."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(db_key + body))


def assert_exact(got, want):
    assert got == want
    for name in ("tokens", "logprobs", "birth_logprobs", "birth_versions"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), name
        assert a.flags.aligned and a.flags.writeable


logprob = st.floats(width=32, allow_nan=False)
version = st.integers(0, 2**63 - 1)


@st.composite
def rollouts(draw):
    n = draw(st.integers(0, 20))

    def column(values, dtype):
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    top = draw(st.sampled_from([0, 255, 65535, 65536, 2**31 - 1]))
    return Rollout(
        KEY,
        draw(st.integers(0, MAX_SLOT)),
        column(st.integers(0, top), np.int32),
        column(logprob, np.float32),
        draw(st.sampled_from(Finish)),
        draw(version),
        column(logprob, np.float32) if draw(st.booleans()) else None,
        column(st.sampled_from([0, 1, 2**63 - 1]) | version, np.int64)
        if draw(st.booleans())
        else None,
    )


@given(rollouts())
@settings(derandomize=True, max_examples=300, deadline=None)
def test_what_is_decoded_is_bit_for_bit_what_was_encoded(original):
    assert_exact(decode(DB_KEY, encode(original, DB_KEY)), original)


@pytest.mark.parametrize("finish", Finish)
def test_an_empty_response_keeps_how_it_ended(finish):
    empty = Rollout(KEY, 0, np.empty(0), np.empty(0), finish, 2**63 - 1)
    assert_exact(decode(DB_KEY, encode(empty, DB_KEY)), empty)


def test_extreme_values_are_exact():
    tiny, huge = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).min
    logprobs = np.array([0.0, -0.0, tiny, huge, -np.inf], np.float32)
    original = Rollout(
        KEY,
        MAX_SLOT,
        np.array([0, 65535, 65536, 2**31 - 2, 2**31 - 1]),
        logprobs,
        Finish.PARTIAL,
        0,
        logprobs[::-1],
        np.array([0, 2**63 - 1, 2**63 - 1, 1, 0]),
    )
    assert_exact(decode(DB_KEY, encode(original, DB_KEY)), original)


def test_log_probs_of_minus_zero_are_not_taken_for_equal_to_zero():
    zeros = np.zeros(3, np.float32)
    original = Rollout(KEY, 0, np.arange(3), zeros, Finish.STOP, 1, -zeros)
    assert_exact(decode(DB_KEY, encode(original, DB_KEY)), original)


def test_a_record_takes_few_bytes_per_token():
    n = 1000
    assert len(encode(rollout(n), DB_KEY)) == 29 + 6 * n
    assert len(encode(rollout(n, token=65536), DB_KEY)) == 29 + 8 * n
    assert len(encode(rollout(n, birth_logprobs=np.zeros(n)), DB_KEY)) == 29 + 10 * n
    two_births = np.repeat([1, 2], n // 2)
    assert len(encode(rollout(n, birth_versions=two_births), DB_KEY)) == 29 + 6 * n + 2 * 12


@pytest.mark.parametrize(
    "original",
    [rollout(0), rollout(6), rollout(6, birth_logprobs=np.zeros(6), birth_versions=range(6))],
    ids=["empty", "plain", "births"],
)
def test_every_flipped_bit_and_every_truncation_is_refused(original):
    record = encode(original, DB_KEY)
    for position in range(len(record)):
        for bit in range(8):
            damaged = bytearray(record)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptRecord):
                decode(DB_KEY, bytes(damaged))
        with pytest.raises(CorruptRecord):
            decode(DB_KEY, record[:position])
    for damaged in (record + b"\0", record[1:], record * 2, b"\0" * 100, b"\xff" * 100):
        with pytest.raises(CorruptRecord):
            decode(DB_KEY, damaged)


@given(st.binary(max_size=200), st.booleans())
@settings(derandomize=True, max_examples=300, deadline=None)
def test_arbitrary_bytes_are_refused_whatever_their_checksum(data, with_version):
    record = sealed(bytes([RECORD_VERSION]) + data if with_version else data)
    try:
        got = decode(DB_KEY, record)
    except CorruptRecord:
        return
    assert encode(got, DB_KEY)[:-8] == record[:-8]  # a well-formed record that came about by chance


def test_a_record_under_another_key_is_refused():
    record = encode(rollout(), DB_KEY)
    for other in (prompt_key([1, 2, 4]) + DB_KEY[16:], KEY + b"\0\6" + bytes(8), KEY):
        with pytest.raises(CorruptRecord, match="checksum"):
            decode(other, record)
    with pytest.raises(InvalidRollout):
        encode(rollout(), prompt_key([1, 2, 4]) + DB_KEY[16:])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (HEADER.pack(RECORD_VERSION + 1, 1, 0, 0, 0, 0, 0), "version 2"),
        (HEADER.pack(RECORD_VERSION, 9, 0, 0, 0, 0, 0), "9 is not a valid Finish"),
        (HEADER.pack(RECORD_VERSION, 1, 4, 0, 0, 0, 0), "unknown flags"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 2**63, 0, 0), "policy_version"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 0, 0) + b"\0", "1 bytes too many"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 2**32 - 1, 0), "buffer"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 1, 1) + bytes(6 + 12), "runs of 0"),
        (HEADER.pack(RECORD_VERSION, 1, 1, 0, 0, 1, 0) + b"\xff" * 4 + bytes(4), "negative"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 1, 0) + b"\0\0\0\0\xc0\x7f", "NaN"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_even_with_a_checksum_that_holds(body, reason):
    with pytest.raises(CorruptRecord, match=reason):
        decode(DB_KEY, sealed(body))


def test_a_rollout_that_was_changed_into_an_invalid_one_does_not_come_back_as_a_valid_one():
    changed = rollout()
    changed.tokens[2] = -1
    with pytest.raises(CorruptRecord, match="negative"):
        decode(DB_KEY, encode(changed, DB_KEY))

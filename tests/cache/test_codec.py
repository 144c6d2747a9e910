"""Records: exact for every rollout, compact, and refused after any damage."""

import math
import pickle
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrl.cache.codec import (
    EXACT,
    RECORD_VERSION,
    STEP,
    TOKENS_32,
    decode,
    encode_all,
    encode_for_transfer,
)
from nemo_specrl.errors import CorruptRecord, InvalidRollout
from nemo_specrl.rollout import MAX_SAMPLE_INDEX, Finish, Rollout, prompt_key
from tests.support.rollouts import rollout

KEY = prompt_key([1, 2, 3])
DB_KEY = KEY + b"\0\7" + bytes(8)
HEADER = struct.Struct("<BBBHIQQQII")


def sized(n=5, *, token=7, version=3, **births):
    """A rollout of ``n`` equal tokens that was born now, unless ``births`` say otherwise."""
    fields = {"tokens": np.full(n, token), "birth_logprobs": None} | births
    return rollout(KEY, version, 7, n, **fields)


def encode(original, db_key, *, exact=False):
    """The record of one rollout."""
    (record,) = encode_all([original], [db_key], exact=exact)
    return record


def sealed(body, db_key=DB_KEY):
    """A record with a checksum that holds, whatever the body says."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(db_key + body))


def assert_exact(got, want):
    assert got == want
    for name in ("tokens", "logprobs", "birth_logprobs", "birth_versions"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), name
        assert a.flags.aligned and not a.flags.writeable


logprob = st.integers(-65535, 0).map(lambda steps: steps * STEP)
version = st.integers(0, 2**63 - 1)


@st.composite
def rollouts(draw):
    n = draw(st.integers(0, 20))

    def column(values, dtype):
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    top = draw(st.sampled_from([0, 255, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 1]))
    return Rollout(
        KEY,
        draw(st.integers(0, MAX_SAMPLE_INDEX)),
        column(st.integers(0, top), np.int32),
        column(logprob, np.float32),
        draw(st.sampled_from(Finish)),
        draw(version),
        column(logprob, np.float32) if draw(st.booleans()) else None,
        column(st.sampled_from([0, 1, 2**63 - 1]) | version, np.int64)
        if draw(st.booleans())
        else None,
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.booleans()),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.booleans()),
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
    logprobs = np.array([0.0, -STEP, -1.0, -32.0, -65535 * STEP], np.float32)
    original = Rollout(
        KEY,
        MAX_SAMPLE_INDEX,
        np.array([0, 65535, 65536, 2**31 - 2, 2**31 - 1]),
        logprobs,
        Finish.PARTIAL,
        0,
        logprobs[::-1],
        np.array([0, 2**63 - 1, 2**63 - 1, 1, 0]),
        2**32 - 1,
        2**64 - 1,
        False,
        2**64 - 1,
    )
    assert_exact(decode(DB_KEY, encode(original, DB_KEY)), original)


@given(st.lists(rollouts(), max_size=6))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_many_at_once_are_what_each_is_by_itself(originals):
    names = [KEY + bytes([0, 0, i]) + bytes(7) for i in range(len(originals))]
    records = encode_all(originals, names)
    assert records == [encode(r, name) for r, name in zip(originals, names, strict=True)]


def test_a_prefix_of_what_was_decoded_is_one_of_the_rollout():
    """It is what a draft is cut to, and has to have a length, be sent and be stored."""
    original = sized(5, version=3, fresh=True)
    decoded = decode(DB_KEY, encode(original, DB_KEY))
    cut = decoded.prefix(2)
    assert len(cut) == 2 and cut == original.prefix(2)
    assert pickle.loads(pickle.dumps(cut)) == cut
    assert decode(DB_KEY, encode(cut, DB_KEY)) == cut


@given(st.lists(rollouts(), max_size=6), st.booleans())
@settings(derandomize=True, max_examples=100, deadline=None)
def test_what_was_decoded_is_encoded_and_sent_as_it_was(originals, exact):
    names = [KEY + bytes([0, 0, i]) + bytes(7) for i in range(len(originals))]
    others = [KEY + bytes([0, 1, i]) + bytes(7) for i in range(len(originals))]
    records = encode_all(originals, names, exact=exact)
    decoded = [decode(name, record) for name, record in zip(names, records, strict=True)]
    for changed in (exact, not exact):
        mixed = [*decoded, *originals]
        assert encode_all(mixed, [*others, *names], exact=changed) == (
            encode_all(originals, others, exact=changed)
            + encode_all(originals, names, exact=changed)
        )
    unused = [decode(name, record) for name, record in zip(names, records, strict=True)]
    # With their arrays made, without, and as they are sent to a store.
    for some in (
        (decoded, unused, encode_for_transfer(originals)) if not exact else (decoded, unused)
    ):
        sent = pickle.dumps(some)
        assert len(sent) < sum(map(len, records)) + 80 * len(records) + 200
        for got, want in zip(pickle.loads(sent), originals, strict=True):
            assert_exact(got, want)
            assert got.outline == want.outline and got.key == want.key


@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False)),
        max_size=20,
    )
)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_exact_records_keep_every_log_prob_as_it_is(pairs):
    last, birth = zip(*pairs, strict=True) if pairs else ((), ())
    original = Rollout(KEY, 0, np.arange(len(pairs)), last, Finish.STOP, 1, birth)
    assert_exact(decode(DB_KEY, encode(original, DB_KEY, exact=True)), original)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=30))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_log_probs_come_back_to_within_half_a_step(values):
    original = Rollout(KEY, 0, np.zeros(len(values), int), values, Finish.STOP, 1)
    got = decode(DB_KEY, encode(original, DB_KEY)).logprobs
    near = np.clip(original.logprobs, -65535 * STEP, 0)
    assert np.abs(got - near).max(initial=0) <= STEP / 2
    assert not np.signbit(got[got == 0]).any()


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.5)])
def test_acceptance_decisions_stay_the_same(lenience):
    """200,000 tokens as a policy has them: most near certain, some rare; p_new near p_old.

    A decision changes with probability at most STEP / 2 = 4.9e-4; that more than 1e-3 of them do
    would be 10 standard deviations off.
    """
    rng = np.random.default_rng(0)
    n = 200_000
    old = -rng.exponential(rng.choice([1e-4, 0.1, 3.0], n, p=[0.6, 0.3, 0.1])).astype(np.float32)
    new = np.minimum(old + rng.normal(0, 0.5, n).astype(np.float32), 0)
    kept = decode(DB_KEY, encode(Rollout(KEY, 0, np.zeros(n, int), old, Finish.STOP, 1), DB_KEY))
    log_uniforms = np.log(1 - rng.random(n))
    before = log_uniforms <= new - old + math.log(lenience)
    after = log_uniforms <= new - kept.logprobs + math.log(lenience)
    assert 0.001 < (~before).mean() < 0.5
    assert (before != after).mean() < 1e-3


def test_a_record_takes_few_bytes_per_token():
    n = 1000
    own = {"birth_logprobs": np.zeros(n)}
    assert len(encode(sized(n), DB_KEY)) == 49 + 4 * n
    assert len(encode(sized(n, **own), DB_KEY)) == 49 + 6 * n
    # A vocabulary of 152k, with birth log-probs of their own: 7 bytes a token.
    assert len(encode(sized(n, token=151_999, **own), DB_KEY)) == 49 + 7 * n
    assert len(encode(sized(n, token=2**24), DB_KEY)) == 49 + 6 * n
    two_births = np.repeat([1, 2], n // 2)
    assert len(encode(sized(n, birth_versions=two_births), DB_KEY)) == 49 + 4 * n + 2 * 12


@pytest.mark.parametrize(
    "original",
    [sized(0), sized(6), sized(6, birth_logprobs=np.zeros(6), birth_versions=range(6))],
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
    record = encode(sized(), DB_KEY)
    for other in (prompt_key([1, 2, 4]) + DB_KEY[16:], KEY + b"\0\6" + bytes(8), KEY):
        with pytest.raises(CorruptRecord, match="checksum"):
            decode(other, record)
    with pytest.raises(InvalidRollout):
        encode(sized(), prompt_key([1, 2, 4]) + DB_KEY[16:])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            HEADER.pack(RECORD_VERSION + 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
            f"version {RECORD_VERSION + 1}",
        ),
        (HEADER.pack(RECORD_VERSION, 9, 0, 0, 0, 0, 0, 0, 0, 0), "9 is not a valid Finish"),
        (HEADER.pack(RECORD_VERSION, 1, 64, 0, 0, 0, 0, 0, 0, 0), "unknown flags"),
        (HEADER.pack(RECORD_VERSION, 1, 3, 0, 0, 0, 0, 0, 0, 0), "unknown flags"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 2**63, 0, 0, 0, 0), "policy_version"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 0, 0, 0, 0, 0) + b"\0", "1 bytes too many"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 0, 0, 0, 2**32 - 1, 0), "bytes too few"),
        (HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 0, 0, 0, 1, 1) + bytes(4 + 12), "runs of 0"),
        (
            HEADER.pack(RECORD_VERSION, 1, 0, 0, 0, 0, 0, 0, 1, 1)
            + bytes(4)
            + struct.pack("<IQ", 1, 2**63),
            "birth version",
        ),
        (
            HEADER.pack(RECORD_VERSION, 1, TOKENS_32, 0, 0, 0, 0, 0, 1, 0) + b"\xff" * 4 + bytes(2),
            "negative",
        ),
        (
            HEADER.pack(RECORD_VERSION, 1, EXACT, 0, 0, 0, 0, 0, 1, 0)
            + bytes(2)
            + struct.pack("<f", math.nan),
            "NaN",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_even_with_a_checksum_that_holds(body, reason):
    with pytest.raises(CorruptRecord, match=reason):
        decode(DB_KEY, sealed(body))


def test_a_rollout_that_was_changed_into_an_invalid_one_does_not_come_back_as_a_valid_one():
    changed = sized()
    changed.tokens[2] = -1
    with pytest.raises(CorruptRecord, match="negative"):
        decode(DB_KEY, encode(changed, DB_KEY))

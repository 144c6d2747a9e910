"""Records: every response comes back, and no damage goes unseen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrl.cache.codec import STEP, decode, encode, is_sound
from nemo_specrl.errors import CorruptRecord
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.rollouts import rollout

KEY = prompt_key([1, 2])
token = st.sampled_from([0, 1, 255, 2**16 - 1, 2**16, 2**24 - 1, 2**24, 2**31 - 1])


@st.composite
def rollouts(draw):
    top = draw(token)
    tokens = draw(st.lists(st.integers(0, top), max_size=40))
    nats = st.floats(-70, 0.5, width=32) | st.just(-np.inf)
    logprobs = draw(st.none() | st.lists(nats, min_size=len(tokens), max_size=len(tokens)))
    return Rollout(
        KEY,
        np.array(tokens, np.int64),
        draw(st.sampled_from(list(Finish))),
        draw(st.integers(0, 2**63 - 1)),
        None if logprobs is None else np.array(logprobs, np.float32),
        draw(st.integers(1, 2**63 - 1)),
    )


@given(rollouts())
@settings(max_examples=300, deadline=None)
def test_a_response_comes_back(r):
    found = decode(KEY, encode(r))
    assert (found.key, found.finish) == (KEY, r.finish) and isinstance(found.finish, Finish)
    assert (found.policy_version, found.identity) == (r.policy_version, r.identity)
    assert found.tokens.dtype == np.int32 and np.array_equal(found.tokens, r.tokens)
    if r.logprobs is None:
        assert found.logprobs is None
    else:
        assert found.logprobs.dtype == np.float32
        kept = np.clip(r.logprobs, -65535 * STEP, 0)
        assert np.all(np.abs(found.logprobs - kept) <= STEP / 2)
        assert encode(found) == encode(r)  # what comes back is kept exactly


@pytest.mark.parametrize(
    ("top", "scored", "size"),
    [(65535, False, 2), (65536, False, 3), (2**24, False, 4), (65535, True, 4), (65536, True, 5)],
)
def test_a_token_takes_a_few_bytes(top, scored, size):
    tokens = np.full(1000, top)
    r = Rollout(KEY, tokens, Finish.STOP, logprobs=np.zeros(1000) if scored else None)
    assert len(encode(r)) == 1000 * size + 32


@pytest.mark.parametrize("scored", [False, True])
def test_every_changed_bit_and_every_cut_is_seen(scored):
    record = encode(rollout(KEY, n=9, scored=scored))
    assert is_sound(KEY, record) and not is_sound(prompt_key([3]), record)
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord, match=KEY.hex()):
            decode(KEY, bytes(changed))
    for end in range(len(record)):
        with pytest.raises(CorruptRecord):
            decode(KEY, record[:end])
    with pytest.raises(CorruptRecord):
        decode(KEY, record + b"\0")

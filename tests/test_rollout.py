"""Rollouts, their prompt keys, and the one-line errors of what cannot be one."""

import re
import subprocess
import sys

import numpy as np
import pytest

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.errors import InvalidRollout
from nemo_specrl.rollout import vocabulary_hash

KEY = bytes(range(16))


def rollout(**changes):
    values = {
        "key": KEY,
        "tokens": [5, 6, 7],
        "logprobs": [-1.0, -2.0, -0.5],
        "finish": Finish.STOP,
        "policy_version": 3,
        "identity": 9,
    }
    return Rollout(**(values | changes))


def test_keys_are_the_same_in_every_process_and_release():
    # A change of these values makes every existing cache useless: it needs a new format version.
    assert prompt_key([]).hex() == "8509f85d857cd325ccac87fdfb280bf9"
    assert prompt_key([1, 2, 3]).hex() == "4363fe89aad55991c0b5c39fe88fe820"
    code = "from nemo_specrl import prompt_key; print(prompt_key([1, 2, 3]).hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == prompt_key([1, 2, 3]).hex()


def test_keys_do_not_depend_on_the_type_of_the_tokens():
    tokens = [0, 1, 70_000, 2**31 - 1]
    keys = {prompt_key(np.array(tokens, dtype=t)) for t in (np.int32, np.int64, np.uint32)}
    assert keys == {prompt_key(tokens)}
    assert len(prompt_key(tokens)) == 16


def test_other_tokens_are_another_prompt():
    assert len({prompt_key(t) for t in ([1, 2], [2, 1], [1, 2, 0], [1], [])}) == 5


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], "one-dimensional"),
        ([1.5], "integers"),
        ([-1], "got -1..-1"),
        ([2**31], "0..2\\^31-1"),
    ],
)
def test_what_is_no_prompt_is_named(tokens, message):
    with pytest.raises(InvalidRollout, match=message):
        prompt_key(tokens)


def test_a_rollout_has_arrays_and_an_identity_of_its_own():
    made = rollout()
    assert made.tokens.dtype == np.int32 and made.logprobs.dtype == np.float32
    assert len(made) == 3
    plain = [Rollout(KEY, [5, 6, 7], Finish.STOP) for _ in range(100)]
    assert len({one.identity for one in plain}) == 100
    assert plain[0].logprobs is None and plain[0].policy_version == 0


def test_rollouts_compare_by_content():
    assert rollout() == rollout()
    changes = (
        {"identity": 2},
        {"tokens": [5, 6, 8]},
        {"finish": Finish.LENGTH},
        {"logprobs": None},
    )
    for change in changes:
        assert rollout() != rollout(**change)


def test_the_identity_of_a_vocabulary_depends_on_tokens_and_their_numbers_alone():
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    known = vocabulary_hash(vocabulary)
    assert re.fullmatch("[0-9a-f]{32}", known)
    assert vocabulary_hash(dict(reversed(vocabulary.items()))) == known
    for other in ({"a": 1, "b": 0, "ab": 2}, {"a": 0, "b": 1}, vocabulary | {"ab": 3}):
        assert vocabulary_hash(other) != known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": b"short"}, "key must be 16 bytes"),
        ({"identity": 1.5}, "identity must be a whole number, got 1.5"),
        ({"identity": 0}, "identity must be in"),
        ({"identity": 2**63}, "identity must be in"),
        ({"logprobs": [-1.0]}, "logprobs must have the shape of tokens"),
        ({"tokens": [1, -2, 3]}, "tokens must be whole numbers"),
        ({"logprobs": [-1.0, np.nan, 0.0]}, "logprobs must be numbers"),
        ({"policy_version": -1}, "policy_version must be in"),
        ({"finish": 7}, "finish must be a Finish, got 7"),
        ({"tokens": [1, 2, 2**31]}, r"tokens must be whole numbers of 0\.\.2\^31-1"),
        ({"tokens": [1.7, 2.0, 3.0]}, "tokens must be whole numbers"),
    ],
)
def test_what_is_no_rollout_is_named(change, message):
    with pytest.raises(InvalidRollout, match=message):
        rollout(**change)

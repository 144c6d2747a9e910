"""Rollouts, their prompt keys, and the one-line errors of what cannot be one."""

import subprocess
import sys

import numpy as np
import pytest

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.errors import InvalidRollout

KEY = bytes(range(16))


def rollout(**changes):
    values = {
        "key": KEY,
        "sample_index": 1,
        "tokens": [5, 6, 7],
        "logprobs": [-1.0, -2.0, -0.5],
        "finish": Finish.STOP,
        "policy_version": 3,
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


def test_a_new_rollout_is_born_now():
    r = rollout()
    assert r.tokens.dtype == np.int32
    assert r.logprobs.dtype == np.float32
    assert np.array_equal(r.birth_logprobs, r.logprobs)
    assert r.birth_versions.tolist() == [3, 3, 3]
    assert len(r) == 3


def test_a_prefix_keeps_its_births():
    r = rollout(birth_logprobs=[-3, -2, -1], birth_versions=[0, 1, 3])
    cut = r.prefix(2)
    assert cut.tokens.tolist() == [5, 6]
    assert cut.birth_logprobs.tolist() == [-3, -2]
    assert cut.birth_versions.tolist() == [0, 1]
    assert cut.finish is Finish.PARTIAL
    assert r.prefix(3) is r


def test_rollouts_compare_by_content():
    assert rollout() == rollout()
    for change in ({"sample_index": 2}, {"tokens": [5, 6, 8]}, {"finish": Finish.LENGTH}):
        assert rollout() != rollout(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": b"short"}, "key must be 16 bytes"),
        ({"sample_index": 1.5}, "sample_index must be a whole number, got 1.5"),
        ({"sample_index": -1}, "sample_index must be in"),
        ({"sample_index": 65536}, "sample_index must be in"),
        ({"logprobs": [-1.0]}, "logprobs must have the shape of tokens"),
        ({"birth_versions": [0]}, "birth_versions must have the shape of tokens"),
        ({"tokens": [1, -2, 3]}, "tokens must not be negative"),
        ({"logprobs": [-1.0, np.nan, 0.0]}, "logprobs must be numbers"),
        ({"birth_versions": [0, -1, 0]}, "birth_versions must not be negative"),
        ({"policy_version": -1}, "policy_version must be in"),
        ({"finish": 7}, "finish must be a Finish, got 7"),
        ({"tokens": [1, 2, 2**31]}, "tokens must be whole numbers up to 2147483647"),
        ({"tokens": [1.7, 2.0, 3.0]}, "tokens must be whole numbers"),
        ({"birth_versions": [0, 1, 2**63]}, "birth_versions must be whole numbers"),
    ],
)
def test_what_is_no_rollout_is_named(change, message):
    with pytest.raises(InvalidRollout, match=message):
        rollout(**change)

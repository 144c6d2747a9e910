"""Which engine gets which rows."""

from __future__ import annotations

import random

import pytest

from nemo_specrl.nemo_rl.balance import PromptPlaces, ResponseLengths, balanced_order
from nemo_specrl.rollout import prompt_key

KEYS = [prompt_key([number]) for number in range(200)]


def shares(keys, lengths, shards, prompt=100):
    """The rows of each engine, as NeMo-RL splits the ordered batch."""
    order = balanced_order(keys, lengths, [prompt] * len(keys), shards)
    assert sorted(order) == list(range(len(keys)))
    size = -(-len(keys) // shards)
    return [order[start : start + size] for start in range(0, len(order), size)]


def test_prompts_stay_whole_and_engines_finish_together():
    rng = random.Random(1)
    keys = [key for key in KEYS[:64] for _ in range(16)]
    lengths = {key: rng.lognormvariate(6, 1) for key in KEYS[:64]}
    dealt = shares(keys, [lengths[key] for key in keys], 8)
    loads = [sum(lengths[keys[row]] for row in share) for share in dealt]
    stock = [sum(16 * lengths[key] for key in KEYS[i : i + 8]) for i in range(0, 64, 8)]
    # Of 8 prompts an engine, the longest alone may be more than a fair share.
    fair = max(sum(loads) / 8, 16 * max(lengths.values()))
    assert max(loads) < 1.1 * fair < max(stock)
    for share in dealt:
        assert len({keys[row] for row in share}) == 8  # each with all of its rows


@pytest.mark.parametrize(
    ("prompts", "group", "shards"), [(3, 8, 4), (5, 3, 2), (1, 16, 4), (7, 5, 3)]
)
def test_shares_have_the_sizes_that_nemo_rl_splits_into(prompts, group, shards):
    rng = random.Random(2)
    keys = [key for key in KEYS[:prompts] for _ in range(group)]
    dealt = shares(keys, [rng.random() for _ in keys], shards)
    size = -(-len(keys) // shards)
    assert [len(share) for share in dealt[:-1]] == [size] * (len(dealt) - 1)


def test_rows_stay_where_nothing_is_won():
    keys = [key for key in KEYS[:8] for _ in range(4)]
    assert balanced_order(keys, [1.0] * 32, [100] * 32, 4) == list(range(32))
    assert balanced_order([], [], [], 4) == []


def test_the_longest_rows_of_an_engine_come_first():
    lengths = [10.0, 10.0, 30.0, 30.0, 20.0, 20.0]
    keys = [KEYS[0], KEYS[0], KEYS[1], KEYS[1], KEYS[2], KEYS[2]]
    assert balanced_order(keys, lengths, [100] * 6, 1) == [2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "longest", "together"), [(100, 4000, 1), (2000, 4000, 1), (16_000, 200, 4)]
)
def test_rows_are_dealt_out_where_that_is_cheaper_than_the_imbalance(prompt, longest, together):
    """One of eight prompts has responses four times as long as the others'."""
    keys = [key for key in KEYS[:8] for _ in range(4)]
    lengths = [longest if key == KEYS[3] else longest / 4 for key in keys]
    dealt = shares(keys, lengths, 4, prompt)
    most = max(sum(keys[row] == KEYS[3] for row in share) for share in dealt)
    assert most == together


def test_a_row_is_expected_to_be_as_long_as_the_last_responses(tmp_path):
    lengths = ResponseLengths()
    assert lengths.expected(KEYS[:2]) == [1.0, 1.0]
    lengths.note([KEYS[0], KEYS[0], KEYS[1]], [10, 20, 45])
    assert lengths.expected(KEYS[:3]) == [15.0, 45.0, 30.0]
    lengths.note(KEYS[:1], [5])
    lengths.save(tmp_path)
    resumed = ResponseLengths()
    resumed.restore(tmp_path)
    assert resumed.expected(KEYS[:3]) == [5.0, 45.0, 25.0]


@pytest.mark.parametrize("damage", [b"", b"no archive"])
def test_damaged_lengths_are_not_known(tmp_path, damage):
    lengths = ResponseLengths()
    lengths.note(KEYS[:1], [5])
    lengths.save(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    resumed = ResponseLengths()
    resumed.restore(tmp_path)
    assert resumed.expected(KEYS[:1]) == [1.0]
    resumed.restore(tmp_path / "absent")


def test_rows_of_a_prompt_share_an_engine_and_prompts_go_where_fewest_rows_run():
    places = PromptPlaces(engines=3, together=4)
    engines = {key: [places.enter(key) for _ in range(4)] for key in KEYS[:3]}
    assert sorted(engines.values()) == [[0] * 4, [1] * 4, [2] * 4]
    for _ in range(3):
        places.leave(1)
    assert [places.enter(KEYS[0]) for _ in range(4)] == [1] * 4  # a later step of the same prompt
    assert [places.enter(key) for key in KEYS[10:13]] == [0, 2, 0]


def test_with_fewer_prompts_than_engines_each_gets_some_rows():
    places = PromptPlaces(engines=4, together=2)
    assert [places.enter(KEYS[0]) for _ in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]

"""Balance of rows over engines: each row once, in shares of the right size and similar cost."""

from hypothesis import given
from hypothesis import strategies as st

from nemo_specrl.engine.load_balance import WORTHWHILE, balanced_order, expected_costs

costs = st.lists(st.floats(0, 1e4), max_size=80)


def shares(order, n, shards):
    size = max(1, -(-n // shards))
    return [order[start : start + size] for start in range(0, n, size)]


def longest(costs, order, shards):
    return max((sum(costs[i] for i in s) for s in shares(order, len(order), shards)), default=0.0)


@given(costs, st.integers(1, 9))
def test_every_row_comes_once_and_no_share_gets_longer(costs, shards):
    order = balanced_order(costs, shards)
    assert sorted(order) == list(range(len(costs)))
    given_order = list(range(len(costs)))
    assert longest(costs, order, shards) <= longest(costs, given_order, shards)


@given(costs, st.integers(2, 9))
def test_rows_move_only_where_that_is_worthwhile(costs, shards):
    order = balanced_order(costs, shards)
    before = longest(costs, list(range(len(costs))), shards)
    if order != list(range(len(costs))):
        assert longest(costs, order, shards) <= WORTHWHILE * before


def test_reused_rows_are_dealt_out_among_the_fresh_ones():
    costs = [100.0] * 8 + [5.0] * 8  # a step's fresh rows side by side
    order = balanced_order(costs, 2)
    assert longest(costs, order, 2) == 4 * 100 + 4 * 5
    assert [sorted(s) for s in shares(order, 16, 2)] == shares(order, 16, 2)  # siblings in order


def test_even_batches_stay_as_they_are():
    assert balanced_order([7.0] * 12, 4) == list(range(12))
    assert balanced_order([], 4) == []
    assert balanced_order([1.0, 9.0], 1) == [0, 1]
    assert balanced_order([1.0, 9.0, 4.0], 8) == [0, 1, 2]


def test_rows_of_a_prompt_are_expected_to_be_as_long_as_the_earlier_ones():
    known = {"short": 10.0, "long": 90.0, "of another batch": 1e6}
    assert expected_costs(["long", "new", "short"], known) == [90.0, 50.0, 10.0]
    assert expected_costs(["new", "other"], known) == [1.0, 1.0]
    assert expected_costs([], known) == []


def test_skewed_lengths_without_a_draft_are_dealt_out_evenly():
    """Groups of 8, of which one writes ten times as much as the others: all rows decode in full."""
    groups = ["long", "a", "b", "c"]
    rows = [group for group in groups for _ in range(8)]
    costs = expected_costs(rows, {"long": 1000.0, "a": 100.0, "b": 100.0, "c": 100.0})
    order = balanced_order(costs, 4)
    totals = [sum(costs[i] for i in share) for share in shares(order, len(rows), 4)]
    assert sum(totals) == 8 * 1300
    assert totals == [2600.0] * 4
    assert longest(costs, range(len(rows)), 4) == 8000

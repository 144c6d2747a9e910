"""Choice of the cached rollout that each row verifies."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from nemo_specrl import Finish, Rollout
from nemo_specrl.speculation.draft_selection import (
    Row,
    assign_sample_indices,
    is_fresh,
    mean_lengths,
    select_drafts,
)

A, B = b"a" * 16, b"b" * 16


def rollout(key, sample_index, version=0, n=3, occurrence=0):
    return Rollout(
        key, sample_index, np.arange(n), -np.ones(n), Finish.STOP, version, occurrence=occurrence
    )


def drafts_of(rows, cached, **options):
    return [choice.draft for choice in select_drafts(rows, cached, **options)]


def test_sample_indices_count_the_rows_of_a_prompt():
    assert assign_sample_indices([A, B, A, A, B]) == [0, 0, 1, 2, 1]


def test_each_sample_index_takes_its_own_draft():
    cached = {A: [rollout(A, 0), rollout(A, 2)], B: [rollout(B, 0)]}
    rows = [Row(A, 2), Row(A, 1), Row(B, 0), Row(A, 0), Row(B, 7)]
    got = drafts_of(rows, cached, policy_version=5)
    assert got == [cached[A][1], None, cached[B][0], cached[A][0], None]


def test_order_and_split_of_the_batch_change_nothing():
    cached = {A: [rollout(A, s, n=s + 1) for s in range(4)]}
    rows = [Row(A, s) for s in range(4)]
    whole = drafts_of(rows, cached, policy_version=1)
    turned = drafts_of(rows[::-1], cached, policy_version=1)[::-1]
    pieces = [drafts_of([row], cached, policy_version=1)[0] for row in rows]
    assert whole == turned == pieces
    assert [len(d) for d in whole] == [1, 2, 3, 4]


def test_outlines_are_chosen_as_their_rollouts_are():
    rng = np.random.default_rng(0)
    cached = {
        key: [rollout(key, s, version=v, n=int(rng.integers(4)), occurrence=v)
              for s in range(8) for v in range(int(rng.integers(4)), 0, -1)]
        for key in (A, B)
    }  # fmt: skip
    rows = [Row(key, s) for key in (A, B) for s in range(9)]
    options = {"policy_version": 2, "fresh_fraction": 0.3}
    whole = select_drafts(rows, cached, **options)
    outlined = select_drafts(
        rows, {k: [r.outline for r in g] for k, g in cached.items()}, **options
    )
    assert outlined == [(d and d.outline, occurrence) for d, occurrence in whole]
    assert {d is None for d, _ in whole} == {True, False}


def test_the_newest_of_a_sample_index_is_drafted():
    newer, older = rollout(A, 0, version=4, n=5), rollout(A, 0, version=2)
    assert drafts_of([Row(A, 0)], {A: [newer, older]}, policy_version=9) == [newer]


def test_a_sample_index_that_these_weights_have_served_gets_no_draft():
    newer, older = rollout(A, 0, version=4), rollout(A, 0, version=2)
    assert drafts_of([Row(A, 0)], {A: [newer, older]}, policy_version=4) == [None]
    # A cache newer than the weights, after a resumption, still drafts.
    assert drafts_of([Row(A, 0)], {A: [newer]}, policy_version=3) == [newer]


def test_what_was_made_for_a_step_that_was_lost_drafts_for_what_takes_its_place():
    lost, older = rollout(A, 0, version=4), rollout(A, 0, version=2)
    rows, cached = [Row(A, 0)], {A: [lost, older]}
    assert drafts_of(rows, cached, policy_version=4, incarnation=7) == [lost]
    again = dataclasses.replace(lost, incarnation=7)
    assert drafts_of(rows, {A: [again, lost]}, policy_version=4, incarnation=7) == [None]


def test_a_rollout_that_was_interrupted_is_continued_as_the_occurrence_that_it_is():
    partial = Rollout(A, 0, np.arange(3), -np.ones(3), Finish.PARTIAL, 4, occurrence=6)
    rows = [Row(A, 0)]
    for version in (4, 5):
        assert select_drafts(rows, {A: [partial]}, policy_version=version) == [(partial, 6)]
    # The weights that were at it go on with it even where the occurrence is one for plain decoding.
    for version, draft in ((4, partial), (5, None)):
        options = {"policy_version": version, "fresh_fraction": 1.0}
        assert select_drafts(rows, {A: [partial]}, **options) == [(draft, 6)]
    whole = rollout(A, 0, version=4)
    assert drafts_of(rows, {A: [whole, partial]}, policy_version=4) == [None]


def test_an_empty_response_is_no_draft():
    assert drafts_of([Row(A, 0)], {A: [rollout(A, 0, n=0)]}, policy_version=1) == [None]


def test_a_sample_index_counts_its_rollouts():
    cached = {A: [rollout(A, 0, version=4, occurrence=6), rollout(A, 0, version=2, occurrence=5)]}
    rows = [Row(A, 0), Row(A, 1)]
    assert [c.occurrence for c in select_drafts(rows, cached, policy_version=9)] == [7, 0]
    # The same weights again, after a crash: the same occurrence.
    assert [c.occurrence for c in select_drafts(rows, cached, policy_version=4)] == [6, 0]
    always = select_drafts(rows, cached, policy_version=9, fresh_fraction=1.0)
    assert always == [(None, 7), (None, 0)]


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.3, 0.5, 0.77])
def test_rows_take_turns_at_being_fresh(fraction):
    """Every row's waits are as even as whole numbers can be; every occurrence has its share of
    rows."""
    rows = [Row(i.to_bytes(16, "big"), s) for i in range(500) for s in range(8)]
    occurrences = range(1, 121)
    fresh = np.array(
        [[is_fresh(r, v, seed=1, fresh_fraction=fraction) for v in occurrences] for r in rows]
    )
    for row in fresh:
        turns = np.flatnonzero(row)
        assert turns[0] < math.ceil(1 / fraction)
        assert set(np.diff(turns)) <= {math.floor(1 / fraction), math.ceil(1 / fraction)}
    # Binomial over 4,000 rows; 120 occurrences at an error rate of 1e-6 each.
    low, high = stats.binom.interval(1 - 1e-6, len(rows), fraction)
    assert ((low <= fresh.sum(axis=0)) & (fresh.sum(axis=0) <= high)).all()
    again = [is_fresh(rows[0], v, seed=1, fresh_fraction=fraction) for v in occurrences]
    assert again == fresh[0].tolist()


def test_the_ends_of_the_dial():
    rows = [Row(i.to_bytes(16, "big"), 0) for i in range(100)]
    for occurrence in range(1, 20):
        assert not any(is_fresh(r, occurrence, seed=1, fresh_fraction=0.0) for r in rows)
        assert all(is_fresh(r, occurrence, seed=1, fresh_fraction=1.0) for r in rows)


def test_mean_lengths_count_what_was_cut_off_only_where_nothing_else_is_known():
    def of(n, finish, sample_index=0):
        return Rollout(A, sample_index, np.arange(n), -np.ones(n), finish, 1)

    whole = [of(4, Finish.STOP), of(8, Finish.LENGTH, 1)]
    cut = [of(3, Finish.PARTIAL), of(5, Finish.PARTIAL, 1)]
    cached = {b"whole": whole, b"both": whole + cut, b"cut": cut, b"none": []}
    assert mean_lengths(cached) == {b"whole": 6, b"both": 6, b"cut": 4}

"""Which cached rollout serves which row."""

import numpy as np

from nemo_specrl import Finish, Rollout
from nemo_specrl.speculation.drafts import Row, assign_slots, is_fresh, select_drafts

A, B = b"a" * 16, b"b" * 16


def rollout(key, slot, version=0, n=3, births=None):
    return Rollout(
        key, slot, np.arange(n), -np.ones(n), Finish.STOP, version, birth_versions=births
    )


def test_slots_count_the_rows_of_a_prompt():
    assert assign_slots([A, B, A, A, B]) == [0, 0, 1, 2, 1]


def test_each_slot_takes_its_own_draft():
    cached = {A: [rollout(A, 0), rollout(A, 2)], B: [rollout(B, 0)]}
    rows = [Row(A, 2), Row(A, 1), Row(B, 0), Row(A, 0), Row(B, 7)]
    got = select_drafts(rows, cached, policy_version=5)
    assert got == [cached[A][1], None, cached[B][0], cached[A][0], None]


def test_order_and_split_of_the_batch_change_nothing():
    cached = {A: [rollout(A, s, n=s + 1) for s in range(4)]}
    rows = [Row(A, s) for s in range(4)]
    whole = select_drafts(rows, cached, policy_version=1)
    turned = select_drafts(rows[::-1], cached, policy_version=1)[::-1]
    pieces = [select_drafts([row], cached, policy_version=1)[0] for row in rows]
    assert whole == turned == pieces
    assert [len(d) for d in whole] == [1, 2, 3, 4]


def test_the_newest_of_a_slot_is_drafted():
    newer, older = rollout(A, 0, version=4, n=5), rollout(A, 0, version=2)
    assert select_drafts([Row(A, 0)], {A: [newer, older]}, policy_version=9) == [newer]


def test_a_slot_that_these_weights_have_served_gets_no_draft():
    newer, older = rollout(A, 0, version=4), rollout(A, 0, version=2)
    assert select_drafts([Row(A, 0)], {A: [newer, older]}, policy_version=4) == [None]
    # A cache newer than the weights, after a resumption, still drafts.
    assert select_drafts([Row(A, 0)], {A: [newer]}, policy_version=3) == [newer]


def test_an_empty_response_is_no_draft():
    assert select_drafts([Row(A, 0)], {A: [rollout(A, 0, n=0)]}, policy_version=1) == [None]


def test_tokens_that_are_too_old_are_cut_off():
    aged = rollout(A, 0, version=9, n=4, births=[9, 9, 3, 9])
    (cut,) = select_drafts([Row(A, 0)], {A: [aged]}, policy_version=10, oldest_birth=5)
    assert cut.tokens.tolist() == [0, 1]
    assert cut.finish is Finish.PARTIAL
    old = rollout(A, 0, version=9, n=4, births=[3, 3, 9, 9])
    assert select_drafts([Row(A, 0)], {A: [old]}, policy_version=10, oldest_birth=5) == [None]


def test_fresh_rows_are_the_asked_for_share():
    rows = [Row(i.to_bytes(16, "big"), s) for i in range(1000) for s in range(8)]
    fresh = [is_fresh(r, seed=1, policy_version=2, fresh_fraction=0.05) for r in rows]
    assert 300 < sum(fresh) < 500  # 400 expected, standard deviation 20
    assert fresh == [is_fresh(r, seed=1, policy_version=2, fresh_fraction=0.05) for r in rows]
    later = [is_fresh(r, seed=1, policy_version=3, fresh_fraction=0.05) for r in rows]
    assert fresh != later
    assert not any(is_fresh(r, seed=1, policy_version=2, fresh_fraction=0.0) for r in rows)
    assert all(is_fresh(r, seed=1, policy_version=2, fresh_fraction=1.0) for r in rows)

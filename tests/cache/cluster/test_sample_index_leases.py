"""Sample indices of rows that come one by one: no two rows at one, and a group keeps to its own."""

import numpy as np

from nemo_specrl import Finish, Rollout
from nemo_specrl.cache.cluster.sample_index_leases import CLAIM_SECONDS, SampleIndexLeases

A, B = b"a" * 16, b"b" * 16


def rollout(sample_index, version):
    return Rollout(A, sample_index, np.arange(3), -np.ones(3), Finish.STOP, version)


def test_rows_of_a_new_prompt_get_one_sample_index_each_in_order():
    claims = SampleIndexLeases()
    assert [claims.claim(A, [], 0) for _ in range(4)] == [0, 1, 2, 3]
    assert claims.claim(B, [], 0) == 0


def test_at_its_next_occurrence_a_group_keeps_to_its_sample_indices_whatever_the_order():
    claims = SampleIndexLeases()
    here = {sample_index: rollout(sample_index, 3) for sample_index in range(4)}
    seen = []
    for done in (False, True, True, False):  # some rows end before the next one comes
        sample_index = claims.claim(A, list(here.values()), 4)
        seen.append(sample_index)
        if done:
            here[sample_index] = rollout(sample_index, 4)
            claims.release(A, sample_index)
    assert sorted(seen) == [0, 1, 2, 3]
    assert claims.claim(A, list(here.values()), 4) == 4  # a fifth row: the group has grown


def test_the_sample_index_that_was_served_longest_ago_comes_first():
    claims = SampleIndexLeases()
    rollouts = [rollout(0, 7), rollout(1, 5), rollout(2, 6)]
    assert [claims.claim(A, rollouts, 8) for _ in range(3)] == [1, 2, 0]


def test_a_claim_of_a_row_that_nobody_renews_runs_out(monkeypatch):
    claims = SampleIndexLeases()
    now = [100.0]
    monkeypatch.setattr(
        "nemo_specrl.cache.cluster.sample_index_leases.time.monotonic", lambda: now[0]
    )
    assert claims.claim(A, [rollout(0, 1)], 2) == 0
    now[0] += CLAIM_SECONDS - 1
    assert claims.claim(A, [rollout(0, 1)], 2) == 1
    claims.hold(A, 1)
    now[0] += CLAIM_SECONDS - 1
    assert claims.claim(A, [rollout(0, 1)], 2) == 0
    assert claims.claim(A, [rollout(0, 1)], 2) == 2
    claims.release(A, 1)  # of a row that failed
    assert claims.claim(A, [rollout(0, 1)], 2) == 1

"""Slots of rows that come one by one: no two rows at one, and a group keeps to its own."""

import numpy as np

from nemo_specrl import Finish, Rollout
from nemo_specrl.cache.slots import CLAIM_SECONDS, SlotClaims

A, B = b"a" * 16, b"b" * 16


def rollout(slot, version):
    return Rollout(A, slot, np.arange(3), -np.ones(3), Finish.STOP, version)


def test_rows_of_a_new_prompt_get_one_slot_each_in_order():
    claims = SlotClaims()
    assert [claims.claim(A, [], 0) for _ in range(4)] == [0, 1, 2, 3]
    assert claims.claim(B, [], 0) == 0


def test_at_its_next_visit_a_group_keeps_to_its_slots_whatever_the_order():
    claims = SlotClaims()
    here = {slot: rollout(slot, 3) for slot in range(4)}
    seen = []
    for done in (False, True, True, False):  # some rows end before the next one comes
        slot = claims.claim(A, list(here.values()), 4)
        seen.append(slot)
        if done:
            here[slot] = rollout(slot, 4)
            claims.release(A, slot)
    assert sorted(seen) == [0, 1, 2, 3]
    assert claims.claim(A, list(here.values()), 4) == 4  # a fifth row: the group has grown


def test_the_slot_that_was_served_longest_ago_comes_first():
    claims = SlotClaims()
    rollouts = [rollout(0, 7), rollout(1, 5), rollout(2, 6)]
    assert [claims.claim(A, rollouts, 8) for _ in range(3)] == [1, 2, 0]


def test_a_claim_of_a_row_that_never_ended_runs_out(monkeypatch):
    claims = SlotClaims()
    now = [100.0]
    monkeypatch.setattr("nemo_specrl.cache.slots.time.monotonic", lambda: now[0])
    assert claims.claim(A, [rollout(0, 1)], 2) == 0
    now[0] += CLAIM_SECONDS - 1
    assert claims.claim(A, [rollout(0, 1)], 2) == 1
    now[0] += 2
    assert claims.claim(A, [rollout(0, 1)], 2) == 0

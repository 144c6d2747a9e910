"""The simulated engine against cases worked out by hand, and properties that hold of any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrl.drafting.suffix_tree import DraftTrees
from nemo_specrl.errors import ConfigError
from nemo_specrl.simulation.simulated_engine import (
    FEATURES,
    SimulatedEngine,
    SimulatedRequest,
    drafting,
    fit_costs,
    run,
    verifying,
)

KEY = b"k" * 16


def decode(prompt, tokens, **options):
    return SimulatedRequest(prompt, iter([(0, 1)] * tokens), **options)


def counted(engine, requests):
    return dict(zip(FEATURES, run(engine, requests).tolist(), strict=True))


def test_two_rows_at_once():
    # Contexts read: 4, 5, 6 and 4, 5, 6, 7, 8.
    counts = counted(SimulatedEngine(2), [decode(4, 3), decode(4, 5)])
    assert counts == {
        "steps": 5,
        "drafting_steps": 0,
        "rows": 3 + 5,
        "tokens": 4 + 2 + 4 + 4,
        "kv_tokens": 15 + 30,
        "verified_tokens": 0,
    }


def test_a_row_waits_for_a_place_and_has_it_in_the_step_after_the_other_ended():
    assert counted(SimulatedEngine(1), [decode(4, 3), decode(4, 5)])["steps"] == 8
    assert counted(SimulatedEngine(2), [decode(4, 3), decode(4, 5), decode(4, 4)])["steps"] == 3 + 4


def test_a_prompt_beyond_the_budget_is_prefilled_in_chunks():
    counts = counted(SimulatedEngine(1, max_num_batched_tokens=4), [decode(10, 2)])
    assert (counts["steps"], counts["tokens"]) == (3 + 1, 10 + 1)
    # The running row comes first; what it leaves of the budget goes to the prompt.
    counts = counted(SimulatedEngine(2, max_num_batched_tokens=4), [decode(4, 3), decode(6, 1)])
    assert (counts["steps"], counts["tokens"]) == (3, 4 + 2 + 6)


def test_a_cached_prefix_is_not_computed_but_read():
    counts = counted(SimulatedEngine(1), [decode(40, 1, cached=32)])
    assert (counts["tokens"], counts["kv_tokens"]) == (8, 40)


def test_rejected_tokens_leave_the_kv_cache():
    steps = iter([(0, 1), (3, 2), (5, 4)])  # the second step accepts 1 of 3
    counts = counted(SimulatedEngine(1, drafts=True), [SimulatedRequest(10, steps)])
    assert counts["drafting_steps"] == 3 and counts["steps"] == 0
    assert counts["tokens"] == 10 + 4 + 6
    assert counts["kv_tokens"] == 10 + 14 + (10 + 2 + 6)


def test_a_full_kv_cache_evicts_the_newest_row_which_computes_all_of_it_again():
    engine = SimulatedEngine(2, kv_tokens=10, block_size=1)
    # Both grow to 5 tokens in three steps. The first takes the place of the second, ends with its
    # fourth step, and the second computes its six tokens at once.
    counts = counted(engine, [decode(3, 4), decode(3, 4)])
    assert counts["steps"] == 5
    assert counts["rows"] == 2 + 2 + 2 + 1 + 1
    assert counts["tokens"] == 6 + 2 + 2 + 1 + 6
    with pytest.raises(ConfigError, match="kv_tokens = 10: must hold a request of 11 tokens"):
        run(engine, [decode(3, 9)])
    with pytest.raises(ConfigError, match="must hold a request of 12 tokens"):
        run(engine, [decode(12, 1)])


def test_siblings_hold_their_prompts_blocks_together():
    """Prompts of 8 blocks and responses of 2: three siblings need 14 blocks, alone 30."""

    def rows(**shared):
        return [decode(8, 3, cached=8 if i and shared else 0, **shared) for i in range(3)]

    engine = SimulatedEngine(3, kv_tokens=14, block_size=1)
    together = counted(engine, rows(siblings="prompt", shared=8))
    assert (together["steps"], together["tokens"]) == (3, 8 + 2 * 3)
    alone = counted(engine, rows())
    assert (alone["steps"], alone["tokens"]) == (9, 3 * (8 + 2))
    # The last of a prompt's rows frees them: the next prompt has room.
    others = [decode(8, 3, siblings="another", shared=8)]
    assert counted(engine, rows(siblings="prompt", shared=8) + others)["steps"] == 3 + 3


def test_what_follows_a_verification_is_sent_when_it_has_ended():
    follows = [decode(12, 2, cached=11), decode(13, 3, cached=11)]
    counts = counted(SimulatedEngine(2), [SimulatedRequest(20, verifying(), then=follows)])
    assert counts["steps"] == 1 + 3
    assert counts["tokens"] == 20 + (1 + 2) + 1 + 1 + 1
    assert counts["verified_tokens"] == 20


def test_a_tree_drafts_what_the_prompts_earlier_response_said():
    response = np.arange(100, 160, dtype=np.int32)
    trees = DraftTrees(2**20)
    cold = list(drafting(trees, KEY, 1, [], response, 24))
    warm = list(drafting(trees, KEY, 2, [], response, 24))
    assert cold == [(0, 1)] * 60  # nothing comes twice in it
    assert warm[0] == (0, 1) and len(warm) < 8
    assert all(yielded == drafted + 1 for drafted, yielded in warm[:-1])
    assert sum(yielded for _, yielded in warm) == 60
    history = [(9, response.tobytes())]
    assert list(drafting(DraftTrees(2**20), KEY, 1, history, response, 24)) == warm


def test_a_row_behind_an_accepted_prefix_yields_the_rest_of_its_response():
    response = np.arange(100, 160, dtype=np.int32)
    for start in (0, 1, 40, 59):
        steps = list(drafting(DraftTrees(2**20), KEY, 1, [], response, 24, start))
        assert steps == [(0, 1)] * (60 - start)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_steps_are_bounded_and_longer_rows_never_make_a_phase_shorter(lengths, places, more, seed):
    steps = counted(SimulatedEngine(places), [decode(1, n) for n in lengths])["steps"]
    assert max(lengths, default=0) <= steps <= sum(lengths)
    assert steps >= -(-sum(lengths) // places)
    longer = list(lengths)
    longer[seed % len(longer)] += more
    assert counted(SimulatedEngine(places), [decode(1, n) for n in longer])["steps"] >= steps


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_a_replay_yields_every_token_once_and_never_more_than_drafted_and_one(responses, most):
    trees = DraftTrees(2**20)
    for identity, response in enumerate(responses):
        tokens = np.array(response, dtype=np.int32)
        steps = list(drafting(trees, KEY, identity, [], tokens, most))
        assert sum(yielded for _, yielded in steps) == len(response)
        assert all(
            0 <= drafted <= most and 1 <= yielded <= drafted + 1 for drafted, yielded in steps
        )


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(20, 60), st.integers(1, 6))
def test_a_small_kv_cache_changes_no_token_and_never_saves_a_step(lengths, kv_tokens, places):
    roomy, small = (
        counted(
            SimulatedEngine(places, kv_tokens=kv, block_size=1), [decode(5, n) for n in lengths]
        )
        for kv in (None, max(kv_tokens, 5 + max(lengths)))
    )
    assert small["steps"] >= roomy["steps"] and small["tokens"] >= roomy["tokens"]


def test_costs_are_found_again_and_are_never_below_zero():
    rng = np.random.default_rng(0)
    counts = rng.uniform(1, 100, size=(20, len(FEATURES)))
    costs = np.array([2e-3, 4e-3, 5e-5, 3e-5, 1e-8, 2e-6])
    np.testing.assert_allclose(fit_costs(counts, counts @ costs), costs, rtol=1e-6)
    negative = counts @ np.array([2e-3, 4e-3, 5e-5, -3e-5, 0, 0])
    fitted = fit_costs(counts, negative)
    assert (fitted >= 0).all() and fitted[3] == 0
    counts[:, 1] = 0  # nothing is known of it
    assert fit_costs(counts, counts @ costs)[1] == 0

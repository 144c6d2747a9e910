"""Responses that were cut off, under lossless drafting: what becomes of their tokens.

The same weights continue a response that was interrupted. Other weights reuse nothing of it; the
tree of its prompt drafts it. How prefix reuse goes on with one is in ``test_failures``.
"""

import contextlib

import pytest

from nemo_specrl import Finish
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.conftest import DictCache
from tests.engine.test_failures import interrupt_after
from tests.support.engines import LOSSLESS
from tests.support.lossless import made_with, rollouts, sample
from tests.support.stores import restore


@pytest.fixture
def llm(drafting_llm):
    return drafting_llm


@pytest.fixture
def interrupted(llm, proposer, monkeypatch):
    """A cache with three rows of version 1 and fingerprint 5 that an interrupt cut off."""
    cache = DictCache()
    made = made_with(llm, cache, LOSSLESS)
    made.fingerprint = 5
    interrupt_after(llm, monkeypatch, 20)
    with pytest.raises(KeyboardInterrupt):
        sample(made, 3, 150)
    proposer.__init__(llm.llm_engine.vllm_config)
    kept = cache.all()
    assert [r.finish for r in kept] == [Finish.PARTIAL] * 3
    assert all(20 <= len(r) < 150 and r.fresh for r in kept)
    return cache


def continued(llm, cache, version, fingerprint, budget=150):
    """One row of each sample index, and the call's metrics."""
    made = made_with(llm, DictCache(cache.all()), LOSSLESS, version=version)
    made.fingerprint = fingerprint
    outputs, tokens = sample(made, 3, budget)
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)
    assert {r.finish for r in made.cache.all()} == {Finish.LENGTH}
    return [rollout_info(o.outputs[0]).accepted for o in outputs], tokens, made.metrics


def test_the_same_weights_continue_what_they_began(llm, interrupted):
    accepted, tokens, _ = continued(llm, interrupted, version=1, fingerprint=5)
    kept = [r.tokens.tolist() for r in interrupted.all()]
    assert accepted == [len(k) for k in kept]
    assert [t[: len(k)] for t, k in zip(tokens, kept, strict=True)] == kept
    assert [len(t) for t in tokens] == [150] * 3


@pytest.mark.parametrize(
    ("version", "fingerprint"),
    [(1, 6), (1, 0), (2, 7)],
    ids=["repeated with other roundings", "unknown weights", "the next weights"],
)
def test_other_weights_draft_it_and_reuse_nothing(llm, proposer, interrupted, version, fingerprint):
    accepted, _, metrics = continued(llm, interrupted, version, fingerprint, budget=3)
    assert accepted == [0] * 3
    assert metrics.drafts == metrics.refused_drafts == 0
    # The second token is all that there is room to draft, and no sibling has one before that.
    assert metrics.tree_drafted_tokens > 0
    proposer.__init__(llm.llm_engine.vllm_config)
    assert continued(llm, DictCache(), version, fingerprint, 3)[2].tree_drafted_tokens == 0


def test_a_response_cut_at_its_budget_is_drafted_and_goes_on_under_a_larger_one(llm, proposer):
    cut = rollouts([[3 + i % 25 for i in range(60)]] * 2)
    assert {r.finish for r in cut} == {Finish.LENGTH}
    for cache, drafted in (([], False), (cut, True)):
        proposer.__init__(llm.llm_engine.vllm_config)
        made = made_with(llm, DictCache(cache), LOSSLESS)
        sample(made, 4, 3)
        assert (made.metrics.tree_drafted_tokens > 0) == drafted
    outputs, tokens = sample(made, 4, 90)
    assert [len(t) for t in tokens] == [90] * 4
    assert [rollout_info(o.outputs[0]).fresh for o in outputs] == [True] * 4
    assert made.metrics.drafts == 0


def test_what_lost_weights_had_made_for_a_step_is_drafted_and_not_taken(llm, proposer, tmp_path):
    """A journal whose step could not be repeated to the bit."""

    def opened():
        return JournaledStore(
            tmp_path / "store",
            tmp_path / "journal",
            run="test",
            max_bytes=8 * 2**20,
            tokenizer_id="test",
        )

    def step(store, fingerprint, budget):
        made = made_with(llm, store, LOSSLESS)
        made.fingerprint = fingerprint
        return sample(made, 1, budget)[0][0].outputs[0], made.metrics

    with contextlib.closing(opened()) as store:
        store.snapshot(tmp_path / "snapshot")
        first, _ = step(store, 5, 60)
    for fingerprint, replayed in ((6, 0), (5, 1)):
        restore(tmp_path / "snapshot", tmp_path / "store")  # as after a crash
        proposer.__init__(llm.llm_engine.vllm_config)
        with contextlib.closing(opened()) as store:
            again, metrics = step(store, fingerprint, 60 if replayed else 3)
        assert metrics.replayed_rows == replayed
        assert rollout_info(again).fresh and metrics.drafts == 0
        if replayed:
            assert again.token_ids == first.token_ids
        else:
            assert metrics.tree_drafted_tokens > 0

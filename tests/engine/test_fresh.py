"""Fresh rows: which rollouts count as fresh, and how often a row is one."""

import dataclasses

import numpy as np
import pytest

from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import NEVER, STRICT, SURE, draft, generate, only, sampling


def test_a_sample_index_is_drafted_once_for_each_policy_version(speculative):
    made = speculative(DictCache([draft([*encode("12"), EOS])]), version=1)
    assert not rollout_info(only(generate(made))).fresh
    assert rollout_info(only(generate(made))).fresh
    made.policy_version = 2
    assert not rollout_info(only(generate(made))).fresh


def test_age_is_bounded_in_epochs(speculative):
    """A row is drafted max_age times in a row, no more and (after its first turn) no less."""
    cache, rows = DictCache(), 8
    fresh = []
    for version in range(12):
        made = speculative(cache, version=version, lenience=1e6, max_age=2)
        outputs = generate(made, rows=rows, params=sampling(max_tokens=3))
        fresh.append([rollout_info(o.outputs[0]).fresh for o in outputs])
        assert [r.occurrence for r in cache.all()] == [version] * rows
    for row in np.array(fresh).T:
        turns = np.flatnonzero(row)
        assert turns[0] == 0 and turns[1] <= 3
        assert set(np.diff(turns[1:])) == {3}


@pytest.mark.parametrize(
    ("tokens", "old", "fresh"),
    [
        (None, None, True),  # no draft
        ([5, 31_999], SURE, True),  # refused: tokens that the model does not know
        (encode("12"), NEVER, False),  # rejected at its first token
        (encode("12"), SURE, False),  # accepted in part of the response
        ([*encode("12"), EOS], SURE, False),  # accepted as the whole response
    ],
)
def test_freshness_is_recorded_and_reported(speculative, tokens, old, fresh):
    cache = DictCache([] if tokens is None else [draft(tokens, old)])
    made = speculative(cache, version=1, lenience=STRICT)
    completion = only(generate(made))
    [rollout] = made.cache.all()
    assert rollout.policy_version == 1
    assert rollout_info(completion).fresh == rollout.fresh == fresh


class JournalCache(DictCache):
    """A cache whose journal has one rollout, made for the present step by the present weights."""

    def __init__(self, rollouts, journaled):
        super().__init__(rollouts)
        self.journaled = journaled

    def take(self, rows, policy_version, fingerprint, enough=all):
        return [self.journaled]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("drafts", [[], [draft(encode("34"))]], ids=["no draft now", "a draft now"])
def test_a_replayed_row_is_as_fresh_as_was_recorded(speculative, fresh, drafts):
    """No token of it was reused, so that only the record tells a rejected draft from none."""
    tokens = [*encode("12"), EOS]
    journaled = dataclasses.replace(draft(tokens, version=1), fingerprint=7, fresh=fresh)
    made = speculative(JournalCache(drafts, journaled), version=1)
    made.fingerprint = 7
    completion = only(generate(made))
    assert list(completion.token_ids) == tokens
    assert made.metrics.replayed_rows == 1
    assert rollout_info(completion).fresh == fresh
    if fresh:
        assert rollout_info(completion).drafted == made.metrics.drafts == 0

"""Verification and continuation of one draft: acceptance, budgets and stop tokens."""

import numpy as np
import pytest

from nemo_specrl import Finish
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import NEVER, PROMPT, STRICT, SURE, draft, generate, only, sampling


def test_every_draft_accepted_in_full(speculative):
    cache = DictCache()
    first = generate(speculative(cache), rows=16, params=[sampling(seed=i) for i in range(16)])
    again = speculative(cache, version=1)
    second = generate(again, rows=16, params=[sampling(seed=99 + i) for i in range(16)])
    assert {o.outputs[0].finish_reason for o in first} == {"stop", "length"}
    for a, b in zip(first, second, strict=True):
        assert b.outputs[0].token_ids == a.outputs[0].token_ids
        assert b.outputs[0].finish_reason == a.outputs[0].finish_reason
        assert b.outputs[0].stop_reason == a.outputs[0].stop_reason
        assert b.outputs[0].text == a.outputs[0].text
        assert b.prompt_token_ids == a.prompt_token_ids == PROMPT
        assert b.outputs[0].cumulative_logprob == pytest.approx(
            a.outputs[0].cumulative_logprob, abs=1e-3
        )
    assert again.metrics.full_reuses == again.metrics.drafts == 16
    assert again.metrics.decoded_tokens == 0
    assert again.metrics.accepted_tokens == again.metrics.response_tokens


def test_a_lost_step_drafts_for_the_one_in_its_place(speculative):
    """The same weights judge it, with other random numbers, where a cluster's cache says so."""
    cache = DictCache()
    lost = speculative(cache)
    first = generate(lost, rows=16, params=[sampling(seed=i) for i in range(16)])
    cache.incarnation, cache.resumed = 7, True
    again = speculative(cache)
    assert again.policy_version == lost.policy_version
    second = generate(again, rows=16, params=[sampling(seed=99 + i) for i in range(16)])
    assert again.metrics.full_reuses == again.metrics.drafts == 16
    assert [o.outputs[0].token_ids for o in second] == [o.outputs[0].token_ids for o in first]
    assert (again.seed, again.draw_seed) == (lost.seed, speculative(cache).draw_seed)
    assert again.draw_seed != lost.draw_seed == lost.seed


def test_every_draft_rejected_at_the_first_token(speculative):
    tokens = encode("12+34=46;#46")
    cache = DictCache([draft(tokens, NEVER, sample_index=s) for s in range(8)])
    made = speculative(cache, version=1, lenience=STRICT)
    outputs = generate(made, rows=8, params=sampling(seed=None))
    assert made.metrics.drafts == 8
    assert made.metrics.accepted_tokens == made.metrics.full_reuses == 0
    assert made.metrics.decoded_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 8


def test_an_empty_response_in_the_cache_is_decoded_plainly(speculative):
    cache = DictCache(
        [draft([], finish=Finish.PARTIAL), draft([], sample_index=1, finish=Finish.LENGTH)]
    )
    made = speculative(cache, version=1)
    outputs = generate(made, rows=2)
    assert all(rollout_info(o.outputs[0]).fresh for o in outputs)
    assert made.metrics.drafts == 0


def test_a_response_of_its_end_alone_is_reused(speculative):
    made = speculative(DictCache([draft([EOS])]), version=1)
    completion = only(generate(made))
    assert list(completion.token_ids) == [EOS]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.text == ""
    assert made.metrics.decoded_tokens == 0


def test_nothing_follows_an_end_of_sequence_and_padding_is_no_end(speculative):
    pad = 0  # eos is 2 here: a pad token is a token like any other
    made = speculative(DictCache([draft([*encode("1"), pad, pad, *encode("2"), EOS])]), version=1)
    completion = only(generate(made))
    assert list(completion.token_ids) == [*encode("1"), pad, pad, *encode("2"), EOS]
    assert completion.finish_reason == "stop"


def test_a_smaller_budget_cuts_the_draft(speculative):
    tokens = [*encode("12+34=46"), EOS]
    made = speculative(DictCache([draft(tokens)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=4)))
    assert list(completion.token_ids) == tokens[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert made.cache.all()[0].finish is Finish.LENGTH
    assert made.metrics.decoded_tokens == 0


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.PARTIAL])
def test_a_larger_budget_is_decoded_on(speculative, finish):
    tokens = encode("12+34")
    made = speculative(DictCache([draft(tokens, finish=finish)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=20, ignore_eos=True)))
    assert list(completion.token_ids)[:5] == tokens
    assert len(completion.token_ids) == 20
    assert completion.finish_reason == "length"
    assert made.metrics.decoded_tokens == 15
    reuse = rollout_info(completion)
    assert (reuse.drafted, reuse.accepted) == (5, 5)
    assert reuse.birth_versions.tolist() == [0] * 5 + [1] * 15


def test_a_draft_exactly_as_long_as_the_budget_needs_no_decoding(speculative):
    tokens = encode("12+34")
    made = speculative(DictCache([draft(tokens, finish=Finish.LENGTH)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=5)))
    assert (completion.finish_reason, list(completion.token_ids)) == ("length", tokens)
    assert made.metrics.decoded_tokens == 0


def test_an_end_of_sequence_that_is_rejected_is_decoded_over(speculative):
    tokens = [*encode("12"), EOS]
    old = np.array([SURE, SURE, NEVER], dtype=np.float32)
    lengths = set()
    for seed in range(4):
        made = speculative(DictCache([draft(tokens, old)]), version=1, lenience=STRICT)
        completion = only(generate(made, params=sampling(seed=seed)))
        assert list(completion.token_ids)[:2] == tokens[:2]
        assert rollout_info(completion).accepted == 2
        lengths.add(len(completion.token_ids))
    assert max(lengths) > 3


def test_a_draft_goes_on_where_its_end_no_longer_ends_it(speculative):
    tokens = [*encode("12"), EOS]
    made = speculative(DictCache([draft(tokens)]), version=1)
    completion = only(generate(made, params=sampling(max_tokens=10, ignore_eos=True)))
    assert list(completion.token_ids)[:3] == tokens
    assert len(completion.token_ids) == 10


def test_a_stop_token_that_is_new_ends_the_draft_where_it_stands(speculative):
    semicolon = encode(";")[0]
    made = speculative(DictCache([draft([*encode("12;34"), EOS])]), version=1)
    completion = only(generate(made, params=sampling(stop_token_ids=[semicolon])))
    assert list(completion.token_ids) == encode("12;")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", semicolon)
    assert completion.text == "12"  # as vLLM: the stop token is no part of the text

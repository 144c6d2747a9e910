"""Calls that end once enough groups are complete, and what becomes of the rows that are left."""

import pytest

from nemo_specrl import Finish, SpecRLConfig, SpeculativeLLM, prompt_key
from nemo_specrl.engine.early_end import EarlyEnd
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import LOSSLESS, draft, sampling
from tests.support.lossless import made_with

PROMPTS = [[1, *encode(f"{i}+{i}=?")] for i in range(10, 14)]
SHORT, LONG = 5, 100


def rolled_out(made, budgets, early_end, rows=2):
    """The responses' tokens and completions, by group and row."""
    prompts = [{"prompt_token_ids": PROMPTS[g]} for g in range(len(budgets)) for _ in range(rows)]
    params = [
        sampling(budget, seed=rows * g + row, ignore_eos=True, detokenize=False, flat_logprobs=True)
        for g, budget in enumerate(budgets)
        for row in range(rows)
    ]
    outputs = made.generate(prompts, params, early_end=early_end, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [p["prompt_token_ids"] for p in prompts]
    flat = [o.outputs[0] for o in outputs]
    return [flat[i : i + rows] for i in range(0, len(flat), rows)]


def reasons(groups):
    return [{completion.finish_reason for completion in group} for group in groups]


def test_what_was_given_up_is_drafted_under_the_next_weights(drafting_llm, proposer):
    """Lossless: nothing of it is taken as it is, and every token is the present weights'."""
    cache = DictCache()
    made = made_with(drafting_llm, cache, LOSSLESS)
    groups = rolled_out(made, [SHORT, LONG, SHORT], EarlyEnd(2, groups=2))
    assert reasons(groups) == [{"length"}, {"abort"}, {"length"}]
    partial = [r for r in cache.all() if r.key == prompt_key(PROMPTS[1])]
    assert [r.finish for r in partial] == [Finish.PARTIAL] * 2
    for completion, rollout in zip(groups[1], partial, strict=True):
        assert SHORT <= len(rollout) < LONG
        assert completion.token_ids == rollout.tokens.tolist()
    tokens = sum(len(c.token_ids) for group in groups for c in group)
    assert made.metrics.decoded_tokens == made.metrics.response_tokens == tokens
    proposer.__init__(drafting_llm.llm_engine.vllm_config)
    following = made_with(drafting_llm, cache, LOSSLESS, version=2)
    assert reasons(rolled_out(following, [LONG] * 2, EarlyEnd(2, groups=2))) == [{"length"}] * 2
    assert following.metrics.tree_drafted_tokens > 0
    for prompt in PROMPTS[:2]:
        for rollout in cache.rollouts[prompt_key(prompt)].values():
            assert rollout.policy_version == 2 and set(rollout.birth_versions.tolist()) == {2}
            assert rollout.fresh and len(rollout) == LONG


def test_a_prefix_that_is_reused_was_verified_by_the_present_weights(speculative):
    cache = DictCache()
    made = speculative(cache, version=1)
    rolled_out(made, [SHORT, LONG], EarlyEnd(2, groups=1))
    partial = {r.sample_index: r for r in cache.all() if r.finish is Finish.PARTIAL}
    assert set(partial) == {0, 1}
    following = speculative(cache, version=2, lenience=1e6)
    groups = rolled_out(following, [SHORT, LONG], EarlyEnd(2, groups=2))
    for sample, completion in enumerate(groups[1]):
        info = rollout_info(completion)
        assert info.accepted == len(partial[sample])
        assert completion.token_ids[: info.accepted] == partial[sample].tokens.tolist()
        assert info.rollout.policy_version == 2  # which has judged what is older
        assert info.birth_versions[: info.accepted].tolist() == [1] * info.accepted
        assert set(info.birth_versions[info.accepted :].tolist()) == {2}


def test_what_a_row_that_was_given_up_has_recomputed_is_not_known(speculative):
    drafts = [draft([5, 6, 7], prompt=PROMPTS[1], sample_index=s) for s in range(2)]
    made = speculative(DictCache(drafts), version=1, lenience=1e6)
    groups = rolled_out(made, [SHORT, LONG], EarlyEnd(2, groups=1))
    assert reasons(groups) == [{"length"}, {"abort"}]
    assert all(len(completion.token_ids) > 3 for completion in groups[1])
    assert made.metrics.recomputed_tokens == 0


def test_a_call_waits_for_the_groups_that_are_awaited(speculative):
    early_end = EarlyEnd(2, groups=1, put_off=1, awaited=1)
    groups = rolled_out(speculative(), [60, SHORT, LONG], early_end)
    assert reasons(groups) == [{"length"}, {"length"}, {"abort"}]


def test_groups_that_were_put_off_begin_before_all_others(speculative, begun):
    """Although earlier responses say that others are longer."""
    known = [
        draft([5] * n, sample_index=s, prompt=PROMPTS[i], finish=Finish.LENGTH)
        for i, n in enumerate([2, 50, 80])
        for s in range(2)
    ]
    for put_off, order in ((0, (2, 1, 0)), (1, (0, 2, 1))):
        made = speculative(DictCache(known), version=1, fresh_fraction=1.0)
        rolled_out(made, [SHORT] * 3, EarlyEnd(2, groups=3, put_off=put_off))
        assert begun == [PROMPTS[i] for i in order for _ in range(2)]
        begun.clear()


def test_rows_that_have_not_begun_are_not_cached(drafting_llm, proposer):
    cache = DictCache()
    made = made_with(drafting_llm, cache, LOSSLESS)
    rows = 2 * made._limits.max_num_seqs  # as many as the engine is given at once
    groups = rolled_out(made, [1, LONG], EarlyEnd(rows, groups=1, put_off=1), rows=rows)
    assert reasons(groups) == [{"length"}, {"abort"}]
    begun = [c for c in groups[1] if c.token_ids]
    assert len(begun) < rows
    assert len(cache.rollouts.get(prompt_key(PROMPTS[1]), ())) == len(begun)


def test_drafts_that_have_not_been_judged_stay_in_the_cache(speculative, llm):
    """Equal ones, which share a verification, and the rest, which wait for the engine."""
    equal, whole = [5] * 30, [*encode("99"), EOS]
    cache = DictCache(
        [draft(whole)] + [draft(equal, sample_index=s, prompt=PROMPTS[1]) for s in range(400)]
    )
    made = speculative(cache, version=1, lenience=1e6)
    first = [{"prompt_token_ids": [1, *encode("12+34=?")]}]
    rest = [{"prompt_token_ids": PROMPTS[1]}] * 400
    params = [sampling(60, seed=i) for i in range(401)]
    outputs = made.generate(
        [*first, *rest], params, early_end=EarlyEnd(1, groups=1, put_off=1), use_tqdm=False
    )
    ended = [o.outputs[0].finish_reason != "abort" for o in outputs]
    assert ended[0] and 0 < sum(ended) < len(ended)
    kept = cache.rollouts[prompt_key(PROMPTS[1])]
    assert len(kept) == 400
    assert all(len(kept[s]) >= 30 for s in range(400))
    assert not llm.llm_engine.has_unfinished_requests()
    assert rollout_info(outputs[0].outputs[0]).accepted == len(whole)


def test_a_call_whose_partial_rollouts_could_not_go_on_is_refused(llm, speculative):
    plain = SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=False))
    with pytest.raises(ConfigError, match=r"early_end: .* set spec_rl.enabled: true"):
        rolled_out(plain, [SHORT], EarlyEnd(2, groups=1))
    made = speculative()
    with pytest.raises(ConfigError, match="early_end: a conversation"):
        made.generate(["1"], early_end=EarlyEnd(1, groups=1), environment=object())


@pytest.mark.parametrize(
    ("ended", "reached"),
    [
        ({0, 1, 2, 4}, False),  # one group
        ({0, 1, 4, 5}, True),
        ({2, 3, 4, 5}, False),  # the first one is awaited
        ({0, 1, 2, 3, 4, 5}, True),
    ],
)
def test_a_call_ends_with_enough_whole_groups(ended, reached):
    assert EarlyEnd(2, groups=2, put_off=1, awaited=1).reached(ended) == reached

"""Calls with several rows: order, sample indices, parameters of their own, equal drafts."""

import numpy as np
import pytest

from nemo_specrl import Finish
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import draft, generate, only, sampling


def test_no_some_and_only_drafts(speculative):
    for drafted in (0, 3, 6):
        cache = DictCache([draft([*encode(f"{s}"), EOS], sample_index=s) for s in range(drafted)])
        made = speculative(cache, version=1)
        outputs = generate(made, rows=6, params=[sampling(seed=s) for s in range(6)])
        reuses = [rollout_info(o.outputs[0]) for o in outputs]
        assert [r.fresh for r in reuses] == [False] * drafted + [True] * (6 - drafted)
        for s, output in enumerate(outputs[:drafted]):
            assert output.outputs[0].text == f"{s}"
        assert len(made.cache.all()) == 6


def test_an_empty_batch(speculative):
    made = speculative()
    assert made.generate([], sampling(), use_tqdm=False) == []


def test_each_request_has_its_own_parameters(speculative):
    cache = DictCache(
        [draft(encode("123456"), sample_index=s, finish=Finish.LENGTH) for s in range(3)]
    )
    made = speculative(cache, version=1)
    params = [
        sampling(max_tokens=2),
        sampling(max_tokens=9, ignore_eos=True),
        sampling(stop_token_ids=encode("4"), logprobs=None),
    ]
    short, long, stopped = (o.outputs[0] for o in generate(made, rows=3, params=params))
    assert list(short.token_ids) == encode("12")
    assert len(long.token_ids) == 9
    assert list(stopped.token_ids) == encode("1234")
    assert (stopped.logprobs, stopped.cumulative_logprob) == (None, None)


def test_order_of_the_batch_is_kept(speculative):
    prompts = [[1, *encode(f"{i}+{i}=?")] for i in range(10, 30)]
    cache = DictCache([draft([*encode(f"{i}"), EOS], prompt=p) for i, p in enumerate(prompts)])
    made = speculative(cache, version=1)
    shuffled = [prompts[i] for i in np.random.default_rng(0).permutation(20)]
    outputs = made.generate([{"prompt_token_ids": p} for p in shuffled], sampling(), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == shuffled
    assert [o.outputs[0].text for o in outputs] == [str(prompts.index(p)) for p in shuffled]


def test_equal_drafts_are_verified_once_and_judged_each_by_itself(speculative, llm, monkeypatch):
    params = [sampling(seed=s, ignore_eos=True) for s in range(8)]
    plain = DictCache()
    only(generate(speculative(plain), params=sampling(max_tokens=12, ignore_eos=True)))
    (decoded,) = plain.all()
    # Old log-probs that are too high: each sample index rejects at a place of its own.
    old = np.minimum(decoded.logprobs + np.float32(0.3), 0)
    cache = [draft(decoded.tokens, old, sample_index=s, finish=Finish.LENGTH) for s in range(8)]
    verified = []
    add = llm.llm_engine.add_request

    def count(request_id, prompt, params, **options):
        if params.prompt_logprobs is not None:
            verified.append(request_id)
        return add(request_id, prompt, params, **options)

    monkeypatch.setattr(llm.llm_engine, "add_request", count)
    together = speculative(DictCache(cache), version=1, lenience=1.0)
    got = [o.outputs[0] for o in generate(together, rows=8, params=params)]
    assert len(verified) == 1
    assert together.metrics.drafts == 8
    alone = speculative(DictCache(cache), version=1, lenience=1.0)
    for sample_index, completion in enumerate(got):
        other = only(generate(alone, params=params[sample_index], sample_indices=[sample_index]))
        assert list(completion.token_ids) == list(other.token_ids)
        assert rollout_info(completion).accepted == rollout_info(other).accepted
        assert list(completion.logprobs)[-1].keys() == list(other.logprobs)[-1].keys()
    assert len(verified) == 9
    assert len({rollout_info(c).accepted for c in got}) > 2, "drafts that do not part prove nothing"
    kept = {r.sample_index: r for r in together.cache.all()}
    assert {s: r.tokens.tolist() for s, r in kept.items()} == {
        s: list(c.token_ids) for s, c in enumerate(got)
    }


def test_several_rollouts_of_one_request(speculative):
    cache = DictCache([draft([*encode(f"{s}"), EOS], sample_index=s) for s in (0, 2)])
    made = speculative(cache, version=1)
    (output,) = generate(made, params=sampling(n=3))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [rollout_info(c).fresh for c in output.outputs] == [False, True, False]
    assert {r.sample_index for r in made.cache.all()} == {0, 1, 2}


def test_sample_indices_may_come_in_several_calls(speculative):
    cache = DictCache([draft([*encode(f"{s}"), EOS], sample_index=s) for s in range(4)])
    made = speculative(cache, version=1)
    texts = [only(generate(made, sample_indices=[s])).text for s in (3, 1, 0, 2)]
    assert texts == ["3", "1", "0", "2"]
    with pytest.raises(ConfigError, match="the same sample index"):
        generate(made, rows=2, sample_indices=[1, 1])
    with pytest.raises(ConfigError, match="sample_indices: 1 of them for 2 prompts"):
        generate(made, rows=2, sample_indices=[1])


def test_rows_begin_longest_expected_first_and_come_back_in_order(speculative, begun):
    """Earlier responses say which prompt's are long; one without any stands in the middle."""
    prompts = [[1, *encode(f"{i}+{i}=?")] for i in range(10, 15)]
    lengths = {0: (2, 4), 1: (30, 50), 3: (9, 11), 4: (60, 80)}  # the mean is 31
    cache = [
        draft([5] * n, sample_index=s, prompt=prompts[i], finish=Finish.LENGTH)
        for i, both in lengths.items()
        for s, n in enumerate(both)
    ]
    rows = [{"prompt_token_ids": p} for p in prompts for _ in range(2)]
    params = [sampling(seed=i) for i in range(10)]
    got = []
    for known in (cache, []):
        made = speculative(DictCache(known), version=1, fresh_fraction=1.0)
        outputs = made.generate(rows, params, use_tqdm=False)
        assert [o.prompt_token_ids for o in outputs] == [r["prompt_token_ids"] for r in rows]
        got.append([list(o.outputs[0].token_ids) for o in outputs])
    assert begun[:10] == [p for i in (4, 1, 2, 3, 0) for p in (prompts[i], prompts[i])]
    assert begun[10:] == [r["prompt_token_ids"] for r in rows]
    assert got[0] == got[1]


def test_rows_that_have_only_siblings_to_draft_from_begin_one_after_the_other(speculative, begun):
    prompts = [[1, *encode(f"{i}+{i}=?")] for i in range(10, 13)]
    cache = [draft([5] * n, prompt=prompts[i], finish=Finish.LENGTH) for i, n in [(0, 4), (1, 60)]]
    tree = {"enabled": True, "method": "rounds"}
    made = speculative(DictCache(cache), version=1, fresh_fraction=1.0, tree=tree)
    rows = [{"prompt_token_ids": p} for p in prompts for _ in range(3)]
    outputs = made.generate(rows, [sampling(seed=i) for i in range(9)], use_tqdm=False)
    first = [tokens[: len(prompts[0])] for tokens in begun[:9]]  # a draft may lie behind them
    # The third one alone has no history.
    assert first == [prompts[i] for i in (1, 1, 1, 2, 0, 0, 0, 2, 2)]
    assert [o.prompt_token_ids for o in outputs] == [r["prompt_token_ids"] for r in rows]

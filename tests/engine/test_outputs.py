"""Outputs compared with vLLM's, forms of log-probs, and requests that bypass the cache."""

import math

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.errors import UnsupportedSampling
from nemo_specrl.trainer.data.toy_tasks import EOS, encode
from tests.conftest import DictCache
from tests.support.engines import NEVER, PROMPT, STRICT, SURE, draft, generate, only, sampling


def test_plain_rows_are_what_vllm_returns(speculative, llm):
    """Text, token ids, log-probs, ranks and endings of rows without a draft, seed by seed."""
    params = [
        sampling(seed=i, logprobs=[0, 2, None][i % 3], flat_logprobs=i % 2 == 0, stop=["7"])
        for i in range(12)
    ]
    prompts = ["12+34=?", PROMPT] * 6
    expected = llm.generate(prompts, params, use_tqdm=False)
    for output, reference in zip(
        speculative().generate(prompts, params, use_tqdm=False), expected, strict=True
    ):
        got, want = output.outputs[0], reference.outputs[0]
        assert list(got.token_ids) == list(want.token_ids)
        assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
        assert (got.stop_reason, got.index) == (want.stop_reason, want.index)
        assert (output.prompt, output.prompt_token_ids) == (
            reference.prompt,
            reference.prompt_token_ids,
        )
        assert type(got.logprobs) is type(want.logprobs)
        if want.logprobs is not None:
            assert list(got.logprobs) == list(want.logprobs)
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(("wanted", "flat"), [(0, True), (0, False), (3, False)])
def test_logprobs_of_reused_tokens_are_those_of_plain_decoding(speculative, wanted, flat):
    """Half a response is reused and the rest decoded; log-probs are as if decoded in one piece."""
    cache = DictCache()
    params = sampling(max_tokens=30, ignore_eos=True, logprobs=wanted, flat_logprobs=flat)
    plain = only(generate(speculative(cache), params=params))
    (whole,) = cache.all()
    half = DictCache([whole.prefix(15)])
    made = speculative(half, version=1)
    joined = only(generate(made, params=params))
    assert rollout_info(joined).accepted == 15
    assert list(joined.token_ids)[:15] == list(plain.token_ids)[:15]
    for a, b in zip(list(plain.logprobs)[:15], list(joined.logprobs)[:15], strict=True):
        assert list(a) == list(b)
        for token in a:
            assert b[token].logprob == pytest.approx(a[token].logprob, abs=0.02)
            assert b[token].decoded_token == a[token].decoded_token
    assert len(joined.logprobs) == 30


def test_a_continuation_is_not_drawn_from_its_drafts_stream(speculative):
    """A caller that seeds each row the same at every step must not get correlated tokens."""
    cache = DictCache()
    first = only(generate(speculative(cache), params=sampling(max_tokens=8, ignore_eos=True)))
    (whole,) = cache.all()
    seen = set()
    for version in range(1, 6):
        made = speculative(DictCache([whole.prefix(1)]), version=version)
        completion = only(generate(made, params=sampling(max_tokens=8, ignore_eos=True)))
        seen.add(tuple(completion.token_ids)[1:])
    assert len(seen) == 5
    assert tuple(first.token_ids)[1:] not in seen


def test_reported_logprobs(speculative):
    """`policy` reports p_new for accepted tokens, `behaviour` min(p_old, l * p_new)."""
    tokens, old = [*encode("12+34"), EOS], np.float32(-5.0)
    rows = {}
    for mode in ("policy", "behaviour"):
        made = speculative(
            DictCache([draft(tokens, old)]), version=1, lenience=1e6, reported_logprobs=mode
        )
        rows[mode] = only(generate(made))
    new = rollout_info(rows["policy"]).policy_logprobs
    carried = [next(iter(p.values())).logprob for p in rows["policy"].logprobs]
    assert carried == pytest.approx(new.tolist(), abs=1e-6)
    carried = [next(iter(p.values())).logprob for p in rows["behaviour"].logprobs]
    assert carried == pytest.approx(np.minimum(old, new + math.log(1e6)).tolist(), abs=1e-5)
    assert rollout_info(rows["behaviour"]).policy_logprobs.tolist() == new.tolist()
    (stored,) = made.cache.all()
    assert stored.logprobs.tolist() == new.tolist()  # the cache keeps the policy's own
    assert stored.birth_logprobs.tolist() == [-5.0] * 6


def test_acceptance_against_birth(speculative):
    tokens = [*encode("12"), EOS]
    made_from = Rollout(
        prompt_key(PROMPT),
        0,
        tokens,
        [SURE] * 3,
        Finish.STOP,
        5,
        birth_logprobs=[SURE, NEVER, SURE],
        birth_versions=[1, 2, 3],
    )
    for reference, accepted in (("last", 3), ("birth", 1)):
        made = speculative(
            DictCache([made_from]), version=6, lenience=STRICT, acceptance_reference=reference
        )
        completion = only(generate(made))
        assert rollout_info(completion).accepted == accepted
        births = rollout_info(completion).birth_versions.tolist()
        assert births[:accepted] == [1, 2, 3][:accepted]
        assert set(births[accepted:]) <= {6}


def test_greedy_requests_neither_read_nor_write_the_cache(speculative):
    made = speculative(DictCache([draft([*encode("12"), EOS])]), version=1)
    before = made.cache.all()
    outputs = generate(made, rows=2, params=SamplingParams(temperature=0.0, max_tokens=6))
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert made.cache.all() == before
    assert made.cache.puts == 0
    assert made.metrics.drafts == 0


def test_requests_for_prompt_logprobs_get_the_engines_own(speculative):
    made = speculative(DictCache([draft([*encode("12"), EOS])]), version=1)
    (output,) = generate(made, params=sampling(prompt_logprobs=1))
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert rollout_info(output.outputs[0]).fresh


def test_switched_off_it_is_the_engine(speculative, llm):
    made = speculative()
    object.__setattr__(made.config, "enabled", False)
    got = only(generate(made))
    want = only(llm.generate({"prompt_token_ids": PROMPT}, sampling(), use_tqdm=False))
    assert list(got.token_ids) == list(want.token_ids)
    assert made.cache.gets == made.cache.puts == 0


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
        {"bad_words": ["1"]},
    ],
)
def test_sampling_that_cannot_be_verified_is_refused(speculative, option):
    ((name, value),) = option.items()
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 4, **option})
    with pytest.raises(UnsupportedSampling, match=f"{name} = .*set {name}: ") as caught:
        generate(speculative(), params=params)
    assert "\n" not in str(caught.value)
    assert str(value)[:3] in str(caught.value)

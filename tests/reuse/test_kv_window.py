"""Continuations find their prefix in the KV cache when more rows wait than it holds.

256 rows of 16 + 160 tokens, and KV blocks for 6,400 tokens, that is for 36 of them.
"""

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.engine.refit import refit
from nemo_specrl.reuse.llm import PrefixReuse
from tests.conftest import make_engine, weights_of
from tests.reuse.conftest import SMALL_KV
from tests.reuse.support import DictCache, block, sampling
from tests.reuse.test_base import collect

pytestmark = pytest.mark.timeout(400)  # so that it begins early: see tests/conftest.py
BLOCK, PROMPT_TOKENS, TOKENS, GROUP, PROMPTS = 32, 16, 160, 4, 64


@pytest.fixture(scope="session")
def small_engine(random_model):
    return make_engine(random_model, max_num_seqs=128, enable_prefix_caching=True, **SMALL_KV)


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 30, (PROMPTS, PROMPT_TOKENS)).tolist()
    # Without seeds: vLLM's CPU engines cannot prefill a seeded request in chunks.
    params = sampling(TOKENS, ignore_eos=True, detokenize=False, seed=None)
    return [(prompt, params) for prompt in prompts for _ in range(GROUP)]


@pytest.fixture(scope="module")
def drafts(small_engine, random_model, asked):
    """Drafts of the engine's own weights; 1 in 25 tokens is taken to have been twice as likely."""
    refit(small_engine, weights_of(random_model))
    rng = np.random.default_rng(1)
    params = SamplingParams(
        n=GROUP, seed=1, max_tokens=TOKENS, logprobs=0, flat_logprobs=True, ignore_eos=True
    )
    prompts = [prompt for prompt, _ in asked[::GROUP]]
    drafts = []
    for start in range(0, PROMPTS, 8):  # as many as the KV cache holds
        some = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + 8]]
        for output in small_engine.generate(some, params, use_tqdm=False):
            for completion in output.outputs:
                values = np.array(completion.logprobs.logprobs, np.float32)
                values += np.where(rng.random(TOKENS) < 1 / 25, np.log(2), 0)
                key, tokens = prompt_key(output.prompt_token_ids), list(completion.token_ids)
                drafts.append(Rollout(key, tokens, Finish.LENGTH, 0, values))
    return drafts


def check(made, outputs):
    accepted = [o.outputs[0].spec_rl.accepted for o in outputs]
    assert made.metrics.drafts == PROMPTS * GROUP
    share = made.metrics.accepted_tokens / made.metrics.draft_tokens
    assert 0.2 < share < 0.6
    unavoidable = sum((PROMPT_TOKENS + a - 1) % BLOCK + 1 for a in accepted if 0 < a < TOKENS)
    again = made.metrics.prefilled_again_tokens
    assert again <= 1.2 * unavoidable, (again, unavoidable)
    # A prompt that is shorter than a block is prefilled with each draft; nothing else is twice.
    assert made.metrics.prefilled_tokens <= PROMPTS * GROUP * (PROMPT_TOKENS + TOKENS)
    return again, unavoidable


def test_one_call(small_engine, random_model, asked, drafts):
    refit(small_engine, weights_of(random_model))
    prompts, params = [p for p, _ in asked], [p for _, p in asked]
    made = PrefixReuse(small_engine, block(1.0), DictCache(drafts), policy_version=0)
    made.policy_version = 1
    again, unavoidable = check(made, made.generate(prompts, params))
    assert made.window == 36
    print("prefilled again", again, "unavoidable", unavoidable)
    # Without the window it is several times that.
    made = PrefixReuse(small_engine, block(1.0), DictCache(drafts))
    object.__setattr__(made.limits, "kv_tokens", 10**9)
    made.policy_version = 1
    made.generate(prompts, params)
    print("without a window", made.metrics.prefilled_again_tokens)
    assert made.metrics.prefilled_again_tokens > 3 * unavoidable


def test_rows_that_arrive_one_by_one(async_reuse, loop, asked, drafts):
    made = async_reuse(DictCache(drafts), version=1, lenience=1.0)
    assert made.limits.kv_tokens == 6400
    again, unavoidable = check(made, loop.run_until_complete(collect(made, asked)))
    print("prefilled again", again, "unavoidable", unavoidable)
    assert made.window == 36

"""Lossless drafting on a real AsyncLLM, whose proposer lies in another process."""

import asyncio

import numpy as np
import pytest
from vllm import SamplingParams

from nemo_specrl import SpecRLConfig
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.compat import EXTRA_ARG
from nemo_specrl.errors import ConfigError
from tests.conftest import make_async_engine
from tests.engine.test_async_engine import CacheInParts, ClaimingCache
from tests.support.engines import DRAFTS, PROMPT, VOCABULARY, chi_squared, draft, sampling

pytestmark = pytest.mark.skipif(not DRAFTS, reason="this vLLM has no custom proposers")
CONFIG = SpecRLConfig(
    enabled=True,
    preset="lossless",
    tree={"max_draft_tokens": 6, "adaptive": False},  # a busy machine drafts as much as an idle one
)
ROWS = 600
ERROR_RATE = 1e-4


@pytest.fixture(scope="module")
def async_llm(random_model, loop):
    llm = make_async_engine(
        random_model,
        loop,
        max_num_seqs=64,
        max_num_batched_tokens=64 * 192,
        max_logprobs=VOCABULARY,
        **engine_options(CONFIG),
    )
    yield llm
    llm.shutdown()


def test_run_ahead_is_refused(async_llm):
    config = SpecRLConfig(enabled=True, preset="lossless", run_ahead={"enabled": True})
    with pytest.raises(ConfigError, match=r"run_ahead\.enabled = true: .*; set it to false"):
        AsyncSpeculativeLLM(async_llm, ClaimingCache(), config)


def test_rows_draft_from_the_cache_and_from_each_other(async_llm, loop):
    """Two epochs of one prompt; the second token's distribution is the policy's."""
    cache = ClaimingCache()
    made = AsyncSpeculativeLLM(async_llm, cache, CONFIG)

    async def row(i):
        params = sampling(3, seed=i, ignore_eos=True, flat_logprobs=True, detokenize=False)
        prompt = {"prompt_token_ids": PROMPT}
        outputs = [o async for o in made.generate(prompt, params, f"{made.policy_version}-{i}")]
        return outputs[-1].outputs[0]

    async def epoch(version):
        await made.set_policy_version(version)
        return await asyncio.gather(*(row(version * ROWS + i) for i in range(ROWS)))

    async def next_tokens(prefix):
        params = sampling(1, logprobs=VOCABULARY, flat_logprobs=True, detokenize=False)
        prompt = {"prompt_token_ids": [*PROMPT, *prefix]}
        async for output in async_llm.generate(prompt, params, f"exact-{prefix}"):
            logprobs = output.outputs[0].logprobs
        p = np.zeros(VOCABULARY)
        p[np.asarray(logprobs.token_ids)] = np.exp(logprobs.logprobs)
        return p / p.sum()

    completions = [c for v in (0, 1) for c in loop.run_until_complete(epoch(v))]
    loop.run_until_complete(made.count_tree_drafts())
    metrics = made.metrics
    assert metrics.tree_drafted_tokens > ROWS
    assert 0 < metrics.tree_accepted_tokens < metrics.tree_drafted_tokens
    assert metrics.tree_steps > 0 and metrics.tree_s > 0
    counted = metrics.tree_steps
    loop.run_until_complete(made.count_tree_drafts())
    assert metrics.tree_steps == counted  # each step once
    assert metrics.cache_errors == 0
    assert all(rollout_info(c).fresh and len(c.token_ids) == 3 for c in completions)

    tokens = np.array([c.token_ids for c in completions])
    first = loop.run_until_complete(next_tokens([]))
    counted = np.bincount(tokens[:, 0], minlength=VOCABULARY).astype(float)
    assert chi_squared(counted, len(tokens) * first) > ERROR_RATE / 2
    common = int(counted.argmax())
    behind = tokens[tokens[:, 0] == common, 1]
    second = loop.run_until_complete(next_tokens([common]))
    counted = np.bincount(behind, minlength=VOCABULARY).astype(float)
    assert chi_squared(counted, len(behind) * second) > ERROR_RATE / 2


class Noting:
    """An engine, and the histories that requests bring it."""

    def __init__(self, llm):
        self.llm, self.histories = llm, []

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def generate(self, prompt, params, request_id, **kwargs):
        _, _, history, _ = params.extra_args[EXTRA_ARG]
        self.histories.append(history)
        return self.llm.generate(prompt, params, request_id, **kwargs)


@pytest.mark.parametrize("before_whole", [0, 5])
def test_the_whole_group_reaches_the_engine_once_however_its_parts_come(
    async_llm, loop, before_whole
):
    """Rows of a group that are claimed at once; the answer with all of it may come last."""
    known = [draft([5 + s] * (s + 1), sample_index=s) for s in range(6)]
    cache, engine, lengths = CacheInParts(known, before_whole), Noting(async_llm), []

    class Made(AsyncSpeculativeLLM):
        def _set_drafts(self, requests, *args):
            super()._set_drafts(requests, *args)
            lengths.append(requests[0].history.mean_length)

    made = Made(engine, cache, CONFIG, policy_version=1)

    async def row(i):
        params = sampling(3, seed=i, ignore_eos=True)
        async for _ in made.generate({"prompt_token_ids": PROMPT}, params, f"part-{i}"):
            pass

    async def rows():
        await asyncio.gather(*map(row, range(6)))

    loop.run_until_complete(rows())
    assert cache.parts == 5 and made.metrics.cache_errors == 0
    [history] = [history for history in engine.histories if history]
    assert sorted(len(tokens) // 4 for _, tokens in history) == [1, 2, 3, 4, 5, 6]
    assert lengths == [3.5] * 6  # of the group, also where a row has a part of it


def test_greedy_rows_draft_where_they_are_told_to_and_are_those_of_plain_decoding(async_llm, loop):
    """As an evaluation asks for them, and the next one, which drafts from it."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)

    async def generated(by, name):
        outputs = [o async for o in by.generate({"prompt_token_ids": PROMPT}, params, name)]
        return list(outputs[-1].outputs[0].token_ids)

    plain = loop.run_until_complete(generated(async_llm, "plain"))
    cache = ClaimingCache()
    for version in (1, 2):
        made = AsyncSpeculativeLLM(async_llm, cache, CONFIG, policy_version=version)
        made.drafts_greedy = True
        assert loop.run_until_complete(generated(made, f"drafted-{version}")) == plain
        loop.run_until_complete(made.count_tree_drafts())
    assert made.metrics.tree_tokens >= 2 * made.metrics.tree_steps

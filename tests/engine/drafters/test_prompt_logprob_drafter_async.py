"""Verification rounds on a real AsyncLLM, which lies in another process and schedules ahead."""

import asyncio

import numpy as np
import pytest

from nemo_specrl import Finish, SpecRLConfig
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from tests.conftest import make_async_engine
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, sampling

CONFIG = SpecRLConfig(
    enabled=True, preset="lossless", tree={"method": "rounds", "max_draft_tokens": 6}
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
        logprobs_mode="processed_logprobs",
    )
    yield llm
    llm.shutdown()


async def row(made, i, max_tokens=3):
    params = sampling(max_tokens, seed=i, ignore_eos=True, flat_logprobs=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPT}
    outputs = [o async for o in made.generate(prompt, params, f"{made.policy_version}-{i}")]
    return outputs[-1].outputs[0]


async def epoch(made, version, rows, max_tokens=3):
    await made.set_policy_version(version)
    return await asyncio.gather(*(row(made, version * rows + i, max_tokens) for i in range(rows)))


async def plain(llm, prefix, **options):
    params = sampling(1, flat_logprobs=True, detokenize=False, **options)
    async for output in llm.generate({"prompt_token_ids": [*PROMPT, *prefix]}, params, str(prefix)):
        return output


async def next_tokens(llm, prefix):
    logprobs = (await plain(llm, prefix, logprobs=VOCABULARY)).outputs[0].logprobs
    p = np.zeros(VOCABULARY)
    p[np.asarray(logprobs.token_ids)] = np.exp(logprobs.logprobs)
    return p / p.sum()


def test_rows_draft_from_the_cache_and_from_each_other(async_llm, loop):
    """Two epochs of one prompt; the second token's distribution is the policy's."""
    made = AsyncSpeculativeLLM(async_llm, ClaimingCache(), CONFIG)
    completions = [c for v in (0, 1) for c in loop.run_until_complete(epoch(made, v, ROWS))]
    metrics = made.metrics
    assert metrics.tree_drafted_tokens > ROWS
    assert 0 < metrics.tree_accepted_tokens < metrics.tree_drafted_tokens
    assert metrics.cache_errors == 0
    assert all(rollout_info(c).fresh and len(c.token_ids) == 3 for c in completions)

    tokens = np.array([c.token_ids for c in completions])
    first = loop.run_until_complete(next_tokens(async_llm, []))
    counted = np.bincount(tokens[:, 0], minlength=VOCABULARY).astype(float)
    assert chi_squared(counted, len(tokens) * first) > ERROR_RATE / 2
    common = int(counted.argmax())
    behind = tokens[tokens[:, 0] == common, 1]
    second = loop.run_until_complete(next_tokens(async_llm, [common]))
    counted = np.bincount(behind, minlength=VOCABULARY).astype(float)
    assert chi_squared(counted, len(behind) * second) > ERROR_RATE / 2


def test_long_rows_leave_their_requests_for_rounds_and_report_the_policys_logprobs(async_llm, loop):
    made = AsyncSpeculativeLLM(async_llm, ClaimingCache(), CONFIG)
    completions = [c for v in (0, 1) for c in loop.run_until_complete(epoch(made, v, 8, 60))]
    metrics = made.metrics
    assert metrics.tree_requests > metrics.rows == 16
    assert metrics.response_tokens == metrics.tree_tokens == 16 * 60
    for completion in completions[-4:]:
        response = list(completion.token_ids)
        again = loop.run_until_complete(plain(async_llm, response, prompt_logprobs=0))
        expected = np.asarray(again.prompt_logprobs.logprobs)[-60:]
        assert np.allclose(np.asarray(completion.logprobs.logprobs), expected, atol=1e-4)


def test_a_cancelled_row_is_kept_and_continued(async_llm, loop):
    cache = ClaimingCache()
    made = AsyncSpeculativeLLM(async_llm, cache, CONFIG)
    loop.run_until_complete(epoch(made, 0, 8, 60))

    async def cancelled():
        await made.set_policy_version(1)
        made.metrics = type(made.metrics)()
        task = asyncio.ensure_future(row(made, 100, 150))
        while made.metrics.tree_tokens < 20:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop.run_until_complete(cancelled())
    [partial] = [r for r in cache.all() if r.finish is Finish.PARTIAL]
    assert partial.policy_version == 1 and len(partial) >= 20

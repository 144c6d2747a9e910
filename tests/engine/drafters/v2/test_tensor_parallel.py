"""Two tensor-parallel ranks of the V2 runner, each in its own process, draft the same tokens.

vLLM does not compare the ranks' drafts: with different ones each rank would judge another
continuation, and their parts of a row would no longer belong together.
"""

import numpy as np
import pytest

from nemo_specrl import AsyncSpeculativeLLM
from tests.engine.drafters.v2.test_async import CONFIG, PROMPTS, arguments, epoch, sampling
from tests.engine.test_async_engine import ClaimingCache
from tests.support.v2_exactness import probabilities
from tests.support.v2_workers import note_drafts, noted_drafts

ROWS, LENGTH = 4, 12


@pytest.fixture(scope="module")
def llm(random_model, loop):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start():
        options = arguments(random_model, "async") | {"tensor_parallel_size": 2}
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    made = loop.run_until_complete(start())
    assert made.vllm_config.use_v2_model_runner
    yield made
    made.shutdown()


@pytest.mark.timeout(900)
def test_both_ranks_draft_the_same(llm, loop, random_model):
    """Over three epochs, while rows of several prompts end in the same steps."""
    loop.run_until_complete(llm.collective_rpc(note_drafts))
    made = AsyncSpeculativeLLM(llm, ClaimingCache(), CONFIG)
    prompts = [prompt for prompt in PROMPTS[:2] for _ in range(ROWS)]
    for version in range(3):
        loop.run_until_complete(made.set_policy_version(version))
        completions, metrics = loop.run_until_complete(
            epoch(made, prompts, params=sampling(LENGTH))
        )
        assert metrics.cache_errors == 0
        assert version == 0 or metrics.tree_accepted_tokens > 0
        for i, prompt in enumerate(PROMPTS[:2]):
            rows = completions[i * ROWS : (i + 1) * ROWS]
            samples = np.array([row.token_ids for row in rows])
            p = probabilities(random_model, samples.tolist(), prompt)
            own = np.log(np.take_along_axis(p, samples[:, :, None], -1))[:, :, 0]
            for row, logprobs in zip(rows, own, strict=True):
                entries = zip(row.logprobs, row.token_ids, strict=True)
                assert [e[t].logprob for e, t in entries] == pytest.approx(logprobs, abs=2e-4)
    first, second = loop.run_until_complete(llm.collective_rpc(noted_drafts))
    assert len(first) > 2 * LENGTH
    assert first == second

"""Two tensor-parallel ranks of the V2 runner, each in its own process, draft the same tokens, and
learn the same of them.

vLLM does not compare the ranks' drafts: with different ones each rank would judge another
continuation, and their parts of a row would no longer belong together.
"""

import asyncio

import numpy as np
import pytest

from nemo_specrl.cache import RolloutStore
from nemo_specrl.engine.counts import counts_async
from nemo_specrl.monitoring import names as metric
from tests.conftest import make_async_engine
from tests.support.v2_drafters import eagle3
from tests.support.v2_exactness import PROMPT, STORE, drafting, likeliest, probabilities, put
from tests.support.v2_workers import note_drafts, noted_drafts

from .test_async import sampling

ROWS, LENGTH, EPOCHS = 3, 10, 2
PROMPTS = [[*PROMPT[:-1], token] for token in (3, 4)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-eagle3"])
def test_both_ranks_draft_the_same(random_model, tmp_path, loop, beside):
    """Over two epochs, while rows of several prompts end in the same steps."""
    options = drafting(tmp_path / "cache", 4)
    store = RolloutStore(tmp_path / "cache", vocabulary=STORE)
    for prompt in PROMPTS:
        put(store, prompt, likeliest(random_model, 1, prompt))
    store.close()
    if beside:
        head = str(eagle3(random_model, tmp_path / "eagle3"))
        own = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
        options["speculative_config"] = own
    llm = make_async_engine(
        random_model,
        loop,
        max_model_len=96,
        max_num_seqs=16,
        tensor_parallel_size=2,
        seed=0,
        async_scheduling=True,
        **options,
    )

    async def row(name, prompt):
        stream = llm.generate({"prompt_token_ids": prompt}, sampling(LENGTH), name)
        return [output async for output in stream][-1].outputs[0]

    async def epoch(number):
        names = [(f"{number}-{i}", prompt) for prompt in PROMPTS for i in range(ROWS)]
        return await asyncio.gather(*(row(name + str(p), p) for name, p in names))

    try:
        assert llm.vllm_config.use_v2_model_runner
        loop.run_until_complete(llm.collective_rpc(note_drafts))
        for number in range(EPOCHS):
            completions = loop.run_until_complete(epoch(number))
            for i, prompt in enumerate(PROMPTS):
                rows = completions[i * ROWS : (i + 1) * ROWS]
                samples = np.array([row.token_ids for row in rows])
                p = probabilities(random_model, samples.tolist(), prompt)
                own = np.log(np.take_along_axis(p, samples[:, :, None], -1))[:, :, 0]
                for completion, logprobs in zip(rows, own, strict=True):
                    entries = zip(completion.logprobs, completion.token_ids, strict=True)
                    assert [e[t].logprob for e, t in entries] == pytest.approx(logprobs, abs=2e-4)
        assert loop.run_until_complete(counts_async(llm))[metric.ACCEPTED_TOKENS] > 0
        (first, learned), second = loop.run_until_complete(llm.collective_rpc(noted_drafts))
        assert len(first) > LENGTH and sum(map(sum, learned)) > LENGTH
        assert (first, learned) == second
        choices = {row for step in first if len(step) == 2 for row in step[0]}
        assert choices == ({False, True} if beside else set())
    finally:
        llm.shutdown()

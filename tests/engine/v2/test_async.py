"""AsyncLLM on the V2 runner, whose engine core and drafter are in another process.

Triton's interpreter runs there, too (``tests.support.v2_spawned``), and drafts are made by the
numpy reference, as in ``test_exactness``.
"""

import asyncio

import numpy as np
import pytest

from nemo_specrl.engine.counts import counts_async
from tests.conftest import make_async_engine
from tests.support.v2_exactness import (
    BENT_SEEN,
    VOCABULARY,
    bent_sampler,
    drafting,
    gained,
    likeliest,
    p_value,
    probabilities,
    put,
)
from tests.support.v2_workers import refitted

K = 4
LIKELIEST = {"temperature": 0.01}
"""Not temperature 0: such requests are not drafted for. The interpreter has no top-k there."""


@pytest.fixture(scope="module")
def llm(random_model, cache_dir, loop):
    """The engine; ``llm.rpc`` asks its worker and waits."""
    made = make_async_engine(
        random_model,
        loop,
        max_model_len=96,
        max_num_seqs=16,
        max_logprobs=VOCABULARY,
        seed=0,
        worker_extension_cls="nemo_specrl.engine.refit.RefitExtension",
        async_scheduling=True,
        **drafting(cache_dir, K),
    )
    config = made.vllm_config
    assert config.use_v2_model_runner and config.scheduler_config.async_scheduling
    made.rpc = lambda *args: loop.run_until_complete(made.collective_rpc(*args))[0]
    yield made
    made.shutdown()


def sampling(max_tokens, **options):
    from vllm import SamplingParams

    usual = {"temperature": 1.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    return SamplingParams(max_tokens=max_tokens, **usual | options)


class Rows:
    """Rows of an engine, each of which comes when the one before it has its second token."""

    def __init__(self, llm, loop):
        self.llm, self.loop, self.count = llm, loop, 0

    def __call__(self, prompt, params):
        """Completions of rows with these parameters, in order, and what their drafts yielded."""
        return self.loop.run_until_complete(self._all(prompt, params))

    async def _all(self, prompt, params):
        begun = [asyncio.Event() for _ in params]
        before = await counts_async(self.llm)
        completions = await asyncio.gather(
            *(
                self._one(prompt, p, begun[i - 1] if i else None, begun[i])
                for i, p in enumerate(params)
            )
        )
        return completions, gained(await counts_async(self.llm), before, K)

    async def _one(self, prompt, params, before, begun):
        if before is not None:
            await before.wait()
        self.count += 1
        stream = self.llm.generate({"prompt_token_ids": list(prompt)}, params, f"row{self.count}")
        try:
            async for output in stream:
                if len(output.outputs[0].token_ids) >= 2:
                    begun.set()
        finally:
            begun.set()
        return output.outputs[0]


@pytest.fixture
def rows(llm, loop):
    return Rows(llm, loop)


@pytest.mark.timeout(600)
def test_exact(llm, rows, store, prompt, random_model):
    """Each token of rows that come at different times has the policy's distribution.

    With good drafts, parts of which are accepted. The bound is 1e-3: a correct sampler fails for
    0.1 % of all seeds, and these are fixed. The control: a sampler that is bent is seen.
    """

    def tested(prompt, seed):
        put(store, prompt, likeliest(random_model, 1, prompt))
        completions, yielded = rows(prompt, [sampling(6, seed=seed + i) for i in range(32)])
        samples = np.array([completion.token_ids for completion in completions])
        assert samples.shape == (32, 6)
        assert yielded > 1.1  # parts of drafts are accepted
        p = probabilities(random_model, samples.tolist(), prompt)
        own = np.log(np.take_along_axis(p, samples[:, :, None], -1))[:, :, 0]
        for completion, logprobs in zip(completions, own, strict=True):
            entries = zip(completion.logprobs, completion.token_ids, strict=True)
            assert [e[t].logprob for e, t in entries] == pytest.approx(logprobs, abs=2e-4)
        return p_value(samples, p)

    p = tested(prompt, 0)
    print(f"p = {p:.3g}")
    assert p > 1e-3
    with bent_sampler(llm.rpc):
        assert tested([*prompt[:-1], 19], 1000) < BENT_SEEN


def logprobs_of(completion):
    return [e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]


def test_rows_beside_rows_that_are_aborted(llm, rows, loop, prompt, random_model):
    """All have the log-probs that the model gives their tokens, and draft from what was aborted."""
    aborted = []

    async def abort_some():
        while len(aborted) < 3:
            await asyncio.sleep(0.2)
            aborted.append(f"row{rows.count - len(aborted)}")
            await llm.abort(aborted[-1])

    task = loop.create_task(abort_some())
    completions, yielded = rows(prompt, [sampling(40, seed=i, **LIKELIEST) for i in range(10)])
    loop.run_until_complete(task)
    whole = [c for c in completions if c.finish_reason != "abort"]
    assert 7 <= len(whole) < 10 and all(len(c.token_ids) == 40 for c in whole)
    for completion in completions:
        tokens = list(completion.token_ids)
        p = probabilities(random_model, [tokens], prompt)[0]
        own = np.log(p[np.arange(len(tokens)), tokens])
        assert logprobs_of(completion) == pytest.approx(own, abs=2e-4)
    assert yielded > 1.5


def same_up_to_a_tie(drafted, plain):
    """Rows of the likeliest tokens part where two tokens are nearly as likely, and not before."""
    pairs = zip(drafted.token_ids, plain.token_ids, strict=True)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.token_ids))
    ours, theirs = logprobs_of(drafted), logprobs_of(plain)
    assert ours[:n] == pytest.approx(theirs[:n], abs=2e-4)
    assert n == len(theirs) or theirs[n] - ours[n] < 0.15  # e^-15 at temperature 0.01


def test_refits(llm, rows, loop, prompt, random_model):
    """Drafts of other weights cost no correctness."""
    likely, greedy = sampling(24, seed=0, **LIKELIEST), sampling(24, temperature=0)
    ((old,), _) = rows(prompt, [likely])
    try:
        llm.rpc(refitted, None, (str(random_model), 0.05))
        loop.run_until_complete(llm.reset_prefix_cache())
        ((plain,), _) = rows(prompt, [greedy])
        (drafted, _) = rows(prompt, [likely] * 2)
        assert logprobs_of(plain)[0] != pytest.approx(logprobs_of(old)[0], abs=2e-4)
        for completion in drafted:
            same_up_to_a_tie(completion, plain)
        _, yielded = rows(prompt, [likely])
        assert yielded > 2
    finally:
        llm.rpc(refitted, None, (str(random_model), 0.0))
        loop.run_until_complete(llm.reset_prefix_cache())

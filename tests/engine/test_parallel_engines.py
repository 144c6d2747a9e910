"""Engines of two ranks, two pipeline stages or two data-parallel cores, in other processes."""

import asyncio

import numpy as np
import pytest

from nemo_specrl import SpecRLConfig
from nemo_specrl.engine.async_engine import AsyncSpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import make_async_engine
from tests.engine.test_async_engine import ClaimingCache
from tests.support.engines import needs_drafters, needs_free_workers, sampling

pytestmark = pytest.mark.timeout(600)
PROMPTS = [[1, *encode(f"{a}+{b}=?")] for a in (12, 34) for b in (5, 67)]
ROWS, LENGTH = 2, 24
FAITHFUL = SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0)
LOSSLESS = SpecRLConfig(
    enabled=True, preset="lossless", tree={"max_draft_tokens": 6, "adaptive": False}
)
SHAPES = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}


def start(model, loop, shape, config):
    llm = make_async_engine(
        model,
        loop,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        **SHAPES[shape],
        **(engine_options(config) if config is LOSSLESS else {}),
    )
    if shape == "pipeline":
        # vLLM's CPU build leaves out the dummy run that makes the tensors which its stages exchange
        # where it compiles nothing; without them its own rows fail, too.
        loop.run_until_complete(llm.collective_rpc("execute_dummy_batch"))
    return llm


def epochs(llm, loop, config, count):
    """Rows of each epoch by prompt and row, and the metrics of each epoch."""
    made = AsyncSpeculativeLLM(llm, ClaimingCache(), config)

    async def row(version, p, i):
        # Seeds differ by epoch, so that what is the same has come from the draft.
        params = sampling(LENGTH, seed=100 * version + 10 * p + i, ignore_eos=True)
        prompt = {"prompt_token_ids": PROMPTS[p]}
        stream = made.generate(prompt, params, f"{version}-{p}-{i}")
        return [output async for output in stream][-1].outputs[0]

    async def epoch(version):
        await made.set_policy_version(version)
        asked = [row(version, p, i) for p in range(len(PROMPTS)) for i in range(ROWS)]
        rows = await asyncio.gather(*asked)
        await made.count_tree_drafts()
        metrics, made.metrics = made.metrics, type(made.metrics)()
        return rows, metrics

    return [loop.run_until_complete(epoch(version)) for version in range(count)]


def check_logprobs(rows, engine):
    """Log-probs of rows are those that an engine of one process gives their tokens."""
    prompts = [prompt for prompt in PROMPTS for _ in range(ROWS)]
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = list(row.token_ids)
        (output,) = engine.generate(
            {"prompt_token_ids": prompt + tokens},
            sampling(1, prompt_logprobs=0, seed=None),
            use_tqdm=False,
        )
        exact = [
            entry[token].logprob
            for token, entry in zip(tokens, output.prompt_logprobs[len(prompt) :], strict=True)
        ]
        given = [entry[token].logprob for token, entry in zip(tokens, row.logprobs, strict=True)]
        assert given == pytest.approx(exact, abs=1e-3)


@needs_free_workers
@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_reuse(random_model, llm, loop, shape):
    """Unchanged weights accept all of a draft, whatever the engine consists of."""
    several = start(random_model, loop, shape, FAITHFUL)
    try:
        (first, _), (second, metrics) = epochs(several, loop, FAITHFUL, 2)
    finally:
        several.shutdown()
    assert metrics.cache_errors == metrics.refused_drafts == 0
    values = metrics.as_dict()
    assert values["spec_rl/draft_coverage"] == values["spec_rl/accepted_fraction"] == 1
    responses = {tuple(row.token_ids) for row in first}
    assert {tuple(row.token_ids) for row in second} <= responses and len(responses) > ROWS
    check_logprobs(first, llm)
    check_logprobs(second, llm)


@needs_drafters
@pytest.mark.parametrize("shape", ["tensor", "data"])
def test_lossless_drafts(random_model, llm, loop, shape):
    """The V1 proposer; pipeline stages are refused, since vLLM's earlier ones fail at the start."""
    several = start(random_model, loop, shape, LOSSLESS)
    try:
        done = epochs(several, loop, LOSSLESS, 3)
    finally:
        several.shutdown()
    for rows, metrics in done:
        assert metrics.cache_errors == 0
        check_logprobs(rows, llm)
    drafted = [metrics.tree_drafted_tokens for _, metrics in done]
    assert all(np.array(drafted[1:]) > 0)
    assert sum(metrics.tree_accepted_tokens for _, metrics in done) > 0

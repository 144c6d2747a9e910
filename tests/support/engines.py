"""Prompts, parameters and exact probabilities that the engine's tests share."""

import asyncio
import math

import numpy as np
import pytest
from scipy import stats
from vllm import SamplingParams
from vllm.platforms import current_platform

from nemo_specrl.trainer.data.toy_tasks import encode

VOCABULARY = 32  # of the random model
PROMPT = [1, *encode("12+34=?")]
EOS = 2
needs_cpu_build = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="this vLLM is not a CPU build, whose defect it is about"
)


def event_loop():
    """Yield an event loop, and close it without leaving tasks."""
    loop = asyncio.new_event_loop()
    yield loop
    tasks = asyncio.all_tasks(loop)  # that of vLLM 0.25 which takes an engine's outputs outlives it
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def scheduler_of(llm):
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def params(max_tokens, **options):
    return SamplingParams(
        **{
            "temperature": 1.0,
            "max_tokens": max_tokens,
            "detokenize": False,
            "ignore_eos": True,
            **options,
        }
    )


def distribution(llm, prefix=()):
    """The engine's own probabilities of the next token, float64 [vocabulary]."""
    (output,) = llm.generate(
        {"prompt_token_ids": [*PROMPT, *prefix]},
        SamplingParams(max_tokens=1, logprobs=VOCABULARY, temperature=1.0, detokenize=False),
        use_tqdm=False,
    )
    (position,) = output.outputs[0].logprobs
    p = np.zeros(VOCABULARY)
    for token, entry in position.items():
        p[token] = math.exp(entry.logprob)
    assert p.sum() == pytest.approx(1, abs=1e-3)
    return p / p.sum()


def chi_squared(counts, expected, *, cells=5):
    """p-value of counts under expected ones, with cells of fewer than 5 merged."""
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 5:
            counts[-2] += counts[-1]
            expected[-2] += expected[-1]
            counts, expected = counts[:-1], expected[:-1]
    assert len(counts) >= cells, "too few cells for a test that could fail"
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue

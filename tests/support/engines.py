"""Prompts, drafts and calls that the engine's tests share."""

import importlib.util
import inspect
import math

import numpy as np
import pytest
from scipy import stats
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils

from nemo_specrl import Finish, Rollout, SpecRLConfig, prompt_key
from nemo_specrl.engine.vllm.environment import cpu_thread_binding
from nemo_specrl.trainer.data.toy_tasks import encode

VOCABULARY = 32  # of the random model
PROMPT = [1, *encode("12+34=?")]
SURE = -60.0  # an old log-prob that makes acceptance certain
LOSSLESS = SpecRLConfig(
    enabled=True,
    preset="lossless",
    tree={"max_draft_tokens": 6, "adaptive": False},  # so that runs repeat to the token
)
DRAFTS = importlib.util.find_spec("vllm.v1.spec_decode.custom_class_proposer") is not None
_KERNEL = getattr(cpu_triton_utils, "_rejection_greedy_sample_kernel_impl", None)
needs_drafters = pytest.mark.skipif(
    _KERNEL is None or "SYNTHETIC_MODE" not in inspect.signature(_KERNEL).parameters,
    reason="the CPU build of this vLLM (0.20) calls its rejection sampler with arguments that it "
    "does not take: no drafter runs on it",
)
needs_free_workers = pytest.mark.skipif(
    cpu_thread_binding() != "nobind",
    reason="the CPU build of this vLLM (0.20) binds each worker to cores, which all engines of a "
    "process share, and runs it in a process of its own: of two workers one finds none",
)
needs_cpu_build = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="this vLLM is not a CPU build, whose defect it is about"
)
NEVER, STRICT = 0.0, 1e-9  # an old log-prob and a lenience that reject (accepted with p < 1e-8)


def sampling(max_tokens=24, **options):
    options = {"seed": 7, "logprobs": 0, **options}
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **options)


def draft(tokens, logprobs=SURE, *, sample_index=0, finish=Finish.STOP, version=0, prompt=PROMPT):
    logprobs = np.broadcast_to(np.float32(logprobs), (len(tokens),))
    return Rollout(prompt_key(prompt), sample_index, tokens, logprobs, finish, version)


def generate(made, prompt=PROMPT, params=None, rows=1, **options):
    params = sampling() if params is None else params
    prompts = [{"prompt_token_ids": list(prompt)} for _ in range(rows)]
    return made.generate(prompts, params, use_tqdm=False, **options)


def only(outputs):
    (output,) = outputs
    (completion,) = output.outputs
    return completion


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

"""What the tests of drafts in the V2 runner share: engines, and whether samples have the policy's
distribution.

A sampler that is bent, which accepts each draft token that was to be rejected, is the control: a
test that could not tell would pass with it, too.
"""

import contextlib
import functools
import itertools

import numpy as np
import torch
from scipy import stats

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.engine.counts import counts
from nemo_specrl.engine.options import engine_options
from nemo_specrl.monitoring import names as metric
from tests.conftest import make_engine

VOCABULARY = 32
"""Of the random model."""
PROMPT = [1, 4, 5, 13, 6, 7, 15, 18]
CELLS = 8
BENT_SEEN = 1e-6
"""A test with the bent sampler has to have a p-value below it."""
STORE = "0" * 32
"""Name of the store: these engines have no tokenizer by which it would be named."""


def drafting(cache_dir, tokens, **draft):
    """Arguments of an engine whose look-ups are never late, with drafts of so many tokens."""
    return engine_options(
        cache_dir=cache_dir,
        vocabulary=STORE,
        deadline_ms=60_000,
        max_tokens=tokens,
        max_bytes=8 << 20,
        **{"adaptive": False, **draft},
    )


def make_llm(folder, scheduling, **options):
    """A plain ``vllm.LLM`` on the V2 runner, in this process.

    Args:
        folder: of the model.
        scheduling: "sync" or "async".
        options: further arguments; those of :func:`drafting` make it draft.
    """
    made = make_engine(
        folder,
        **{
            "max_model_len": 96,
            "max_num_seqs": 64,
            "enforce_eager": not torch.cuda.is_available(),
            "skip_tokenizer_init": True,
            "max_logprobs": VOCABULARY,
            "async_scheduling": scheduling == "async",
            **options,
        },
    )
    config = made.llm_engine.vllm_config
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling == (scheduling == "async")
    return made


def runner_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def put(store, prompt, responses):
    """Keep responses to a prompt, before any of its requests has come."""
    store.put(
        [
            Rollout(prompt_key(prompt), tokens, Finish.LENGTH, identity=1 + i)
            for i, tokens in enumerate(responses)
        ]
    )


def gained(now, before, drafted):
    """Tokens of a verified draft and the one behind it, on average, between two counts.

    Args:
        now: counts of the engine.
        before: its counts before.
        drafted: tokens of a draft.
    """
    accepted, verified = (
        now[name] - before[name] for name in (metric.ACCEPTED_TOKENS, metric.DRAFTED_TOKENS)
    )
    return 1 + drafted * accepted / max(1, verified)


class Gained:
    """What drafts of an engine have yielded since this was made: see :func:`gained`."""

    def __init__(self, llm):
        self._llm, self._before = llm, counts(llm)

    def __call__(self):
        drafter = self._llm.llm_engine.vllm_config.speculative_config
        return gained(counts(self._llm), self._before, drafter.num_speculative_tokens)


@functools.cache
def _model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def probabilities(folder, sequences, prompt=PROMPT):
    """The model's, of each token behind the prompt, float64 ``[sequences, tokens, vocabulary]``."""
    with torch.inference_mode():
        logits = _model(folder)(torch.tensor([[*prompt, *tokens] for tokens in sequences])).logits
    return torch.softmax(logits[:, len(prompt) - 1 : -1].double(), -1).numpy()


def likeliest(folder, sign, prompt=PROMPT):
    """For each first token, the most (or the least) likely ones behind it: responses of 8."""
    responses = [[token] for token in range(VOCABULARY)]
    for _ in range(7):
        p = probabilities(folder, [[*response, 0] for response in responses], prompt)[:, -1]
        responses = [[*r, int((sign * q).argmax())] for r, q in zip(responses, p, strict=True)]
    return responses


def p_value(samples, p):
    """Of a chi-squared test that samples have these distributions, each given those before it.

    The probability of all tokens more likely than the sampled one, and a random part of its own,
    is uniform where they have, and independent from token to token.

    Args:
        samples: int ``[rows, tokens]``.
        p: float64 ``[rows, tokens, vocabulary]``.
    """
    own = np.take_along_axis(p, samples[:, :, None], -1)
    before = np.where(p > own, p, 0).sum(-1)
    u = before + own[:, :, 0] * np.random.default_rng(1).random(samples.shape)
    return stats.chisquare(np.histogram(u, CELLS, (0, 1))[0]).pvalue


def bend_sampler(worker):
    """Accept, in the process of a worker, the first draft token of each row that is rejected."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    straight = rejection_sampler.rejection_sample

    def bent(target_logits, draft_logits, draft_sampled, cu_num_logits, *args, **kwargs):
        sampled, num_sampled = straight(
            target_logits, draft_logits, draft_sampled, cu_num_logits, *args, **kwargs
        )
        for i, (begin, end) in enumerate(itertools.pairwise(cu_num_logits.tolist())):
            last = int(num_sampled[i]) - 1
            if 0 <= last < end - begin - 1:
                sampled[i, last] = draft_sampled[begin + 1 + last]
        return sampled, num_sampled

    bent.straight = straight
    rejection_sampler.rejection_sample = bent


def straighten_sampler(worker):
    """Undo :func:`bend_sampler`."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    rejection_sampler.rejection_sample = rejection_sampler.rejection_sample.straight


@contextlib.contextmanager
def bent_sampler(collective_rpc):
    """The sampler of an engine is bent meanwhile. ``collective_rpc`` is its, and does not wait."""
    collective_rpc(bend_sampler)
    try:
        yield
    finally:
        collective_rpc(straighten_sampler)

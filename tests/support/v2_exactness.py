"""What the tests of drafts in the V2 runner share: whether samples have the policy's distribution.

A sampler that is bent, which accepts each draft token that was to be rejected, is the control: a
test that could not tell would pass with it, too.
"""

import contextlib
import itertools

import numpy as np
import torch
from scipy import stats

from tests.support.engines import PROMPT, VOCABULARY

CELLS = 8
BENT_SEEN = 1e-6
"""A test with the bent sampler has to have a p-value below it."""


def probabilities(folder, sequences, prompt=PROMPT):
    """The model's, of each token behind the prompt, float64 ``[sequences, tokens, vocabulary]``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens] for tokens in sequences])).logits
    return torch.softmax(logits[:, len(prompt) - 1 : -1].double(), -1).numpy()


def likeliest(folder, sign):
    """For each first token, the most (or the least) likely ones behind it: responses of 8."""
    responses = [[token] for token in range(VOCABULARY)]
    for _ in range(7):
        p = probabilities(folder, [[*response, 0] for response in responses])[:, -1]
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

"""The distribution of rollouts, by chi-squared tests on the real engine.

Each test states its own error rate; draws are seeded, so that a test that passes goes on passing.
"""

import math

import numpy as np
import pytest
from scipy import stats
from vllm import SamplingParams

from nemo_specrl import Finish
from nemo_specrl.engine.refit import refit
from nemo_specrl.reuse.llm import PrefixReuse
from tests.conftest import weights_of
from tests.reuse.support import DictCache, block
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, distribution

pytestmark = pytest.mark.timeout(400)  # so that it begins early: see tests/conftest.py
ERROR_RATE = 1e-4


def sample(made, rows, max_tokens):
    params = SamplingParams(
        temperature=1.0,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
    )
    outputs = made.generate([PROMPT] * rows, params)
    return outputs, np.array([o.outputs[0].token_ids for o in outputs])


def test_with_unchanged_weights_reuse_has_the_plain_distribution(llm, reuse):
    """Pairs of tokens: the first from a draft, the second from its continuation, against exact p.

    The drafts were cut to one token, so that half of what is compared was decoded behind a verified
    prefix. Lenience 1, where the rule is exact: so are its rows beside fresh ones.
    """
    rows = 8_000
    first = distribution(llm)
    common = np.argsort(-first)[:4]
    second = {int(t): distribution(llm, [int(t)]) for t in common}
    cache = DictCache()
    sample(reuse(cache), rows, 1)
    made = reuse(cache, version=1, lenience=1.0, fresh_fraction=0.2)
    outputs, tokens = sample(made, rows, 2)
    # Decoding and prefill round differently even in float32: not every token is accepted.
    assert made.metrics.accepted_tokens >= made.metrics.draft_tokens - 2
    fresh = np.array([o.outputs[0].spec_rl.fresh for o in outputs])
    assert made.metrics.draft_tokens == (~fresh).sum() and 1333 < fresh.sum() < 1867
    for some in (fresh, ~fresh):
        counts = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(counts, (tokens[some, 0], tokens[some, 1]), 1)
        assert chi_squared(counts.sum(axis=1), some.sum() * first) > ERROR_RATE / 10
        for token, p in () if some is fresh else second.items():
            assert chi_squared(counts[token], counts[token].sum() * p) > ERROR_RATE / 10


@pytest.fixture(scope="module")
def changed(engine, random_model):
    """8,000 one-token drafts of the first weights, and other weights."""
    refit(engine, weights_of(random_model))
    old = distribution(engine)
    cache = DictCache()
    made = PrefixReuse(engine, block(), cache)
    made.policy_version = 0
    sample(made, 8_000, 1)
    drafts = cache.all()
    assert all(d.finish is Finish.LENGTH for d in drafts)
    return old, drafts, weights_of(random_model, noise=0.05, seed=3)


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.5)])
def test_with_changed_weights_one_token_is_distributed_as_stated(llm, reuse, changed, lenience):
    """min(p_old, l p_new) + r p_new, with r the rejected mass; and the behaviour log-probs bring
    expectations back to the new policy's, but for their mean, which is 1 + r.
    """
    old, drafts, weights = changed
    refit(llm, weights)
    new = distribution(llm)
    kept = np.minimum(old, lenience * new)
    rejected = 1 - kept.sum()
    assert 0.02 < rejected < 0.6, "weights that differ too little or too much show nothing"
    options = {"lenience": lenience, "reported_logprobs": "behaviour"}
    made = reuse(DictCache(drafts), version=1, **options)
    outputs, tokens = sample(made, len(drafts), 1)
    n, counts = len(drafts), np.bincount(tokens[:, 0], minlength=VOCABULARY).astype(float)
    assert chi_squared(counts, n * (kept + rejected * new)) > ERROR_RATE / 4
    # The test can tell them apart: neither the new policy's distribution fits, nor the old one's.
    assert chi_squared(counts, n * new) < 1e-6
    assert chi_squared(counts, n * old) < 1e-6
    accepted = made.metrics.accepted_tokens
    assert stats.binomtest(accepted, n, kept.sum()).pvalue > ERROR_RATE / 4

    reported = np.array([o.outputs[0].logprobs.logprobs[0] for o in outputs])
    policy = np.array([o.outputs[0].spec_rl.policy_logprobs[0] for o in outputs])
    assert policy == pytest.approx(np.log(new)[tokens[:, 0]], abs=1e-3)
    weight = np.exp(policy - reported)
    z = (weight.mean() - (1 + rejected)) / (weight.std() / math.sqrt(n))
    assert stats.norm.sf(abs(z)) * 2 > ERROR_RATE / 24
    common = np.argsort(-new)[:10]
    for token in common:
        hit = (tokens[:, 0] == token).astype(float)
        estimate = (weight * hit).mean() / weight.mean()
        spread = (weight * (hit - estimate)).std() / weight.mean() / math.sqrt(n)
        assert stats.norm.sf(abs(estimate - new[token]) / spread) * 2 > ERROR_RATE / 24
    plain = counts[common] / n  # without the weights they are off by far more than chance
    assert (np.abs(plain - new[common]) / np.sqrt(plain * (1 - plain) / n)).max() > 5

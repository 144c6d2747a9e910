"""The distribution of rollouts, by chi-squared tests on the real engine.

Each test states its own error rate; draws are seeded, so that a test that passes goes on passing.
"""

import math

import numpy as np
import pytest
from scipy import stats
from vllm import SamplingParams

from nemo_specrl import Finish, SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.outputs import rollout_info
from nemo_specrl.engine.vllm.refit import refit
from tests.conftest import DictCache, weights_of
from tests.support.engines import PROMPT, VOCABULARY, chi_squared, distribution

ERROR_RATE = 1e-4


def params(max_tokens, **options):
    return SamplingParams(
        temperature=1.0,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        **options,
    )


def sample(made, rows, max_tokens):
    outputs = made.generate([PROMPT] * rows, params(max_tokens), use_tqdm=False)
    return outputs, np.array([o.outputs[0].token_ids for o in outputs])


def test_with_unchanged_weights_reuse_has_the_plain_distribution(llm, speculative):
    """Pairs of tokens: the first from a draft, the second from its continuation, against exact p.

    The drafts were cut to one token, so that half of what is compared was decoded on the prefix
    cache that verification filled. Strict and lenient, each with half the error rate.
    """
    rows = 12_000
    first = distribution(llm)
    common = np.argsort(-first)[:4]
    second = {int(t): distribution(llm, [int(t)]) for t in common}
    for lenience in (1.0, math.exp(0.5)):
        cache = DictCache()
        sample(speculative(cache), rows, 1)
        made = speculative(cache, version=1, lenience=lenience)
        _, tokens = sample(made, rows, 2)
        assert made.metrics.accepted_tokens == made.metrics.draft_tokens == rows
        assert made.metrics.decoded_tokens == rows
        counts = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
        marginal = chi_squared(counts.sum(axis=1), rows * first)
        assert marginal > ERROR_RATE / 10
        for token, p in second.items():
            conditional = chi_squared(counts[token], counts[token].sum() * p)
            assert conditional > ERROR_RATE / 10


@pytest.fixture(scope="module")
def changed(engine, random_model):
    """20,000 one-token drafts of the first weights, and both weights' exact distributions."""
    refit(engine, weights_of(random_model))
    old = distribution(engine)
    cache = DictCache()
    made = SpeculativeLLM(
        engine, cache, SpecRLConfig(enabled=True, preset="faithful", fresh_fraction=0.0)
    )
    sample(made, 20_000, 1)
    drafts = cache.all()
    assert all(d.finish is Finish.LENGTH for d in drafts)
    return old, drafts, weights_of(random_model, noise=0.05, seed=3)


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.5)])
def test_with_changed_weights_one_token_is_distributed_as_stated(
    llm, speculative, changed, lenience
):
    """min(p_old, l p_new) + r p_new, with r the rejected mass."""
    old, drafts, weights = changed
    refit(llm, weights)
    new = distribution(llm)
    kept = np.minimum(old, lenience * new)
    rejected = 1 - kept.sum()
    assert 0.02 < rejected < 0.6, "weights that differ too little or too much show nothing"
    stated = kept + rejected * new
    made = speculative(DictCache(drafts), version=1, lenience=lenience)
    _, tokens = sample(made, len(drafts), 1)
    counts = np.bincount(tokens[:, 0], minlength=VOCABULARY).astype(float)
    assert chi_squared(counts, len(drafts) * stated) > ERROR_RATE / 2
    # The test can tell them apart: neither the new policy's distribution fits, nor the old one's.
    assert chi_squared(counts, len(drafts) * new) < 1e-6
    assert chi_squared(counts, len(drafts) * old) < 1e-6
    accepted = made.metrics.accepted_tokens
    assert stats.binomtest(accepted, len(drafts), kept.sum()).pvalue > ERROR_RATE / 2


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.5)])
def test_behaviour_weights_bring_expectations_back_to_the_new_policy(
    llm, speculative, changed, lenience
):
    """Weights p_new / mu: normalised by their mean, expectations are those of p_new.

    Their mean is 1 + r, since a rejected token's mass comes out a second time.
    """
    old, drafts, weights = changed
    refit(llm, weights)
    new = distribution(llm)
    rejected = 1 - np.minimum(old, lenience * new).sum()
    made = speculative(
        DictCache(drafts), version=1, lenience=lenience, reported_logprobs="behaviour"
    )
    outputs, tokens = sample(made, len(drafts), 1)
    reported = np.array([o.outputs[0].logprobs.logprobs[0] for o in outputs])
    policy = np.array([rollout_info(o.outputs[0]).policy_logprobs[0] for o in outputs])
    weight = np.exp(policy - reported)
    n = len(drafts)
    z = (weight.mean() - (1 + rejected)) / (weight.std() / math.sqrt(n))
    assert stats.norm.sf(abs(z)) * 2 > ERROR_RATE / 12
    common = np.argsort(-new)[:10]
    for token in common:
        hit = (tokens[:, 0] == token).astype(float)
        estimate = (weight * hit).mean() / weight.mean()
        spread = (weight * (hit - estimate)).std() / weight.mean() / math.sqrt(n)
        assert stats.norm.sf(abs(estimate - new[token]) / spread) * 2 > ERROR_RATE / 12
    # Without the weights the same expectations are off by far more than chance.
    plain = np.array([(tokens[:, 0] == t).mean() for t in common])
    error = np.sqrt(plain * (1 - plain) / n)
    assert (np.abs(plain - new[common]) / error).max() > 5

"""History beside a drafter of the user's own: each row takes the better draft, and stays exact."""

import numpy as np
import pytest

from nemo_specrl.engine.patches import vllm_version
from nemo_specrl.errors import ConfigError
from tests.support.v2_drafters import eagle3, noisy
from tests.support.v2_exactness import (
    BENT_SEEN,
    Gained,
    bent_sampler,
    drafting,
    likeliest,
    make_llm,
    p_value,
    probabilities,
    put,
    runner_of,
)

from .test_exactness import generate, tokens_of

K, ROWS, TOKENS = 3, 24, 6


@pytest.fixture(scope="module")
def drafters(random_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "draft_model": noisy(random_model, folder / "noisy", 0.1),
        "eagle3": eagle3(random_model, folder / "eagle3"),
    }


def own(drafters, method, **others):
    model = {"method": method, "model": str(drafters[method])}
    return {**model, "num_speculative_tokens": K, **others}


@pytest.fixture(params=["draft_model-async", "eagle3-sync"])
def llm(request, engines, random_model, cache_dir, drafters, by_reference):
    method, scheduling = request.param.split("-")
    if method == "draft_model" and vllm_version() < (0, 32):
        pytest.skip("this vLLM has no draft models in its V2 runner")
    if request.param not in engines:
        options = drafting(cache_dir, K)
        options["speculative_config"] = own(drafters, method)
        engines[request.param] = make_llm(random_model, scheduling, **options)
    return engines[request.param]


def test_exact(llm, store, prompt, random_model, monkeypatch):
    """Each token has the policy's distribution, whichever draft a row takes.

    The bound is 1e-3 for each of four tests: a correct sampler fails one of them for 0.4 % of all
    seeds, and these are fixed.
    """
    history, chosen = runner_of(llm).speculator.history, []
    better = history.history_is_better

    def noting(rows):
        chosen.extend(better(rows).tolist())
        return better(rows)

    monkeypatch.setattr(history, "history_is_better", noting)

    def tested(prompt, seed, sign):
        put(store, prompt, likeliest(random_model, sign, prompt))
        outputs = generate(llm, prompt, ROWS, max_tokens=TOKENS, seed=seed)
        samples = np.array(tokens_of(outputs))
        assert samples.shape == (ROWS, TOKENS)
        return p_value(samples, probabilities(random_model, samples.tolist(), prompt))

    gained = Gained(llm)
    p = tested(prompt, 0, 1)
    yielded, share = gained(), np.mean(chosen)
    print(f"p = {p:.3g}, {yielded:.2f} tokens a step, from history {share:.2f}")
    print(history.index.outcomes[-K:].tolist())
    assert p > 1e-3
    assert yielded > 1.1 and 0 < share < 1
    assert history.index.outcomes[-K, 0] > 0
    with bent_sampler(llm.collective_rpc):
        assert tested([*prompt[:-1], 19], 100, -1) < BENT_SEEN


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method = 'probabilistic'"),
        ({"num_speculative_tokens_per_batch_size": [(1, 512, 2)]}, "_per_batch_size: drafts of"),
        ({"method": "ngram", "prompt_lookup_max": 2}, "method = 'ngram': "),
    ],
)
def test_refused(random_model, cache_dir, drafters, options, refusal):
    config = drafting(cache_dir, K)
    config["speculative_config"] = own(drafters, "eagle3") | options
    with pytest.raises((ConfigError, ValueError), match=refusal):
        make_llm(random_model, "sync", **config)

"""vLLM's adaptive verification, which verifies the tokens of drafts that are worth their time.

On a CPU vLLM has no CUDA graphs, without which it would refuse, and measures no steps: its checks
for graphs are left out, and it is given the costs of steps. All else is its own.
"""

import numpy as np
import pytest
import torch

from nemo_specrl.drafting.chances import CHANCES
from nemo_specrl.engine.patches import vllm_version
from tests.support.v2_exactness import (
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

pytestmark = pytest.mark.skipif(
    vllm_version() < (0, 32), reason="this vLLM has none for drafts without a model"
)
K, ROWS, TOKENS = 4, 24, 8
ON_GPU = torch.cuda.is_available()
COSTS = [(1, 0.1), (ROWS, 0.1)], [(1, 1.0), (8, 1.05), (16, 1.5), (32, 3.0), (128, 12.0)]
"""Milliseconds of drafting by rows, and of a step by tokens."""


@pytest.fixture(scope="module")
def llm(random_model, cache_dir):
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.gpu import model_runner

    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
            name = "resolve_adaptive_cudagraph_mode"
            patch.setattr(model_runner, name, lambda mode, **_: mode)
            builder = CPUAttentionMetadataBuilder
            patch.setattr(builder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
        options = drafting(cache_dir, K, adaptive=True, adaptive_verification=True)
        made = make_llm(random_model, "async", max_num_seqs=ROWS, **options)
    if not ON_GPU:
        runner_of(made).adaptive_verification.set_cost_curves(*COSTS)
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture
def budgets(llm, by_reference, monkeypatch):
    """Of each step so far that had drafts: rows, tokens drafted, and tokens to be verified."""
    manager, seen = runner_of(llm).adaptive_verification, []
    chosen = manager.get_num_tokens

    def noted(tokens_of_rows, drafts):
        tokens = chosen(tokens_of_rows, drafts)
        drafted, _, budget = manager._batch_budget
        seen.append((len(tokens_of_rows), sum(drafted.values()), budget))
        return tokens

    monkeypatch.setattr(manager, "get_num_tokens", noted)
    return seen


@pytest.mark.parametrize("drafts", ["good", "unlikely"])
def test_exact(llm, budgets, store, prompt, random_model, drafts):
    """Each token has the policy's distribution, whichever of a row's draft tokens are verified.

    The bound is 1e-3 for both tests: a correct sampler fails one of them for 0.2 % of all seeds,
    and these are fixed.
    """

    def tested(prompt, seed):
        put(store, prompt, likeliest(random_model, -1 if drafts == "unlikely" else 1, prompt))
        samples = np.array(tokens_of(generate(llm, prompt, ROWS, max_tokens=TOKENS, seed=seed)))
        assert samples.shape == (ROWS, TOKENS)
        return p_value(samples, probabilities(random_model, samples.tolist(), prompt))

    assert tested(prompt, 0) > 1e-3
    if not ON_GPU:
        assert any(0 < budget < drafted for _, drafted, budget in budgets)
    if drafts == "unlikely":
        with bent_sampler(llm.collective_rpc):  # few drafts are verified that it could accept
            assert tested([*prompt[:-1], 19], 100) < 1e-3


def test_chances_are_learned(llm, by_reference, store, prompt, random_model):
    """Of unlikely drafts they fall, whether vLLM verifies them or not."""
    index = runner_of(llm).speculator.index
    index.outcomes.zero_()
    put(store, prompt, likeliest(random_model, -1, prompt))
    generate(llm, prompt, 1, max_tokens=TOKENS)
    tried, right = index.outcomes.cpu().numpy()[: len(CHANCES)].T
    assert tried.sum() > right.sum()
    fell = index.chances.cpu().numpy()[: len(CHANCES)] < CHANCES
    assert fell[(tried > 0) & (right == 0)].all() and not fell[tried == 0].any()


@pytest.mark.skipif(ON_GPU, reason="the costs of steps are the GPU's")
def test_rows_that_nothing_is_known_for_verify_nothing(llm, budgets, prompt):
    """Once vLLM has seen their chances; it takes a row's first draft for certain."""
    generate(llm, prompt, ROWS, extra={"spec_rl": False}, max_tokens=8)
    assert budgets and {budget for _, _, budget in budgets[2:]} == {0}

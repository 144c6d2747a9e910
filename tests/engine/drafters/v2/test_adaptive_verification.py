"""vLLM's adaptive verification, which verifies the tokens of drafts that are worth their time.

On a CPU vLLM has no CUDA graphs, without which it would refuse, and measures no steps: its checks
for graphs are left out, and it is given the costs of steps. All else is its own.
"""

import numpy as np
import pytest
import torch

from nemo_specrl.engine.vllm.environment import FIRST_WITH_ADAPTIVE_VERIFICATION, Engines
from tests.conftest import make_engine
from tests.support.engines import VOCABULARY
from tests.support.v2_exactness import bent_sampler, likeliest, p_value, probabilities
from tests.support.v2_workers import forget

from .test_engine import generate

K, ROWS, TOKENS = 4, 24, 8
ON_GPU = torch.cuda.is_available()
OLD = Engines.installed(cpu=not ON_GPU).before(FIRST_WITH_ADAPTIVE_VERIFICATION)
COSTS = [(1, 0.1), (ROWS, 0.1)], [(1, 1.0), (8, 1.05), (16, 1.5), (32, 3.0), (128, 12.0)]
"""Milliseconds of drafting by rows, and of a step by tokens."""


@pytest.fixture(params=["sync", "async"])
def llm(request, engines, random_model, monkeypatch):
    if OLD:
        pytest.skip("this vLLM has none for drafts without a model")
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.gpu import model_runner

    from nemo_specrl.engine.vllm import v2_patches

    if request.param not in engines:
        v2_patches.install()
        if not ON_GPU:
            monkeypatch.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
            name = "resolve_adaptive_cudagraph_mode"
            monkeypatch.setattr(model_runner, name, lambda mode, **_: mode)
            builder = CPUAttentionMetadataBuilder
            monkeypatch.setattr(builder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
        made = engines[request.param] = make_engine(
            random_model,
            max_model_len=96,
            max_num_seqs=ROWS,
            enforce_eager=not ON_GPU,
            skip_tokenizer_init=True,
            max_logprobs=VOCABULARY,
            async_scheduling=request.param == "async",
            **v2_patches.speculator_options(K, 8 << 20, adaptive=True, by_chance=True),
        )
        if not ON_GPU:
            manager_of(made).set_cost_curves(*COSTS)
    return engines[request.param]


def manager_of(llm):
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.adaptive_verification is not None
    return runner.adaptive_verification


@pytest.fixture
def budgets(llm, by_reference, monkeypatch):
    """Of each step so far that had drafts: rows, tokens drafted, and tokens to be verified."""
    llm.collective_rpc(forget)
    manager, seen = manager_of(llm), []
    chosen = manager.get_num_tokens

    def noted(tokens_of_rows, drafts):
        tokens = chosen(tokens_of_rows, drafts)
        drafted, _, budget = manager._batch_budget
        seen.append((len(tokens_of_rows), sum(drafted.values()), budget))
        return tokens

    monkeypatch.setattr(manager, "get_num_tokens", noted)
    return seen


@pytest.mark.parametrize(
    ("llm", "drafts"), [("sync", "good"), ("async", "unlikely")], indirect=["llm"]
)
def test_exact(llm, budgets, random_model, drafts):
    """Each token has the policy's distribution, whichever of a row's draft tokens are verified.

    The bound is 1e-3 for both tests: a correct sampler fails one of them for 0.2 % of all seeds,
    and these are fixed.
    """
    history = likeliest(random_model, -1 if drafts == "unlikely" else 1)

    def tested():
        outputs = generate(llm, ROWS, history=history, max_tokens=TOKENS)
        samples = np.array([output.token_ids for output in outputs])
        assert samples.shape == (ROWS, TOKENS)
        return p_value(samples, probabilities(random_model, samples.tolist()))

    assert tested() > 1e-3
    if not ON_GPU:
        assert any(0 < budget < drafted for _, drafted, budget in budgets)
    if drafts == "unlikely":
        llm.collective_rpc(forget)
        with bent_sampler(llm.collective_rpc):
            assert tested() < 1e-3  # few drafts are verified that the bent one could accept


@pytest.mark.skipif(ON_GPU, reason="the costs of steps are the GPU's")
def test_the_likeliest_tokens_of_all_rows_are_verified(llm, budgets):
    """Ten of six rows' 24, as their costs say; nearly all of them are accepted."""
    plain = generate(llm, 1, extra=False, temperature=0, max_tokens=24)[0]
    truth = list(plain.token_ids)
    budgets.clear()
    speculator = llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator
    speculator.index.take_totals()
    outputs = generate(llm, 6, history=[truth], temperature=0, max_tokens=24)
    assert [list(output.token_ids) for output in outputs] == [truth] * 6
    for output in outputs:
        got, wanted = (
            [next(iter(entry.values())).logprob for entry in made.logprobs]
            for made in (output, plain)
        )
        assert got == pytest.approx(wanted, abs=1e-4)
    whole = [budget for rows, drafted, budget in budgets if (rows, drafted) == (6, 6 * K)]
    assert whole and set(whole) == {10}
    steps, tokens, drafted, accepted = speculator.index.take_totals()
    assert tokens / steps > 2 and accepted > 0.9 * drafted


@pytest.mark.skipif(ON_GPU, reason="the costs of steps are the GPU's")
@pytest.mark.parametrize("llm", ["sync"], indirect=True)
def test_rows_that_nothing_is_known_for_verify_nothing(llm, budgets):
    """Once vLLM has seen their chances; it takes a row's first draft for certain."""
    generate(llm, ROWS, extra=False, max_tokens=8)
    assert budgets and {budget for _, _, budget in budgets[2:]} == {0}

"""Mixtures of experts in vLLM's V2 runner, by Triton's interpreter, on each version that has it.

vLLM before 0.29 runs them in V1 unless it is asked for V2. Drafts are made by the numpy reference.
"""

import pytest
import torch

from nemo_specrl.engine.vllm.environment import FIRST_WITH_ROUTES, Engines
from tests.conftest import make_engine
from tests.engine.drafters.v2.test_engine import generate
from tests.support.engines import PROMPT, VOCABULARY
from tests.support.routes import (
    assert_reused_rows_have_their_routes,
    assert_routes,
    load_reference,
    save_mixture,
)
from tests.support.v2_workers import forget

K = 3
TOKENS = 24
ROUTES = not Engines.installed(cpu=True).before(FIRST_WITH_ROUTES)
"""Whether this vLLM's V2 model runner can return which experts have made a token."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module", params=["sync", "async"])
def llm(request, mixture):
    from nemo_specrl.engine.vllm import v2_patches

    v2_patches.install()
    made = make_engine(
        mixture,
        max_model_len=96,
        max_num_seqs=16,
        skip_tokenizer_init=True,
        async_scheduling=request.param == "async",
        enable_return_routed_experts=ROUTES,
        **v2_patches.speculator_options(K, 8 << 20, adaptive=False),
    )
    config = made.llm_engine.vllm_config
    assert config.use_v2_model_runner and config.model_config.is_moe
    return made


def test_whatever_is_drafted_tokens_and_log_probs_are_those_of_plain_decoding(
    llm, mixture, by_reference
):
    """A draft that is right, one that is right at first, and two that are wrong; greedily."""
    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    index = speculator_of(llm.llm_engine.model_executor.driver_worker.worker.model_runner).index
    (plain,) = generate(llm, 1, extra=False, temperature=0, max_tokens=TOKENS)
    truth = list(plain.token_ids)
    model = load_reference(mixture)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *truth]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == truth
    expected = torch.log_softmax(logits, -1).max(-1).values.tolist()
    wrong = [(token + 1) % VOCABULARY for token in truth]
    steps = []
    for i, history in enumerate([truth, truth[: TOKENS // 2] + wrong, wrong, [7] * TOKENS]):
        llm.collective_rpc(forget)
        (drafted,) = generate(
            llm, 1, history=[history], temperature=0, max_tokens=TOKENS, identity=10 + i
        )
        assert list(drafted.token_ids) == truth
        got = [e[t].logprob for e, t in zip(drafted.logprobs, drafted.token_ids, strict=True)]
        assert got == pytest.approx(expected, abs=1e-4)
        steps.append(index.take_totals()[0])
    assert steps[0] < TOKENS / 2.5  # whole drafts are accepted
    assert steps[0] < steps[1] < steps[2]


needs_routes = pytest.mark.skipif(
    not ROUTES, reason="vLLM before 0.29 returns routes from its V1 runner alone"
)


@needs_routes
def test_routes_are_those_of_the_tokens_that_are_kept(llm, mixture, by_reference):
    """As NeMo-RL's router replay needs them, however many drafts are refused; not greedy."""
    model = load_reference(mixture)
    (plain,) = generate(llm, 1, extra=False, max_tokens=TOKENS)
    truth = list(plain.token_ids)
    wrong = [(token + 1) % VOCABULARY for token in truth]
    histories = [truth, truth[: TOKENS // 2] + wrong, wrong, [7] * TOKENS]
    llm.collective_rpc(forget)
    rows = [plain, *generate(llm, 8, history=histories, max_tokens=TOKENS, identity=100)]
    for row in rows:
        assert_routes(model, [*PROMPT, *row.token_ids], row.routed_experts)


@needs_routes
def test_rows_that_reuse_a_prefix_have_routes_of_all_their_tokens(llm, mixture, by_reference):
    assert_reused_rows_have_their_routes(llm, load_reference(mixture))

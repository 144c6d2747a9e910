"""Mixtures of experts in vLLM's V2 runner, by Triton's interpreter, on each version that has it.

vLLM before 0.32 runs them in V1 unless it is asked for V2. Drafts are made by the numpy reference.
"""

import shutil

import pytest
import torch

from tests.conftest import SHIPPED_MODEL
from tests.engine.drafters.v2.test_engine import generate
from tests.support.engines import PROMPT, VOCABULARY

K = 3
TOKENS = 24


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A Qwen3-MoE of random weights, eight experts of which two are chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, folder)
    return folder


@pytest.fixture(scope="module", params=["sync", "async"])
def llm(request, mixture):
    from vllm import LLM

    from nemo_specrl.engine.vllm import v2_patches

    v2_patches.install()
    made = LLM(
        str(mixture),
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=16,
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=32,
        seed=0,
        async_scheduling=request.param == "async",
        **v2_patches.speculator_options(K, 8 << 20, adaptive=False),
    )
    config = made.llm_engine.vllm_config
    assert config.use_v2_model_runner and config.model_config.is_moe
    return made


def test_whatever_is_drafted_tokens_and_log_probs_are_those_of_plain_decoding(
    llm, mixture, by_reference
):
    """A draft that is right, one that is right at first, and two that are wrong; greedily."""
    from transformers import AutoModelForCausalLM

    from nemo_specrl.engine.vllm.v2_patches import speculator_of

    index = speculator_of(llm.llm_engine.model_executor.driver_worker.worker.model_runner).index
    (plain,) = generate(llm, 1, extra=False, temperature=0, max_tokens=TOKENS)
    truth = list(plain.token_ids)
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *truth]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == truth
    expected = torch.log_softmax(logits, -1).max(-1).values.tolist()
    wrong = [(token + 1) % VOCABULARY for token in truth]
    steps = []
    for i, history in enumerate([truth, truth[: TOKENS // 2] + wrong, wrong, [7] * TOKENS]):
        for row in range(16):
            index.close_row(row)  # vLLM would with the next step
        index.forget()
        index.take_totals()
        (drafted,) = generate(
            llm, 1, history=[history], temperature=0, max_tokens=TOKENS, identity=10 + i
        )
        assert list(drafted.token_ids) == truth
        got = [e[t].logprob for e, t in zip(drafted.logprobs, drafted.token_ids, strict=True)]
        assert got == pytest.approx(expected, abs=1e-4)
        steps.append(index.take_totals()[0])
    assert steps[0] < TOKENS / 2.5  # whole drafts are accepted
    assert steps[0] < steps[1] < steps[2]

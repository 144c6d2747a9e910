"""Refits of a running engine, compared with transformers on the same weights."""

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from nemo_specrl.engine.refit import refit
from nemo_specrl.errors import ConfigError, PolicyError, RefitError
from nemo_specrl.trainer.data.toy_tasks import encode
from tests.conftest import make_engine, shared_with_none, weights_of

TOKENS = [1, *encode("12+34=46;#46")]


def engine_logprobs(llm):
    (output,) = llm.generate(
        {"prompt_token_ids": TOKENS},
        SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False),
        use_tqdm=False,
    )
    return np.array(output.prompt_logprobs.logprobs)


def reference_logprobs(folder, weights, tokens=TOKENS):
    """The log-probs of all tokens but the first that transformers computes, in float32."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in weights:
            model.get_parameter(name).copy_(tensor.float())
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0], -1)
    return logprobs[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_a_refit_engine_computes_with_the_new_weights(llm, random_model):
    """The tied output layer included, which vLLM's own reload leaves behind on CPU."""
    before = engine_logprobs(llm)
    weights = weights_of(random_model, noise=0.05, seed=1)
    expected = reference_logprobs(random_model, weights)
    assert np.abs(expected - before).max() > 0.5
    refit(llm, (pair for pair in weights))  # as a policy streams them
    assert np.abs(engine_logprobs(llm) - expected).max() < 1e-3
    refit(llm, weights_of(random_model))
    assert np.array_equal(engine_logprobs(llm), before)


def test_a_refit_forgets_the_old_weights_blocks(llm, random_model):
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prompt = {"prompt_token_ids": [3 + i % 12 for i in range(100)]}
    for _ in range(2):
        (warm,) = llm.generate(prompt, params, use_tqdm=False)
    assert warm.num_cached_tokens == 96
    refit(llm, weights_of(random_model, noise=0.05))
    (cold,) = llm.generate(prompt, params, use_tqdm=False)
    assert cold.num_cached_tokens == 0


@pytest.fixture(scope="session")
def engine_to_break(random_model):
    with shared_with_none():
        return make_engine(random_model, max_model_len=64, max_num_batched_tokens=64)


def test_an_engine_whose_refit_broke_off_serves_nothing(engine_to_break, random_model):
    """The weights stop in the middle, as those of a policy do that loses a rank."""
    llm = engine_to_break
    assert len(engine_logprobs(llm)) == len(TOKENS) - 1

    def broken():
        yield from weights_of(random_model, noise=0.05)[:9]
        raise PolicyError("rank 1 died")

    with pytest.raises(PolicyError, match="rank 1 died"):
        refit(llm, broken())
    with pytest.raises(RefitError, match="the engine's last refit broke off"):
        engine_logprobs(llm)
    with pytest.raises(RefitError, match="the engine's last refit broke off"):
        refit(llm, weights_of(random_model))


def test_a_refit_under_running_requests_is_refused(llm, random_model):
    before = engine_logprobs(llm)
    engine = llm.llm_engine
    engine.add_request(
        "running", {"prompt_token_ids": [5] * 100}, SamplingParams(max_tokens=50, ignore_eos=True)
    )
    engine.step()
    with pytest.raises(ConfigError, match="requests are still running"):
        refit(llm, weights_of(random_model, noise=0.05))
    engine.abort_request(["running"])
    while engine.has_unfinished_requests():
        engine.step()
    assert np.array_equal(engine_logprobs(llm), before)  # it has kept its weights
    refit(llm, weights_of(random_model))

"""A policy version begins with an empty prefix cache or not at all, and stands for certain weights.

Weights are changed as a user's own code changes them: past this package, which is told the version.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from nemo_specrl import RolloutStore, SpeculativeLLM
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.policy_version import (
    EngineWeights,
    TokenVersions,
    refuse_kv_connector,
)
from nemo_specrl.engine.vllm.refit import refit
from nemo_specrl.errors import ConfigError
from tests.conftest import DictCache, make_engine, weights_of
from tests.engine.vllm.test_refit import reference_logprobs
from tests.support.engines import LOSSLESS, PROMPT, generate, needs_drafters, only, sampling

LONG = [3 + i % 12 for i in range(100)]  # three of the engine's blocks


def own_refit(llm, weights):
    """New weights as a user's own code loads them, which leaves the prefix cache as it is."""
    llm.collective_rpc("specrl_refit", args=(weights,))


def reported(output):
    return np.array([p[t].logprob for t, p in zip(*_pairs(output.outputs[0]), strict=True)])


def _pairs(completion):
    return completion.token_ids, completion.logprobs


@needs_drafters
def test_the_loop_of_the_readme_gives_the_log_probs_of_the_new_weights(
    drafting_llm, random_model, tmp_path
):
    """Two refits of one's own, each followed by a new version, over a warm prefix cache.

    The reported log-probs are those of transformers in float32 on the same weights, within 2e-3
    nats; with the blocks of the old weights they would be off by more than 0.5.
    """
    llm, config = drafting_llm, LOSSLESS
    assert engine_options(config)
    store = RolloutStore(tmp_path / "specrl", max_bytes=2**24, tokenizer_id="test")
    speculative = SpeculativeLLM(llm, store, config)
    prompts = [{"prompt_token_ids": LONG}] * 4
    for step in range(3):
        outputs = speculative.generate(prompts, sampling(8, seed=step), use_tqdm=False)
        weights = weights_of(random_model, noise=0.05 * (step > 0), seed=step)
        for output in outputs:
            tokens = [*LONG, *output.outputs[0].token_ids]
            expected = reference_logprobs(random_model, weights, tokens)[len(LONG) - 1 :]
            assert np.abs(reported(output) - expected).max() < 2e-3
        own_refit(llm, weights_of(random_model, noise=0.05, seed=step + 1))
        speculative.policy_version += 1  # after every refit
        assert speculative.policy_version == step + 1
    store.close()


def test_a_version_begins_with_an_empty_prefix_cache_for_plain_requests_too(llm, speculative):
    made = speculative()
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for _ in range(2):
        (warm,) = llm.generate({"prompt_token_ids": LONG}, params, use_tqdm=False)
    assert warm.num_cached_tokens == 96
    made.policy_version += 1
    (cold,) = llm.generate({"prompt_token_ids": LONG}, params, use_tqdm=False)
    assert cold.num_cached_tokens == 0


def test_while_requests_are_running_no_version_begins(llm, speculative):
    made = speculative(version=3)
    made.fingerprint = 7
    engine = llm.llm_engine
    engine.add_request("running", {"prompt_token_ids": LONG}, sampling(50, ignore_eos=True))
    engine.step()
    with pytest.raises(ConfigError, match="the prefix cache was not reset: requests are still"):
        made.policy_version += 1
    assert (made.policy_version, made.fingerprint) == (3, 7)
    engine.abort_request(["running"])
    while engine.has_unfinished_requests():
        engine.step()
    made.policy_version += 1
    assert made.policy_version == 4


def test_a_refit_without_a_new_version_is_noticed(llm, speculative, random_model):
    made = speculative(version=1)
    generate(made)
    refit(llm, weights_of(random_model, noise=0.05))
    with pytest.raises(ConfigError, match="policy_version = 1: the engine was refitted since"):
        generate(made)
    made.policy_version += 1
    generate(made)


def test_a_fingerprint_belongs_to_its_version(speculative):
    made = speculative(version=1)
    made.fingerprint = 5
    made.fingerprint = 5
    with pytest.raises(ConfigError, match="policy version 1 has weights of fingerprint 5"):
        made.fingerprint = 6
    made.policy_version = 2
    assert made.fingerprint == 0  # else the new weights' rollouts would pass for the old ones'
    made.fingerprint = 6


def test_a_kv_connector_is_refused(llm):
    refuse_kv_connector(llm.llm_engine.vllm_config)
    with pytest.raises(ConfigError, match=r"kv_transfer_config: .* build the engine without one"):
        refuse_kv_connector(SimpleNamespace(kv_transfer_config=object()))


RANK = 4


def write_adapter(folder, seed):
    """A LoRA adapter of the random model, as peft would save it."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, 64, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(64, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="session")
def lora_engine(random_model):
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_num_seqs": 8}
    return make_engine(random_model, **options, **engine_options(LOSSLESS))


def scored(llm, tokens, adapter):
    """Log-probs of a response to PROMPT under an adapter, by one prefill."""
    (plain,) = llm.generate(
        {"prompt_token_ids": [*PROMPT, *tokens]},
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        lora_request=adapter,
        use_tqdm=False,
    )
    positions = plain.prompt_logprobs[len(PROMPT) :]
    return np.array([p[t].logprob for t, p in zip(tokens, positions, strict=True)])


@needs_drafters
def test_one_adapter_for_each_version(lora_engine, tmp_path):
    """Two adapters of a real engine, whose log-probs differ."""
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(name, i, write_adapter(tmp_path / name, i)) for i, name in ((1, "a"), (2, "b"))
    )
    made = SpeculativeLLM(lora_engine, DictCache(), LOSSLESS)
    params = [sampling(seed=i, ignore_eos=True) for i in range(2)]
    outputs = generate(made, rows=2, params=params, lora_request=[first, first])
    for output in outputs:
        expected = scored(lora_engine, output.outputs[0].token_ids, first)
        assert np.abs(reported(output) - expected).max() < 2e-3

    for other in (second, None):
        with pytest.raises(ConfigError, match=r"version 0 has generated with 'a' .*; raise"):
            generate(made, lora_request=other)
    with pytest.raises(ConfigError, match=r"lora_request: 'a' .* and 'b' .* in one call"):
        generate(made, rows=2, lora_request=[first, second])
    with pytest.raises(ConfigError, match="lora_request: 1 of them for 2 prompts"):
        generate(made, rows=2, lora_request=[first])
    # Plain requests, such as a validation's, are no rollouts of the policy.
    only(generate(made, params=SamplingParams(temperature=0.0, max_tokens=4), lora_request=second))

    made.policy_version = 1
    for output in generate(made, rows=2, params=params, lora_request=second):
        tokens = output.outputs[0].token_ids
        expected = scored(lora_engine, tokens, second)
        assert np.abs(expected - scored(lora_engine, tokens, first)).max() > 0.05
        assert np.abs(reported(output) - expected).max() < 2e-3
    assert made.metrics.tree_drafted_tokens > 0


@needs_drafters
def test_what_an_interrupt_has_left_is_not_verified_where_that_would_fail(lora_engine):
    """Prefills of several rows with log-probs; vLLM's CPU build fails in them with adapters."""
    made = SpeculativeLLM(lora_engine, DictCache(), LOSSLESS)
    made.fingerprint = 7
    step, steps = lora_engine.llm_engine.step, iter(range(100))

    def interrupted():
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step()

    params = [sampling(seed=i, ignore_eos=True) for i in range(3)]
    lora_engine.llm_engine.step = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(made, rows=3, params=params)
    finally:
        del lora_engine.llm_engine.step
    assert len(made.cache.all()) == 3
    outputs = generate(made, rows=3, params=params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [24] * 3
    assert made.metrics.drafts == made.metrics.cache_errors == 0


def test_an_adapter_that_is_loaded_again_needs_a_new_version():
    adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a", load_inplace=True)
    kept = SimpleNamespace(**{**vars(adapter), "load_inplace": False})
    weights = EngineWeights(object())
    weights.check(adapter)
    weights.check(kept)
    with pytest.raises(ConfigError, match="raise policy_version when the adapter changes or is"):
        weights.check(adapter)
    weights.begin(1)
    weights.check(adapter)


def test_a_response_knows_the_versions_of_its_tokens():
    versions = TokenVersions()
    assert versions.of(3, 7).tolist() == [7, 7, 7] and versions.at_end(0, 7) == 7
    versions.begin(0, 1)  # a verification
    assert versions.at_end(0, 7) == 1 and versions.single
    versions.begin(2, 1)  # its continuation, which the weights change under, twice at one token
    versions.begin(4, 2)
    versions.begin(4, 3)
    assert versions.of(6, 7).tolist() == [1, 1, 1, 1, 3, 3] and not versions.single
    assert versions.at_end(4, 7) == 1 and versions.at_end(5, 7) == 3
    versions.begin(3, 4)  # a stop string has cut off what was made behind it
    assert versions.of(4, 7).tolist() == [1, 1, 1, 4]

"""What requests may ask for beside drafts: they get what vLLM's V2 runner gives without any."""

import json

import pytest
import torch

from nemo_specrl.engine.patches import vllm_version
from tests.conftest import SHIPPED_MODEL
from tests.support.v2_exactness import VOCABULARY, Gained, drafting, make_llm, put

K, TOKENS = 4, 20
GREEDY = {"temperature": 1.0, "top_k": 1, "ignore_eos": True, "max_tokens": TOKENS}
"""Not temperature 0: such requests are not drafted for."""
CASES = {
    "log-probs": {"logprobs": 3},
    "stop strings": {"stop": True},
    "stop tokens": {"stop_token_ids": True},
    "min_tokens": {"stop_token_ids": True, "min_tokens": 15},
    "bad_words": {"bad_words": True},
    "penalties": {"presence_penalty": 1.8, "frequency_penalty": 0.9, "repetition_penalty": 1.5},
    "allowed tokens": {"allowed_token_ids": True},
    "a seed": {"seed": 3},
    "several responses": {"n": 3},
    "structured output": {"structured_outputs": True},
}
NOT_BEFORE_0_32 = {
    "stop strings": "an update of several tokens keeps those behind a stop string",
    "allowed tokens": "they may not exceed the tokenizer's, which has fewer than the model",
    "structured output": "its bitmasks are pinned, for which there has to be a GPU",
    "an adapter": "vLLM does not load this one",
}
"""What older versions do not give on a CPU, and why, as seen on 0.25.1."""
LOGPROB_NOISE = 0.02 if torch.cuda.is_available() else 1e-4
"""Between steps of other sizes, nats: GPUs multiply in TF32."""


def skip_if_not_given(name):
    if name in NOT_BEFORE_0_32 and vllm_version() < (0, 32):
        pytest.skip(NOT_BEFORE_0_32[name])


@pytest.fixture(autouse=True)
def as_for_few_rows(by_reference, monkeypatch):
    """The interpreter cannot run this kernel. On GPUs vLLM takes the other for less than 8 rows."""
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)


def both(folder, cache_dir, **options):
    """Two engines, without and with drafts."""
    usual = {"max_num_seqs": 8, "skip_tokenizer_init": False, **options}
    return (
        make_llm(folder, "async", **usual),
        make_llm(folder, "async", **usual, **drafting(cache_dir, K)),
    )


@pytest.fixture(scope="module")
def pair(cache_dir):
    """Of a model whose tokens have texts, for stop strings and the like."""
    return both(SHIPPED_MODEL, cache_dir)


def options_of(name, truth, tokenizer):
    """Sampling parameters of a case; some depend on what is sampled without them."""
    from vllm.sampling_params import StructuredOutputsParams

    options = GREEDY | CASES[name]
    texts = [t for t in truth if tokenizer.decode([t], skip_special_tokens=True)]
    late = max(texts, key=truth.index)  # the token that comes up last for the first time
    values = {
        "stop": [tokenizer.decode([late])],
        "stop_token_ids": [late],
        "bad_words": [tokenizer.decode([late])],
        "allowed_token_ids": [token for token in range(VOCABULARY) if token != late],
    }
    options |= {key: value for key, value in values.items() if key in options}
    if options.get("structured_outputs"):
        options["structured_outputs"] = StructuredOutputsParams(
            regex="[0-9+=]{3}(7|8)[0-9+=]{9,12}"
        )
        options["ignore_eos"] = False
    return options


def generate(llm, prompt, options, lora=None):
    from vllm import SamplingParams

    prompts = {"prompt_token_ids": list(prompt)}
    (output,) = llm.generate(prompts, SamplingParams(**options), use_tqdm=False, lora_request=lora)
    return output.outputs


@pytest.mark.parametrize("name", CASES)
def test_as_the_runner_alone(pair, store, prompt, name):
    """Token for token, and with drafts of which most are accepted."""
    skip_if_not_given(name)
    plain, _ = pair
    truth = list(generate(plain, prompt, GREEDY)[0].token_ids)
    options = options_of(name, truth, plain.get_tokenizer())
    wanted = check_same(pair, store, prompt, options)
    if name not in ("log-probs", "a seed", "several responses"):
        assert wanted != truth  # the case says something


def test_an_adapter(random_model, store, prompt, cache_dir, tmp_path):
    """A LoRA adapter of random weights that changes what is sampled."""
    skip_if_not_given("an adapter")
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 64), ("v_proj", 32)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, 8, generator=generator)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "lora_dropout": 0.0}
    config |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    pair = both(random_model, cache_dir, enable_lora=True, max_lora_rank=8, max_loras=1)
    truth = list(generate(pair[0], prompt, GREEDY)[0].token_ids)
    lora = LoRARequest("adapter", 1, str(tmp_path))
    assert check_same(pair, store, prompt, GREEDY, lora) != truth


def check_same(pair, store, prompt, options, lora=None):
    """The tokens that both give."""
    plain, drafting = pair
    wanted = generate(plain, prompt, options, lora)
    put(store, prompt, [list(one.token_ids) for one in wanted])
    gained = Gained(drafting)
    got = generate(drafting, prompt, options, lora)
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert [getattr(one, name) for one in got] == [getattr(one, name) for one in wanted]
    if options.get("logprobs"):
        for ours, theirs in zip(got[0].logprobs, wanted[0].logprobs, strict=True):
            assert {t: e.logprob for t, e in ours.items()} == pytest.approx(
                {t: e.logprob for t, e in theirs.items()}, abs=LOGPROB_NOISE
            )
    assert gained() > 1.5
    return list(wanted[0].token_ids)

"""What requests may ask for beside drafts: they get what vLLM's V2 runner gives without any."""

import json

import pytest
import torch

from nemo_specrl import SpecRLConfig, engine_options, send_histories
from nemo_specrl.engine.vllm.environment import Engines
from tests.conftest import KV_BLOCKS, SHIPPED_MODEL
from tests.support.engines import PROMPT, VOCABULARY
from tests.support.v2_workers import forget, seen

K, TOKENS = 4, 20
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS}
CASES = {
    "plain": {},
    "log-probs": {"logprobs": 3},
    "stop strings": {"stop": True},
    "stop tokens": {"stop_token_ids": True},
    "min_tokens": {"stop_token_ids": True, "min_tokens": 15},
    "bad_words": {"bad_words": True},
    "penalties": {"presence_penalty": 1.8, "frequency_penalty": 0.9, "repetition_penalty": 1.5},
    "allowed tokens": {"allowed_token_ids": True},
    "a seed": {"seed": 3},
    "several responses": {"n": 3, "temperature": 1.0, "top_k": 1},
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
OLD = Engines.installed(cpu=True).before((0, 32))


def skip_if_not_given(name):
    if OLD and name in NOT_BEFORE_0_32:
        pytest.skip(NOT_BEFORE_0_32[name])


@pytest.fixture(scope="module")
def adapter(random_model, tmp_path_factory):
    """A LoRA adapter of random weights that changes what is sampled."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 64), ("v_proj", 32)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "lora_dropout": 0.0}
    config |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def both(folder, **options):
    """Two engines, without and with drafts."""
    from vllm import LLM

    config = SpecRLConfig(
        enabled=True,
        preset="lossless",
        tree={"max_draft_tokens": K, "adaptive": False, "max_bytes": 8 << 20},
    )
    usual = {
        "model": str(folder),
        "enforce_eager": True,
        "max_model_len": 96,
        "max_num_seqs": 8,
        "dtype": "float32",
        **KV_BLOCKS,
        "seed": 0,
        "max_logprobs": VOCABULARY,
        **options,
    }
    plain, drafting = LLM(**usual), LLM(**usual, **engine_options(config))
    assert all(llm.llm_engine.vllm_config.use_v2_model_runner for llm in (plain, drafting))
    return plain, drafting


@pytest.fixture(scope="module")
def engines():
    """Of a model whose tokens have texts, for stop strings and the like."""
    return both(SHIPPED_MODEL)


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


def generate(llm, options, lora=None):
    from vllm import SamplingParams

    prompts = {"prompt_token_ids": list(PROMPT)}
    (output,) = llm.generate(prompts, SamplingParams(**options), use_tqdm=False, lora_request=lora)
    return output.outputs


@pytest.fixture(autouse=True)
def as_for_few_rows(by_reference, monkeypatch):
    """The interpreter cannot run this kernel. On GPUs vLLM takes the other for less than 8 rows."""
    from vllm.v1.sample.ops import topk_topp_sampler as filters

    monkeypatch.setattr(filters, "apply_top_k_top_p_triton", filters.apply_top_k_top_p_pytorch)


@pytest.mark.parametrize("name", CASES)
def test_as_the_runner_alone(engines, name):
    """Token for token, and with drafts of which most are accepted."""
    skip_if_not_given(name)
    plain, _ = engines
    truth = list(generate(plain, GREEDY)[0].token_ids)
    options = options_of(name, truth, plain.get_tokenizer())
    wanted = check_same(engines, options)
    if name not in ("plain", "log-probs", "a seed", "several responses"):
        assert wanted != truth  # the case says something


def test_an_adapter(random_model, adapter):
    skip_if_not_given("an adapter")
    from vllm.lora.request import LoRARequest

    pair = both(random_model, enable_lora=True, max_lora_rank=8, max_loras=1)
    truth = list(generate(pair[0], GREEDY)[0].token_ids)
    assert check_same(pair, GREEDY, LoRARequest("adapter", 1, str(adapter))) != truth


def check_same(engines, options, lora=None):
    """The tokens that both give."""
    plain, drafting = engines
    wanted = generate(plain, options, lora)
    drafting.collective_rpc(forget)
    send_histories(drafting, [(PROMPT, [list(one.token_ids) for one in wanted])])
    got = generate(drafting, options, lora)
    ((_, _, drafted, accepted),) = (here["totals"] for here in drafting.collective_rpc(seen))
    assert [list(one.token_ids) for one in got] == [list(one.token_ids) for one in wanted]
    assert [one.text for one in got] == [one.text for one in wanted]
    assert [one.finish_reason for one in got] == [one.finish_reason for one in wanted]
    assert [one.stop_reason for one in got] == [one.stop_reason for one in wanted]
    if options.get("logprobs"):
        for ours, theirs in zip(got[0].logprobs, wanted[0].logprobs, strict=True):
            assert {t: e.logprob for t, e in ours.items()} == pytest.approx(
                {t: e.logprob for t, e in theirs.items()}, abs=LOGPROB_NOISE
            )
    assert accepted > 0.4 * sum(len(one.token_ids) - 2 for one in wanted) > 0, drafted
    return list(wanted[0].token_ids)

"""What is refused by name, before the first step of the engine."""

import copy
import dataclasses

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import STR_SPEC_DEC_REJECTS_LOGITSPROCS, build_logitsprocs

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.limits import EngineLimits, alterations
from nemo_specrl.engine.request_checks import check_engine
from nemo_specrl.errors import ConfigError, UnsupportedSampling
from tests.conftest import DictCache
from tests.support.engines import LOSSLESS, PROMPT, VOCABULARY, needs_drafters, sampling

ROUNDS = SpecRLConfig(enabled=True, preset="lossless", tree={"method": "rounds"})


@pytest.fixture
def unstepped(llm, monkeypatch):
    """The engine, on which nothing may run."""
    for name in ("step", "add_request"):
        monkeypatch.setattr(llm.llm_engine, name, lambda *a, **k: pytest.fail("it ran"))
    return llm


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ([], "has no token; a prompt needs one at least"),
        ({"prompt_token_ids": []}, "has no token"),
        ([5] * 192, r"has 192 tokens, .* together is 192 \(max_model_len\)"),
        ([5] * 500, "has 500 tokens"),
        ([5, VOCABULARY], f"has token 32, and the model's vocabulary is 0..{VOCABULARY - 1}"),
        ([5, -1], "has token -1"),
        ([5, 2**40], "has token 1099511627776"),
        ([5, 2**70], "must be token ids"),
        ({"prompt_token_ids": [5, 6.0]}, "must be token ids, .* got float, int"),
        ({"prompt_token_ids": [5, None]}, "must be token ids, .* got NoneType, int"),
        ({"prompt_token_ids": ["5", "6"]}, "must be token ids, .* got str"),
        ({"prompt_token_ids": [[5], [6, 7]]}, "must be token ids"),
        ({"prompt_token_ids": np.ones((2, 2), int)}, "must be token ids"),
        ({"prompt_token_ids": True}, "must be token ids, .* got bool"),
        ({"tokens": [5]}, "must be token ids, .* got NoneType"),
        ({"prompt": None}, "must be token ids, .* got NoneType"),
        (None, "must be token ids, .* got NoneType"),
        (object(), "must be token ids, .* got object"),
    ],
)
def test_a_bad_prompt_late_in_a_call_is_named_before_anything_begins(
    speculative, unstepped, prompt, line
):
    made = speculative()
    with pytest.raises(ConfigError, match=rf"^prompts\[3\]: {line}") as caught:
        made.generate([PROMPT, PROMPT, PROMPT, prompt], sampling(), use_tqdm=False)
    assert "\n" not in str(caught.value)
    assert made.cache.gets == 0
    assert not unstepped.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (sampling(logprobs=VOCABULARY + 1), r"sampling_params\[3\]: vLLM refuses them: .*33"),
        (
            SamplingParams(temperature=0.0, logit_bias={VOCABULARY: 1.0}),
            r"sampling_params\[3\]: vLLM refuses them: .*logit_bias",
        ),
        ({"temperature": 1.0}, r"sampling_params\[3\]: must be vllm.SamplingParams, got dict"),
        (None, r"sampling_params\[3\]: must be vllm.SamplingParams, got NoneType"),
    ],
)
def test_parameters_that_vllm_refuses_are_named_before_anything_begins(
    speculative, unstepped, params, line
):
    with pytest.raises(ConfigError, match=line) as caught:
        speculative().generate([PROMPT] * 4, [sampling()] * 3 + [params], use_tqdm=False)
    assert "\n" not in str(caught.value)


def test_sample_indices_out_of_range_are_named(speculative, unstepped):
    for wrong in (-1, 2**16):
        with pytest.raises(ConfigError, match=f"sample_indices: {wrong} is not in 0..65535"):
            speculative().generate([PROMPT], sampling(), sample_indices=[wrong], use_tqdm=False)
    with pytest.raises(ConfigError, match=r"prompts: must be prompts .* got int"):
        speculative().generate(5, sampling(), use_tqdm=False)


def test_good_prompts_of_all_kinds_are_taken(speculative, llm):
    prompts = [PROMPT, tuple(PROMPT), np.array(PROMPT), {"prompt_token_ids": np.uint8(PROMPT)}]
    outputs = speculative().generate([*prompts, "12+34=?"], sampling(2), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == [PROMPT] * 4 + [PROMPT[1:]]
    assert len(speculative().generate(np.array(PROMPT), sampling(2), use_tqdm=False)) == 1
    assert speculative().generate([], sampling(2), use_tqdm=False) == []


def changed(llm, block, **values):
    """The engine's configuration with other values."""
    config = copy.copy(llm.llm_engine.vllm_config)
    part = config if block is None else copy.copy(getattr(config, block))
    for name, value in values.items():
        object.__setattr__(part, name, value)
    if block is not None:
        object.__setattr__(config, block, part)
    return config


def refusal(llm, monkeypatch, config, vllm_config):
    monkeypatch.setattr(llm.llm_engine, "vllm_config", vllm_config)
    with pytest.raises(ConfigError) as caught:
        SpeculativeLLM(llm, DictCache(), config)
    assert "\n" not in str(caught.value)
    SpeculativeLLM(llm, DictCache(), SpecRLConfig(enabled=False))  # the engine is the user's alone
    return str(caught.value)


class Forbidding:
    """Stands for a logits processor's class; its name is all that is looked at."""


@pytest.mark.parametrize("config", [LOSSLESS, ROUNDS, SpecRLConfig(enabled=True, preset="fast")])
@pytest.mark.parametrize("processor", [Forbidding, "a.module:Forbidding"])
def test_an_engine_with_a_logits_processor_is_refused_by_name(llm, monkeypatch, config, processor):
    other = changed(llm, "model_config", logits_processors=[processor])
    line = refusal(llm, monkeypatch, config, other)
    assert line.startswith("logits_processors = ") and "Forbidding: the engine samples" in line


@pytest.fixture
def installed_processor(tmp_path, monkeypatch):
    """A package whose entry point vLLM would load into every engine."""
    info = tmp_path / "forbidding-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forbidding\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.logits_processors]\nforbid = tests.engine.test_request_checks:Forbidding\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_logits_processor_of_an_entry_point_is_refused_by_name(
    llm, monkeypatch, installed_processor
):
    line = refusal(llm, monkeypatch, ROUNDS, llm.llm_engine.vllm_config)
    assert line.startswith(
        "logits_processors = forbid (entry point tests.engine.test_request_checks:"
    )


@needs_drafters
def test_beside_a_drafter_vllm_has_no_logits_processors(drafting_llm, installed_processor):
    """The V1 model runner leaves those of entry points out, and refuses an engine with others."""
    config = drafting_llm.llm_engine.vllm_config
    assert alterations(config) == ()
    names = [type(p).__name__ for p in build_logitsprocs(config, "cpu", False, False).all]
    assert names == ["MinTokensLogitsProcessor"]
    with pytest.raises(ValueError, match=STR_SPEC_DEC_REJECTS_LOGITSPROCS):
        build_logitsprocs(config, "cpu", False, False, custom_logitsprocs=("a:B",))
    assert SpeculativeLLM(drafting_llm, DictCache(), LOSSLESS)


@pytest.mark.parametrize(
    ("block", "values", "line"),
    [
        (None, {"watermark_config": object()}, "watermark_config: watermarked"),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill = True"),
        ("model_config", {"logprobs_mode": "raw_logits"}, "logprobs_mode = raw_logits: must be"),
    ],
)
def test_other_engines_of_which_drafts_cannot_be_verified_are_refused_by_name(
    llm, monkeypatch, block, values, line
):
    assert refusal(llm, monkeypatch, ROUNDS, changed(llm, block, **values)).startswith(line)


def test_adapters_on_a_cpu_are_refused_where_prompts_verify(llm, monkeypatch):
    """With `lossless` by a drafter nothing does: test_policy_version.py."""
    adapters = changed(llm, None, lora_config=object())
    for config in (ROUNDS, SpecRLConfig(enabled=True, preset="faithful")):
        line = refusal(llm, monkeypatch, config, adapters)
        assert line.startswith("enable_lora = True: on a CPU vLLM fails") and "lossless" in line


@needs_drafters
def test_an_engine_with_a_drafter_takes_no_rounds(drafting_llm, monkeypatch):
    line = "speculative_config: an engine has one drafter. This one has that of tree.method = pro"
    with pytest.raises(ConfigError, match=line):
        SpeculativeLLM(drafting_llm, DictCache(), ROUNDS)
    config = drafting_llm.llm_engine.vllm_config
    synthetic = copy.copy(config.speculative_config)
    object.__setattr__(synthetic, "rejection_sample_method", "synthetic")
    other = changed(drafting_llm, None, speculative_config=synthetic)
    assert "rejection_sample_method = synthetic" in refusal(
        drafting_llm, monkeypatch, LOSSLESS, other
    )


def test_rounds_beside_a_drafter_of_vllms_are_refused_by_name(llm):
    """What the class itself refuses, from limits as an engine with n-grams has them."""
    limits = EngineLimits.of(llm)
    object.__setattr__(limits, "steps_of_several_tokens", True)
    with pytest.raises(ConfigError, match="This one has one of vLLM's own"):
        check_engine(limits, ROUNDS)
    check_engine(limits, SpecRLConfig(enabled=True, preset="faithful"))


@pytest.mark.parametrize(
    ("known", "block", "line"),
    [
        ({"async_scheduling": True}, {}, "async_scheduling = True: some .* steps .*; set False"),
        ({}, {"run_ahead": {"enabled": True}}, "spec_rl.run_ahead.enabled = true: an engine of a"),
        ({}, {"tree": {"adaptive_verification": True}}, "tree.adaptive_verification = true: engin"),
    ],
)
def test_what_an_engine_of_a_data_parallel_group_cannot_do(llm, known, block, line):
    limits = dataclasses.replace(EngineLimits.of(llm), drafter="v2", **known)
    config = SpecRLConfig(enabled=True, preset="lossless", **block)
    check_engine(limits, config)
    with pytest.raises(ConfigError, match=line):
        check_engine(dataclasses.replace(limits, in_group=True), config)


def test_defaults_of_the_engine_that_are_not_raw_are_named_as_such(
    speculative, unstepped, monkeypatch
):
    """As a model's generation_config.json has them."""
    monkeypatch.setattr(unstepped, "default_sampling_params", {"temperature": 0.6, "top_p": 0.95})
    with pytest.raises(UnsupportedSampling, match=r"generation_config\.json.*temperature = 0\.6"):
        speculative().generate([PROMPT], use_tqdm=False)

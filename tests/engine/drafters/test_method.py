"""Which way of drafting an engine gets, and what is refused, in one line each.

No GPU is needed: what vLLM says of its platform is replaced where a test says so, and nothing else.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.drafters import method as method_module
from nemo_specrl.engine.drafters.method import drafting_method, engine_options
from nemo_specrl.engine.vllm import environment
from nemo_specrl.engine.vllm.prompt_logprob_memory import (
    check_prompt_logprob_memory,
    prompt_logprob_bytes,
)
from nemo_specrl.errors import ConfigError, IncompatibleVersion
from tests.conftest import DictCache
from tests.support.engines import DRAFTS

GIB = 2**30


def config(method="auto", **options):
    return SpecRLConfig(enabled=True, preset="lossless", tree={"method": method}, **options)


def refusal(error, what):
    with pytest.raises(error) as refused:
        drafting_method(what)
    line = str(refused.value)
    assert "\n" not in line and "enabled: false" in line and "preset: faithful" in line
    return line


@pytest.fixture
def machine(monkeypatch):
    """Pretend that vLLM runs on a GPU, and that it takes proposers or not."""

    def pretend(cpu, proposers=True, v2=None):
        monkeypatch.setattr(method_module, "on_cpu", lambda: cpu)
        monkeypatch.setattr(method_module, "has_custom_proposers", lambda: proposers)
        if v2 is None:
            monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        else:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)

    return pretend


def test_on_a_cpu_the_proposer_is_taken_unasked(machine):
    machine(cpu=True)
    assert drafting_method(config()) == "proposer"
    assert engine_options(config())["speculative_config"]["method"] == "custom_class"


def test_on_a_gpu_nothing_drafts_unasked(machine):
    machine(cpu=False)
    line = refusal(ConfigError, config())
    assert line.startswith("spec_rl.tree.method = auto: on GPUs the tree proposer needs")
    assert "name tree.method: proposer or rounds" in line
    assert drafting_method(config("proposer")) == "proposer"
    assert drafting_method(config("rounds")) == "rounds"


@pytest.mark.parametrize("cpu", [True, False])
def test_without_proposers_rounds_are_taken_by_name_alone(machine, cpu):
    """VLLM 0.20, of NeMo-RL v0.7.0."""
    machine(cpu=cpu, proposers=False)
    line = refusal(ConfigError, config())
    assert "has no custom proposers" in line and "name tree.method: rounds" in line
    assert "has no custom proposers" in refusal(IncompatibleVersion, config("proposer"))
    assert drafting_method(config("rounds")) == "rounds" and engine_options(config("rounds")) == {}


@pytest.mark.parametrize("cpu", [True, False])
def test_the_v2_model_runner_takes_no_proposer(machine, cpu):
    """VLLM itself ends with an error from inside its configuration."""
    machine(cpu=cpu, v2="1")
    assert "VLLM_USE_V2_MODEL_RUNNER" in refusal(ConfigError, config())
    assert "unset it, or name tree.method: rounds" in refusal(ConfigError, config("proposer"))
    assert drafting_method(config("rounds")) == "rounds"
    machine(cpu=True, v2="0")
    assert drafting_method(config()) == "proposer"


def test_without_trees_there_is_nothing_to_refuse(machine):
    machine(cpu=False, proposers=False, v2="1")
    for off in (SpecRLConfig(), SpecRLConfig(enabled=True, preset="faithful")):
        assert drafting_method(off) is None and engine_options(off) == {}


def test_this_machine_is_told_apart(machine):
    assert environment.on_cpu() == current_platform.is_cpu()
    assert environment.has_custom_proposers() == DRAFTS


def test_an_engine_without_the_proposer_gets_no_rounds_unasked(engine):
    line = "built without the tree proposer|has no custom proposers"
    for method in ("auto", "proposer"):
        with pytest.raises((ConfigError, IncompatibleVersion), match=line):
            SpeculativeLLM(engine, DictCache(), config(method))
    assert SpeculativeLLM(engine, DictCache(), config("rounds"))._prompt_logprob_drafter is not None


def engine_of(*, batch, v2=False, device="cuda", length=32768):
    """The parts of an engine's configuration that the check reads: Qwen3-8B on a GPU."""
    model = SimpleNamespace(
        max_model_len=length, dtype=torch.bfloat16, get_vocab_size=lambda: 151_936
    )
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=model,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=batch),
            device_config=SimpleNamespace(device_type=device),
            cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
            use_v2_model_runner=v2,
        )
    )


def test_an_engine_without_memory_for_verification_is_refused(monkeypatch):
    """On an H100, whose memory is made up here; the rest is the real check."""
    monkeypatch.setattr(
        type(current_platform), "get_device_total_memory", lambda *a: 80 * GIB, raising=False
    )
    assert prompt_logprob_bytes(engine_of(batch=16384)) == 16384 * 151_936 * 6
    with pytest.raises(ConfigError) as refused:
        check_prompt_logprob_memory(engine_of(batch=16384))
    line = str(refused.value)
    assert "max_num_batched_tokens = 16384" in line and "13.9 GiB" in line
    assert "gpu_memory_utilization = 0.9 leaves 8.0 GiB; set it to 9422 or less" in line
    check_prompt_logprob_memory(engine_of(batch=9422))
    check_prompt_logprob_memory(engine_of(batch=16384, length=4096))
    check_prompt_logprob_memory(engine_of(batch=16384, v2=True))  # in pieces of 1,024 tokens


def test_the_memory_of_a_cpu_engine_is_that_of_the_machine(engine, monkeypatch):
    check_prompt_logprob_memory(engine)
    monkeypatch.setattr(
        "psutil.virtual_memory", lambda: SimpleNamespace(available=prompt_logprob_bytes(engine) - 1)
    )
    with pytest.raises(ConfigError, match=r"has free 0\.0 GiB; set it to 191 or less"):
        SpeculativeLLM(engine, DictCache(), SpecRLConfig(enabled=True, preset="faithful"))
    SpeculativeLLM(engine, DictCache(), SpecRLConfig(enabled=False))

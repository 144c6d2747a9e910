"""Which way of drafting an engine gets, and what is refused, in one line each.

No GPU is needed: what vLLM says of its platform is replaced where a test says so, and nothing else.
"""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.platforms import current_platform

from nemo_specrl import SpecRLConfig, SpeculativeLLM
from nemo_specrl.engine.drafters import method as method_module
from nemo_specrl.engine.drafters.method import drafting_method, engine_options
from nemo_specrl.engine.vllm import environment
from nemo_specrl.engine.vllm.environment import Engines, asks_for_v2, why_not_v2
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
    """Pretend that vLLM runs on a GPU, and that it takes proposers and speculators or not."""

    def pretend(cpu, proposers=True, speculators=True, v2=None, problem=None):
        monkeypatch.setattr(environment, "on_cpu", lambda: cpu)
        monkeypatch.setattr(environment, "has_custom_proposers", lambda: proposers)
        monkeypatch.setattr(environment, "has_v2_speculators", lambda: speculators)
        monkeypatch.setattr(method_module, "_v2_problem", lambda engines: problem)
        if v2 is None:
            monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        else:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)

    return pretend


def test_on_a_cpu_the_proposer_is_taken_unasked(machine):
    machine(cpu=True)
    assert drafting_method(config()) == "proposer"
    assert engine_options(config())["speculative_config"]["method"] == "custom_class"
    assert "on a CPU vLLM runs its V1" in refusal(ConfigError, config("v2"))
    machine(cpu=True, v2="1")
    assert drafting_method(config()) == drafting_method(config("v2")) == "v2"


def test_on_a_gpu_the_speculator_is_taken_unasked(machine):
    machine(cpu=False)
    assert drafting_method(config()) == drafting_method(config("v2")) == "v2"
    assert drafting_method(config("proposer")) == "proposer"
    assert drafting_method(config("rounds")) == "rounds"


def test_where_v2_is_forbidden_nothing_drafts_unasked(machine):
    machine(cpu=False, v2="0")
    line = refusal(ConfigError, config())
    assert line.startswith("spec_rl.tree.method = auto: VLLM_USE_V2_MODEL_RUNNER forbids")
    assert "name tree.method: proposer or rounds" in line
    assert "VLLM_USE_V2_MODEL_RUNNER forbids" in refusal(ConfigError, config("v2"))
    assert drafting_method(config("proposer")) == "proposer"
    machine(cpu=True, v2="0")
    assert drafting_method(config()) == "proposer"


@pytest.mark.parametrize("cpu", [True, False])
def test_without_drafters_rounds_are_taken_by_name_alone(machine, cpu):
    """VLLM 0.20, of NeMo-RL v0.7.0."""
    machine(cpu=cpu, proposers=False, speculators=False)
    line = refusal(ConfigError, config())
    assert "takes no drafter" in line and "name tree.method: rounds" in line
    assert "has no custom proposers" in refusal(IncompatibleVersion, config("proposer"))
    assert "no V2 model runner that takes drafters" in refusal(IncompatibleVersion, config("v2"))
    assert drafting_method(config("rounds")) == "rounds" and engine_options(config("rounds")) == {}


@pytest.mark.parametrize("cpu", [True, False])
def test_the_v2_model_runner_takes_no_proposer(machine, cpu):
    """VLLM itself ends with an error from inside its configuration."""
    machine(cpu=cpu, v2="1")
    assert "unset it, or name tree.method: rounds" in refusal(ConfigError, config("proposer"))
    assert drafting_method(config("rounds")) == "rounds"


def test_a_v2_runner_that_is_not_known_decodes_plainly(machine, caplog):
    machine(cpu=False, problem="this vLLM's GPUModelRunner.add_requests has a source (1)")
    assert drafting_method(config()) is None and engine_options(config()) == {}
    assert "without drafts: this vLLM's GPUModelRunner.add_requests has a source" in caplog.text
    assert "add_requests has a source" in refusal(IncompatibleVersion, config("v2"))


def test_without_a_device_the_workers_decide(monkeypatch):
    """As in NeMo-RL's driver on a node without GPUs: nothing of vLLM's runner is imported there."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(environment, "on_cpu", lambda: False)
    monkeypatch.setattr(environment, "has_v2_speculators", lambda: True)
    monkeypatch.setattr(environment, "engines_run_here", lambda: False)
    monkeypatch.setattr(method_module, "install", lambda: pytest.fail("imported"))
    assert drafting_method(config()) == drafting_method(config("v2")) == "v2"


def test_what_other_machines_have_is_told_by_their_version(monkeypatch):
    monkeypatch.setattr(method_module, "install", lambda: pytest.fail("imported"))
    asked = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    for version in ("0.25.1", "0.32.0", None):
        assert drafting_method(config(), Engines.elsewhere(version, {})) == "v2"
    with pytest.raises(ConfigError, match=r"auto: vLLM 0\.20\.0 takes no drafter of ours"):
        drafting_method(config(), Engines.elsewhere("0.20.0", {}))
    with pytest.raises(ConfigError, match="auto: VLLM_USE_V2_MODEL_RUNNER forbids"):
        drafting_method(config(), Engines.elsewhere("0.25.1", asked))
    assert drafting_method(config("rounds"), Engines.elsewhere("0.20.0", {})) == "rounds"


MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
HYBRID = {"architectures": ["Lfm2ForCausalLM"]}


DEFAULT, ASKED = Engines.elsewhere("0.25.1", {}), {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (MIXTURE, True),
        ({"architectures": ["A"], "text_config": {"n_routed_experts": 8}}, True),
        ({"architectures": ["A"], "thinker_config": {"text_config": {"num_experts": 8}}}, True),
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({"architectures": ["Gemma4ForConditionalGeneration"], "num_experts": None}, False),
        ({"architectures": ["DeepseekV2ForCausalLM"], "n_routed_experts": 64}, False),
        ({"architectures": ["NemotronHForCausalLM"]}, True),
        ({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, True),
        ({}, False),
    ],
)
def test_for_some_models_vllm_has_to_be_asked_for_v2(model, asked):
    assert asks_for_v2(DEFAULT, model) is asked
    assert why_not_v2(DEFAULT, model) is None
    for others in ("0.32.0", None):
        assert not asks_for_v2(Engines.elsewhere(others, {}), model)
    assert not asks_for_v2(Engines.elsewhere("0.25.1", ASKED), model)


def test_state_that_is_not_brought_back_forbids_v2():
    """Also where V2 is asked for, and where the model has experts besides."""
    for model in (HYBRID, HYBRID | {"n_routed_experts": 128}):
        for environ in ({}, ASKED):
            why = why_not_v2(Engines.elsewhere("0.25.1", environ), model)
            assert why == (
                "vLLM 0.25.1 does not bring back all state of other layers than attention "
                "(Lfm2ForCausalLM) behind refused drafts (0.32 does)"
            )
        assert why_not_v2(Engines.elsewhere("0.32.0", {}), model) is None
        assert why_not_v2(Engines.elsewhere(None, {}), model) is None
    for name in ("JambaForCausalLM", "BailingMoeV2_5ForCausalLM"):
        for engines in (DEFAULT, Engines.elsewhere("0.32.0", {}), Engines.elsewhere(None, {})):
            why = why_not_v2(engines, {"architectures": [name]})
            assert why is not None and why.endswith(f"({name}) behind refused drafts")
    attention = {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"]}
    assert why_not_v2(DEFAULT, attention) is None


def test_the_models_of_v1_are_those_that_vllm_says():
    """By the sources of 0.25.1 and 0.26.0; from 0.29 on all run in V2, and in 0.20 none."""
    config_source = Path(vllm.__file__).with_name("config") / "vllm.py"
    if "_is_default_v2_model_runner_model" not in config_source.read_text():
        pytest.skip("this vLLM does not choose the model runner by the model")
    from vllm.config.vllm import DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    assert DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES >= environment.V2_MIXTURES
    names = inspect.getsource(ModelArchConfigConvertorBase.get_num_experts)
    assert all(f'"{key}"' in names for key in environment.EXPERTS)
    assert names.count('",  #') == len(environment.EXPERTS)
    models = Path(vllm.__file__).parent / "model_executor" / "models"
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for file in models.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def hybrid(name):
        return "IsHybrid" in bases.get(name, ()) or any(map(hybrid, bases.get(name, ())))

    registry = (models / "registry.py").read_text()
    entries = re.findall(
        r'"(\w+For(?:CausalLM|ConditionalGeneration))":\s*\(\s*"\w+",\s*"(\w+)"', registry
    )
    assert len(entries) > 100
    said = {name for name, _ in entries if name.startswith(environment.HYBRIDS)}
    assert said == {name for name, implementation in entries if hybrid(implementation)}


def test_options_of_the_speculator(machine):
    machine(cpu=False)
    options = engine_options(config())
    assert options["speculative_config"]["num_speculative_tokens"] == 11
    ours = options["additional_config"]["spec_rl"]
    assert ours == {"drafter": "v2", "max_bytes": 2**29, "lengths": [0, 2, 3, 5, 11]}
    tree = {"max_draft_tokens": 4, "max_bytes": 2**20}
    ours = engine_options(SpecRLConfig(enabled=True, tree=tree))["additional_config"]["spec_rl"]
    assert ours == {"drafter": "v2", "max_bytes": 2**20, "lengths": [0, 2, 3, 4]}
    fixed = engine_options(
        SpecRLConfig(enabled=True, tree={"max_draft_tokens": 20, "adaptive": False})
    )
    assert fixed["speculative_config"]["num_speculative_tokens"] == 20
    assert fixed["additional_config"]["spec_rl"]["lengths"] == [20]
    if not environment.Engines.installed(cpu=False).before(
        environment.FIRST_WITH_ADAPTIVE_VERIFICATION
    ):
        by_chance = SpecRLConfig(enabled=True, tree={"adaptive_verification": True})
        ours = engine_options(by_chance)["additional_config"]["spec_rl"]
        assert ours["lengths"] == [11] and ours["by_chance"]


@pytest.mark.parametrize(
    ("tree", "error", "match"),
    [
        ({"method": "rounds"}, ConfigError, "drafts come by rounds"),
        ({"method": "v2", "adaptive": False}, ConfigError, r"tree\.adaptive = false"),
        ({"method": "v2"}, IncompatibleVersion, "0.32 has"),
    ],
)
def test_what_adaptive_verification_needs(tree, error, match, monkeypatch):
    old = environment.Engines.elsewhere("0.25.1", {})
    monkeypatch.setattr(environment.Engines, "here", classmethod(lambda cls: old))
    tree = {"enabled": True, "adaptive_verification": True, **tree}
    config = SpecRLConfig(enabled=True, preset="lossless", tree=tree)
    with pytest.raises(error, match=match):
        engine_options(config)


def test_without_trees_there_is_nothing_to_refuse(machine):
    machine(cpu=False, proposers=False, speculators=False, v2="1")
    for off in (SpecRLConfig(), SpecRLConfig(enabled=True, preset="faithful")):
        assert drafting_method(off) is None and engine_options(off) == {}


def test_this_machine_is_told_apart(machine):
    assert environment.on_cpu() == current_platform.is_cpu()
    assert environment.has_custom_proposers() == DRAFTS


def test_an_engine_without_the_proposer_gets_no_rounds_unasked(engine):
    line = "built without its drafter|has no custom proposers|takes no drafter"
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

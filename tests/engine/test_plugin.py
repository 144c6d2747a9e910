"""``additional_config: {"spec_rl": {...}}`` is enough, and what does not go with it is refused."""

import subprocess
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs

from nemo_specrl import SpecRLConfig, engine_options
from nemo_specrl.engine import patches
from nemo_specrl.engine.plugin import all_patches, vocabulary_of
from nemo_specrl.engine.row import block_of
from nemo_specrl.errors import ConfigError
from nemo_specrl.rollout import vocabulary_hash
from tests.conftest import KV_BLOCKS


def configured(model, block, **options):
    usual = {"dtype": "float32", "max_model_len": 192, "enforce_eager": True, **KV_BLOCKS}
    additional = {} if block is None else {"spec_rl": block, "mine": 1}
    args = EngineArgs(model=str(model), additional_config=additional, **usual | options)
    return args.create_engine_config()


def test_the_block_sets_drafter_and_scheduler(random_model, tmp_path):
    args = EngineArgs(
        model=str(random_model),
        **engine_options(cache_dir=tmp_path, max_tokens=7),
        dtype="float32",
        max_model_len=192,
        **KV_BLOCKS,
    )
    for _ in range(2):  # a host may do it twice
        config = args.create_engine_config()
        assert config.speculative_config.num_speculative_tokens == 7
        assert config.scheduler_config.scheduler_cls.endswith(".HistoryScheduler")
        cache = config.additional_config["spec_rl"]["cache"]
        assert cache["dir"] == str(tmp_path)
        assert cache["vocabulary"] == vocabulary_of(config.model_config)
    assert args.speculative_config is None and args.scheduler_cls is None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(random_model))
    assert cache["vocabulary"] == vocabulary_hash(tokenizer.get_vocab())


@pytest.mark.parametrize("block", [None, {"enabled": False}])
def test_without_it_nothing_is_changed(random_model, block):
    config = configured(random_model, block)
    assert config.speculative_config is None and config.scheduler_config.scheduler_cls is None
    assert engine_options(SpecRLConfig()) == {}


@pytest.mark.parametrize(
    ("block", "options", "refusal"),
    [
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "leave one"),
        ({}, {"scheduler_cls": "a.B"}, "scheduler_cls: additional_config.spec_rl brings its own"),
        ({"tree": {}}, {}, "additional_config.spec_rl.tree = .*the key is now draft"),
        ({"preset": "faithful"}, {}, "the preset is now reuse"),
        ({"draft": {"max_token": 3}}, {}, r"draft.max_token: unknown key; known are max_tokens"),
        ([], {}, "must be a mapping"),
        ({"draft": {"adaptive_verification": True}}, {}, "needs vLLM's V2 model runner"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(random_model, block, options, refusal):
    with pytest.raises(ConfigError, match=refusal) as refused:
        configured(random_model, block, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["specrl", "spec-rl", "SPEC_RL", "nemo_specrl"])
def test_a_block_under_a_misspelled_key_is_not_passed_over(key):
    with pytest.raises(ConfigError, match=f"^additional_config.{key}: the key is spec_rl$"):
        block_of({key: {}})
    assert block_of({"spec": {}, "speculative_rl": {}}) is None  # may be another plug-in's


def test_options_for_code_are_checked_at_once(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine_options.cache.colour: unknown key"):
        engine_options(colour="red")
    with pytest.raises(ConfigError, match="not both"):
        engine_options(SpecRLConfig(enabled=True), max_tokens=3)
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS = 'others': leaves nemo_specrl out"):
        engine_options()


def test_an_unknown_vllm_decodes_plainly_and_says_so(random_model, monkeypatch, caplog):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        return {}

    monkeypatch.setattr(GPUModelRunner, "_get_prompt_logprobs_dict", _get_prompt_logprobs_dict)
    config = configured(random_model, {})
    assert config.speculative_config is None and config.scheduler_config.scheduler_cls is None
    assert "rows are decoded without drafts: this vLLM's" in caplog.text
    assert "has a source (" in caplog.text


def test_every_patch_is_needed_for_a_reason_and_fits_this_vllm():
    table = all_patches()
    assert set(table) == {"engine", "v1", "v2", "hybrid"}
    names = [(patch.owner, patch.name) for group in table.values() for patch in group]
    assert len(set(names)) == len(names)
    for group in table.values():
        for patch in group:
            assert len(patch.reason) > 30 and patch.reason.endswith(".")
    patches.check(table["engine"] + table["v1"])


def test_an_engine_that_does_not_draft_says_so(llm):
    from nemo_specrl import counts

    assert counts(llm) in ({"spec_rl/drafting": 0.0},)


IMPORTS = """
import sys, time
import vllm, vllm.v1.engine.core, vllm.engine.arg_utils
import vllm.v1.core.sched.async_scheduler
import pydantic, numpy
before = set(sys.modules)
import nemo_specrl.engine.plugin, nemo_specrl.engine.scheduler
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new))
"""


def test_the_plug_in_brings_nothing_that_vllm_does_not():
    """Neither Ray nor the compiled part nor transformers' models, for example."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    new = eval(done.stdout.splitlines()[-1])
    assert set(new) <= {"nemo_specrl", "xxhash", "_xxhash"}

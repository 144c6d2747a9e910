"""Reading of a recipe: the block, where it goes, and what is refused in one line."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.recipe import (
    check_recipe,
    current_run,
    give_to_engines,
    read_block,
    run_of,
    setting_up,
)
from nemo_specrl.rollout import vocabulary_hash

CACHE = {"dir": "/raid/specrl"}
BASE = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": None,
            "vllm_cfg": {
                "async_engine": False,
                "precision": "bfloat16",
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "expert_parallel_size": 1,
            },
            "vllm_kwargs": {},
        }
    },
    "grpo": {
        "num_generations_per_prompt": 16,
        "num_prompts_per_step": 32,
        "max_num_steps": 100,
        "seq_logprob_error_threshold": None,
        "async_grpo": {"enabled": False, "in_flight_weight_updates": False},
    },
    "checkpointing": {"checkpoint_dir": "results/grpo"},
    "logger": {"log_dir": "logs/grpo"},
}
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})


def recipe(block=None, **changes):
    """The base recipe, with the block and with dotted keys ("__" for ".") changed."""
    made = copy.deepcopy(BASE)
    if block is not None:
        made["policy"]["generation"]["spec_rl"] = {"enabled": True, "cache": CACHE, **block}
    for path, value in changes.items():
        put(made, path.split("__"), value)
    return made


def put(made, path, value):
    """Set the key of a recipe that a path leads to."""
    *blocks, name = path
    for block in blocks:
        made = made.setdefault(block, {})
    made[name] = value


def refusal(made, **known):
    with pytest.raises(ConfigError) as raised:
        check_recipe(made, **known)
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_without_a_block_or_with_a_disabled_one_the_plugin_is_off():
    assert check_recipe(recipe()) is None
    assert check_recipe(recipe({"enabled": False})) is None
    assert run_of(recipe(), TOKENIZER) is None


def test_a_run_knows_its_group_steps_folders_and_vocabulary(tmp_path):
    for step in (2, 10):
        (tmp_path / f"step_{step}").mkdir()
    (tmp_path / "tmp_step_12").mkdir()
    run = run_of(recipe({}, checkpointing__checkpoint_dir=str(tmp_path)), TOKENIZER)
    assert (run.group, run.prompts, run.steps) == (16, 32, 100)
    assert run.checkpoint == tmp_path / "step_10"
    assert run.spec_rl.cache.vocabulary == vocabulary_hash({"a": 0, "b": 1})
    processor = SimpleNamespace(tokenizer=TOKENIZER)
    assert run_of(recipe({}), processor).spec_rl == run.spec_rl
    assert "\n" not in run.summary and run.summary.endswith("/raid/specrl on each node")


@pytest.mark.parametrize(
    ("changes", "epochs", "drawn"),
    [
        ({}, math.inf, 3200),
        ({"grpo__max_num_epochs": 3}, 3, 3200),
        ({"grpo__max_num_epochs": 1, "data__use_multiple_dataloader": True}, math.inf, 3200),
        ({"grpo__max_num_epochs": 3, "grpo__async_grpo__enabled": True}, 1, 3200),
        ({"grpo__use_dynamic_sampling": True}, math.inf, math.inf),
    ],
)
def test_a_run_knows_how_often_its_data_comes_at_most(changes, epochs, drawn):
    made = recipe({}, **changes)
    if "grpo__async_grpo__enabled" in changes:
        made["policy"]["generation"]["vllm_cfg"]["async_engine"] = True
        made.setdefault("loss_fn", {})["use_importance_sampling_correction"] = True
    run = run_of(made, TOKENIZER)
    assert (run.epochs, run.drawn) == (epochs, drawn)


def test_a_run_says_what_stays_on_the_gpus_beside_the_policy():
    made = recipe({"draft": {"max_bytes": "1GiB"}}, policy__generation__colocated={"enabled": True})
    assert "keeps 1.0 GiB of histories and some 1.5 GiB of CUDA" in run_of(made, TOKENIZER).summary


def test_the_engines_get_the_block_beside_what_the_user_gives_them():
    made = recipe(
        {"draft": {"max_tokens": 8}}, policy__generation__vllm_kwargs__additional_config={"x": 1}
    )
    generation = made["policy"]["generation"]
    before = generation["vllm_kwargs"]
    give_to_engines(generation, run_of(made, TOKENIZER).spec_rl)
    config = generation["vllm_kwargs"]["additional_config"]
    assert config["x"] == 1 and config["spec_rl"]["cache"]["dir"] == "/raid/specrl"
    assert config["spec_rl"]["draft"]["max_tokens"] == 8
    assert len(config["spec_rl"]["cache"]["vocabulary"]) == 32
    assert before == {"additional_config": {"x": 1}}  # that of the user is left as it is
    assert read_block({"vllm_kwargs": generation["vllm_kwargs"]}).draft.max_tokens == 8


def test_the_block_may_stand_where_the_engines_read_it():
    made = recipe(policy__generation__vllm_kwargs__additional_config={"spec_rl": {"cache": CACHE}})
    assert check_recipe(made).enabled
    made["policy"]["generation"]["spec_rl"] = {"enabled": True}
    assert "are the same block; keep one of them" in refusal(made)
    wrong = recipe(policy__generation__vllm_kwargs__additional_config={"spec_rl": {"cash": {}}})
    assert refusal(wrong).startswith(
        "policy.generation.vllm_kwargs.additional_config.spec_rl.cash: unknown key"
    )


@pytest.mark.parametrize(
    "place",
    [
        *("spec_rl", "policy__spec_rl", "grpo__spec_rl"),
        *("policy__generation__vllm_cfg__spec_rl", "policy__generation__vllm_kwargs__spec_rl"),
    ],
)
def test_a_block_in_a_wrong_place_is_refused_with_the_right_one(place):
    line = refusal(recipe(**{place: {"enabled": True}}))
    assert line.startswith(place.replace("__", ".")) and "policy.generation.spec_rl" in line


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"tree": {"method": "rounds"}}, "policy.generation.spec_rl.tree = .*the key is now draft"),
        ({"preset": "faithful"}, "preset = 'faithful': the preset is now reuse"),
        ({"cache": {}}, "cache.dir: must name a folder"),
        ({"run_ahead": {"enabled": True}}, "run_ahead.enabled = True: NeMo-RL's engines are not"),
    ],
)
def test_blocks_that_cannot_be(block, line):
    with pytest.raises(ConfigError, match=line):
        check_recipe(recipe(block))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("policy__generation__backend", "sglang", "backend = 'sglang': must be vllm"),
        (
            "policy__generation__vllm_kwargs__speculative_config",
            {"method": "ngram"},
            "speculative_config.method = 'ngram': history has nothing to gain",
        ),
        (
            "policy__generation__vllm_cfg__pipeline_parallel_size",
            2,
            "pipeline_parallel_size = 2: vLLM's pipeline stages",
        ),
        (
            "policy__generation__vllm_cfg__env_vars",
            {"VLLM_PLUGINS": ""},
            "would not load nemo_specrl",
        ),
        ("grpo__partial_rollouts", {"enabled": True}, "grpo.partial_rollouts: NeMo-RL's engines"),
    ],
)
@pytest.mark.parametrize("preset", ["lossless", "reuse"])
def test_recipes_with_which_nothing_drafts(preset, key, value, line):
    assert line in refusal(recipe({"preset": preset}, **{key: value}))


LOSSLESS_TAKES = [
    ("policy__generation__temperature", 0.7, "policy.generation.temperature = 0.7: drafts are"),
    ("policy__generation__top_k", 50, "policy.generation.top_k = 50"),
    ("policy__generation__vllm_cfg__precision", "fp8", "vllm_cfg.precision = fp8"),
    ("policy__generation__vllm_cfg__kv_cache_dtype", "fp8_e4m3", "vllm_cfg.kv_cache_dtype = fp8"),
    ("policy__generation__vllm_kwargs__quantization", "fp8", "vllm_kwargs.quantization = fp8"),
    ("policy__generation__vllm_kwargs__kv_cache_dtype", "fp8", "vllm_kwargs.kv_cache_dtype = fp8"),
    ("policy__generation__quant_cfg", "NVFP4_DEFAULT_CFG", "policy.generation.quant_cfg"),
    ("policy__generation__worker_extension_cls_fqn", "my.Worker", "worker_extension_cls_fqn"),
    ("policy__generation__vllm_cfg__enable_prefix_caching", False, "prefix_caching = false"),
    (
        "policy__generation__vllm_cfg__expert_parallel_size",
        8,
        "expert_parallel_size = 8, above that",
    ),
    ("policy__generation__vllm_cfg__expose_http_server", True, "expose_http_server = true"),
    ("policy__generation__refit_transport", "zmq_sparse", "refit_transport = zmq_sparse"),
    ("policy__router_replay", {"enabled": True}, "policy.router_replay.enabled = true"),
    ("env__should_use_nemo_gym", True, "env.should_use_nemo_gym = true"),
    ("data_plane", {"enabled": True}, "data_plane.enabled = true"),
]


@pytest.mark.parametrize(("key", "value", "line"), LOSSLESS_TAKES)
def test_what_prefix_reuse_does_not_work_with_lossless_does(key, value, line):
    assert check_recipe(recipe({}, **{key: value})) is not None
    refused = refusal(recipe({"preset": "reuse"}, **{key: value}))
    assert refused.startswith("policy.generation.spec_rl.preset = 'reuse': does not work with ")
    assert line in refused and "set preset: lossless" in refused


def test_prefix_reuse_is_refused_in_the_single_controller_and_with_images():
    for known, line in (({"controller": True}, "async_rl"), ({"images": True}, "images, sounds")):
        assert line in refusal(recipe({"preset": "reuse"}), **known)
        assert check_recipe(recipe({}), **known) is not None
    assert check_recipe(recipe({"preset": "reuse"})).reuse.lenience == pytest.approx(
        1.6487, abs=1e-4
    )


def test_other_log_probs_than_the_policys_do_not_go_with_a_threshold_for_them():
    block = {"preset": "reuse", "reuse": {"reported_logprobs": "behaviour"}}
    assert check_recipe(recipe(block)) is not None
    made = recipe(block, grpo__seq_logprob_error_threshold=2.0)
    assert "grpo.seq_logprob_error_threshold masks rows" in refusal(made)


def test_ppo_has_its_own_block(tmp_path):
    made = recipe({}, ppo={"num_generations_per_prompt": 4, "num_prompts_per_step": 8})
    del made["grpo"]
    run = run_of(made, TOKENIZER)
    assert (run.group, run.prompts) == (4, 8)


def test_a_run_is_current_while_it_is_set_up():
    run = run_of(recipe({}), TOKENIZER)
    with pytest.raises(RuntimeError), setting_up(run):
        assert current_run() is run
        raise RuntimeError
    assert current_run() is None

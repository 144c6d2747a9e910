"""Mistakes and unusual options of recipes: each is refused in one line, runs, or says it is off.

``nemo-specrl check`` and the job read a recipe by the same function; here it reads it in the three
forms that it has there: a mapping, a file with what it inherits, and NeMo-RL's own models. The
latter two need a checkout of NeMo-RL in NEMO_RL_HOME.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.recipe import check_recipe, run_of
from nemo_specrl.nemo_rl.recipe_file import check_file, load
from tests.nemo_rl.test_recipe import BASE, TOKENIZER, put
from tests.support.nemo_rl.jobs import HOME, SITE

STOCK = "examples/configs/grpo_math_1B.yaml"
GENERATION = "policy.generation"
BLOCK = f"{GENERATION}.spec_rl"
ENGINES = f"{GENERATION}.vllm_kwargs.additional_config.spec_rl"
CFG, KWARGS = f"{GENERATION}.vllm_cfg", f"{GENERATION}.vllm_kwargs"
ON = {f"{BLOCK}.enabled": True, f"{BLOCK}.cache.dir": "/raid/specrl"}
REUSE = ON | {f"{BLOCK}.preset": "reuse"}
ASYNCHRONOUS = ON | {
    "grpo.async_grpo.enabled": True,
    f"{CFG}.async_engine": True,
    f"{GENERATION}.colocated.enabled": False,
    "loss_fn.use_importance_sampling_correction": True,
}
RUNS, OFF = "runs", "off"
WITH_REUSE = "does not work with"
RECIPES = [
    # The block: where it is, whether it is on.
    ({}, OFF),
    ({BLOCK: None}, OFF),
    ({f"{BLOCK}.enabled": False}, OFF),
    (ON | {f"{BLOCK}.enabled": False}, OFF),
    ({f"{ENGINES}.enabled": False}, OFF),
    (ON, RUNS),
    (ON | {f"{BLOCK}.enabled": "true"}, RUNS),
    ({f"{ENGINES}.cache.dir": "/raid/specrl"}, RUNS),
    ({BLOCK: {}}, f"{BLOCK}.enabled: not set"),
    ({f"{BLOCK}.cache.dir": "/raid/specrl"}, f"{BLOCK}.enabled: not set"),
    ({BLOCK: True}, f"{BLOCK}: must be a mapping"),
    ({ENGINES: True}, f"{ENGINES}: must be a mapping"),
    (ON | {ENGINES: {}}, "are the same block"),
    ({ENGINES: {}}, f"{ENGINES}.cache.dir: must name a folder"),
    ({f"{ENGINES}.preset": "reuse"}, f"write the block as {BLOCK}, which nemo-specrl run reads"),
    (
        {f"{KWARGS}.additional_config.cache.dir": "/raid/specrl"},
        f"additional_config.cache: is read by nobody here; write {BLOCK}.cache",
    ),
    *(
        ({f"{place}.enabled": True}, f"{place}: is read by nobody here; write {BLOCK}")
        for place in (
            *("spec_rl", "policy.spec_rl", "grpo.spec_rl", "env.spec_rl", "cluster.spec_rl"),
            *(f"{CFG}.spec_rl", f"{KWARGS}.spec_rl", "generation.spec_rl", "policy.specrl"),
            *(f"{GENERATION}.spec-rl", f"{GENERATION}.specRL", f"{GENERATION}.SPEC_RL"),
            *(f"{ENGINES}l", f"{GENERATION}.spec_r", f"{GENERATION}.pec_rl"),
            *(f"{GENERATION}.additional_config.spec_rl", f"{CFG}.additional_config.spec_rl"),
        )
    ),
    (ON | {f"{BLOCK}.spec_rl.enabled": True}, f"{BLOCK}.spec_rl: unknown key"),
    (ON | {"grpo.partial_rollouts.enabled": True}, "grpo.partial_rollouts: NeMo-RL's engines"),
    (ON | {"grpo.partial_rollout.enabled": True}, "grpo.partial_rollout: NeMo-RL's engines"),
    ({"policy.partial_rollouts.enabled": True}, "policy.partial_rollouts: NeMo-RL's engines"),
    # The block: what is in it.
    (ON | {f"{BLOCK}.enabled": "nein"}, f"{BLOCK}.enabled = 'nein'"),
    (ON | {f"{BLOCK}.preset": "loseless"}, f"{BLOCK}.preset = 'loseless'"),
    (ON | {f"{BLOCK}.preset": "faithful"}, "the preset is now reuse"),
    (ON | {f"{BLOCK}.preset": "fast"}, "the preset is now reuse"),
    (ON | {f"{BLOCK}.prset": "lossless"}, f"{BLOCK}.prset: unknown key; known are"),
    (ON | {f"{BLOCK}.tree.method": "rounds"}, "the key is now draft"),
    (ON | {f"{BLOCK}.lenience": 1.65}, "the key is now reuse.lenience"),
    (ON | {f"{BLOCK}.max_age": 3}, "the key is gone"),
    (ON | {f"{BLOCK}.monitor": {}}, "the key is gone"),
    (ON | {f"{BLOCK}.reuse.lenience": 1.0}, "is for preset: reuse"),
    (ON | {f"{BLOCK}.cache": {"dir": None}}, f"{BLOCK}.cache.dir: must name a folder"),
    (ON | {f"{BLOCK}.cache.dir": "None"}, f"{BLOCK}.cache.dir = 'None'"),
    (ON | {f"{BLOCK}.cache.dir": ""}, f"{BLOCK}.cache.dir = ''"),
    (ON | {f"{BLOCK}.cache.dir": "~nobody-here/cache"}, "there is no home folder"),
    (ON | {f"{BLOCK}.cache.max_bytes_per_node": "64 GBB"}, "must be a number of bytes"),
    (ON | {f"{BLOCK}.cache.max_bytes_per_node": "1KiB"}, "cache.max_bytes_per_node = "),
    (ON | {f"{BLOCK}.cache.max_bytes_per_node": "64GiB"}, RUNS),
    (ON | {f"{BLOCK}.cache.replicas": 0}, f"{BLOCK}.cache.replicas = 0"),
    (ON | {f"{BLOCK}.cache.replicas": 9}, f"{BLOCK}.cache.replicas = 9"),
    (ON | {f"{BLOCK}.cache.replicas": 1}, RUNS),
    (ON | {f"{BLOCK}.cache.responses_per_prompt": 0}, "responses_per_prompt = 0"),
    (ON | {f"{BLOCK}.cache.deadline_ms": -1}, "deadline_ms = -1"),
    (ON | {f"{BLOCK}.cache.partitions": 64}, "cache.partitions: unknown key"),
    (ON | {f"{BLOCK}.cache.vocabulary": "Qwen/Qwen3-8B"}, "cache.vocabulary = 'Qwen/Qwen3-8B'"),
    (ON | {f"{BLOCK}.draft.max_tokens": 0}, "draft.max_tokens = 0"),
    (ON | {f"{BLOCK}.draft.max_tokens": 129}, "draft.max_tokens = 129"),
    (ON | {f"{BLOCK}.draft.max_tokens": 8}, RUNS),
    (ON | {f"{BLOCK}.draft.adaptive": False}, RUNS),
    (ON | {f"{BLOCK}.draft.max_bytes": "1GiB"}, RUNS),
    (ON | {f"{BLOCK}.run_ahead.enabled": True}, "run_ahead.enabled = True: NeMo-RL's engines"),
    # With both presets: what no engine does with drafts.
    (ON | {f"{GENERATION}.backend": "sglang"}, "backend = 'sglang': must be vllm"),
    (ON | {f"{GENERATION}.backend": "megatron"}, "backend = 'megatron': must be vllm"),
    (ON | {f"{GENERATION}.backend": "trtllm"}, "backend = 'trtllm': must be vllm"),
    (ON | {f"{KWARGS}.speculative_config": {"method": "ngram"}}, "method = 'ngram': history has"),
    (ON | {f"{KWARGS}.speculative_config": {"method": "eagle3"}}, RUNS),
    (
        ON
        | {f"{KWARGS}.speculative_config": {"method": "eagle3"}}
        | {f"{BLOCK}.draft": {"adaptive_verification": True}},
        "adaptive verification beside policy.generation.vllm_kwargs.speculative_config",
    ),
    *(
        (
            ON | {f"{KWARGS}.speculative_config": {"method": "eagle3", key: value}},
            f"policy.generation.vllm_kwargs.speculative_config.{key}",
        )
        for key, value in (
            ("draft_sample_method", "probabilistic"),
            ("num_speculative_tokens_per_batch_size", [[1, 8, 2]]),
        )
    ),
    (REUSE | {f"{KWARGS}.speculative_config": {"method": "eagle3"}}, "prefix reuse is not tested"),
    (ON | {f"{KWARGS}.speculative_config": None}, RUNS),
    (ON | {f"{KWARGS}.spec_method": "ngram"}, "vllm_kwargs.spec_method: an engine has one"),
    (ON | {f"{KWARGS}.spec_model": "x/y"}, "vllm_kwargs.spec_model: an engine has one"),
    (ON | {f"{KWARGS}.scheduler_cls": "my.Scheduler"}, "vllm_kwargs.scheduler_cls: an engine has"),
    (ON | {f"{KWARGS}.logits_processors": ["my.Processor"]}, "vllm_kwargs.logits_processors: an"),
    (ON | {f"{KWARGS}.logits_processors": []}, RUNS),
    (ON | {f"{KWARGS}.enable_dbo": True}, "vllm_kwargs.enable_dbo: an engine"),
    (ON | {f"{KWARGS}.enable_dbo": False}, RUNS),
    (ON | {f"{KWARGS}.kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill: an engine"),
    (ON | {f"{CFG}.pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: vLLM's pipeline"),
    (REUSE | {f"{CFG}.pipeline_parallel_size": 4}, "pipeline_parallel_size = 4: vLLM's pipeline"),
    (ON | {f"{CFG}.env_vars": {"VLLM_PLUGINS": ""}}, "VLLM_PLUGINS = '': vLLM's processes would"),
    (ON | {f"{CFG}.env_vars": {"VLLM_PLUGINS": "modelopt"}}, "VLLM_PLUGINS = 'modelopt'"),
    (ON | {f"{CFG}.env_vars": {"VLLM_PLUGINS": "modelopt,nemo_specrl"}}, RUNS),
    (ON | {f"{CFG}.env_vars": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, "VLLM_USE_V2_MODEL_RUNNER = '0'"),
    (ON | {f"{CFG}.env_vars": {"VLLM_USE_V2_MODEL_RUNNER": 1}}, RUNS),
    (ON | {f"{CFG}.env_vars": ["VLLM_PLUGINS="]}, "vllm_cfg.env_vars: must be a mapping"),
    (ON | {f"{CFG}.env_vars": {"NCCL_DEBUG": "INFO"}}, RUNS),
    # What NeMo-RL would refuse once the engines have started.
    (ASYNCHRONOUS, RUNS),
    (ASYNCHRONOUS | {"grpo.async_grpo.in_flight_weight_updates": True}, RUNS),
    (
        REUSE | ASYNCHRONOUS | {"grpo.async_grpo.in_flight_weight_updates": True},
        f"{WITH_REUSE} grpo.async_grpo.in_flight_weight_updates = true",
    ),
    (ASYNCHRONOUS | {f"{GENERATION}.colocated.enabled": True}, "colocated.enabled=false"),
    (
        ASYNCHRONOUS | {f"{CFG}.async_engine": False},
        "needs policy.generation.vllm_cfg.async_engine",
    ),
    (
        ASYNCHRONOUS | {"loss_fn.use_importance_sampling_correction": False},
        "needs loss_fn.use_importance_sampling_correction=true",
    ),
    # Sampling, precision, parallelism and transport: lossless takes all of them, reuse some.
    *(
        pair
        for key, value, line in (
            (f"{GENERATION}.temperature", 0.7, "policy.generation.temperature = 0.7: drafts are"),
            (f"{GENERATION}.top_p", 0.9, "policy.generation.top_p = 0.9: drafts are"),
            (f"{GENERATION}.top_k", 50, "policy.generation.top_k = 50: drafts are"),
            (f"{CFG}.precision", "fp8", "vllm_cfg.precision = fp8, whose rounding"),
            (f"{CFG}.precision", "FP8", "vllm_cfg.precision = FP8, whose rounding"),
            (f"{CFG}.kv_cache_dtype", "fp8_e4m3", "vllm_cfg.kv_cache_dtype = fp8_e4m3"),
            (f"{KWARGS}.kv_cache_dtype", "fp8_e5m2", "vllm_kwargs.kv_cache_dtype = fp8_e5m2"),
            (f"{KWARGS}.kv_cache_dtype", "nvfp4", "vllm_kwargs.kv_cache_dtype = nvfp4"),
            (f"{KWARGS}.quantization", "fp8", "vllm_kwargs.quantization = fp8"),
            (f"{KWARGS}.quantization", "modelopt_fp4", "vllm_kwargs.quantization = modelopt_fp4"),
            (
                f"{KWARGS}.hf_overrides",
                {"quantization_config": {"quant_method": "fp8"}},
                "vllm_kwargs.hf_overrides.quantization_config = ",
            ),
            (f"{GENERATION}.quant_cfg", "NVFP4_DEFAULT_CFG", "policy.generation.quant_cfg"),
            (f"{CFG}.enable_prefix_caching", False, "enable_prefix_caching = false"),
            (f"{CFG}.expert_parallel_size", 8, "expert_parallel_size = 8, above that of tensors"),
            (f"{CFG}.expose_http_server", True, "expose_http_server = true"),
            (f"{GENERATION}.refit_transport", "vllm_zmq_sparse", "refit_transport = vllm_zmq_sp"),
            (f"{GENERATION}.refit_transport", "nixl", "refit_transport = nixl"),
            (f"{GENERATION}.worker_extension_cls_fqn", "my.Worker", "worker_extension_cls_fqn"),
            ("policy.router_replay.enabled", True, "policy.router_replay.enabled = true"),
            ("env.should_use_nemo_gym", True, "env.should_use_nemo_gym = true"),
            ("data_plane.enabled", True, "data_plane.enabled = true"),
        )
        for pair in ((ON | {key: value}, RUNS), (REUSE | {key: value}, f"{WITH_REUSE} .*{line}"))
    ),
    (REUSE, RUNS),
    (REUSE | {f"{BLOCK}.reuse.lenience": 0}, "reuse.lenience = 0"),
    (REUSE | {f"{BLOCK}.reuse.fresh_fraction": 0}, RUNS),
    (REUSE | {f"{GENERATION}.top_k": -1}, RUNS),
    (REUSE | {f"{KWARGS}.kv_cache_dtype": "auto"}, RUNS),
    (REUSE | {f"{GENERATION}.refit_transport": "nccl_reshard"}, RUNS),
    (
        REUSE
        | {f"{BLOCK}.reuse.reported_logprobs": "behaviour", "grpo.seq_logprob_error_threshold": 2},
        "reported_logprobs: behaviour, since grpo.seq_logprob_error_threshold masks",
    ),
    # Options of NeMo-RL that have nothing to do with it.
    *(
        (preset | {key: value}, RUNS)
        for preset in (ON, REUSE)
        for key, value in (
            ("grpo.use_dynamic_sampling", True),
            ("grpo.overlong_filtering", True),
            ("grpo.max_rollout_turns", 4),
            ("policy.sequence_packing.enabled", True),
            ("policy.lora_cfg.enabled", True),
            (f"{CFG}.tensor_parallel_size", 4),
            (f"{CFG}.gpu_memory_utilization", 0.5),
            (f"{KWARGS}.max_num_seqs", 256),
            (f"{GENERATION}.stop_strings", ["</answer>"]),
            ("checkpointing.enabled", False),
        )
    ),
]
"""The keys of each recipe, and its outcome; a line is part of the refusal, a regular expression."""


def nested(keys):
    """Keys with dots as the blocks of a recipe."""
    made = {}
    for path, value in keys.items():
        put(made, path.split("."), value)
    return made


def outcome(read):
    """Of a function that reads a recipe: its refusal, in one line; or what it says."""
    try:
        said = read()
    except ConfigError as error:
        assert "\n" not in str(error)
        return str(error)
    return OFF if said is None or "spec_rl is off" in str(said) else RUNS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("keys", "expected"), RECIPES)
def test_a_recipe_is_refused_in_one_line_runs_or_is_off(keys, expected):
    recipe = OmegaConf.to_container(OmegaConf.merge(BASE, nested(keys)))
    said = outcome(lambda: check_recipe(recipe))
    if expected in (RUNS, OFF):
        assert said == expected
    else:
        assert said not in (RUNS, OFF)
        with pytest.raises(ConfigError, match=expected):
            run_of(recipe, TOKENIZER)  # as the job reads it


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("VLLM_PLUGINS", "lora_resolver", "VLLM_PLUGINS = 'lora_resolver': vLLM's processes would"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0", "VLLM_USE_V2_MODEL_RUNNER = '0'"),
        ("RAY_TMPDIR", "/lustre/" + 32 * "r", r"RAY_TMPDIR = .* of at most 39 bytes"),
    ],
)
def test_the_environment_of_the_job_is_read_too(monkeypatch, name, value, line):
    recipe = OmegaConf.to_container(OmegaConf.merge(BASE, nested(ON)))
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=line):
        check_recipe(recipe)
    monkeypatch.setenv(name, {"VLLM_PLUGINS": "nemo_specrl", "RAY_TMPDIR": "/tmp"}.get(name, "1"))
    assert check_recipe(recipe) is not None


@pytest.fixture(scope="module")
def models():
    """NeMo-RL's own model of a recipe."""
    if not HOME:
        pytest.skip("set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL and run `make test-nemo`")
    # By its path, since this Python may have a sitecustomize of its own.
    runpy.run_path(str(SITE / "sitecustomize.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(HOME).resolve()), *sys.path])
        yield importlib.import_module("nemo_rl.algorithms.grpo").MasterConfig


@pytest.mark.parametrize(("keys", "expected"), RECIPES)
def test_check_and_the_job_say_the_same_of_a_file(models, tmp_path, keys, expected):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"defaults": str(Path(HOME) / STOCK), **nested(keys)}))
    said = outcome(lambda: check_file(path))
    assert said == outcome(lambda: run_of(models(**load(path)), TOKENIZER))
    assert (said == expected) if expected in (RUNS, OFF) else said not in (RUNS, OFF)

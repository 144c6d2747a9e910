"""How the plug-in reads recipes of NeMo-RL, and which it refuses; needs no NeMo-RL."""

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_specrl.engine.drafters import method
from nemo_specrl.engine.vllm.environment import (
    Engines,
    has_custom_proposers,
    has_v2_speculators,
)
from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.nemo_rl import compat
from nemo_specrl.nemo_rl.context import RunContext, current_run, setting_up
from nemo_specrl.nemo_rl.metrics_log import metrics_file
from nemo_specrl.nemo_rl.recipe_checks import check_elsewhere
from nemo_specrl.nemo_rl.rollout_metadata import response_spans
from tests.conftest import REPOSITORY

GENERATION = {
    "backend": "vllm",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "vllm_cfg": {"async_engine": False},
    "vllm_kwargs": {},
    "spec_rl": {"enabled": True, "cache": {"dir": "/raid/specrl"}, "tree": {"method": "rounds"}},
}
CACHE = {"cache": {"dir": "/raid/specrl"}}
REUSE = {"spec_rl__preset": "faithful"}
ROUNDS = {"spec_rl__tree": {"method": "rounds"}}
AHEAD = {"spec_rl__run_ahead": {"enabled": True}}
GROUP = {"vllm_cfg__expert_parallel_size": 16, "vllm_cfg__tensor_parallel_size": 8}
AUTO = {"spec_rl__tree": {}}
PROPOSER = {"spec_rl__tree": {"method": "proposer"}}


def recipe(tmp_path, **changes):
    """A MasterConfig as far as it is read; ``changes`` are of dotted keys of the generation."""
    generation = copy.deepcopy(GENERATION)
    for path, value in changes.items():
        block, _, name = path.rpartition("__")
        target = generation
        for part in block.split("__") if block else []:
            target = target.setdefault(part, {})
        target[name] = value
    return SimpleNamespace(
        policy={
            "model_name": str(tmp_path / "model"),
            "generation": generation,
            "tokenizer": {"name": "Qwen/Qwen3-8B"},
        },
        grpo=SimpleNamespace(seed=42),
        ppo={"seed": 43},
        distillation=SimpleNamespace(seed=44, num_generations_per_prompt=2),
        logger={"log_dir": str(tmp_path / "logs")},
        checkpointing={"enabled": True, "checkpoint_dir": str(tmp_path / "checkpoints")},
        loss_fn={"force_on_policy_ratio": False},
        data={},
        data_plane=None,
    )


def test_without_the_block_or_switched_off_there_is_nothing_to_do(tmp_path):
    off = recipe(tmp_path, spec_rl__enabled=False, temperature=0.6)
    assert RunContext.of(off, "grpo") is None
    del off.policy["generation"]["spec_rl"]
    assert RunContext.of(off, "grpo") is None


def test_a_run_reads_its_recipe(tmp_path):
    run = RunContext.of(recipe(tmp_path), "grpo")
    assert (run.seed, run.checkpoint, run.tokenizer_id) == (42, None, "Qwen/Qwen3-8B")
    assert run.spec_rl.preset == "lossless" and not run.trains_later
    assert run.store_folder.parent == Path("/raid/specrl")
    other = recipe(tmp_path / "elsewhere")
    assert RunContext.of(other, "grpo").store_folder != run.store_folder


@pytest.mark.parametrize("enabled", [True, False])
def test_a_resumed_run_knows_its_last_checkpoint(tmp_path, enabled):
    """NeMo-RL resumes from it whether it writes others or not."""
    resumed = recipe(tmp_path)
    resumed.checkpointing["enabled"] = enabled
    for algorithm in ("grpo", "ppo", "distillation"):
        assert RunContext.of(resumed, algorithm).checkpoint is None
    for name in ("step_9", "step_10", "tmp_step_11", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for algorithm in ("grpo", "ppo", "distillation"):
        newest = RunContext.of(resumed, algorithm).checkpoint
        assert newest == tmp_path / "checkpoints" / "step_10"


def write_steps(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "log": folder.name}) for step in range(1, count + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9, "rew')


def test_a_resumed_run_goes_on_with_the_lines_up_to_its_checkpoint(tmp_path):
    """In the folder of the process that wrote it, in a new one, or with nothing."""
    checkpoint = tmp_path / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    for name in ("exp_001", "exp_002", "exp_003"):
        resumed = recipe(tmp_path)
        resumed.logger["log_dir"] = str(tmp_path / name)
        write_steps(tmp_path / "exp_001", 3)
        file = metrics_file(RunContext.of(resumed, "grpo"))
        file.write({"step": 3, "log": "new"})
        file.close()
        logs = [row["log"] for row in read_metrics(file.path)]
        assert logs == ([] if name == "exp_003" else ["exp_001"] * 2) + ["new"]
        (checkpoint / "config.yaml").write_text(f"logger: {{log_dir: {tmp_path / 'exp_001'}}}")
        if name == "exp_002":
            (checkpoint / "config.yaml").write_text(f"logger: {{log_dir: {tmp_path / 'none'}}}")


@pytest.mark.parametrize("damage", ["logs", "recipe", "lines"])
def test_a_log_that_cannot_be_written_or_read_is_a_warning(tmp_path, caplog, damage):
    checkpoint = tmp_path / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    if damage == "logs":
        (tmp_path / "logs" / "metrics.jsonl").mkdir()
    elif damage == "recipe":
        (checkpoint / "config.yaml").write_text("[")
    else:
        (tmp_path / "logs" / "metrics.jsonl").write_text('{"name": "of another program"}\n')
    assert metrics_file(RunContext.of(recipe(tmp_path), "grpo")) is None
    [record] = caplog.records
    assert "logs/metrics.jsonl: steps are not written (" in record.message


@pytest.mark.parametrize(
    ("changes", "named", "way_out"),
    [
        (REUSE | {"temperature": 0.6}, "policy.generation.temperature = 0.6", "preset: lossless"),
        (ROUNDS | {"temperature": 0.6}, "tree.method: rounds verifies", "set 1.0"),
        (AHEAD | {"vllm_cfg__async_engine": True}, "run_ahead.enabled = True: an async", "false"),
        (AHEAD, "run_ahead.enabled = True: needs a drafter inside", "tree.method to auto"),
        (REUSE | {"top_p": 0.95}, "policy.generation.top_p = 0.95", "set 1.0"),
        (REUSE | {"top_k": 50}, "policy.generation.top_k = 50: prefix reuse", "set null"),
        (REUSE | {"vllm_cfg__precision": "fp8"}, "vllm_cfg.precision = fp8", "set bfloat16"),
        (REUSE | {"vllm_cfg__kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype = fp8_e4m3", "set auto"),
        (AHEAD | GROUP, "run_ahead.enabled = True: where policy.generation.vllm_cfg.exp", "false"),
        (
            {"spec_rl__tree": {"adaptive_verification": True}} | GROUP,
            "adaptive_verification = True: where policy.generation.vllm_cfg.expert_parallel_size",
            "set it to false",
        ),
        (
            GROUP | {"vllm_kwargs__async_scheduling": True},
            "policy.generation.vllm_kwargs.async_scheduling = True: where policy.generation.vllm",
            "leave it out",
        ),
        ({"vllm_kwargs__data_parallel_size": 2}, "vllm_kwargs.data_parallel_size = 2", "leave it"),
        ({"worker_extension_cls_fqn": "my.Worker"}, "cls_fqn = my.Worker", "leave it out"),
        ({"bad_words": ["x"]}, "policy.generation.bad_words", "leave them out"),
        ({"backend": "megatron"}, "policy.generation.backend = 'megatron'", "must be vllm"),
        (
            REUSE | {"quant_cfg": "FP8_DEFAULT_CFG"},
            "generation.quant_cfg: its numerical noise",
            "leave it",
        ),
        ({"vllm_cfg__expose_http_server": True}, "vllm_cfg.expose_http_server", "without rounds"),
        ({"vllm_kwargs__enable_return_routed_experts": True}, "routed_experts", "router replay"),
        ({"vllm_kwargs__kv_transfer_config": {"a": 1}}, "kv_transfer_config", "leave it out"),
        ({"spec_rl__cache": {}}, "spec_rl.cache.dir", "such as /raid/specrl"),
        ({"spec_rl__lenience": 0}, "policy.generation.spec_rl.lenience = 0", "greater than 0"),
        ({"spec_rl__lenient": 1}, "spec_rl.lenient: unknown key", "known are enabled, preset"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, changes, named, way_out):
    with pytest.raises(ConfigError) as raised:
        RunContext.of(recipe(tmp_path, **changes), "grpo")
    line = str(raised.value)
    assert named in line and way_out in line and "\n" not in line


@pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) takes no proposer")
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.6, "top_p": 0.95},
        {"vllm_cfg__precision": "fp8", "vllm_cfg__kv_cache_dtype": "fp8"},
        {"quant_cfg": "FP8_DEFAULT_CFG"},
        {"vllm_cfg__expert_parallel_size": 8, "vllm_cfg__tensor_parallel_size": 8},
        GROUP,
        {"vllm_kwargs__data_parallel_size": 1, "worker_extension_cls_fqn": None},
        {"refit_transport": "vllm_s3_sparse"},
        {"refit_transport": "vllm_zmq_sparse", "vllm_cfg__async_engine": True},
    ],
)
def test_a_proposer_drafts_under_any_sampling(tmp_path, changes):
    """Its drafts are judged by what is sampled from; only prefix reuse and rounds need it raw."""
    assert RunContext.of(recipe(tmp_path, **PROPOSER, **changes), "grpo") is not None


def test_top_k_is_for_v2_alone(tmp_path):
    likeliest = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
    known = {"engines": Engines.elsewhere("0.25.1", {}), "model": {}}
    assert RunContext.of(recipe(tmp_path, **AUTO, **likeliest), "grpo", **known) is not None
    with pytest.raises(ConfigError, match=r"top_k = 50: with .*proposer vLLM fails .* set null"):
        RunContext.of(recipe(tmp_path, **PROPOSER, top_k=50), "grpo", **known)


def test_records_of_rollouts_are_collected_for_what_reads_them(tmp_path):
    def needs_records(**changes):
        new = Engines.elsewhere("0.25.1", {})
        return RunContext.of(recipe(tmp_path, **changes), "grpo", engines=new).needs_records

    assert needs_records(**REUSE)
    assert not needs_records(**REUSE, spec_rl__monitor={"enabled": False})
    assert not needs_records(**PROPOSER)  # lossless: no row is reused


def test_distillation_has_neither_rewards_nor_a_ratio(tmp_path):
    run = RunContext.of(recipe(tmp_path, **REUSE), "distillation")
    assert (run.seed, run.group) == (44, 2)
    assert not run.spec_rl.monitor.enabled and not run.needs_records
    assert RunContext.of(recipe(tmp_path, **REUSE), "grpo").needs_records
    for changes, line in (
        ({"spec_rl__clip_anchor": "birth"}, r"clip_anchor = 'birth': the loss of distillation has"),
        (
            {"spec_rl__monitor": {"auto": True}},
            r"monitor.auto = True: in distillation there are no",
        ),
    ):
        with pytest.raises(ConfigError, match=line):
            RunContext.of(recipe(tmp_path, **REUSE, **changes), "distillation")


@pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) takes no proposer")
def test_run_ahead_needs_one_loader_in_the_process_of_the_generation(tmp_path):
    ahead = recipe(tmp_path, **PROPOSER, **AHEAD)
    assert RunContext.of(ahead, "grpo").spec_rl.run_ahead.enabled
    ahead.data["use_multiple_dataloader"] = True
    with pytest.raises(ConfigError, match=r"run_ahead.enabled = True: with several data loaders"):
        RunContext.of(ahead, "grpo")
    ahead.data, ahead.data_plane = {}, {"enabled": True}
    with pytest.raises(ConfigError, match=r"run_ahead.enabled = True: the data plane's rollouts"):
        RunContext.of(ahead, "grpo")


PARTIAL = {"enabled": True, "over_provision": 1.5}


def with_partial_rollouts(tmp_path, block, **changes):
    asked = recipe(tmp_path, **REUSE, **changes)
    asked.grpo = SimpleNamespace(
        seed=42, use_dynamic_sampling=True, max_rollout_turns=1, partial_rollouts=block
    )
    return asked


def test_partial_rollouts_are_read_from_the_algorithms_block(tmp_path):
    run = RunContext.of(with_partial_rollouts(tmp_path, PARTIAL), "grpo")
    assert run.partial_rollouts.over_provision == 1.5 and run.partial_rollouts.max_put_off == 1
    assert not RunContext.of(recipe(tmp_path, **REUSE), "grpo").partial_rollouts.enabled
    with pytest.raises(ConfigError, match=r"grpo\.partial_rollouts\.over_provision"):
        RunContext.of(with_partial_rollouts(tmp_path, PARTIAL | {"over_provision": 3}), "grpo")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"grpo__use_dynamic_sampling": False}, "set grpo.use_dynamic_sampling=true, or false"),
        ({"grpo__max_rollout_turns": 2}, "set grpo.max_rollout_turns=1, or false"),
        ({"data": {"use_multiple_dataloader": True}}, "data.use_multiple_dataloader=false"),
        ({"data_plane": {"enabled": True}}, "data_plane.enabled=false"),
    ],
)
def test_partial_rollouts_are_refused_where_no_prompt_can_be_put_off(tmp_path, change, line):
    asked = with_partial_rollouts(tmp_path, PARTIAL)
    for name, value in change.items():
        block, _, key = name.rpartition("grpo__")
        setattr(asked.grpo if "grpo__" in name else asked, key or block, value)
    with pytest.raises(ConfigError) as raised:
        RunContext.of(asked, "grpo")
    assert str(raised.value).startswith("grpo.partial_rollouts.enabled = true: ")
    assert line in str(raised.value) and "\n" not in str(raised.value)


def test_partial_rollouts_need_synchronous_engines_grpo_and_a_cache(tmp_path):
    asked = with_partial_rollouts(tmp_path, PARTIAL, vllm_cfg__async_engine=True)
    with pytest.raises(ConfigError, match=r"vllm_cfg\.async_engine=false, or false"):
        RunContext.of(asked, "grpo")
    asked = recipe(tmp_path, **REUSE)
    asked.ppo = {"seed": 43, "partial_rollouts": PARTIAL, "use_dynamic_sampling": True}
    with pytest.raises(ConfigError, match=r"ppo\.partial_rollouts\.enabled = true: .* set false"):
        RunContext.of(asked, "ppo")
    for change in ("off", "absent"):
        asked = with_partial_rollouts(tmp_path, PARTIAL, spec_rl__enabled=False)
        if change == "absent":
            del asked.policy["generation"]["spec_rl"]
        with pytest.raises(ConfigError, match=r"set policy\.generation\.spec_rl\.enabled=true"):
            RunContext.of(asked, "grpo")


@pytest.mark.parametrize("transport", [None, "nccl_reshard", "nixl", "my_module:Engine"])
def test_refits_that_are_counted_are_not_refused(tmp_path, transport):
    assert RunContext.of(recipe(tmp_path, refit_transport=transport), "grpo") is not None


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_weights_are_updated_in_flight_but_not_in_rounds_nor_on_old_vllm(tmp_path, algorithm):
    """In v0.7.0's form of a recipe, and in main's; without the trainer the key says nothing."""
    name = f"async_{algorithm}"
    new, old = (Engines.elsewhere(version, {}) for version in ("0.25.1", "0.20.0"))
    rounds, reuse = recipe(tmp_path), recipe(tmp_path, **REUSE)
    for own in (lambda block: {"seed": 1, name: block}, lambda b: SimpleNamespace(**{name: b})):
        for enabled, in_flight in ((True, False), (False, True)):
            block = {"enabled": enabled, "in_flight_weight_updates": in_flight}
            for asked in (rounds, reuse):
                setattr(asked, algorithm, own(block))
                assert RunContext.of(asked, algorithm, engines=old) is not None
        block = {"enabled": True, "in_flight_weight_updates": True}
        for asked, engines, why in ((rounds, new, "log-probs of two"), (reuse, old, "vLLM 0.20.0")):
            setattr(asked, algorithm, own(block))
            with pytest.raises(ConfigError) as raised:
                RunContext.of(asked, algorithm, engines=engines)
            line = str(raised.value)
            assert f"{algorithm}.{name}.in_flight_weight_updates = true" in line and why in line
            assert "set it to false" in line and "\n" not in line
        for recompute in (False, True):
            block["recompute_kv_cache_after_weight_updates"] = recompute
            run = RunContext.of(reuse, algorithm, engines=new)
            assert run.recompute_kv is recompute and run.trains_later


@pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) loses tokens at refits")
def test_rows_of_the_single_controller_run_on_through_refits_but_not_in_rounds(tmp_path):
    for recompute in (False, True):
        reuse = recipe(tmp_path, **REUSE)
        reuse.async_rl = SimpleNamespace(recompute_kv_cache_after_weight_updates=recompute)
        run = RunContext.of(reuse, "grpo", single_controller=True)
        assert run.recompute_kv is recompute and run.trains_later
    rounds = recipe(tmp_path)
    rounds.async_rl = {}
    with pytest.raises(ConfigError, match=r"log-probs of two policies; set .*\.tree\.method=auto$"):
        RunContext.of(rounds, "grpo", single_controller=True)


def test_an_anchor_that_nothing_starts_from_is_refused(tmp_path):
    anchored = recipe(tmp_path, spec_rl__clip_anchor="birth")
    assert RunContext.of(anchored, "grpo").spec_rl.clip_anchor == "birth"
    anchored.loss_fn["force_on_policy_ratio"] = True
    with pytest.raises(ConfigError, match="no ratio to anchor"):
        RunContext.of(anchored, "grpo")
    anchored.loss_fn["force_on_policy_ratio"] = False
    anchored.data_plane = {"enabled": True}
    with pytest.raises(ConfigError, match="does not reach the data plane"):
        RunContext.of(anchored, "grpo")
    reused = recipe(tmp_path, **REUSE, spec_rl__clip_anchor="birth")
    reused.data_plane, reused.async_rl = {"enabled": True}, {}
    new = Engines.elsewhere("0.25.1", {})
    assert RunContext.of(reused, "grpo", single_controller=True, engines=new).needs_records
    anchored.data_plane = None
    assert RunContext.of(anchored, "ppo").seed == 43


def test_router_replay_is_known_before_setup_turns_it_into_options_of_the_engine(tmp_path):
    """Of reused prefixes any vLLM returns routes; with drafts its V2 model runner, since 0.29."""
    for changes, version, why in (
        (REUSE, "0.20.0", None),
        (REUSE, "0.25.1", None),
        (REUSE, "0.32.0", None),
        (ROUNDS, "0.32.0", "drafts by rounds has not been run"),
        (PROPOSER, "0.32.0", "drafts by proposer has not been run"),
        (AUTO, "0.25.1", "vLLM 0.25.1 returns routed experts from its V1 model runner alone"),
        (AUTO, "0.29.0", None),
    ):
        replayed = recipe(tmp_path, **changes)
        replayed.policy["router_replay"] = {"enabled": True}
        known = {"engines": Engines.elsewhere(version, {}), "model": {}}
        if why is None:
            assert RunContext.of(replayed, "grpo", **known) is not None
            continue
        with pytest.raises(ConfigError, match=r"policy.router_replay.enabled = true: ") as raised:
            RunContext.of(replayed, "grpo", **known)
        assert why in str(raised.value) and "off, or" in str(raised.value)


def test_log_probs_that_nemo_rl_would_take_for_errors_are_refused(tmp_path):
    masking = recipe(tmp_path, spec_rl__reported_logprobs="behaviour")
    masking.grpo.seq_logprob_error_threshold = None
    assert RunContext.of(masking, "grpo") is not None
    masking.grpo.seq_logprob_error_threshold = 2.0
    with pytest.raises(ConfigError) as raised:
        RunContext.of(masking, "grpo")
    line = str(raised.value)
    assert "spec_rl.reported_logprobs = 'behaviour'" in line and "to policy" in line
    assert "grpo.seq_logprob_error_threshold" in line and "null" in line
    assert RunContext.of(recipe(tmp_path), "grpo") is not None


@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "eagle3", "num_speculative_tokens": 3},
        {"method": "mtp"},  # as many as its model has
        {"method": "ngram", "num_speculative_tokens": 4},
    ],
)
def test_an_engine_has_one_drafter(tmp_path, drafter):
    """The recipe's own beside reuse, the tree proposer, or neither; never both."""
    own = {"vllm_kwargs__speculative_config": drafter}
    for spec_rl in ({"spec_rl__preset": "faithful"}, {"spec_rl__preset": "fast"}):
        assert RunContext.of(recipe(tmp_path, **own, **spec_rl), "grpo") is not None
    tree = {"enabled": True, "method": "rounds"}  # which every vLLM takes
    for spec_rl in ({}, {"spec_rl__preset": "fast", "spec_rl__tree": tree}):
        assert RunContext.of(recipe(tmp_path, **spec_rl), "grpo") is not None
        with pytest.raises(ConfigError) as raised:
            RunContext.of(recipe(tmp_path, **own, **spec_rl), "grpo")
        line = str(raised.value)
        assert "vllm_kwargs.speculative_config" in line and "spec_rl.tree.enabled" in line
        assert "leave it out" in line and "\n" not in line


def test_a_disabled_drafter_is_no_drafter(tmp_path):
    drafter = {"method": "mtp", "num_speculative_tokens": 0}
    disabled = recipe(tmp_path, vllm_kwargs__speculative_config=drafter, spec_rl__preset="lossless")
    assert RunContext.of(disabled, "grpo") is not None


@pytest.mark.skipif(not has_v2_speculators(), reason="this vLLM takes no speculator")
def test_the_v2_drafter_takes_no_pipeline_stages(tmp_path, monkeypatch):
    """Before the workers start, which would find out minutes later."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(method, "_v2_problem", lambda engines: None)  # Triton may be missing here
    v2 = {"spec_rl__tree": {"method": "v2"}}
    assert RunContext.of(recipe(tmp_path, **v2), "grpo") is not None
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 2: .*tree.method = v2 does"):
        RunContext.of(recipe(tmp_path, **v2, vllm_cfg__pipeline_parallel_size=2), "grpo")


@pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) takes no proposer")
def test_nor_does_a_proposer(tmp_path):
    stages = recipe(tmp_path, **PROPOSER, vllm_cfg__pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"size = 2: .*method = proposer does not work with pipe"):
        RunContext.of(stages, "grpo")
    assert RunContext.of(recipe(tmp_path, **REUSE, vllm_cfg__pipeline_parallel_size=2), "grpo")


GPUS = Engines.elsewhere("0.25.1", {})
DENSE = {"architectures": ["Qwen3ForCausalLM"]}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
HYBRID = {"architectures": ["Lfm2ForCausalLM"]}
NEMOTRON = {"architectures": ["NemotronHForCausalLM"]}


def test_what_workers_on_gpus_will_do_is_known_to_a_driver_without_any(tmp_path, monkeypatch):
    lossless = recipe(tmp_path, **AUTO)
    assert RunContext.of(lossless, "grpo", engines=GPUS, model=DENSE) is not None
    with pytest.raises(ConfigError, match=r"auto: vLLM 0\.20\.0 takes no drafter of ours"):
        RunContext.of(lossless, "grpo", engines=Engines.elsewhere("0.20.0", {}), model=DENSE)
    for environ in ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}):
        with pytest.raises(ConfigError, match=r"auto: vLLM 0\.25\.1 does not bring back all state"):
            asked = Engines.elsewhere("0.25.1", environ)
            RunContext.of(lossless, "grpo", engines=asked, model=HYBRID)
    faithful = recipe(tmp_path, spec_rl={"enabled": True, "preset": "faithful"} | CACHE)
    assert RunContext.of(faithful, "grpo", engines=GPUS, model=HYBRID) is not None
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ConfigError, match="vLLM's processes would not load nemo_specrl"):
        RunContext.of(lossless, "grpo", engines=GPUS, model=DENSE)
    assert RunContext.of(faithful, "grpo", engines=GPUS, model=DENSE) is not None


@pytest.mark.parametrize("model", [MIXTURE, NEMOTRON])
def test_some_models_get_the_v2_runner_and_a_line_says_so(tmp_path, caplog, model):
    lossless = recipe(tmp_path, **AUTO, vllm_cfg__env_vars={"OTHER": "2"})
    vllm_cfg = lossless.policy["generation"]["vllm_cfg"]
    RunContext.of(lossless, "grpo", engines=GPUS, model=DENSE)
    assert vllm_cfg["env_vars"] == {"OTHER": "2"} and not caplog.records
    RunContext.of(lossless, "grpo", engines=GPUS, model=model)
    assert vllm_cfg["env_vars"] == {"OTHER": "2", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert "env_vars.VLLM_USE_V2_MODEL_RUNNER is set to '1': drafts" in caplog.text
    for other in (
        recipe(tmp_path, **AUTO, spec_rl__enabled=False),
        recipe(tmp_path, spec_rl={"enabled": True, "preset": "faithful"} | CACHE),
    ):
        RunContext.of(other, "grpo", engines=GPUS, model=model)
        assert "env_vars" not in other.policy["generation"]["vllm_cfg"]


def test_without_a_vllm_the_checkout_says_which_one_workers_have(tmp_path, monkeypatch):
    package = tmp_path / "nemo_rl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    found = {"nemo_rl": importlib.util.spec_from_file_location("nemo_rl", package / "__init__.py")}
    found["nemo_rl"].submodule_search_locations = [str(package)]
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: found.get(name))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert compat.engines_of({}) == Engines.elsewhere(None, {})
    (tmp_path / "pyproject.toml").write_text("vllm = [\"vllm==0.25.1 ; sys_platform == 'x'\"]")
    assert compat.engines_of({}) == GPUS
    variables = {"vllm_cfg": {"env_vars": {"VLLM_USE_V2_MODEL_RUNNER": 1}}}
    assert compat.engines_of(variables).v2_wanted is True


def test_a_model_is_looked_up_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    assert compat.model_of(str(tmp_path))["num_experts"] == 128
    assert compat.model_of(str(tmp_path / "none")) == {}


@pytest.mark.parametrize("changes", [REUSE, REUSE | AUTO, ROUNDS])
def test_images_and_bad_words_are_refused_where_prompts_verify(tmp_path, changes):
    with pytest.raises(ConfigError, match=r"preset = .* multimodal processor.* set preset: lossl"):
        RunContext.of(recipe(tmp_path, **changes), "grpo", images=True)
    with pytest.raises(ConfigError, match=r"bad_words: .* verifies drafts by prompt log-probs"):
        RunContext.of(recipe(tmp_path, **changes, bad_words=["<image>"]), "grpo")


@pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) takes no proposer")
def test_with_a_drafter_in_the_engine_images_and_bad_words_are_drafted_for(tmp_path):
    assert RunContext.of(recipe(tmp_path, **PROPOSER, bad_words=["a"]), "grpo", images=True)
    with pytest.raises(ConfigError, match=r"run_ahead.enabled = True: .* only the token ids"):
        RunContext.of(recipe(tmp_path, **PROPOSER, **AHEAD), "grpo", images=True)


@pytest.mark.parametrize("changes", [REUSE, REUSE | AUTO, ROUNDS])
def test_nemo_gym_is_refused_where_its_requests_would_not_draft(tmp_path, changes):
    gym = recipe(tmp_path, **changes)
    gym.env = {"should_use_nemo_gym": True}  # before its script switches the server on
    with pytest.raises(ConfigError, match=r"env.should_use_nemo_gym = true: .* set preset: lossl"):
        RunContext.of(gym, "grpo")


@pytest.mark.skipif(not has_custom_proposers(), reason="this vLLM (0.20) takes no proposer")
def test_with_a_drafter_in_the_engine_conversations_come_by_http(tmp_path):
    served = recipe(tmp_path, **PROPOSER, vllm_cfg__expose_http_server=True)
    run = RunContext.of(served, "grpo")
    assert run.served and run.needs_records
    assert not RunContext.of(recipe(tmp_path, **PROPOSER), "grpo").served
    served.data_plane = SimpleNamespace(enabled=True)
    with pytest.raises(ConfigError, match=r"http_server = true: .* set data_plane.enabled=false"):
        RunContext.of(served, "grpo")
    served.async_rl = {}
    assert RunContext.of(served, "grpo", single_controller=True).served


@pytest.mark.parametrize("backend", ["vllm", "megatron", "sglang"])
def test_where_nothing_is_drafted_the_block_is_refused_for_every_backend(backend):
    for off in (None, {}, {"backend": backend}, {"spec_rl": {"enabled": False}}):
        check_elsewhere(off)
    with pytest.raises(ConfigError, match="and not here; set false"):
        check_elsewhere({"backend": backend, "spec_rl": {"enabled": True}})


def test_a_run_is_current_while_it_is_set_up(tmp_path):
    run = RunContext.of(recipe(tmp_path), "grpo")
    with setting_up(run):
        assert current_run() is run
    assert current_run() is None


def copy_package(name, folder):
    (found,) = importlib.util.find_spec(name).submodule_search_locations
    shutil.copytree(found, folder / name)


def run_command(*arguments, **environment):
    """``nemo-specrl run``, by the first copy of the package that the process finds."""
    clean = {k: v for k, v in os.environ.items() if k != "NEMO_RL_PY_EXECUTABLES_SYSTEM"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "nemo_specrl", "run", *map(str, arguments)],
        env=clean | environment,
        capture_output=True,
        text=True,
    )


def test_workers_get_the_folder_of_the_plugin_alone(tmp_path):
    """A copy that workers can import is not refused; then NeMo-RL is what is missing."""
    plugin, script = tmp_path / "plugin", tmp_path / "script.py"
    script.write_text("")
    copy_package("nemo_specrl", plugin)

    def refused():
        done = run_command(script, PYTHONPATH=str(plugin))
        assert done.returncode != 0 and done.stderr.count("\n") == 1
        return done.stderr

    assert "nemo_rl" in refused()
    (plugin / "torch").mkdir()
    line = refused()
    assert f"nemo_specrl in {plugin}: " in line and "(torch lies beside it)" in line
    assert "pip wheel --no-deps" in line and "--target DIR" in line
    shared = run_command(script, PYTHONPATH=str(plugin), NEMO_RL_PY_EXECUTABLES_SYSTEM="1")
    assert "nemo_rl" in shared.stderr and "beside it" not in shared.stderr


@pytest.mark.parametrize("damage", ["missing", "of another machine"])
def test_trees_without_their_compiled_part_are_refused_before_anything_starts(tmp_path, damage):
    copy_package("nemo_specrl", tmp_path)
    (compiled,) = (tmp_path / "nemo_specrl" / "speculation").glob("_suffix*.so")
    if damage == "missing":
        compiled.unlink()
    else:
        compiled.write_bytes(compiled.read_bytes()[:18] + b"\xff\xff" + compiled.read_bytes()[20:])
    read = (
        "import pathlib, tests.nemo_rl.test_context as t\n"
        "t.RunContext.of(t.recipe(pathlib.Path()), 'grpo')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", read],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    last = done.stderr.strip().split("\n")[-1]
    assert "the compiled part of nemo_specrl, which trees need, is missing" in last
    assert "install a wheel" in last


def test_the_launcher_says_what_is_missing(tmp_path):
    done = run_command(tmp_path / "none.py", "--config", "x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "none.py: no such file" in done.stderr


def test_spans_of_responses():
    assert response_spans(np.array([0, 0, 1, 1, 0, 1], dtype=bool)) == [(2, 4), (5, 6)]
    assert response_spans(np.array([1, 1], dtype=bool)) == [(0, 2)]
    assert response_spans(np.zeros(3, dtype=bool)) == []

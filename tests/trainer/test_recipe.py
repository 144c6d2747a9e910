"""Recipes: the shipped ones, overrides, and one line for whatever is wrong."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import yaml

from nemo_specrl.errors import CheckpointError, ConfigError
from nemo_specrl.trainer.checkpoint import check_same_recipe, latest, resume_identity
from nemo_specrl.trainer.recipe import load_recipe
from tests.conftest import REPOSITORY

RECIPES = sorted((REPOSITORY / "examples" / "configs").glob("*_cpu.yaml"))
DEMO = REPOSITORY / "examples" / "configs" / "grpo_sort_cpu.yaml"
MEGATRON = DEMO.with_name("grpo_sort_megatron_cpu.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_say_what_they_need(path):
    recipe = load_recipe(path)
    assert recipe.spec_rl.enabled
    assert "CPU" in path.read_text().split("\n\n")[0].split("grpo:")[0]


def test_overrides_are_yaml_values():
    recipe = load_recipe(
        DEMO,
        [
            "grpo.seed=7",
            "policy.generation.spec_rl.draft.max_tokens=1",
            "policy.optimizer.kwargs.betas=[0.8,0.9]",
            "+policy.generation.top_k=null",
        ],
    )
    assert recipe.algorithm.seed == 7
    assert recipe.spec_rl.draft.max_tokens == 1
    assert recipe.policy.optimizer.kwargs.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.sed=1", r"grpo\.sed: unknown key; known are num_prompts_per_step"),
        ("grpo.seed=one", r"grpo\.seed = 'one': must be a valid integer"),
        (
            "policy.generation.spec_rl.draft.max_tokens=0",
            r"spec_rl\.draft\.max_tokens = 0: must be greater than",
        ),
        ("policy.generation.spec_rl.tree.enabled=true", r"spec_rl\.tree = .*the key is now draft"),
        ("policy.generation.spec_rl.preset=faithful", r"preset = 'faithful': .* is now reuse"),
        (
            "policy.generation.vllm_kwargs.speculative_config={method: ngram}",
            r"generation\.vllm_kwargs\.speculative_config = .* set by spec_rl; leave it out, or",
        ),
        (
            "policy.generation.colocated.enabled=false",
            r"^policy\.generation\.colocated\.enabled = False: this trainer has one engine",
        ),
        ("policy.generation.backend=sglang", r"backend = 'sglang': must be 'vllm'"),
        (
            "policy.train_global_batch_size=100",
            r"^policy\.train_global_batch_size = 100: must divide the 128 rollouts",
        ),
        (
            "data.num_prompts=4",
            r"^grpo\.num_prompts_per_step = 16: must not exceed data\.num_prompts = 4",
        ),
        ("ppo.seed=1", r"^the recipe: must have either a grpo: or a ppo: block"),
        (
            "grpo.adv_estimator.name=gae",
            r"^grpo\.adv_estimator\.name = 'gae': .* gae belongs under ppo:",
        ),
        (
            "grpo.max_rollout_turns=3",
            r"^grpo\.max_rollout_turns = 3: must be 1 without a tool .* set env\.tools",
        ),
        (
            "env.tools=[calculator]",
            r"^env\.tools = \['calculator'\]: answer turns .* set grpo\.max_rollout_turns above 1",
        ),
        ("env.tools=[browser]", r"'browser': must be 'calculator'"),
        ("grpo.seed", r"'grpo\.seed': overrides have the form key=value"),
        ("=3", r"overrides have the form key=value"),
        ("grpo.seed=[1", r"'grpo\.seed=\[1'"),
        ("policy.model_name=${nowhere}", r"nowhere"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(DEMO, [override])
    assert "\n" not in str(caught.value)
    assert "model_name" not in str(caught.value) or "model_name" in override  # one key, not all


def test_what_is_left_of_the_ranks_is_data_parallel():
    recipe = load_recipe(MEGATRON, ["cluster.gpus_per_node=8", "cluster.num_nodes=3"])
    assert recipe.parallelism == (2, 1, 12)
    assert load_recipe(DEMO).parallelism == (1, 1, 1)


def test_a_resumed_run_may_have_another_layout():
    def fixed(*overrides):
        return resume_identity(load_recipe(MEGATRON, overrides))

    sizes = ["tensor_model_parallel_size=1", "pipeline_model_parallel_size=2"]
    assert fixed() == fixed(*(f"policy.megatron_cfg.{size}" for size in sizes))
    assert fixed() == fixed("cluster.gpus_per_node=4")
    assert fixed() != fixed("policy.megatron_cfg.enabled=false")


def without(values, name):
    """Fixed keys without one of them."""
    *blocks, key = name.split(".")
    values = inner = copy.deepcopy(values)
    for block in blocks:
        inner = inner[block]
    del inner[key]
    return values


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("grpo.ppo_epochs", "1", "2"),
        ("loss_fn.ratio_clip_c", "null", "10"),
        ("policy.generation.spec_rl.draft.adaptive", "true", "false"),
    ],
)
def test_a_key_that_is_new_in_a_release_matters_only_with_another_value(name, default, other):
    before = without(resume_identity(load_recipe(DEMO)), name)
    check_same_recipe(Path("step_1"), before, load_recipe(DEMO, [f"{name}={default}"]))
    message = rf"^step_1: was made with {re.escape(name)} = None, the recipe says "
    with pytest.raises(CheckpointError, match=message):
        check_same_recipe(Path("step_1"), before, load_recipe(DEMO, [f"{name}={other}"]))


def test_a_key_that_a_release_no_longer_has_is_told(caplog):
    before = resume_identity(load_recipe(DEMO))
    before["loss_fn"]["gone"] = 3
    check_same_recipe(Path("step_1"), before, load_recipe(DEMO))
    assert "loss_fn.gone = 3, which this release does not have" in caplog.text


def test_only_the_length_of_a_run_and_its_evaluation_may_change():
    before = resume_identity(load_recipe(DEMO))
    longer = ["grpo.max_num_epochs=99", "grpo.max_num_steps=7", "grpo.max_val_samples=8"]
    check_same_recipe(Path("step_1"), before, load_recipe(DEMO, [*longer, "grpo.val_period=5"]))
    before["grpo"]["max_rollout_turns"] = 4
    with pytest.raises(CheckpointError, match=r"max_rollout_turns = 4, the recipe says 1"):
        check_same_recipe(Path("step_1"), before, load_recipe(DEMO))


@pytest.mark.parametrize(
    ("made_with", "now", "message"),
    [
        ([], ["grpo.seed=1"], r"grpo\.seed = 42, the recipe says 1"),
        ([], ["grpo=null", "ppo.adv_estimator.name=gae"], r"grpo\..* the recipe says None"),
        (["policy.generation.vllm_kwargs.max_num_seqs=9"], [], r"max_num_seqs = 9"),
        (["+policy.generation.vllm_kwargs.seed_of=9"], [], r"vllm_kwargs\.seed_of = 9"),
    ],
)
def test_what_makes_another_run_is_refused(made_with, now, message):
    before = resume_identity(load_recipe(DEMO, made_with))
    with pytest.raises(CheckpointError, match=message):
        check_same_recipe(Path("step_1"), before, load_recipe(DEMO, now))


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "3", "{", "{}", "[" * 100_000, "\xff"),
        *('{"format": 1, "steps": 3}', '{"format": "1"}', '{"format": null}'),
        *('{"format": 1, "step": "3"}', '{"format": 1, "step": 2}', '{"format": 1, "step": true}'),
        '{"format": 1, "step": 3, "recipe": null}',
        '{"format": 1, "step": 3, "position": -1}',
        *('{"format": 2, "step": 3, "put_off": 1}', '{"format": 2, "step": 3, "put_off": [[1]]}'),
    ],
    ids=lambda text: text[:40],
)
def test_a_progress_that_is_none_says_how_to_go_on(tmp_path, text):
    for step in (1, 3):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        (folder / "progress.json").write_text(text, encoding="latin-1")
    (tmp_path / "step_\u00b2").mkdir()
    with pytest.raises(
        CheckpointError, match=r"; remove this folder to resume from step_1$"
    ) as told:
        latest(tmp_path)
    assert str(told.value).startswith(f"{tmp_path / 'step_3'}: damaged (progress.json: ")
    assert "\n" not in str(told.value) and len(str(told.value)) < 500
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match=r"to begin anew, as there is no other$"):
        latest(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cluster.gpus_per_node=3",
            r"^cluster\.gpus_per_node = 3: times num_nodes = 1 must be a multiple of the 2 ranks",
        ),
        (
            "policy.megatron_cfg.tensor_model_parallel_size=0",
            r"^policy\.megatron_cfg\.tensor_model_parallel_size = 0: must be greater than",
        ),
    ],
)
def test_ranks_that_do_not_add_up(override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(MEGATRON, [override])


def test_plain_training_takes_a_drafter_of_vllms_own():
    drafter = "policy.generation.vllm_kwargs.speculative_config={method: ngram}"
    plain = load_recipe(DEMO, [drafter, "policy.generation.spec_rl.enabled=false"])
    assert plain.policy.generation.vllm_kwargs["speculative_config"] == {"method": "ngram"}


@pytest.mark.parametrize("option", ["temperature=0.7", "top_p=0.9", "top_k=5"])
def test_other_sampling_does_not_go_with_reuse(option):
    """Drafts are judged by what is sampled from; a prefix, by the raw distribution."""
    load_recipe(DEMO, [f"policy.generation.{option}"])
    name, value = option.split("=")
    with pytest.raises(ConfigError, match=rf"{name} = {value}: .* or spec_rl.preset: lossless"):
        load_recipe(DEMO, [f"policy.generation.{option}", "policy.generation.spec_rl.preset=reuse"])


def test_temperature_may_be_any_with_speculation_off():
    recipe = load_recipe(
        DEMO, ["policy.generation.temperature=0.7", "policy.generation.spec_rl.enabled=false"]
    )
    assert recipe.policy.generation.temperature == 0.7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; give a YAML recipe"),
        ("grpo: [", "cannot be read as YAML"),
        ("- a\n- b", "must be a mapping"),
        ("", "policy: missing; the recipe must set it"),
        ("policy: {}", r"policy\.model_name: missing"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)


def test_recipes_have_no_key_twice():
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader, node):
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for path in RECIPES:
        yaml.load(path.read_text(), Strict)


LOSSLESS = "policy.generation.spec_rl.preset=lossless"
TURNS = ("grpo.max_rollout_turns=3", "env.tools=[calculator]")


def test_conversations_are_of_text_and_drafted_losslessly():
    """No part of the demo's recipe but its data stands in their way."""
    text = (*TURNS, "data.dataset_name=reasoning_gym:basic_arithmetic")
    assert load_recipe(DEMO, [*text, LOSSLESS]).algorithm.max_rollout_turns == 3
    load_recipe(DEMO, [*text, "policy.generation.spec_rl.enabled=false"])
    with pytest.raises(ConfigError, match=r"^env\.tools = .*: need text, which sorting is not"):
        load_recipe(DEMO, [*TURNS, LOSSLESS])
    with pytest.raises(ConfigError, match=r"^grpo\.max_rollout_turns = 3: .*preset: lossless"):
        load_recipe(DEMO, [*text, "policy.generation.spec_rl.preset=reuse"])

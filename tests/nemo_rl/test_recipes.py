"""The recipes of examples/configs/nemo_rl, read as files and by NeMo-RL's loader and models.

The tests of the second kind need a checkout of NeMo-RL in NEMO_RL_HOME.
"""

import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nemo_specrl.nemo_rl.recipe import algorithm_of, check_recipe
from tests.support.nemo_rl.jobs import HOME, SITE

FOLDER = Path(__file__).parents[2] / "examples" / "configs" / "nemo_rl"
ALGORITHMS = {
    "dapo_qwen3_8b": "grpo",
    "grpo_math_1B": "grpo",
    "grpo_qwen3_0.6b_megatron_tp2_pp2": "grpo",
    "grpo_qwen3_32b_megatron_tp8_pp2": "grpo",
    "grpo_qwen3_8b_async": "grpo",
    "grpo_qwen3_8b_megatron_tp2": "grpo",
    "grpo_qwen3_8b_reuse": "grpo",
    "ppo_qwen3_8b": "ppo",
}
"""The algorithm of each recipe, whose script starts it."""
STOCK = "${oc.env:NEMO_RL_HOME,${oc.env:PWD}}/"
ABSENT = object()


def own(name):
    """The keys of the recipe itself, without those that it inherits."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def header(name):
    """The comment at the head of a recipe, as one text."""
    lines = (FOLDER / f"{name}.yaml").read_text().split("\n")
    comment = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(line.removeprefix("#").strip() for line in comment)


def hardware(name):
    """The numbers of nodes, and of GPUs in each, from the header."""
    found = re.search(r"^Hardware: (\d+) nodes? of (\d+) GPUs;", header(name), re.MULTILINE)
    assert found is not None, "the header has no line 'Hardware: N nodes of M GPUs; ...'"
    return int(found[1]), int(found[2])


def leaves(block, path=()):
    """Each value of a nested mapping, by its path."""
    for key, value in block.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def at(block, path):
    """The value at ``path`` of a nested mapping, or ABSENT."""
    for key in path:
        if not isinstance(block, dict) or key not in block:
            return ABSENT
        block = block[key]
    return block


def test_each_recipe_is_tested():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_header_says_on_what_and_how_it_starts(name):
    nodes, gpus = hardware(name)
    assert nodes >= 1 and gpus == 8
    command = " ".join(header(name).replace("\\\n", " ").split())
    assert "uv run python -m nemo_specrl run " in command
    script = f"examples/run_{ALGORITHMS[name]}.py"
    assert f" {script} --config $SPECRL/examples/configs/nemo_rl/{name}.yaml " in f"{command} "


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_but_one_are_lossless(name):
    recipe = own(name)
    preset = at(recipe, ("policy", "generation", "spec_rl", "preset"))
    assert preset == ("reuse" if name.endswith("_reuse") else "lossless")
    based_on_ours = recipe["defaults"].removesuffix(".yaml") in ALGORITHMS
    assert based_on_ours or recipe["defaults"].startswith(f"{STOCK}examples/configs/")


def test_no_two_recipes_share_a_folder():
    for path in (("checkpointing", "checkpoint_dir"), ("logger", "log_dir")):
        folders = [at(own(name), path) for name in ALGORITHMS]
        assert ABSENT not in folders and len(set(folders)) == len(folders)


@pytest.fixture(scope="module")
def nemo():
    """The checkout's folder and loader, and its algorithms by name."""
    if not HOME:
        pytest.skip("set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL and run `make test-nemo`")
    home = Path(HOME).resolve()
    # By its path, since this Python may have a sitecustomize of its own.
    runpy.run_path(str(SITE / "sitecustomize.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRL", str(FOLDER.parents[2]))
        patch.syspath_prepend(str(home))
        config = importlib.import_module("nemo_rl.utils.config")
        algorithms = {
            name: importlib.import_module(f"nemo_rl.algorithms.{name}") for name in ("grpo", "ppo")
        }
        assert Path(config.__file__).is_relative_to(home), "another NeMo-RL is first on PYTHONPATH"
        config.register_omegaconf_resolvers()
        yield SimpleNamespace(home=home, load=config.load_config, algorithms=algorithms)


def loaded(nemo, path):
    """A recipe as NeMo-RL's scripts see it, with inherited and interpolated values."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(nemo.load(path), resolve=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nemo_rl_and_the_plugin_take_it(nemo, name):
    recipe = loaded(nemo, FOLDER / f"{name}.yaml")
    assert algorithm_of(recipe) == ALGORITHMS[name]
    config = nemo.algorithms[ALGORITHMS[name]].MasterConfig(**recipe)
    spec_rl = check_recipe(config)
    assert spec_rl == check_recipe(recipe)  # as `nemo-specrl check` has it
    assert spec_rl.cache.dir == Path("/raid/specrl")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_stock_script_reads_it_from_the_checkout(nemo, name, monkeypatch):
    """Without a variable that only our launcher sets; a shell sets PWD."""
    launched = loaded(nemo, FOLDER / f"{name}.yaml")
    monkeypatch.delenv("NEMO_RL_HOME")
    monkeypatch.setenv("PWD", str(nemo.home))
    assert loaded(nemo, FOLDER / f"{name}.yaml") == launched


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_says_only_what_stock_does_not(nemo, name):
    recipe = own(name)
    base = recipe.pop("defaults")
    folder = nemo.home if base.startswith(STOCK) else FOLDER
    stock = loaded(nemo, folder / base.removeprefix(STOCK))
    inherited = loaded(nemo, FOLDER / f"{name}.yaml")
    said = [".".join(path) for path, _ in leaves(recipe) if at(inherited, path) == at(stock, path)]
    assert not said


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_fits_the_hardware_of_its_header(nemo, name):
    recipe = loaded(nemo, FOLDER / f"{name}.yaml")
    cluster, policy = recipe["cluster"], recipe["policy"]
    assert (cluster["num_nodes"], cluster["gpus_per_node"]) == hardware(name)
    gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
    colocated = policy["generation"]["colocated"]
    apart = 0
    if not colocated["enabled"]:
        resources = colocated["resources"]
        apart = resources["num_nodes"] * resources["gpus_per_node"]
    vllm_cfg = policy["generation"]["vllm_cfg"]
    engine = vllm_cfg["tensor_parallel_size"] * vllm_cfg["pipeline_parallel_size"]
    assert (apart or gpus) % engine == 0
    models = [policy, recipe["value"]] if "value" in recipe else [policy]
    for model in models:
        block, megatron = model["dtensor_cfg"], model["megatron_cfg"]
        size = block["tensor_parallel_size"] * block["context_parallel_size"]
        if megatron["enabled"]:
            size = (
                megatron["tensor_model_parallel_size"]
                * megatron["pipeline_model_parallel_size"]
                * megatron["context_parallel_size"]
            )
        assert (gpus - apart) % size == 0
        copies = (gpus - apart) // size
        assert model["train_global_batch_size"] % (copies * model["train_micro_batch_size"]) == 0
    algorithm = recipe[ALGORITHMS[name]]
    rollouts = algorithm["num_prompts_per_step"] * algorithm["num_generations_per_prompt"]
    assert rollouts % policy["train_global_batch_size"] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_its_engines_make_cuda_graphs_and_are_not_quantized(nemo, name):
    """Without graphs decoding is slow, with the plug-in and without it."""
    recipe = loaded(nemo, FOLDER / f"{name}.yaml")
    generation = recipe["policy"]["generation"]
    vllm_cfg = generation["vllm_cfg"]
    assert vllm_cfg["enforce_eager"] is False
    assert vllm_cfg["precision"] == "bfloat16" and vllm_cfg["kv_cache_dtype"] == "auto"
    assert generation.get("quant_cfg") is None and not generation.get("real_quant")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_files_and_data_that_it_names_are_in_the_checkout(nemo, name):
    recipe = loaded(nemo, FOLDER / f"{name}.yaml")
    default = recipe["data"]["default"]
    for file in (default["prompt_file"], default["system_prompt_file"]):
        assert file is None or (nemo.home / file).is_file()
    known = importlib.import_module("nemo_rl.data.datasets.response_datasets").DATASET_REGISTRY
    for part in ("train", "validation"):
        data = recipe["data"][part]
        if data is None:  # a recipe that does not validate
            assert recipe[ALGORITHMS[name]]["val_period"] == 0
            continue
        assert data["dataset_name"] in known
        if "data_path" in data:  # a file of this repository
            (first, *_) = known[data["dataset_name"]](**data).dataset
            question, answer = first["messages"]
            assert question["content"].startswith("What is") and int(answer["content"])

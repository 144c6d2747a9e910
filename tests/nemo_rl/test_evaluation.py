"""How the plug-in reads recipes of NeMo-RL's evaluation, and which it refuses; needs no NeMo-RL."""

import copy
from types import SimpleNamespace

import pytest

from nemo_specrl.engine.metrics import EngineMetrics
from nemo_specrl.engine.vllm.environment import Engines
from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.evaluation import check_evaluation, evaluation_run
from nemo_specrl.nemo_rl.metrics import counts, evaluation_summary

GENERATION = {
    "backend": "vllm",
    "model_name": "nobody/nothing",
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "vllm_cfg": {"async_engine": False},
    "spec_rl": {
        "enabled": True,
        "preset": "lossless",
        "cache": {"dir": "/raid/specrl"},
        "tree": {"method": "proposer"},
    },
}


def recipe(generation=(), spec_rl=(), data="AIME2024"):
    """A MasterConfig as far as it is read."""
    block = copy.deepcopy(GENERATION) | dict(generation)
    block["spec_rl"] |= dict(spec_rl)
    return SimpleNamespace(
        generation=block,
        eval={"seed": 7, "num_tests_per_prompt": 16},
        data={"dataset_name": data},
    )


def tokenizer(**vocabulary):
    return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1} | vocabulary)


@pytest.fixture(autouse=True)
def no_vllm_here(monkeypatch):
    """As on a driver of NeMo-RL, whose workers have one that takes proposers."""
    from nemo_specrl.nemo_rl import compat

    monkeypatch.setattr(compat, "engines_of", lambda _: Engines.elsewhere("0.25.1", {}))


def test_without_the_block_or_switched_off_there_is_nothing_to_do():
    off = recipe(spec_rl={"enabled": False, "preset": "faithful"})
    assert evaluation_run(off, tokenizer()) is None
    del off.generation["spec_rl"]
    assert evaluation_run(off, tokenizer()) is None


def test_checkpoints_of_one_vocabulary_share_the_store_of_a_data_set():
    """The folders of models and tokenizers change from checkpoint to checkpoint."""
    run = evaluation_run(recipe(), tokenizer())
    assert (run.seed, run.group, run.evaluates, run.needs_records) == (7, 16, True, False)
    later = recipe({"model_name": "step_20/hf", "temperature": 0.7, "top_p": 0.9})
    assert evaluation_run(later, tokenizer()).store_folder == run.store_folder
    for other in (
        evaluation_run(recipe(data="gpqa"), tokenizer()),
        evaluation_run(recipe(), tokenizer(c=2)),
    ):
        assert other.store_folder != run.store_folder
    assert evaluation_run(recipe(), tokenizer(c=2)).tokenizer_id != run.tokenizer_id


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        (recipe(spec_rl={"preset": "faithful"}), "spec_rl.preset = faithful: a reused prefix"),
        (recipe(spec_rl={"preset": "fast"}), "spec_rl.preset = fast: a reused prefix"),
        (recipe(spec_rl={"fresh_fraction": 0.5}), "spec_rl.fresh_fraction = 0.5: a reused"),
        (recipe(spec_rl={"tree": {"enabled": False}}), "spec_rl.tree.enabled = false: nothing"),
        (recipe(spec_rl={"run_ahead": {"enabled": True}}), "spec_rl.run_ahead.enabled = true: "),
        (recipe(spec_rl={"cache": {}}), "spec_rl.cache.dir: must name a folder"),
        (recipe(spec_rl={"tree": {"method": "rounds"}}), "spec_rl.tree.method = rounds: not tried"),
        (recipe({"backend": "megatron"}), "backend = 'megatron': must be vllm, or generation.spec"),
        (
            recipe({"vllm_kwargs": {"speculative_config": {"method": "ngram"}}}),
            "vllm_kwargs.speculative_config: .* leave it out, or set enabled: false$",
        ),
        (recipe({"top_k": 20, "temperature": 1.0}), r"top_k = 20: with generation\.spec_rl\.tree"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_recipes_own_keys(recipe, line):
    with pytest.raises(ConfigError, match=f"^generation\\.{line}") as refused:
        evaluation_run(recipe, tokenizer())
    assert "policy." not in str(refused.value)


def test_a_vllm_without_drafters_is_refused():
    spec_rl = evaluation_run(recipe(), tokenizer()).spec_rl
    with pytest.raises(
        ConfigError, match=r"^generation\.spec_rl\.enabled = true: vLLM 0\.20\.0 ta"
    ):
        check_evaluation(recipe(), spec_rl, engines=Engines.elsewhere("0.20.0", {}))


def test_the_tokenizer_of_a_data_set_with_images_is_a_processors():
    processor = SimpleNamespace(tokenizer=tokenizer())
    run = evaluation_run(recipe(data="daily-omni"), processor)
    assert run.evaluates and run.tokenizer_id == evaluation_run(recipe(), tokenizer()).tokenizer_id
    for changes, line in (
        ({"preset": "faithful"}, "preset = faithful: a reused prefix"),
        ({"tree": {"method": "rounds"}}, r"tree\.method = rounds: not tried"),
    ):
        with pytest.raises(ConfigError, match=rf"^generation\.spec_rl\.{line}"):
            evaluation_run(recipe(spec_rl=changes), processor)


def test_engines_that_need_a_variable_get_it():
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}
    block = recipe(spec_rl={"tree": {"method": "auto"}})
    spec_rl = evaluation_run(recipe(), tokenizer()).spec_rl
    spec_rl = spec_rl.model_copy(
        update={"tree": spec_rl.tree.model_copy(update={"method": "auto"})}
    )
    engines = Engines.elsewhere("0.25.1", {})
    needed = check_evaluation(block, spec_rl, engines=engines, model=experts)
    assert needed == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_the_line_at_the_end():
    drafted = EngineMetrics(
        response_tokens=100, tree_steps=40, tree_tokens=100, tree_drafted_tokens=80,
        tree_accepted_tokens=60,
    )  # fmt: skip
    line = evaluation_summary(counts(drafted) | {"spec_rl/cache_bytes": 2.0**21})
    assert line == (
        "spec_rl: 100 tokens of responses, 2.50 per row and engine step (1 without drafts); "
        "80 draft tokens verified, 75% of them accepted; 2.0 MiB of rollouts in the cache"
    )
    nothing = evaluation_summary(counts(EngineMetrics(cache_errors=3)))
    assert nothing == "spec_rl: 0 tokens of responses; 3 errors of the cache"

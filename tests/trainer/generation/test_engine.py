"""The engine of a run: its seeds, its log-probs after a refit, and its cache in checkpoints."""

import logging

import numpy as np
import pytest

from nemo_specrl import RolloutStore, prompt_key
from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.errors import RefitError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.generation import Engine
from nemo_specrl.trainer.generation.engine import cache_config, in_order, open_store, row_seed
from nemo_specrl.trainer.policy import Sample
from nemo_specrl.trainer.policy.torch.policy import TorchPolicy
from tests.conftest import KV_BLOCKS, shared_with_none
from tests.support.trainer.ranks import samples
from tests.trainer.policy.torch.test_policy import recipe_of

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 5], [15, 16]]


def recipe_in(folder, model, **spec_rl):
    generation = {
        "max_new_tokens": 24,
        "stop_token_ids": [2],
        "vllm_cfg": {"max_model_len": 64},
        "vllm_kwargs": {"max_num_seqs": 8, **KV_BLOCKS},
        "spec_rl": {
            "enabled": True,
            "draft": {"adaptive": False, "max_tokens": 6},
            "cache": {"max_bytes_per_node": 2**22},
            **spec_rl,
        },
    }
    recipe = recipe_of(model, policy={"generation": generation})
    checkpointing = recipe.checkpointing.model_copy(update={"checkpoint_dir": folder})
    grpo = recipe.grpo.model_copy(update={"num_generations_per_prompt": 4})
    return recipe.model_copy(update={"checkpointing": checkpointing, "grpo": grpo})


# An engine that ends destroys the process groups of others: these stay for the session.
@pytest.fixture(scope="session")
def recipe(random_model, tmp_path_factory):
    return recipe_in(tmp_path_factory.mktemp("engine"), random_model)


@pytest.fixture(scope="session")
def engine(recipe):
    left = recipe.run_dir / CACHE_FOLDER / "left"
    left.parent.mkdir()
    left.touch()
    with shared_with_none():
        built = Engine(recipe, None)
    assert not left.exists()  # what another run has left there is no part of this one
    return built


@pytest.fixture(scope="module")
def policy(recipe):
    return TorchPolicy(recipe.policy, recipe.loss_fn, 0)


def largest_difference(policy, prompts, groups):
    """Between the log-probs that the engine reports and the policy's of the same responses."""
    pairs = [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]
    scored = policy.logprobs([Sample.to_score(p, r.tokens) for p, r in pairs])
    ours = np.concatenate([r.logprobs for _, r in pairs])
    return float(np.abs(np.concatenate(scored) - ours).max())


def store_of(recipe):
    config = cache_config(recipe)
    return RolloutStore(config.dir, vocabulary=config.vocabulary, max_bytes=2**22)


def test_groups_are_drafted_for_and_kept(engine, policy, recipe):
    """The second time from the first, under other weights, with the new weights' log-probs."""
    first = engine.rollouts(PROMPTS)
    cold = engine.take_times()
    assert [len(group) for group in first] == [4] * 5
    assert largest_difference(policy, PROMPTS, first) < 1e-3
    tokens = sum(response.length for group in first for response in group)
    assert cold.response_tokens == cold.decoded_tokens == tokens
    assert cold.metrics[metric.HISTORIES_FOUND] == 0
    assert cold.metrics[metric.RESPONSES_KEPT] == 20
    assert cold.metrics[metric.CACHE_RESPONSES] == 20
    policy.train(samples(8), epochs=3)  # another policy, under which the old log-probs would show
    engine.refit(policy.stream_weights(), 1)
    assert engine.policy_version == 1
    again = engine.rollouts(PROMPTS)
    warm = engine.take_times()
    assert largest_difference(policy, PROMPTS, again) < 1e-3
    assert warm.metrics[metric.DRAFTED_TOKENS] > 0 and warm.metrics[metric.TOKENS_PER_STEP] > 1
    with store_of(recipe) as store:
        kept = store.get(map(prompt_key, PROMPTS))
    for prompt, *groups in zip(PROMPTS, first, again, strict=True):
        responses = sorted(r.tokens for group in groups for r in group)
        assert sorted(r.tokens.tolist() for r in kept[prompt_key(prompt)]) == responses


def test_held_out_responses_are_neither_drafted_for_nor_kept(engine, policy):
    engine.take_times()
    groups = engine.heldout(PROMPTS[:3], 2)
    assert [len(group) for group in groups] == [2] * 3
    assert engine.heldout_s > 0
    assert largest_difference(policy, PROMPTS[:3], groups) < 1e-3
    again = engine.heldout(PROMPTS[:3], 2)
    assert [[r.tokens for r in g] for g in again] == [[r.tokens for r in g] for g in groups]
    times = engine.take_times()
    assert times.response_tokens == times.rollout_s == 0
    assert times.metrics[metric.RESPONSES_KEPT] == times.metrics[metric.DRAFTED_TOKENS] == 0


def test_seeds_depend_on_the_row_alone():
    seeds = {
        row_seed(run, prompt, sample)
        for run in ("rollout 0 7 0", "rollout 0 7 1", "rollout 1 7 0", "heldout 7 0")
        for prompt in PROMPTS
        for sample in range(4)
    }
    assert len(seeds) == 4 * 5 * 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert row_seed("a", [1], 0) == row_seed("a", [1], 0)


def test_rows_of_new_prompts_come_one_after_the_other_and_long_ones_first():
    lengths = {prompt_key(PROMPTS[1]): 30.0, prompt_key(PROMPTS[3]): 70.0}
    # Of the new prompts 0 and 2: rows 0, 6, then 1, 7, then 2, 8. The mean of the others is 50.
    found = in_order(PROMPTS[:4], 3, lengths)
    assert found == [9, 10, 11, 0, 6, 3, 4, 5, 1, 7, 2, 8]
    assert in_order(PROMPTS[:2], 2, {}) == [0, 2, 1, 3]


def test_the_cache_of_a_checkpoint_is_restored_with_what_was_kept_since(
    engine, recipe, random_model, tmp_path
):
    engine.rollouts(PROMPTS[:2])
    engine.save(tmp_path / "step_1" / CACHE_FOLDER)
    with store_of(recipe) as store:
        before = store.get(map(prompt_key, PROMPTS))
    engine.rollouts(PROMPTS[:1])
    engine.save(tmp_path / "step_2" / CACHE_FOLDER)
    elsewhere = recipe_in(tmp_path / "elsewhere", random_model)
    for folder in ("step_1", "step_1", "step_2"):
        with open_store(elsewhere, tmp_path / folder) as store:
            found = store.get(map(prompt_key, PROMPTS))
        if folder == "step_1":
            assert {k: {r.identity for r in v} for k, v in found.items()} == {
                k: {r.identity for r in v} for k, v in before.items()
            }
    key = prompt_key(PROMPTS[0])
    assert len(found[key]) == len(before[key]) + 4


def test_a_checkpoint_without_the_cache_is_a_cold_start(random_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        store = open_store(recipe_in(tmp_path / "run", random_model), tmp_path / "step_1")
    assert "rollout cache: " in caplog.text and "it is not restored" in caplog.text
    assert store.stats().responses == 0
    store.close()


def test_a_refit_that_breaks_off_leaves_no_engine_with_half_a_model(engine, policy):
    """The last test of this engine."""

    def broken():
        for index, weight in enumerate(policy.stream_weights()):
            if index == 7:
                raise OSError("the policy is gone")
            yield weight

    with pytest.raises(OSError, match=r"^the policy is gone$"):
        engine.refit(broken(), 9)
    assert engine.policy_version < 9
    with pytest.raises(RefitError, match=r"its weights are incomplete; build a new engine"):
        engine.rollouts(PROMPTS)

"""Several engines in processes of their own: what they make, refits, one that dies, a whole run."""

import re

import numpy as np
import psutil
import pytest
import ray

from nemo_specrl.errors import ConfigError, EngineError, RefitError
from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.trainer.generation.ray_engines import RayEngines
from nemo_specrl.trainer.policy import Sample
from nemo_specrl.trainer.policy.torch.policy import TorchPolicy
from nemo_specrl.trainer.policy_config import ColocatedConfig
from tests.conftest import KV_BLOCKS
from tests.support.trainer.ranks import samples, wait_until_gone
from tests.trainer.policy.test_torch import recipe_of
from tests.trainer.test_training import start, train, wait_for_steps

pytestmark = pytest.mark.usefixtures("own_ray")

TWO = {"enabled": False, "resources": {"gpus_per_node": 2}}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16]]


def engines_of(model, folder, **spec_rl):
    generation = {
        "colocated": TWO,
        "max_new_tokens": 24,
        "stop_token_ids": [2],
        "vllm_cfg": {"max_model_len": 64},
        "vllm_kwargs": {"max_num_seqs": 8, **KV_BLOCKS},
        "spec_rl": {
            "enabled": True,
            "cache": {"max_bytes_per_node": 2**22, "deadline_ms": 60_000},
            **spec_rl,
        },
    }
    recipe = recipe_of(model, policy={"generation": generation})
    checkpointing = recipe.checkpointing.model_copy(update={"checkpoint_dir": folder})
    grpo = recipe.grpo.model_copy(update={"num_generations_per_prompt": 4})
    return recipe.model_copy(update={"checkpointing": checkpointing, "grpo": grpo})


@pytest.fixture(scope="module")
def recipe(random_model, tmp_path_factory):
    # The random model is unsure of everything: every draft is accepted, or none would be.
    reuse = {
        "preset": "faithful",
        "lenience": 1e6,
        "fresh_fraction": 0.0,
        "tree": {"enabled": False},
    }
    hub = tmp_path_factory.mktemp("hub")
    (hub / "models--our--model" / "snapshots").mkdir(parents=True)
    (hub / "models--our--model" / "refs").mkdir()
    (hub / "models--our--model" / "refs" / "main").write_text("1")
    (hub / "models--our--model" / "snapshots" / "1").symlink_to(random_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
        yield engines_of("our/model", tmp_path_factory.mktemp("engines"), **reuse)


@pytest.fixture(scope="module")
def engines(recipe, own_ray):
    """Two engines that have started their own Ray."""
    built = RayEngines(recipe, None)
    yield built
    built.shutdown()


@pytest.fixture(scope="module")
def policy(recipe):
    return TorchPolicy(recipe.policy, recipe.loss_fn, 0)


def largest_difference(policy, prompts, groups):
    """Between the log-probs that the engines report and the policy's of the same prompts."""
    pairs = [(p, g) for p, group in zip(prompts, groups, strict=True) for g in group]
    scored = policy.logprobs([Sample.to_score(p, g.tokens) for p, g in pairs])
    ours = np.concatenate([g.policy_logprobs for _, g in pairs])
    return float(np.abs(np.concatenate(scored) - ours).max())


def test_each_prompt_gets_its_own_responses(engines, policy):
    """And the next time drafts, whichever engine it comes to, with the new weights' log-probs."""
    first = engines.rollouts(PROMPTS)
    cold = engines.take_times()
    assert [len(group) for group in first] == [4] * 5
    assert largest_difference(policy, PROMPTS, first) < 1e-3
    assert cold.engine.rows == 20 and cold.engine.drafts == cold.engine.cache_errors == 0
    assert cold.response_tokens == sum(len(g.tokens) for group in first for g in group)
    # Another policy, under which the old one's log-probs would be noticed.
    policy.train(samples(8), epochs=3)
    engines.refit(policy.stream_weights(), 1)
    order = [4, 2, 0, 1, 3]
    again = engines.rollouts([PROMPTS[i] for i in order])
    warm = engines.take_times()
    assert warm.engine.drafts == 20
    for group, i in zip(again, order, strict=True):
        for rollout, before in zip(group, first[i], strict=True):
            reused = int(rollout.reused.sum())
            assert reused > 0
            assert rollout.tokens[:reused] == before.tokens[:reused]
    assert largest_difference(policy, [PROMPTS[i] for i in order], again) < 1e-3
    heldout = engines.heldout(PROMPTS[:3], 2)
    assert largest_difference(policy, PROMPTS[:3], heldout) < 1e-3
    engines.set_fresh_fraction(1.0)
    engines.refit(policy.stream_weights(), 2)
    engines.rollouts(PROMPTS)
    assert engines.take_times().engine.drafts == 0


def test_fewer_prompts_than_engines(engines, policy):
    groups = engines.rollouts(PROMPTS[:1])
    assert largest_difference(policy, PROMPTS[:1], groups) < 1e-3
    assert engines.heldout([], 1) == []


def test_the_cache_is_in_a_checkpoint(engines, recipe, tmp_path):
    engines.save(tmp_path / "rollout_cache")
    engines.on_checkpoint_complete()
    (store,) = engines.stores()
    assert (store.prompts, store.corrupt_records) == (5, 0)
    restored, damaged = engines.cache.restore(tmp_path / "rollout_cache")
    assert damaged == []
    assert restored.policy_version == engines.policy_version
    assert sum(file.rollouts for file in restored.files) == 20


def test_a_refit_that_breaks_off_leaves_no_engine_with_half_a_model(engines, policy):
    def broken():
        for index, weight in enumerate(policy.stream_weights()):
            if index == 7:
                raise OSError("the policy is gone")
            yield weight

    with pytest.raises(OSError, match=r"^the policy is gone$"):
        engines.refit(broken(), 9)
    assert engines.policy_version < 9
    with pytest.raises(RefitError, match=r"its weights are incomplete; build a new engine"):
        engines.rollouts(PROMPTS)
    with pytest.raises(
        EngineError, match=r"^engine 0 has ended: by a shutdown, or because another "
    ):
        engines.rollouts(PROMPTS)
    engines.shutdown()
    assert not ray.is_initialized()  # it was the engines' own


def test_vllm_refuses_something_in_one_line(recipe, tmp_path):
    one = ColocatedConfig(enabled=False, resources={"gpus_per_node": 1})
    wrong = {"colocated": one, "vllm_kwargs": {"no_such_thing": 1}}
    generation = recipe.policy.generation.model_copy(update=wrong)
    policy = recipe.policy.model_copy(update={"generation": generation})
    with pytest.raises(ConfigError, match=r"^policy\.generation: vLLM refuses .*no_such_thing"):
        RayEngines(recipe.model_copy(update={"policy": policy}), None)
    assert not ray.is_initialized()


def colocated(*, engines):
    where = "policy.generation"
    return (
        f"{where}.colocated.enabled=false",
        f"{where}.colocated.resources.gpus_per_node={engines}",
        f"{where}.spec_rl.cache.deadline_ms=60000",  # on a machine that does other things, too
    )


@pytest.mark.timeout(600)  # four runs
def test_a_run_whose_engine_died_goes_on_with_another_number_of_engines(tmp_path):
    """What it had made since the checkpoint drafts for what it makes in its place."""
    process = start(tmp_path, *colocated(engines=2))
    wait_for_steps(process, tmp_path, 3)
    others = psutil.Process(process.pid).children(recursive=True)
    engines = [p for p in others if "EngineActor" in " ".join(p.cmdline())]
    assert len(engines) == 2
    engines[0].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"engine [01] died; the run can be resumed from its last", one_line(output))
    wait_until_gone([p.pid for p in others])
    done = train(tmp_path, *colocated(engines=1))
    assert "resuming from step 2" in done.stdout
    assert "rollout cache" not in done.stderr
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    warm = steps[2:]
    assert all(r["spec_rl/draft_coverage"] > 0.5 for r in warm)
    assert all(r["decoded_tokens"] < r["response_tokens"] for r in warm)
    assert all(r["spec_rl/cache_errors"] == 0 for r in steps)
    # On with one engine in the trainer's process, and back: each reads the other's cache.
    *_, deadline = colocated(engines=2)
    for epochs, options in ((4, [deadline]), (5, colocated(engines=2))):
        done = train(tmp_path, f"grpo.max_num_epochs={epochs}", *options)
        assert "rollout cache" not in done.stderr
        steps = read_metrics(tmp_path / "metrics.jsonl")[-2:]
        assert [r["step"] for r in steps] == [2 * epochs - 1, 2 * epochs]
        assert all(r["spec_rl/draft_coverage"] > 0.5 for r in steps)


def one_line(text):
    return " ".join(text.split())

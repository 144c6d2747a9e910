"""The samples of a batch, and PPO's advantages: nothing is learned from what a tool has said."""

import numpy as np
import pytest

from nemo_specrl.monitoring import names as metric
from nemo_specrl.trainer.batch import Batch, Group
from nemo_specrl.trainer.data.toy_tasks import problems
from nemo_specrl.trainer.generation import Response
from nemo_specrl.trainer.losses import gae
from nemo_specrl.trainer.policy import Sample
from nemo_specrl.trainer.recipe import AdvEstimatorConfig, Recipe

(PROBLEM,) = problems("sorting", 1, 1)


def response(logprobs, made, truncated=False):
    values = np.array(logprobs, np.float32)
    tokens = list(range(3, 3 + len(values)))
    return Response(tokens, values, np.array(made, bool), truncated, ended=True)


def batch_of(*rewards_and_made):
    """A batch of groups of a rollout each, with its reward and which tokens the policy has made."""
    groups = [
        Group(PROBLEM, [response([-1.0] * len(made), made)], np.array([reward]))
        for reward, made in rewards_and_made
    ]
    return Batch(epoch=0, groups=groups)


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_and_returns_of_samples(normalize):
    samples = [Sample.to_score([1], [2, 3]), Sample.to_score([1], [4])]
    samples[0].old_values = np.array([0.25, 0.5], np.float32)
    samples[1].old_values = np.array([0.5], np.float32)
    config = AdvEstimatorConfig(name="gae", gae_lambda=1.0, normalize_advantages=normalize)
    batch_of((1.0, [True] * 2), (0.0, [True])).set_gae_advantages(samples, config)
    # With gamma and lambda of 1, a token's return is the reward, whatever the values are.
    assert samples[0].returns.tolist() == [1.0, 1.0] and samples[1].returns.tolist() == [0.0]
    raw = np.array([0.75, 0.5, -0.5])
    expected = (raw - raw.mean()) / raw.std() if normalize else raw
    found = np.concatenate([sample.advantages for sample in samples])
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_estimates_step_over_what_a_tool_has_said():
    """Whatever the value model says there, and as if it had not been said."""
    own = np.array([True, True, False, False, True])
    config = AdvEstimatorConfig(name="gae", gae_gamma=0.9, gae_lambda=0.8)
    found = []
    for silly in (0.0, 100.0):
        samples = [Sample.to_score([1], [2, 3, 4, 5, 6]), Sample.to_score([1], [7, 8])]
        samples[0].old_values = np.array([0.1, 0.2, silly, -silly, 0.3], np.float32)
        samples[1].old_values = np.array([0.5, 0.4], np.float32)
        batch_of((1.0, own), (0.0, [True] * 2)).set_gae_advantages(samples, config)
        found.append(np.concatenate([samples[0].advantages, samples[0].returns]))
        assert (samples[0].advantages[~own] == 0).all() and (samples[0].returns[~own] == 0).all()
    np.testing.assert_array_equal(*found)
    values = np.array([0.1, 0.2, 0.3], np.float32)
    raw = [
        gae(1.0, values, gamma=0.9, lam=0.8),
        gae(0.0, samples[1].old_values, gamma=0.9, lam=0.8),
    ]
    both = np.concatenate(raw)
    np.testing.assert_allclose(samples[0].returns[own], raw[0] + values, rtol=1e-5)
    np.testing.assert_allclose(
        samples[0].advantages[own], (raw[0] - both.mean()) / both.std(), rtol=1e-4
    )


def test_a_tools_tokens_are_neither_trained_on_nor_counted():
    rows = [response([-1, -3, 0, 0], [1, 1, 0, 0]), response([-2], [1]), response([-4], [1], True)]
    group = Group(PROBLEM, rows, np.array([1.0, 0.0, 0.0]))
    batch = Batch(0, [0], [group])
    recipe = Recipe.model_validate(
        {
            "grpo": {"overlong_filtering": True, "num_prompts_per_step": 1},
            "policy": {"model_name": "nowhere", "train_global_batch_size": 1},
        }
    )
    first, second, third = batch.samples(recipe)
    assert first.mask.tolist() == [1, 1, 0, 0] and second.trained is None
    assert third.mask.tolist() == [0]
    assert first.advantages[0] > 0 and first.advantages[2:].tolist() == [0, 0]
    assert batch.metrics()[metric.RESPONSE_LENGTH] == pytest.approx(4 / 3)
    assert batch.fresh.all()

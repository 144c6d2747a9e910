"""A training that has diverged is noticed, whichever of its numbers it shows in."""

import numpy as np
import pytest
import torch

from nemo_specrl.errors import Diverged
from nemo_specrl.trainer.divergence import check_finite, first_not_finite
from nemo_specrl.trainer.policy import build_policy, build_value_model
from tests.trainer.policy.torch.test_policy import recipe_of, samples


class Weights:
    """A model of one tensor."""

    def __init__(self, *values):
        self.values = torch.tensor(values)

    def not_finite(self):
        return first_not_finite([("w", self.values)])


GOOD = Weights(1.0, -2.0)


@pytest.mark.parametrize(
    ("metrics", "policy", "value", "cause"),
    [
        ({"loss": float("nan"), "grad_norm": 1.0}, GOOD, None, "loss = nan"),
        ({"loss": 0.1, "grad_norm": float("inf")}, GOOD, None, "grad_norm = inf"),
        ({"loss": 0.1}, Weights(1.0, float("nan")), None, "the policy's weights are not finite"),
        ({"loss": 0.1}, Weights(float("-inf")), GOOD, "the policy's weights are not finite"),
        ({"loss": 0.1}, Weights(1e30, 1e30), None, "such as w"),  # their squares are not
        ({"loss": 0.1}, GOOD, Weights(float("nan")), "the value model's weights are not finite"),
    ],
)
def test_the_cause_and_the_last_checkpoint_are_in_one_line(tmp_path, metrics, policy, value, cause):
    weights = {"policy": policy.not_finite(), "value model": value and value.not_finite()}
    for last, kept in ((None, "there is no checkpoint"), (tmp_path, str(tmp_path))):
        with pytest.raises(Diverged) as ended:
            check_finite(7, metrics, weights, last)
        line = str(ended.value)
        assert line.startswith("step 7: ") and cause in line and kept in line
        assert "\n" not in line


def test_what_is_finite_passes():
    weights = {"policy": GOOD.not_finite(), "value model": None}
    check_finite(1, {"loss": -1e30, "grad_norm": 0.0}, weights, None)
    assert first_not_finite([("half", torch.full((9,), 6e4, dtype=torch.float16))]) is None


def test_real_models_report_the_weights_that_a_step_has_ruined(random_model):
    recipe = recipe_of(random_model, "ppo")
    policy, value = build_policy(recipe), build_value_model(recipe)
    batch = samples()
    for sample in batch:
        sample.returns = np.full(len(sample.response), np.nan, dtype=np.float32)
    value.predict(batch)
    assert policy.not_finite() is value.not_finite() is None
    metrics = value.train(batch)
    assert np.isnan(metrics["value_loss"])
    assert value.not_finite().startswith("backbone.")
    for sample in batch:
        sample.advantages *= np.float32(1e38)
    metrics = policy.train(batch, epochs=1)
    assert not np.isfinite(metrics["grad_norm"])
    assert policy.not_finite().startswith("model.")

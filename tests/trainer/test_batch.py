"""PPO's advantages of a batch."""

import numpy as np
import pytest

from nemo_specrl.trainer.batch import set_gae_advantages
from nemo_specrl.trainer.policy import Sample
from nemo_specrl.trainer.recipe import AdvEstimatorConfig


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_and_returns_of_samples(normalize):
    samples = [Sample.to_score([1], [2, 3]), Sample.to_score([1], [4])]
    samples[0].old_values = np.array([0.25, 0.5], np.float32)
    samples[1].old_values = np.array([0.5], np.float32)
    config = AdvEstimatorConfig(name="gae", gae_lambda=1.0, normalize_advantages=normalize)
    set_gae_advantages(samples, np.array([1.0, 0.0]), config)
    # With gamma and lambda of 1, a token's return is the reward, whatever the values are.
    assert samples[0].returns.tolist() == [1.0, 1.0] and samples[1].returns.tolist() == [0.0]
    raw = np.array([0.75, 0.5, -0.5])
    expected = (raw - raw.mean()) / raw.std() if normalize else raw
    found = np.concatenate([sample.advantages for sample in samples])
    np.testing.assert_allclose(found, expected, rtol=1e-4)

"""NeMo-RL's environment of a reward model, with a small model in place of the model's workers."""

from __future__ import annotations

import ray
from nemo_rl.environments import reward_model_environment

from tests.support.nemo_rl.models import SmallRewardModel

reward_model_environment.Policy = SmallRewardModel  # which Ray pickles with the class


@ray.remote(num_cpus=0)
class Scores(reward_model_environment.RewardModelEnvironment.__ray_metadata__.modified_class):  # type: ignore[misc]
    pass

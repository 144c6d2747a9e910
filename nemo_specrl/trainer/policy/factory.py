"""Builds the policy and the value model of a recipe."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.policy.base import Policy
from nemo_specrl.trainer.recipe import Recipe

if TYPE_CHECKING:
    from nemo_specrl.trainer.policy.torch.value import TorchValueModel

__all__ = ["build_policy", "build_value_model"]


def build_policy(recipe: Recipe) -> Policy:
    """Build the policy that a recipe describes, with its first weights.

    Raises:
        ConfigError: the backend is not installed, the model cannot be loaded, or the layout does
            not divide it.
    """
    policy, seed = recipe.policy, recipe.algorithm.seed
    if not policy.megatron_cfg.enabled:
        from nemo_specrl.trainer.policy.torch.policy import TorchPolicy

        return TorchPolicy(policy, recipe.loss_fn, seed)
    for module, package in (("megatron.core", "megatron-core"), ("ray", "ray")):
        if not _installed(module):
            raise ConfigError(
                f"policy.megatron_cfg.enabled = True: {package} is not installed; "
                f"pip install {package}, or set it to false to train with torch"
            )
    from nemo_specrl.trainer.policy.megatron.policy import MegatronPolicy
    from nemo_specrl.trainer.policy.megatron.weights import Layout

    layout, nodes = Layout(*recipe.parallelism), recipe.cluster.num_nodes
    return MegatronPolicy(policy, recipe.loss_fn, seed, layout, nodes)


def build_value_model(recipe: Recipe) -> TorchValueModel:
    """Build PPO's value model. It is a torch model, even with a Megatron policy.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    from nemo_specrl.trainer.policy.torch.value import TorchValueModel

    return TorchValueModel(recipe.policy, recipe.value)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module's parent package is missing
        return False

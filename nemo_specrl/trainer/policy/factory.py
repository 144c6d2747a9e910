"""The choice of a policy's backend by the recipe."""

from __future__ import annotations

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.policy.base import Policy, ValueModel
from nemo_specrl.trainer.recipe import Recipe

__all__ = ["build_policy", "build_value_model"]


def build_policy(recipe: Recipe) -> Policy:
    """Build the policy that a recipe describes, with its first weights.

    Raises:
        ConfigError: the recipe asks for a backend that this release lacks, or for a model that
            cannot be loaded.
    """
    _check_backend(recipe)
    from nemo_specrl.trainer.policy.torch_policy import TorchPolicy

    return TorchPolicy(recipe.policy, recipe.loss_fn, recipe.algorithm.seed)


def build_value_model(recipe: Recipe) -> ValueModel:
    """Build PPO's value model in the backend of the policy.

    Raises:
        ConfigError: see :func:`build_policy`.
    """
    _check_backend(recipe)
    from nemo_specrl.trainer.policy.torch_value import TorchValueModel

    return TorchValueModel(recipe.policy, recipe.value)


def _check_backend(recipe: Recipe) -> None:
    if recipe.policy.megatron_cfg.enabled:
        raise ConfigError(
            "policy.megatron_cfg.enabled = True: the Megatron backend is not in this release; "
            "set it to false to train with torch on one machine, or use nemo-specrl run for "
            "Megatron policies in NeMo-RL"
        )

"""Low-rank adapters of the torch backend, by peft: only they are trained.

An engine gets the weights with the adapters added, so it runs like any other. The recipe's block is
NeMo-RL's (``policy.dtensor_cfg.lora_cfg``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nemo_specrl.errors import ConfigError, last_line
from nemo_specrl.trainer.policy_config import LoraConfig

__all__ = ["add_adapters", "merged_weights"]

NAME = "default"
PREFIX = "base_model.model."
"""The prefix that peft adds to the names of the model's parameters."""


def add_adapters(model: torch.nn.Module, config: LoraConfig) -> torch.nn.Module:
    """Return the model with adapters; all its own weights are frozen.

    Raises:
        ConfigError: peft is missing, or the model has no module of the given names.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"policy.dtensor_cfg.lora_cfg.enabled = True: peft cannot be imported "
            f"({last_line(error)}); pip install peft"
        ) from None
    try:
        adapted: torch.nn.Module = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config.dim,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules="all-linear" if config.match_all_linear else config.target_modules,
                exclude_modules=config.exclude_modules or None,
                task_type="CAUSAL_LM",
            ),
            adapter_name=NAME,
        )
    except ValueError as error:
        raise ConfigError(f"policy.dtensor_cfg.lora_cfg: {last_line(error)[:200]}") from None
    return adapted


@torch.no_grad()
def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model with adapters as those of one without, one tensor at a time.

    Yields:
        name as in the model without adapters, and tensor.
    """
    adapted: dict[str, Any] = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight: torch.Tensor = parameter.detach()
        if (module := adapted.get(name)) is not None:
            weight = weight + module.get_delta_weight(NAME)
        yield name.removeprefix(PREFIX).replace(".base_layer.", "."), weight

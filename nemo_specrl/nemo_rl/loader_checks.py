"""Recipes in which NeMo-RL's data loader cannot be wrapped for run-ahead or partial rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.nemo_rl.compat import block_enabled, get_option
from nemo_specrl.nemo_rl.row_checks import BLOCK

__all__ = ["partial_rollouts_block", "refused_partial_rollouts", "refused_run_ahead"]


def refused_run_ahead(master_config: Any, spec_rl: SpecRLConfig) -> list[tuple[bool, str]]:
    """Recipes in which the next prompts are not known, or idle engines cannot be seen."""
    if not spec_rl.run_ahead.enabled:
        return []
    name = f"{BLOCK}.run_ahead.enabled = True"
    return [
        *(
            (wrong, f"{name}: {why}; set it to false, or {way}")
            for wrong, why, way in _unwrappable(master_config)
        ),
        (
            spec_rl.tree.method == "rounds",
            f"{name}: needs a drafter inside the engine, and {BLOCK}.tree.method = rounds has "
            "none; set it to false, or tree.method to auto",
        ),
    ]


def partial_rollouts_block(master_config: Any, algorithm: str) -> Any:
    """Return the recipe's partial-rollouts block, which NeMo-RL itself does not read, or None.

    Args:
        master_config: NeMo-RL's MasterConfig.
        algorithm: the name of the algorithm's block.
    """
    return get_option(getattr(master_config, algorithm), "partial_rollouts", None)


def refused_partial_rollouts(
    master_config: Any, algorithm: str, images: bool
) -> Iterator[tuple[bool, str]]:
    """Recipes in which prompts cannot be put off, or a batch cannot do without them."""
    if not get_option(partial_rollouts_block(master_config, algorithm), "enabled", False):
        return
    name = f"{algorithm}.partial_rollouts.enabled = true"
    own = getattr(master_config, algorithm)
    yield (
        algorithm != "grpo",
        f"{name}: prompts are put off in GRPO with dynamic sampling alone; set false",
    )
    yield (
        not get_option(own, "use_dynamic_sampling", False),
        f"{name}: needs dynamic sampling to refill the batch when prompts are put off; set "
        "grpo.use_dynamic_sampling=true, or false",
    )
    yield (
        int(get_option(own, "max_rollout_turns", 1)) > 1,
        f"{name}: a conversation that is cut off cannot be continued; set "
        "grpo.max_rollout_turns=1, or false",
    )
    for wrong, why, way in _unwrappable(master_config):
        yield wrong, f"{name}: {why}; set {way}, or false"
    yield (
        images,
        f"{name}: this recipe uses a multimodal processor, and prompts with media cannot be put "
        "off; set false",
    )


def _unwrappable(master_config: Any) -> list[tuple[bool, str, str]]:
    """Recipes that do not use batches as the driver's loader gives them; what to set instead."""
    vllm_cfg = master_config.policy["generation"].get("vllm_cfg") or {}
    return [
        (
            bool(vllm_cfg.get("async_engine")),
            "an asynchronous engine is asked for one row at a time",
            "policy.generation.vllm_cfg.async_engine=false",
        ),
        (
            block_enabled(master_config, "data_plane"),
            "the data plane's rollouts are asked for in another process than the data loader's",
            "data_plane.enabled=false",
        ),
        (
            bool(get_option(master_config.data, "use_multiple_dataloader", False)),
            "with several data loaders, the source of the next batch is not known in advance",
            "data.use_multiple_dataloader=false",
        ),
    ]

"""Arguments of an engine that drafts from history, for code that builds one."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from nemo_specrl.config import DraftConfig, SpecRLConfig, validated
from nemo_specrl.engine.row import REQUEST
from nemo_specrl.errors import ConfigError

__all__ = ["engine_options"]


def engine_options(
    config: SpecRLConfig | None = None, *, cache_dir: Any = None, **keys: Any
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` or ``AsyncEngineArgs`` for an engine that drafts by itself.

    For example ``vllm.LLM(model, **engine_options(cache_dir="/raid/specrl"))``. Merge
    ``additional_config`` with your own.

    Args:
        config: the whole block; with it, leave the others out.
        cache_dir: folder of the rollout cache. None: the engine drafts from the rows of its own
            life alone.
        keys: keys of the blocks ``spec_rl.cache`` and ``spec_rl.draft``, such as ``max_tokens``.

    Returns:
        ``additional_config`` alone, from which the plug-in sets everything else; nothing if
        ``config`` is not enabled.

    Raises:
        ConfigError: a key or value is wrong, or vLLM will not load this package's plug-in.
    """
    if config is None:
        blocks: dict[str, dict[str, Any]] = {"cache": {}, "draft": {}}
        if cache_dir is not None:
            blocks["cache"]["dir"] = str(cache_dir)
        for key, value in keys.items():
            block = "draft" if key in DraftConfig.model_fields else "cache"
            blocks[block][key] = value
        config = validated(SpecRLConfig, {"enabled": True, **blocks}, "engine_options")
    elif cache_dir is not None or keys:
        raise ConfigError("engine_options: give a configuration, or single keys, not both")
    if not config.enabled:
        return {}
    _check_plugin()
    return {"additional_config": {REQUEST: config.model_dump(mode="json")}}


def _check_plugin() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(p.value == "nemo_specrl.engine.plugin:vllm_plugin" for p in found):
        raise ConfigError(
            "nemo_specrl is no plug-in of vLLM here, which it is only where it was installed: "
            "pip install nemo-specrl (in a checkout: pip install -e .)"
        )
    if allowed is not None and "nemo_specrl" not in allowed.split(","):
        raise ConfigError(f"VLLM_PLUGINS = {allowed!r}: leaves nemo_specrl out; add it")

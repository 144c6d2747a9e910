"""How drafts from trees reach an engine: the choice of the method, and what it asks of the engine.

Makes the options with which an engine has to be built for the tree proposer (``v1_proposer``), and
checks engines that have a drafter of vLLM's own.
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.limits import TREE_PROPOSER, EngineLimits
from nemo_specrl.engine.vllm.compat import EXTRA_ARG, check_version, in_this_process
from nemo_specrl.engine.vllm.environment import (
    asks_for_v2,
    has_custom_proposers,
    on_cpu,
    why_not_drafted,
)
from nemo_specrl.engine.vllm.patches import fix_cpu_rejection_sampler, vllm_plugin
from nemo_specrl.errors import ConfigError, IncompatibleVersion

if TYPE_CHECKING:
    pass

__all__ = [
    "check_cpu_drafter",
    "drafting_method",
    "engine_options",
    "method_in",
]


_POSSIBLE = {
    True: "name tree.method: proposer or rounds to have it all the same, or set preset: faithful "
    "(prefix reuse, not exact), or enabled: false",
    False: "name tree.method: rounds to have drafts all the same, or set preset: faithful (prefix "
    "reuse, not exact), or enabled: false",
}
"""What is possible where ``auto`` is not, by whether vLLM takes proposers."""


def drafting_method(config: SpecRLConfig) -> Literal["proposer", "rounds"] | None:
    """How drafts from trees are to reach an engine that is yet to be built; None: there are none.

    Rounds are never taken unasked, since they cost more than they save nearly everywhere
    (docs/guide/lossless.md), and the proposer not on GPUs (``why_not_drafted``).

    Raises:
        ConfigError: ``tree.method`` is ``auto``, and nothing is faster than plain decoding, or the
            environment forbids what it names.
        IncompatibleVersion: it asks for a proposer, which this vLLM does not take.
    """
    if not (config.enabled and config.tree.enabled):
        return None
    method = config.tree.method
    if method == "rounds":
        return "rounds"
    proposers = has_custom_proposers()
    if method == "auto":
        reason = why_not_drafted(cpu=on_cpu(), proposers=proposers, v2=asks_for_v2())
        if reason is not None:
            raise ConfigError(f"spec_rl.tree.method = auto: {reason}; {_POSSIBLE[proposers]}")
    elif not proposers:
        raise IncompatibleVersion(
            f"spec_rl.tree.method = proposer: vLLM {check_version()} has no custom proposers "
            f"(0.25.1 has); {_POSSIBLE[False]}"
        )
    elif asks_for_v2():
        raise ConfigError(
            "spec_rl.tree.method = proposer: VLLM_USE_V2_MODEL_RUNNER asks for vLLM's V2 model "
            f"runner, which takes no proposer; unset it, or {_POSSIBLE[False]}"
        )
    return "proposer"


def method_in(config: SpecRLConfig, limits: EngineLimits) -> Literal["proposer", "rounds"] | None:
    """How drafts from trees reach an engine that runs; None: there are none.

    Raises:
        ConfigError: not as ``tree.method`` says.
    """
    if not (config.enabled and config.tree.enabled):
        return None
    if config.tree.method == "rounds":
        return "rounds"
    if not limits.drafts_from_trees:
        drafting_method(config)  # it may be that there is no way
        raise ConfigError(
            f"spec_rl.tree.method = {config.tree.method}: the engine was built without the tree "
            "proposer; pass nemo_specrl.engine_options(config) to vllm.LLM, or set rounds"
        )
    return "proposer"


def engine_options(config: SpecRLConfig) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that an engine for this configuration needs.

    There are none without trees, nor where drafts are verified in rounds (``rounds``).

    Raises:
        ConfigError, IncompatibleVersion: see :func:`drafting_method`, or the package was not
            compiled.
    """
    method = drafting_method(config)
    if method is not None:
        importlib.import_module("nemo_specrl.speculation.suffix_tree")  # its index is native code
    if method != "proposer":
        return {}
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": TREE_PROPOSER,
            "num_speculative_tokens": config.tree.max_draft_tokens,
        },
        "additional_config": {
            EXTRA_ARG: {"max_bytes": config.tree.max_bytes, "adaptive": config.tree.adaptive}
        },
    }


def check_cpu_drafter(engine: Any) -> None:
    """Make sure that an engine with a drafter of vLLM's samples from the policy on a CPU, too.

    In this process the rejection sampler is fixed here. Other processes of the engine fix theirs
    when vLLM loads its plug-ins, if it finds this package among them. On GPUs nothing is wrong.

    Args:
        engine: an ``LLMEngine`` or ``AsyncLLM``.

    Raises:
        ConfigError: the engine has other processes, and this package is no plug-in of theirs.
        IncompatibleVersion: this vLLM's rejection sampler is not known.
    """
    config = engine.vllm_config
    if config.speculative_config is None or config.device_config.device_type != "cpu":
        return
    fix_cpu_rejection_sampler()
    allowed = os.environ.get("VLLM_PLUGINS")
    loaded = any(
        plugin.value == f"{vllm_plugin.__module__}:{vllm_plugin.__name__}"
        and (allowed is None or plugin.name in allowed.split(","))
        for plugin in metadata.entry_points(group="vllm.general_plugins")
    )
    if not (loaded or in_this_process(engine)):
        raise ConfigError(
            "speculative_config on a CPU: vLLM's rejection sampler is wrong there, and nemo_specrl "
            "fixes it in the engine's other processes as a plug-in of vLLM, which it is only where "
            "it was installed by pip and VLLM_PLUGINS does not leave it out; install it, or set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0, or leave the drafter out"
        )

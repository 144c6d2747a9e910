"""How drafts from earlier responses reach an engine: the choice of the method, and its options.

``v2`` is a speculator of vLLM's V2 model runner (``v2``), ``proposer`` one of its V1 runner
(``v1_proposer``), and ``rounds`` verifies drafts in requests of their own
(``prompt_logprob_drafter``). Engines with one of vLLM's own drafters are checked here, too.
"""

from __future__ import annotations

import importlib
import logging
import os
from importlib import metadata
from typing import Any, Literal

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.limits import TREE_PROPOSER, EngineLimits
from nemo_specrl.engine.vllm.compat import EXTRA_ARG, in_this_process
from nemo_specrl.engine.vllm.cpu_sampler import fix_cpu_rejection_sampler
from nemo_specrl.engine.vllm.environment import (
    FIRST_WITH_ADAPTIVE_VERIFICATION,
    FIRST_WITH_ROUTES,
    Engines,
    Method,
    auto_method,
    would_run_v2,
)
from nemo_specrl.engine.vllm.plugin import vllm_plugin
from nemo_specrl.engine.vllm.v2_patches import install, speculator_options
from nemo_specrl.errors import ConfigError, IncompatibleVersion

__all__ = [
    "check_other_processes",
    "drafting_method",
    "engine_options",
    "is_vllm_plugin",
    "method_in",
    "why_no_routes",
]

logger = logging.getLogger(__name__)

V2_MAX_BYTES = 2**29
"""The most device memory for responses: a prompt's are needed only while its rows run, and
histories come with the requests. It is taken from what ``gpu_memory_utilization`` leaves free."""
_OTHERWISE = "set preset: faithful (prefix reuse, not exact), or enabled: false"


def drafting_method(config: SpecRLConfig, engines: Engines | None = None) -> Method | None:
    """How drafts will reach an engine that is not built yet; None: there are none.

    Args:
        config: the ``spec_rl:`` block.
        engines: what is known of them; None: they are built in this process.

    Raises:
        ConfigError: ``tree.method`` is ``auto``, and no method is faster than plain decoding, or
            the environment forbids the named method.
        IncompatibleVersion: this vLLM does not support the named drafter, or lacks what
            ``tree.adaptive_verification`` needs.
    """
    if not (config.enabled and config.tree.enabled):
        return None
    engines = engines or Engines.here()
    method = _method(config.tree.method, engines)
    if method is not None and config.tree.adaptive_verification:
        _check_adaptive_verification(config, method, engines)
    return method


def _method(method: Literal["auto"] | Method, engines: Engines) -> Method | None:
    if method == "auto":
        chosen = auto_method(engines)
        if chosen not in ("v2", "proposer"):
            raise ConfigError(f"spec_rl.tree.method = auto: {chosen}; {_possible(engines)}")
        if chosen == "v2" and (problem := _v2_problem(engines)):
            logger.warning("rows are decoded without drafts: %s; %s", problem, _possible(engines))
            return None
        return "v2" if chosen == "v2" else "proposer"
    if method == "v2":
        _check_v2(engines)
    elif method == "proposer":
        _check_proposer(engines)
    return method


def _check_adaptive_verification(config: SpecRLConfig, method: Method, engines: Engines) -> None:
    name = "spec_rl.tree.adaptive_verification = true"
    if not config.tree.adaptive:
        raise ConfigError(f"{name}: rows of one length are asked for by tree.adaptive = false")
    if method != "v2":
        raise ConfigError(
            f"{name}: drafts come by {method}; it needs tree.method: v2, or set false"
        )
    if engines.before(FIRST_WITH_ADAPTIVE_VERIFICATION):
        raise IncompatibleVersion(
            f"{name}: vLLM {engines.version} does not have it for drafts without a model (0.32 "
            "has); set false, and lengths follow the rows of a step"
        )


def _possible(engines: Engines) -> str:
    """What is possible when ``auto`` is not."""
    v1 = engines.custom_proposers and not engines.v2_wanted
    others = "proposer or rounds" if v1 else "rounds"
    return f"name tree.method: {others} to have drafts all the same, or {_OTHERWISE}"


def _v2_problem(engines: Engines) -> str | None:
    """Why the speculator cannot be put into this vLLM; None: it can, or no engine runs here."""
    if not engines.in_this_process:
        return None
    try:
        install()
    except IncompatibleVersion as error:
        return str(error)
    return None


def _check_v2(engines: Engines) -> None:
    name = "spec_rl.tree.method = v2"
    if not engines.v2_speculators:
        raise IncompatibleVersion(
            f"{name}: vLLM {engines.version} has no V2 model runner that takes drafters (0.25.1 "
            f"has); {_possible(engines)}"
        )
    if engines.v2_wanted is False:
        raise ConfigError(
            f"{name}: VLLM_USE_V2_MODEL_RUNNER forbids vLLM's V2 model runner; unset it, or "
            f"{_possible(engines)}"
        )
    if not would_run_v2(engines):
        raise ConfigError(
            f"{name}: on a CPU vLLM runs its V1 model runner; name tree.method: proposer, or "
            f"{_OTHERWISE}"
        )
    if (problem := _v2_problem(engines)) is not None:
        raise IncompatibleVersion(f"{name}: {problem}; {_possible(engines)}")


def _check_proposer(engines: Engines) -> None:
    name = "spec_rl.tree.method = proposer"
    if not engines.custom_proposers:
        raise IncompatibleVersion(
            f"{name}: vLLM {engines.version} has no custom proposers (0.25.1 has); "
            f"{_possible(engines)}"
        )
    if engines.v2_wanted:
        raise ConfigError(
            f"{name}: VLLM_USE_V2_MODEL_RUNNER asks for vLLM's V2 model runner, which takes no "
            f"proposer; unset it, or {_possible(engines)}"
        )


def why_no_routes(engines: Engines, method: Method | None) -> str | None:
    """Why engines do not return the routed experts of drafted rows; None: they do.

    Args:
        engines: engines that draft by ``method``.
        method: how they draft; None: they do not.
    """
    if method is None:
        return None
    if method != "v2":
        return f"what vLLM returns behind drafts by {method} has not been run"
    if engines.before(FIRST_WITH_ROUTES):
        return (
            f"vLLM {engines.version} returns routed experts from its V1 model runner alone (0.29 "
            "from V2), and on GPUs drafts need V2"
        )
    return None


def method_in(config: SpecRLConfig, limits: EngineLimits) -> Method | None:
    """How drafts reach a running engine; None: there are none.

    Raises:
        ConfigError, IncompatibleVersion: the engine does not draft as ``tree.method`` says.
    """
    if not (config.enabled and config.tree.enabled):
        return None
    method = config.tree.method
    if method == "rounds":
        return "rounds"
    if limits.drafter is None:
        if drafting_method(config) is None:  # otherwise there may be no way
            return None
        raise ConfigError(
            f"spec_rl.tree.method = {method}: the engine was built without its drafter; pass "
            "nemo_specrl.engine_options(config) to vllm.LLM, or set rounds"
        )
    if method not in ("auto", limits.drafter):
        raise ConfigError(
            f"spec_rl.tree.method = {method}: the engine was built for {limits.drafter}; build it "
            "with nemo_specrl.engine_options of this configuration"
        )
    return limits.drafter


def engine_options(config: SpecRLConfig) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` (or ``AsyncEngineArgs``) that this configuration needs.

    For example ``vllm.LLM(model, **engine_options(config))``. Merge ``additional_config`` with your
    own, and pass no other ``speculative_config``: an engine has one drafter.

    Args:
        config: the ``spec_rl:`` block.

    Returns:
        ``speculative_config`` and ``additional_config``, and whatever else the method needs. Empty
        with ``enabled: false``, without trees, with ``tree.method: rounds``, and, after a warning,
        if ``auto`` finds a vLLM whose V2 runner it cannot patch.

    Raises:
        ConfigError: ``tree.method`` is ``auto`` and no method is faster than plain decoding here,
            or the environment forbids the named one.
        IncompatibleVersion: this vLLM does not support the named drafter, or the compiled extension
            of this package is missing.
    """
    method = drafting_method(config)
    if method is not None:
        importlib.import_module("nemo_specrl.speculation.suffix_tree")  # its index is native code
    tree = config.tree
    if method == "v2":
        return speculator_options(
            tree.max_draft_tokens,
            min(tree.max_bytes, V2_MAX_BYTES),
            adaptive=tree.adaptive,
            by_chance=tree.adaptive_verification,
        )
    if method != "proposer":
        return {}
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": TREE_PROPOSER,
            "num_speculative_tokens": tree.max_draft_tokens,
        },
        "additional_config": {EXTRA_ARG: {"max_bytes": tree.max_bytes, "adaptive": tree.adaptive}},
    }


def check_other_processes(engine: Any, drafter: str | None) -> None:
    """Make sure that all processes of an engine have the parts of this package that its drafter
    needs.

    Args:
        engine: an ``LLMEngine`` or ``AsyncLLM``.
        drafter: the drafter of this package that the engine was built with; None: another one, or
            none.

    Raises:
        ConfigError: the engine has other processes, and this package is not a plug-in there, so
            that vLLM would draft n-grams instead of from history.
        IncompatibleVersion: this vLLM's rejection sampler for CPUs is not known.
    """
    if drafter is None:
        _check_cpu_drafter(engine)
    elif drafter == "v2" and not (is_vllm_plugin() or in_this_process(engine)):
        raise ConfigError(
            "spec_rl.tree.method = v2: in the engine's other processes vLLM drafts from history "
            "where this package is a plug-in of vLLM, which it is only where it was installed by "
            "pip and VLLM_PLUGINS does not leave it out; install it, or set preset: faithful"
        )


def _check_cpu_drafter(engine: Any) -> None:
    """Make sure that an engine with one of vLLM's drafters samples from the policy on a CPU, too.

    In this process the rejection sampler is fixed here. Other processes of the engine fix theirs
    when vLLM loads its plug-ins, if it finds this package among them. GPUs are not affected.

    Args:
        engine: an ``LLMEngine`` or ``AsyncLLM``.

    Raises:
        ConfigError: the engine has other processes, and this package is not a plug-in there.
        IncompatibleVersion: this vLLM's rejection sampler is not known.
    """
    config = engine.vllm_config
    if config.speculative_config is None or config.device_config.device_type != "cpu":
        return
    fix_cpu_rejection_sampler()
    if not (is_vllm_plugin() or in_this_process(engine)):
        raise ConfigError(
            "speculative_config on a CPU: vLLM's rejection sampler is wrong there, and nemo_specrl "
            "fixes it in the engine's other processes as a plug-in of vLLM, which it is only where "
            "it was installed by pip and VLLM_PLUGINS does not leave it out; install it, or set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0, or leave the drafter out"
        )


def is_vllm_plugin() -> bool:
    """Whether vLLM's other processes load this package: it is installed by pip, and allowed."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return any(
        plugin.value == f"{vllm_plugin.__module__}:{vllm_plugin.__name__}"
        and (allowed is None or plugin.name in allowed.split(","))
        for plugin in metadata.entry_points(group="vllm.general_plugins")
    )

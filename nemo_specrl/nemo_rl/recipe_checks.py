"""NeMo-RL recipes that the plug-in cannot run: each gets one line that says what to set."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.drafters.method import drafting_method, is_vllm_plugin, why_no_routes
from nemo_specrl.engine.vllm.environment import V2_USE, Engines, asks_for_v2, why_not_v2
from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl import compat
from nemo_specrl.nemo_rl.compat import block_enabled, get_option
from nemo_specrl.nemo_rl.loader_checks import refused_partial_rollouts, refused_run_ahead
from nemo_specrl.nemo_rl.row_checks import (
    BLOCK,
    RAW_TOP_K,
    refused_media,
    refused_sampling,
    verified_by_prompts,
)

__all__ = [
    "DISTILLATION",
    "check_elsewhere",
    "check_recipe",
    "serves_requests",
]

DISTILLATION = "distillation"
"""The name of the block of the algorithm that learns from a teacher's log-probs, not rewards."""
OLDEST_IN_FLIGHT = (0, 25)
"""The oldest vLLM in which rows keep all their tokens at a refit in flight."""
ROUTES = "policy.router_replay.enabled = true"
NO_ROUTES = "switch router replay (enable_return_routed_experts) off"


def check_recipe(
    master_config: Any,
    spec_rl: SpecRLConfig,
    algorithm: str,
    *,
    images: bool = False,
    single_controller: bool = False,
    engines: Engines | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Refuse what the plug-in cannot do, before anything is started.

    Args:
        master_config: NeMo-RL's MasterConfig.
        spec_rl: its ``spec_rl:`` block.
        algorithm: ``grpo``, ``ppo``, ``distillation`` or ``eval``, the name of its block.
        images: whether the script passed ``setup`` a processor of images, sounds or videos.
        single_controller: whether the run uses NeMo-RL's single controller.
        engines: what is known about the recipe's engines; None: what can be seen from here.
        model: configuration of its model; None: as its name says.

    Returns:
        Variables that the engines' processes need in addition to those of the recipe.

    Raises:
        ConfigError: names the key, its value and what to set.
        IncompatibleVersion: the drafter that the block names does not run here.
    """
    generation = master_config.policy["generation"]
    off = f"or {BLOCK}.enabled=false"
    # In the single controller, the plug-in looks into the data plane (single_controller.py).
    unseen = block_enabled(master_config, "data_plane") and not single_controller
    refitted = None if single_controller else algorithm
    refused = itertools.chain(
        refused_sampling(generation, spec_rl),
        refused_media(images, spec_rl),
        _refused_engines(generation, off),
        _refused_in_groups(generation, spec_rl),
        _refused_features(master_config, spec_rl, off),
        _refused_served(master_config, spec_rl, unseen, off),
        _refused_options(master_config, spec_rl, algorithm, unseen),
        _refused_in_flight(master_config, spec_rl, refitted, engines),
        refused_run_ahead(master_config, spec_rl),
        refused_partial_rollouts(master_config, algorithm, images),
    )
    for wrong, line in refused:
        if wrong:
            raise ConfigError(line)
    if spec_rl.tree.enabled:  # its index is native code, which may be missing here, as in workers
        importlib.import_module("nemo_specrl.speculation.suffix_tree")
        engines = engines or compat.engines_of(generation)
        return _check_drafter(master_config, spec_rl, engines, model)
    return {}


def check_elsewhere(generation: Any) -> None:
    """Refuse the ``spec_rl:`` block in a run that makes rollouts without the plug-in.

    Args:
        generation: the recipe's block of that name, for whatever backend; may be None.

    Raises:
        ConfigError: the block is enabled.
    """
    if get_option((generation or {}).get("spec_rl"), "enabled", False):
        raise ConfigError(
            f"{BLOCK}.enabled = true: rollouts are reused in NeMo-RL's GRPO, PPO, distillation, "
            "single controller and evaluation, and not here; set false"
        )


def _check_drafter(
    master_config: Any, spec_rl: SpecRLConfig, engines: Engines, model: Mapping[str, Any] | None
) -> dict[str, str]:
    """Refuse what the workers would refuse minutes later, for trees; return variables they need."""
    method = drafting_method(spec_rl, engines)
    generation = master_config.policy["generation"]
    if method == "proposer" and generation["top_k"] not in RAW_TOP_K:
        raise ConfigError(
            f"policy.generation.top_k = {generation['top_k']}: with {BLOCK}.tree.method = proposer "
            "vLLM fails in steps that have no draft (seen on a CPU); set null, or "
            f"{BLOCK}.enabled=false"
        )
    if compat.returns_routes(master_config.policy) and (why := why_no_routes(engines, method)):
        raise ConfigError(f"{ROUTES}: {why}; {NO_ROUTES}, or {BLOCK}.enabled=false")
    stages = (generation.get("vllm_cfg") or {}).get("pipeline_parallel_size") or 1
    if stages > 1 and method in ("v2", "proposer"):
        # In V1 the runners of all stages except the last ask for a drafter that they do not have.
        raise ConfigError(
            f"policy.generation.vllm_cfg.pipeline_parallel_size = {stages}: {BLOCK}.tree.method = "
            f"{method} does not work with pipeline stages; set it to 1, or preset: faithful "
            "without trees"
        )
    if method != "v2":
        return {}
    if model is None:
        model = compat.model_of(str(master_config.policy["model_name"]))
    why = why_not_v2(engines, model)
    if why is not None:
        raise ConfigError(
            f"{BLOCK}.tree.method = {spec_rl.tree.method}: {why}, and on GPUs drafts need its V2 "
            "model runner; set preset: faithful"
        )
    if not is_vllm_plugin():
        raise ConfigError(
            f"{BLOCK}.tree.method = {spec_rl.tree.method}: vLLM's processes would not load "
            "nemo_specrl, since pip has not installed it or VLLM_PLUGINS leaves it out; install it "
            "by 'pip install --no-deps --target DIR', with DIR on PYTHONPATH, or set preset: "
            "faithful"
        )
    return {V2_USE: "1"} if asks_for_v2(engines, model) else {}


def _refused_features(
    master_config: Any, spec_rl: SpecRLConfig, off: str
) -> list[tuple[bool, str]]:
    """Features of NeMo-RL that are incompatible with drafts."""
    generation = master_config.policy["generation"]
    vllm_kwargs = generation.get("vllm_kwargs") or {}
    drafter = vllm_kwargs.get("speculative_config") or {}
    return [
        (
            generation["backend"] != "vllm",
            f"policy.generation.backend = {generation['backend']!r}: must be vllm, {off}",
        ),
        (
            spec_rl.tree.enabled and bool(drafter) and drafter.get("num_speculative_tokens") != 0,
            "policy.generation.vllm_kwargs.speculative_config: an engine has one drafter, and "
            f"{BLOCK}.tree.enabled = true asks for another; leave it out, or take preset: faithful "
            "without trees",
        ),
    ]


def serves_requests(master_config: Any) -> str | None:
    """Return the key that makes rollouts go through the engines' HTTP servers, or None."""
    # NeMo-Gym's script switches the server on, after the recipe has been read.
    if get_option(getattr(master_config, "env", None), "should_use_nemo_gym", False):
        return "env.should_use_nemo_gym = true"
    exposed = (master_config.policy["generation"].get("vllm_cfg") or {}).get("expose_http_server")
    return "policy.generation.vllm_cfg.expose_http_server = true" if exposed else None


def _refused_served(
    master_config: Any, spec_rl: SpecRLConfig, unseen: bool, off: str
) -> Iterator[tuple[bool, str]]:
    """Cases in which HTTP requests would not draft, or rollouts would not return to the cache."""
    name = serves_requests(master_config)
    if name is None:
        return
    yield (
        verified_by_prompts(spec_rl),
        f"{name}: NeMo-Gym sends each turn as a single engine request, so a prefix cannot be "
        f"verified in a request before it; set preset: lossless without rounds, {off}",
    )
    yield (
        unseen,
        f"{name}: conversations return to the cache by policy.train, which the data plane does not "
        f"call; set data_plane.enabled=false, {off}",
    )


def _refused_options(
    master_config: Any, spec_rl: SpecRLConfig, algorithm: str, unseen: bool
) -> list[tuple[bool, str]]:
    """Keys of the ``spec_rl:`` block that are missing, or incompatible with others."""
    threshold = get_option(getattr(master_config, algorithm), "seq_logprob_error_threshold", None)
    masked = f"{algorithm}.seq_logprob_error_threshold takes them for errors and masks such rows"
    return [
        (
            spec_rl.cache.dir is None,
            f"{BLOCK}.cache.dir: must name a folder on each node's own disk, such as /raid/specrl",
        ),
        (
            threshold is not None and spec_rl.reported_logprobs == "behaviour",
            f"{BLOCK}.reported_logprobs = 'behaviour': reused rows report other log-probs than the "
            f"policy's, {masked}; set it to null, or reported_logprobs to policy",
        ),
        (
            spec_rl.clip_anchor == "birth"
            and bool(get_option(master_config.loss_fn, "force_on_policy_ratio", False)),
            f"{BLOCK}.clip_anchor = 'birth': with loss_fn.force_on_policy_ratio there is no ratio "
            "to anchor; set that to false, or the anchor to current",
        ),
        (
            spec_rl.clip_anchor == "birth" and algorithm == DISTILLATION,
            f"{BLOCK}.clip_anchor = 'birth': the loss of distillation has no ratio to anchor; set "
            "current",
        ),
        (
            spec_rl.monitor.auto and algorithm == DISTILLATION,
            f"{BLOCK}.monitor.auto = True: in distillation there are no rewards to compare; set "
            "false",
        ),
        (
            spec_rl.clip_anchor == "birth" and unseen,
            f"{BLOCK}.clip_anchor = 'birth': does not reach the data plane yet; set "
            "data_plane.enabled=false, or the anchor to current",
        ),
    ]


def _refused_engines(generation: Any, off: str) -> list[tuple[bool, str]]:
    """Engines that are not one of ours for each worker, or keep something from old weights."""
    vllm_kwargs = generation.get("vllm_kwargs") or {}
    engines = vllm_kwargs.get("data_parallel_size") or 1
    own = generation.get("worker_extension_cls_fqn")
    return [
        (
            engines > 1,
            f"policy.generation.vllm_kwargs.data_parallel_size = {engines}: NeMo-RL makes "
            f"data-parallel groups by vllm_cfg.expert_parallel_size; leave it out, {off}",
        ),
        (
            own is not None,
            f"policy.generation.worker_extension_cls_fqn = {own}: it would take the place of the "
            f"worker that drafts; leave it out, {off}",
        ),
        (
            bool(vllm_kwargs.get("kv_transfer_config")),
            "policy.generation.vllm_kwargs.kv_transfer_config: what a KV connector keeps of the "
            f"old weights would be read after a refit; leave it out, {off}",
        ),
    ]


def _refused_in_groups(generation: Any, spec_rl: SpecRLConfig) -> Iterator[tuple[bool, str]]:
    """What engines of vLLM's data-parallel groups, which step together, would do on their own."""
    vllm_cfg = generation.get("vllm_cfg") or {}
    experts, tensor = (vllm_cfg.get(f"{kind}_parallel_size") or 1 for kind in ("expert", "tensor"))
    if experts <= tensor:
        return
    name = "policy.generation.vllm_cfg.expert_parallel_size"
    group = f"where {name} is above tensor_parallel_size"
    scheduling = (generation.get("vllm_kwargs") or {}).get("async_scheduling")
    yield (
        spec_rl.run_ahead.enabled,
        f"{BLOCK}.run_ahead.enabled = True: {group}, an engine takes no steps without the others; "
        "set it to false",
    )
    yield (
        spec_rl.tree.enabled and spec_rl.tree.adaptive_verification,
        f"{BLOCK}.tree.adaptive_verification = True: {group}, all engines have to verify the same "
        "number of tokens of each row; set it to false",
    )
    yield (
        bool(scheduling),
        f"policy.generation.vllm_kwargs.async_scheduling = {scheduling}: {group}, engines that "
        "step together would wait for each other without end; leave it out",
    )


def _refused_in_flight(
    master_config: Any, spec_rl: SpecRLConfig, algorithm: str | None, engines: Engines | None
) -> Iterator[tuple[bool, str]]:
    """Refits while rows are running, if these could not continue; None: the single controller."""
    name, off = "async_rl, in which rows run on through refits", f"set {BLOCK}.tree.method=auto"
    if algorithm is not None:
        asynchronous = get_option(getattr(master_config, algorithm), f"async_{algorithm}", None)
        wanted = ("enabled", "in_flight_weight_updates")
        if not all(get_option(asynchronous, name, False) for name in wanted):
            return
        name = f"{algorithm}.async_{algorithm}.in_flight_weight_updates = true"
        off = f"set it to false, or {BLOCK}.enabled=false"
    yield (
        spec_rl.tree.enabled and spec_rl.tree.method == "rounds",
        f"{name}: with {BLOCK}.tree.method = rounds a draft would be judged by log-probs of two "
        f"policies; {off}",
    )
    known = engines or compat.engines_of(master_config.policy["generation"])
    yield (
        known.before(OLDEST_IN_FLIGHT),
        f"{name}: has not been run on vLLM {known.version}, which may lose a token of each row "
        f"that is running at a refit; {off}",
    )

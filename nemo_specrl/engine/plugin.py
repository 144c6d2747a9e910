"""What vLLM runs of this package: ``additional_config: {"spec_rl": {...}}`` is enough, in any host.

vLLM loads the plug-in in each of its processes before it configures an engine. The block then sets
the drafter and the scheduler (:func:`configured`). Engines without a block are not changed.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from nemo_specrl.config import SpecRLConfig, validated
from nemo_specrl.engine import patches, v2_config
from nemo_specrl.engine.patches import Patch
from nemo_specrl.engine.row import REQUEST, block_of
from nemo_specrl.errors import ConfigError, IncompatibleVersion
from nemo_specrl.rollout import vocabulary_hash

__all__ = ["all_patches", "vllm_plugin", "vocabulary_of"]

logger = logging.getLogger(__name__)

WHERE = f"additional_config.{REQUEST}"
PROPOSER = "nemo_specrl.engine.proposer.HistoryProposer"
SCHEDULER = "nemo_specrl.engine.scheduler."


def vllm_plugin() -> None:
    """Entry point ``vllm.general_plugins``. Never raises: vLLM must start without drafts, too."""
    try:
        patches.install(CONFIGURATION)
        if _would_run_v2():  # workers of another process learn of it in no other way
            patches.install(all_patches()["v2"])
    except IncompatibleVersion as error:
        logger.debug("drafts from history are not possible: %s", error)
    except Exception:
        logger.warning("nemo_specrl could not be loaded; rows decode without drafts", exc_info=True)


def all_patches() -> dict[str, tuple[Patch, ...]]:
    """All patches: by ``engine`` (where an engine is configured and has its core), ``v1`` and
    ``v2`` (its model runner), ``hybrid`` (in V2, for models with other layers than attention)."""
    from nemo_specrl.engine import core_patches, v1_patches, v2_hybrids, v2_patches

    return {
        "engine": CONFIGURATION + core_patches.PATCHES,
        "v1": v1_patches.PATCHES,
        "v2": v2_patches.PATCHES,
        "hybrid": v2_hybrids.HYBRID_PATCHES,
    }


def _would_run_v2() -> bool:
    from vllm.platforms import current_platform

    return v2_config.would_run_v2(cpu=bool(current_platform.is_cpu()))


def configured(original: Any, args: Any, *others: Any, **options: Any) -> Any:
    """``EngineArgs.create_engine_config``: makes an engine draft that has a ``spec_rl`` block.

    Raises:
        ConfigError: the block is wrong, or there is a scheduler of the user's beside it, or, in V1
            and where it would not be exact, a drafter.
    """
    block = block_of(args.additional_config)
    if block is None:
        return original(args, *others, **options)
    whole = {"enabled": True, **block} if isinstance(block, dict) else block
    config = validated(SpecRLConfig, whole, WHERE)
    if not config.enabled:
        return original(args, *others, **options)
    v2 = _would_run_v2()
    has_drafter = _refuse_others(args, v2)
    try:
        table = all_patches()
        patches.check((*table["engine"], *table["v2" if v2 else "v1"]))
    except IncompatibleVersion as error:
        logger.warning("%s: rows are decoded without drafts: %s", WHERE, error)
        return original(args, *others, **options)
    additional, own = args.additional_config, args.speculative_config
    drafter = v2_config.speculative_config(config.draft) if v2 else _proposer(config)
    try:
        args.speculative_config = copy.deepcopy(own) if has_drafter else drafter
        args.additional_config = {**additional, REQUEST: config.model_dump(mode="json")}
        vllm_config = original(args, *others, **options)
    finally:  # a host may configure several engines from the same arguments
        args.speculative_config, args.additional_config = own, additional
    if vllm_config.speculative_config is None:  # V2 said why
        return vllm_config
    scheduler = vllm_config.scheduler_config
    name = "AsyncHistoryScheduler" if scheduler.async_scheduling else "HistoryScheduler"
    scheduler.scheduler_cls = SCHEDULER + name
    if config.cache.vocabulary is None:
        cache = vllm_config.additional_config[REQUEST]["cache"]
        cache["vocabulary"] = vocabulary_of(vllm_config.model_config)
    return vllm_config


def _refuse_others(args: Any, v2: bool) -> bool:
    """Refuse what the block cannot be beside; whether there is a drafter that it can."""
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    given = [name for name in names if getattr(args, name, None) is not None]
    if given and not v2:
        raise ConfigError(
            f"{given[0]}: {WHERE} brings its own drafter, and an engine has one except in vLLM's "
            "V2 model runner; leave one out"
        )
    method = (args.speculative_config or {}).get("method", getattr(args, "spec_method", None))
    if method == v2_config.METHOD:  # as which vLLM knows history
        raise ConfigError(f"speculative_config.method = {method}: leave it or {WHERE} out")
    if args.scheduler_cls is not None:
        raise ConfigError(f"scheduler_cls: {WHERE} brings its own scheduler; leave one out")
    return bool(given)


def _proposer(config: SpecRLConfig) -> dict[str, Any]:
    """The argument ``speculative_config`` of an engine with the V1 model runner."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ConfigError(
            f"{WHERE}: VLLM_USE_V2_MODEL_RUNNER forbids vLLM's V2 model runner, and in V1, without "
            "asynchronous scheduling, drafts make GPUs slower than stock vLLM; unset it"
        )
    if config.draft.adaptive_verification:
        raise ConfigError(
            f"{WHERE}.draft.adaptive_verification = True: needs vLLM's V2 model runner; set false"
        )
    return {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": config.draft.max_tokens,
    }


def vocabulary_of(model_config: Any) -> str:
    """Hash of a model's vocabulary; without a tokenizer, of its size.

    vLLM keeps the tokenizer that is loaded here, and needs it next.
    """
    try:
        from vllm.tokenizers.registry import cached_get_tokenizer

        tokenizer = cached_get_tokenizer(  # also where the engine itself has none
            model_config.tokenizer,
            runner_type=model_config.runner_type,
            tokenizer_mode=model_config.tokenizer_mode,
            revision=model_config.tokenizer_revision,
            trust_remote_code=model_config.trust_remote_code,
        )
        return vocabulary_hash(tokenizer.get_vocab())
    except Exception as error:
        size = int(model_config.get_vocab_size())
        logger.info("no vocabulary can be read (%s); histories are those of its size", error)
        return vocabulary_hash({"": size})


CONFIGURATION = (
    Patch(
        "vllm.engine.arg_utils:EngineArgs",
        "create_engine_config",
        configured,
        "Drafter and scheduler are set before vLLM validates its configuration, in any host.",
    ),
)

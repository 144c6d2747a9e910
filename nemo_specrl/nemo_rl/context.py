"""The plug-in's view of a NeMo-RL run, read from its MasterConfig when the run is set up.

``setup`` of NeMo-RL's algorithms has the whole recipe; the generation that it builds gets only a
part. What the plug-in cannot do is refused before anything is started (``recipe_checks``).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_specrl.cache.cluster.cluster_cache import ClusterCache
from nemo_specrl.cache.cluster.run_cache import open_run_cache
from nemo_specrl.config import PartialRolloutsConfig, SpecRLConfig, validated
from nemo_specrl.engine.drafters.method import drafting_method, engine_options
from nemo_specrl.errors import CacheError, ConfigError
from nemo_specrl.files import step_folders
from nemo_specrl.nemo_rl.compat import engines_of, get_option
from nemo_specrl.nemo_rl.loader_checks import partial_rollouts_block
from nemo_specrl.nemo_rl.recipe_checks import (
    DISTILLATION,
    check_recipe,
    serves_requests,
)
from nemo_specrl.nemo_rl.row_checks import BLOCK

__all__ = [
    "ENDED",
    "GROUPS",
    "PHASE",
    "PROMPT_KEYS",
    "SAMPLE_INDICES",
    "UPCOMING",
    "RunContext",
    "current_run",
    "engine_arguments",
    "read_block",
    "set_variables",
    "setting_up",
]

SAMPLE_INDICES = "spec_rl_sample_indices"
"""Column of a batch for generation: the sample index of each row, int64 ``[rows]``. Without it,
rows are decoded plainly."""
PROMPT_KEYS = "spec_rl_prompt_keys"
"""Column of a batch for generation: the key of each row's prompt, a list of bytes."""
UPCOMING = "spec_rl_upcoming"
"""Column of a batch for generation: upcoming prompts for which the row's engine may decode when it
would be idle, a list of token ids each."""

GROUPS = "spec_rl_groups"
"""Column of a batch for generation that ends early: the group of each row, int64 ``[rows]``."""
PHASE = "spec_rl_phase"
"""Column of such a batch: the ``phase_end.Phase``, the same for each row."""
ENDED = "spec_rl_ended"
"""Column of the result of such a generation: whether the row has ended, bool ``[rows]``."""

logger = logging.getLogger(__name__)

_current: RunContext | None = None


@dataclass(frozen=True)
class RunContext:
    """A run that reuses rollouts.

    Args:
        spec_rl: the ``spec_rl:`` block.
        seed: seed of the algorithm.
        group: number of rows that a batch has for each of its prompts.
        name: name of the run's folder on each node, different for each checkpoint folder.
        label: label of the run in Prometheus, the name of its checkpoint folder.
        log_folder: NeMo-RL's ``logger.log_dir``; None: it has no logger, as in evaluation.
        checkpoint: folder of the checkpoint from which the run resumes, or None.
        tokenizer_id: the tokenizer's identity in the cache.
        recompute_kv: whether the KV blocks of rows running at a refit are recomputed.
        served: whether rollouts are made by requests to the engines' HTTP servers, as NeMo-Gym
            makes them.
        partial_rollouts: the ``grpo.partial_rollouts:`` block.
        evaluates: whether weights are evaluated rather than trained: greedy rows are then drafted
            for, too, and the cache begins with what earlier evaluations left on the nodes' disks.
        trains_later: whether rows may be trained on in a later step than the one they were made in.
        prompts: number of prompts of a step; None: not known.
        skips_policy_logprobs: whether NeMo-RL does not compute the policy's log-probs of a step's
            rows, so that the column ``prev_logprobs`` is zero, or missing.
    """

    spec_rl: SpecRLConfig
    seed: int
    group: int
    name: str
    label: str
    log_folder: Path | None
    checkpoint: Path | None
    tokenizer_id: str
    recompute_kv: bool = False
    served: bool = False
    partial_rollouts: PartialRolloutsConfig = field(default_factory=PartialRolloutsConfig)
    evaluates: bool = False
    trains_later: bool = False
    prompts: int | None = None
    skips_policy_logprobs: bool = False

    @property
    def store_folder(self) -> Path:
        """Folder of the rollout store on each node."""
        assert self.spec_rl.cache.dir is not None
        return self.spec_rl.cache.dir / self.name

    @property
    def needs_records(self) -> bool:
        """Whether the driver needs a record of each rollout from the workers."""
        births = self.spec_rl.clip_anchor == "birth"
        return self.spec_rl.monitors_drift or births or self.served

    @property
    def policy_logprobs(self) -> str | None:
        """The column of a step's rows with the policy's log-probs; None: no column has them."""
        if not self.skips_policy_logprobs:
            return "prev_logprobs"
        # The engines report those of the policy, whose weights they have, unless told otherwise.
        policy = self.spec_rl.reported_logprobs == "policy"
        return "generation_logprobs" if policy else None

    def summary(self, generation: Any) -> str:
        """Describe in one line what the plug-in does in this run.

        Args:
            generation: the recipe's block of that name.
        """
        ways = []
        if self.spec_rl.effective_fresh_fraction < 1:
            ways.append("prefix reuse")
        if self.spec_rl.tree.enabled:
            method = drafting_method(self.spec_rl, engines_of(generation))
            ways.append(f"lossless drafting (tree.method {method or 'none'})")
        return (
            f"preset {self.spec_rl.preset}: {' and '.join(ways) or 'plain decoding'}, rollouts in "
            f"{self.store_folder} on each node"
        )

    def open_cache(self) -> tuple[ClusterCache | None, int]:
        """Open the cache as the run's checkpoint has it; return it and the policy version.

        A missing cache costs only speed: if no node can open its part, the run continues without
        one.
        """
        try:
            cache, version = open_run_cache(
                self.store_folder,
                self.spec_rl.cache,
                tokenizer_id=self.tokenizer_id,
                checkpoint=self.checkpoint,
                keep=self.evaluates,
            )
        except CacheError as error:
            logger.warning("rollout cache: %s; no rollouts are kept, and all rows are plain", error)
            return None, 0
        # Each evaluation has a version other than all previous ones: they are not counted, so their
        # time serves as the version, in seconds since 1970.
        return cache, cache.incarnation // 10**9 if self.evaluates else version

    @classmethod
    def of(cls, master_config: Any, algorithm: str, **known: Any) -> RunContext | None:
        """Read the run from a recipe; None if ``spec_rl`` is absent or not enabled.

        Variables that the engines need are added to the recipe's ``vllm_cfg.env_vars``, and logged.

        Args:
            master_config: NeMo-RL's MasterConfig.
            algorithm: ``grpo``, ``ppo`` or ``distillation``, the name of the algorithm's block.
            known: what the recipe does not say (``recipe_checks.check_recipe``).

        Raises:
            ConfigError: the recipe asks for something that the plug-in cannot do.
        """
        generation = master_config.policy["generation"]
        block = (generation or {}).get("spec_rl")
        spec_rl = read_block({} if block is None else block, BLOCK)
        name = f"{algorithm}.partial_rollouts"
        partial = partial_rollouts_block(master_config, algorithm)
        partial = validated(PartialRolloutsConfig, _plain({} if partial is None else partial), name)
        if block is None or not spec_rl.enabled:
            if partial.enabled:
                raise ConfigError(
                    f"{name}.enabled = true: partial rollouts are kept in the rollout cache; set "
                    f"{BLOCK}.enabled=true, or false"
                )
            return None
        own = getattr(master_config, algorithm)
        set_variables(generation, check_recipe(master_config, spec_rl, algorithm, **known))
        if algorithm == DISTILLATION:
            # There are neither rewards nor the policy's log-probs to compare.
            monitor = spec_rl.monitor.model_copy(update={"enabled": False})
            spec_rl = spec_rl.model_copy(update={"monitor": monitor})
        controlled = bool(known.get("single_controller"))
        asynchronous = (
            master_config.async_rl if controlled else get_option(own, f"async_{algorithm}", None)
        )
        folder = Path(master_config.checkpointing["checkpoint_dir"]).absolute()
        return cls(
            spec_rl=spec_rl,
            seed=int(get_option(own, "seed", 0) or 0),
            group=int(get_option(own, "num_generations_per_prompt", 1)),
            name=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
            label=folder.name,
            log_folder=Path(master_config.logger["log_dir"]).absolute(),
            # NeMo-RL resumes from it even with checkpointing.enabled=false.
            checkpoint=next(reversed(step_folders(folder)), None),
            tokenizer_id=str(master_config.policy["tokenizer"]["name"]),
            recompute_kv=bool(
                get_option(asynchronous, "recompute_kv_cache_after_weight_updates", False)
            ),
            served=serves_requests(master_config) is not None,
            partial_rollouts=partial,
            trains_later=controlled or bool(get_option(asynchronous, "enabled", False)),
            prompts=get_option(own, "num_prompts_per_step", None),
            skips_policy_logprobs=_skips_policy_logprobs(master_config, algorithm),
        )


def engine_arguments(arguments: dict[str, Any], block: Any) -> dict[str, Any]:
    """Add what lossless drafting needs to the arguments of a vLLM engine.

    NeMo-RL's own ``vllm_kwargs.speculative_config`` stays empty: if it is set, NeMo-RL shortens
    responses near the model's limit, for drafters that read beyond it (vllm_worker.py,
    ``_spec_decode_max_tokens``). This drafter does not.

    Args:
        arguments: as NeMo-RL made them.
        block: the recipe's ``spec_rl:`` block.

    Raises:
        ConfigError: ``tree.method`` is ``auto``, and nothing is faster than stock vLLM.
        IncompatibleVersion: ``tree.method`` is ``proposer`` on a vLLM that supports none, or the
            package was not compiled.
    """
    options = engine_options(read_block(block, BLOCK))
    if options:
        options["additional_config"] |= arguments.get("additional_config") or {}
    return {**arguments, **options}


def set_variables(generation: Any, variables: Mapping[str, str]) -> None:
    """Pass these variables to the engines' processes, and log them."""
    for name, value in variables.items():
        vllm_cfg = generation["vllm_cfg"]
        vllm_cfg["env_vars"] = {**(vllm_cfg.get("env_vars") or {}), name: value}
        logger.warning(
            "generation.vllm_cfg.env_vars.%s is set to '%s': drafts (spec_rl.tree) need vLLM's V2 "
            "model runner, which this version takes for such a model only if asked to",
            *(name, value),
        )


def current_run() -> RunContext | None:
    """The run that is being set up in this process, or None."""
    return _current


@contextmanager
def setting_up(run: RunContext | None) -> Iterator[None]:
    """Make ``run`` the current one while NeMo-RL's ``setup`` builds the objects of the run."""
    global _current
    _current = run
    try:
        yield
    finally:
        _current = None


def read_block(block: Any, where: str) -> SpecRLConfig:
    """Read a recipe's ``spec_rl:`` block.

    Args:
        block: as the recipe has it.
        where: its dotted path there.

    Raises:
        ConfigError: names the first key that is wrong.
    """
    return validated(SpecRLConfig, _plain(block), where)


def _skips_policy_logprobs(master_config: Any, algorithm: str) -> bool:
    """Whether a step does without the policy's log-probs of its rows.

    This is so in GRPO if nothing needs them (``_skip_prev_logprobs`` in algorithms/opd.py).
    """
    return (
        algorithm == "grpo"
        and bool(get_option(master_config.loss_fn, "force_on_policy_ratio", False))
        and get_option(master_config.grpo, "seq_logprob_error_threshold", None) is None
    )


def _plain(block: Any) -> Any:
    """Copy OmegaConf's containers into plain dicts."""
    if isinstance(block, Mapping):
        return {str(name): _plain(value) for name, value in block.items()}
    return block

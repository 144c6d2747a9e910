"""The recipe of the embedded trainer, with NeMo-RL's key names wherever NeMo-RL has the same thing.

:func:`load_recipe` turns a YAML file and ``key=value`` overrides into one validated, immutable
:class:`Recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, model_validator

from nemo_specrl.config import (
    MAX_COUNT,
    Block,
    Count,
    PartialRolloutsConfig,
    SpecRLConfig,
    UserPath,
    WrongKey,
    validated,
)
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.data_config import TOY_TASKS, DataConfig, Prompts
from nemo_specrl.trainer.policy_config import MAX_PER_NODE, Nodes, PolicyConfig, ValueConfig

if TYPE_CHECKING:
    import torch

__all__ = [
    "AdvEstimatorConfig",
    "Algorithm",
    "LossConfig",
    "Recipe",
    "load_recipe",
]

Group = Annotated[int, Field(ge=1, le=65536)]
"""A number of rollouts of a prompt."""


class AdvEstimatorConfig(Block):
    """Estimator of the advantages; ``gae`` is PPO's."""

    name: Literal["grpo", "gae"] = "grpo"
    gae_gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    normalize_advantages: bool = True


class Algorithm(Block):
    """The ``grpo:`` block, or ``ppo:``, which has the same keys."""

    num_prompts_per_step: Prompts = 16
    num_generations_per_prompt: Group = 8
    max_num_epochs: Count = 10
    max_num_steps: Count = 1_000_000
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False
    use_dynamic_sampling: bool = False
    """DAPO: replace groups whose rewards are all equal by groups of further prompts."""
    dynamic_sampling_max_gen_batches: Count = 10
    partial_rollouts: PartialRolloutsConfig = PartialRolloutsConfig()
    overlong_filtering: bool = False
    """Leave responses that were cut off at the maximum length out of the loss."""
    max_rollout_turns: Count = 1
    """The maximum number of turns of the model in a rollout; more than 1 needs ``env.tools``."""
    ppo_epochs: Count = 1
    """Number of passes over a step's rollouts."""
    adv_estimator: AdvEstimatorConfig = AdvEstimatorConfig()
    val_period: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps between held-out evaluations; 0: none."""
    val_at_start: bool = False
    val_at_end: bool = True
    max_val_samples: Prompts = 128
    """Number of held-out prompts."""
    val_num_generations_per_prompt: Group = 1
    val_kl_to_start: bool = False
    """Measure the KL divergence of held-out responses from the run's first weights."""
    seed: int = Field(default=42, ge=0, lt=2**31)


class LossConfig(Block):
    """The ``loss_fn:`` block: the clipped policy-gradient loss."""

    ratio_clip_min: float = Field(default=0.2, ge=0, lt=1)
    ratio_clip_max: float = Field(default=0.2, ge=0)
    """Above ``ratio_clip_min``: DAPO's clip-higher."""
    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip."""
    token_level_loss: bool = True
    """Mean over all tokens. If false, over each response's tokens, and then over responses."""
    reference_policy_kl_penalty: float = Field(default=0.0, ge=0)
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_ratio: float | None = Field(default=2.0, gt=0)


class CheckpointingConfig(Block):
    """The ``checkpointing:`` block."""

    enabled: bool = True
    checkpoint_dir: UserPath = Path("results/grpo")
    save_period: Count = 10
    """Steps."""
    keep_top_k: Count | None = 2
    """Number of newest checkpoints to keep; None: all."""


class LoggerConfig(Block):
    """The ``logger:`` block."""

    log_dir: UserPath = Path("results/grpo")
    """Folder of metrics.jsonl and of TensorBoard's event files."""
    tensorboard_enabled: bool = True
    prometheus_textfile: UserPath | None = None
    """File ending in .prom for node_exporter's textfile collector."""


class ClusterConfig(Block):
    """The ``cluster:`` block: the ranks of a Megatron policy."""

    gpus_per_node: int | None = Field(default=None, ge=1, le=MAX_PER_NODE)
    """Ranks per node, even on a machine without GPUs; None: as many as one replica needs."""
    num_nodes: Nodes = 1


class EnvConfig(Block):
    """The ``env:`` block: what answers the model's turns."""

    tools: list[Literal["calculator"]] = Field(default_factory=list)


class Recipe(Block):
    """A whole recipe."""

    grpo: Algorithm | None = None
    ppo: Algorithm | None = None
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig
    value: ValueConfig = ValueConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.grpo is None) == (self.ppo is None):
            raise ValueError("must have either a grpo: or a ppo: block")
        if self.ppo is not None and self.ppo.adv_estimator.name != "gae":
            raise WrongKey("ppo.adv_estimator.name", self.ppo.adv_estimator.name, "must be gae")
        if self.grpo is not None and self.grpo.adv_estimator.name != "grpo":
            name = self.grpo.adv_estimator.name
            raise WrongKey("grpo.adv_estimator.name", name, "must be grpo; gae belongs under ppo:")
        algorithm, block = self.algorithm, "grpo" if self.grpo else "ppo"
        if (prompts := self.data.prompts) is not None and algorithm.num_prompts_per_step > prompts:
            raise WrongKey(
                f"{block}.num_prompts_per_step",
                algorithm.num_prompts_per_step,
                f"must not exceed data.num_prompts = {prompts}",
            )
        rows = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
        if rows % self.policy.train_global_batch_size:
            raise WrongKey(
                "policy.train_global_batch_size",
                self.policy.train_global_batch_size,
                f"must divide the {rows} rollouts of a step "
                "(num_prompts_per_step * num_generations_per_prompt)",
            )
        megatron, cluster = self.policy.megatron_cfg, self.cluster
        replica = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        if megatron.enabled and cluster.gpus_per_node is not None:
            ranks = cluster.gpus_per_node * cluster.num_nodes
            if ranks % replica:
                raise WrongKey(
                    "cluster.gpus_per_node",
                    cluster.gpus_per_node,
                    f"times num_nodes = {cluster.num_nodes} must be a multiple of the {replica} "
                    "ranks of tensor_model_parallel_size * pipeline_model_parallel_size",
                )
        return self

    @model_validator(mode="after")
    def _conversations(self) -> Recipe:
        turns, tools = self.algorithm.max_rollout_turns, self.env.tools
        key = f"{'grpo' if self.grpo else 'ppo'}.max_rollout_turns"
        if turns > 1 and not tools:
            raise WrongKey(key, turns, "must be 1 without a tool to answer; set env.tools")
        if tools and turns == 1:
            raise WrongKey("env.tools", tools, f"answer turns but the last; set {key} above 1")
        if tools and self.data.dataset_name in TOY_TASKS:
            raise WrongKey("env.tools", tools, f"need text, which {self.data.dataset_name} is not")
        if turns > 1 and self.spec_rl.enabled and self.spec_rl.preset == "reuse":
            raise WrongKey(
                key,
                turns,
                "no prefix of a conversation can be reused; set spec_rl.preset: lossless, or "
                "max_rollout_turns: 1",
            )
        return self

    @model_validator(mode="after")
    def _partial_rollouts(self) -> Recipe:
        algorithm, key = (
            self.algorithm,
            f"{'grpo' if self.grpo else 'ppo'}.partial_rollouts.enabled",
        )
        if not algorithm.partial_rollouts.enabled:
            return self
        for clashes, problem in (
            (
                not self.spec_rl.enabled or self.spec_rl.preset == "reuse",
                "what is put off is drafted from; set policy.generation.spec_rl.enabled: true, "
                "with preset: lossless",
            ),
            (
                algorithm.use_dynamic_sampling,
                "dynamic sampling does not say how many groups it needs; set "
                "use_dynamic_sampling: false",
            ),
            (
                algorithm.max_rollout_turns > 1,
                "a conversation that is cut off cannot be continued; set max_rollout_turns: 1",
            ),
        ):
            if clashes:
                raise WrongKey(key, True, problem)
        return self

    @property
    def algorithm(self) -> Algorithm:
        """The ``grpo:`` or ``ppo:`` block."""
        block = self.grpo or self.ppo
        assert block is not None
        return block

    @property
    def run_dir(self) -> Path:
        """Folder of the run's cache: ``checkpoint_dir``; without checkpoints, the log's folder."""
        made = self.checkpointing.enabled
        return self.checkpointing.checkpoint_dir if made else self.logger.log_dir

    @property
    def spec_rl(self) -> SpecRLConfig:
        """``policy.generation.spec_rl``."""
        return self.policy.generation.spec_rl

    @property
    def parallelism(self) -> tuple[int, int, int]:
        """Tensor-, pipeline- and data-parallel size; the last follows from the number of ranks."""
        megatron = self.policy.megatron_cfg
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        ranks = (self.cluster.gpus_per_node or tp * pp) * self.cluster.num_nodes
        return tp, pp, ranks // (tp * pp)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the engine's weights."""
        import torch

        dtype: torch.dtype = getattr(torch, self.policy.generation.vllm_cfg.precision)
        return dtype

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a pass over the data. Prompts beyond the last whole step are skipped.

        0 for a file whose rows have not been counted (:meth:`with_prompts`).
        """
        return (self.data.prompts or 0) // self.algorithm.num_prompts_per_step

    def with_prompts(self, count: int) -> Recipe:
        """Return this recipe with the number of training prompts that a file has.

        Raises:
            ConfigError: they are fewer than a step takes.
        """
        values = self.model_dump()
        values["data"]["num_prompts"] = count
        return validated(Recipe, values)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a YAML file.

    For example::

        load_recipe(Path("examples/configs/grpo_sort_cpu.yaml"), ["grpo.max_num_epochs=3"])

    Args:
        path: the file.
        overrides: ``key=value`` pairs with dotted keys and YAML values.

    Raises:
        ConfigError: one line that names the file or key, its value and what would be right.
    """
    try:
        config = _of_yaml(f"{path}: cannot be read as YAML", lambda: OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a YAML recipe") from None
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip(". +"):
            raise ConfigError(
                f"{override[:100]!r}: overrides have the form key=value, such as grpo.seed=1"
            )
        assignment = f"{key.lstrip('+')}={value}"
        config = _of_yaml(
            repr(override[:100]),
            lambda: OmegaConf.merge(config, OmegaConf.from_dotlist([assignment])),  # noqa: B023
        )
    values = _of_yaml(str(path), lambda: OmegaConf.to_container(config, resolve=True))
    return validated(Recipe, values)


def _of_yaml(what: str, read: Callable[[], Any]) -> Any:
    """Call ``read``, and turn errors of YAML and OmegaConf into a ConfigError."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except Exception as error:  # YAML and OmegaConf raise many kinds without a common base
        raise ConfigError(f"{what}: {' '.join(str(error).split())[:300]}") from None

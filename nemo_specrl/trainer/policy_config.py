"""The recipe's ``policy:`` and ``value:`` blocks: models, their optimizers, engines and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from nemo_specrl.config import MAX_COUNT, Block, Count, SpecRLConfig, WrongKey, parse_path
from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.vllm_kwargs import check_vllm_kwargs

__all__ = [
    "MAX_PER_NODE",
    "ColocatedConfig",
    "Nodes",
    "OptimizerConfig",
    "PolicyConfig",
    "ValueConfig",
    "model_folder",
    "read_model_config",
    "tokenizer_file",
]

MAX_PER_NODE = 1024
Nodes = Annotated[int, Field(ge=1, le=65536)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerKwargs(Block):
    """Arguments of ``torch.optim.AdamW``."""

    lr: float = Field(default=1e-4, gt=0, le=1)
    """About the distance that AdamW moves each weight in a step."""
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0, le=1)

    @model_validator(mode="after")
    def _decaying(self) -> OptimizerKwargs:
        if self.lr * self.weight_decay >= 1:
            raise WrongKey(
                "weight_decay",
                self.weight_decay,
                f"must be less than 1 / lr = {1 / self.lr:g}: a step shrinks each weight by lr * "
                "weight_decay of itself",
            )
        return self


class OptimizerConfig(Block):
    """The optimizer of the policy, or of the value model."""

    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    kwargs: OptimizerKwargs = OptimizerKwargs()


class VllmConfig(Block):
    """The ``vllm_cfg:`` block."""

    precision: Literal["bfloat16", "float32"] = "float32"
    """dtype of the engine. For small models on a CPU float32 is as fast as bfloat16 where the
    processor has bfloat16 instructions, and several times faster where it has none."""
    max_model_len: int = Field(default=512, ge=2, le=MAX_COUNT)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    enforce_eager: bool = True


class EngineResources(Block):
    """The ``resources:`` block of engines that are not colocated: one engine for each GPU.

    On a machine without GPUs this is the number of engines that share its cores.
    """

    gpus_per_node: int | None = Field(default=None, ge=1, le=MAX_PER_NODE)
    num_nodes: Nodes | None = None
    """None: 1."""


class ColocatedConfig(Block):
    """The ``colocated:`` block: where the engines are."""

    enabled: bool = True
    """One engine, in the trainer's process. If false, as many as ``resources`` says, each in a
    process of its own."""
    resources: EngineResources = EngineResources()

    @model_validator(mode="after")
    def _complete(self) -> ColocatedConfig:
        if not self.enabled and self.resources.gpus_per_node is None:
            raise WrongKey(
                "resources.gpus_per_node",
                None,
                "must be the number of engines on a node with colocated.enabled: false",
            )
        return self


class GenerationConfig(Block):
    """The ``generation:`` block."""

    backend: Literal["vllm"] = "vllm"
    colocated: ColocatedConfig = ColocatedConfig()
    max_new_tokens: Count = 256
    temperature: float = Field(default=1.0, ge=0, le=1000)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_COUNT)]] | None = None
    stop_strings: list[Annotated[str, Field(min_length=1)]] | None = None
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``vllm.LLM``."""
    spec_rl: SpecRLConfig = SpecRLConfig()

    @model_validator(mode="after")
    def _for_vllm(self) -> GenerationConfig:
        check_vllm_kwargs(self.vllm_kwargs)
        return self

    @model_validator(mode="after")
    def _verifiable(self) -> GenerationConfig:
        # With any preset, since the policies' log-probs are those of raw sampling as well. What an
        # engine can verify in a single request is decided in engine/sampling_rules.py.
        if self.spec_rl.enabled:
            for name, value, raw in (
                ("temperature", self.temperature, (1.0,)),
                ("top_p", self.top_p, (1.0,)),
                ("top_k", self.top_k, (None, 0, -1)),
            ):
                if value not in raw:
                    right = "null" if raw[0] is None else raw[0]
                    raise WrongKey(
                        name,
                        value,
                        "drafts are verified by prompt log-probs, which are those of raw sampling; "
                        f"set {name}: {right}, or spec_rl.enabled: false",
                    )
            drafter = self.vllm_kwargs.get("speculative_config")
            if drafter and self.spec_rl.tree.enabled:
                raise WrongKey(
                    "vllm_kwargs.speculative_config",
                    drafter,
                    "an engine has one drafter, and spec_rl.tree.enabled: true asks for another; "
                    "leave it out, or take preset: faithful without trees",
                )
        return self


class MegatronConfig(Block):
    """The ``megatron_cfg:`` block. Its other keys are NeMo-RL's and are not read."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    """Train a Megatron-Core model over several ranks instead of a torch model in this process."""
    tensor_model_parallel_size: Nodes = 1
    pipeline_model_parallel_size: Nodes = 1


class PolicyConfig(Block):
    """The ``policy:`` block."""

    model_name: Annotated[str, BeforeValidator(lambda value: str(parse_path(value)))]
    """Folder of a model and its tokenizer in Hugging Face format."""
    train_global_batch_size: Count = 128
    """Rollouts in an optimizer step."""
    train_micro_batch_size: Count = 8
    max_grad_norm: float = Field(default=1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    generation: GenerationConfig = GenerationConfig()


class ValueConfig(Block):
    """The ``value:`` block: PPO's value model, which starts from the policy's weights."""

    optimizer: OptimizerConfig = OptimizerConfig(kwargs=OptimizerKwargs(lr=3e-4))
    value_clip: float = Field(default=0.2, gt=0)


def model_folder(model_name: str) -> Path:
    """The folder of a model in Hugging Face format.

    Raises:
        ConfigError: there is no such folder, or it has no config.json.
    """
    folder = Path(model_name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.model_name = {model_name!r}: must be a folder with a config.json and weights "
            "in Hugging Face format"
        )
    return folder


def read_model_config(model_name: str) -> dict[str, Any]:
    """Read the config.json in a model's folder.

    Raises:
        ConfigError: there is none, or it holds no JSON object.
    """
    path = model_folder(model_name) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.model_name = {model_name!r}: config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"policy.model_name = {model_name!r}: config.json holds no object")
    return config


def tokenizer_file(model_name: str) -> Path:
    """The tokenizer.json in a model's folder.

    Raises:
        ConfigError: there is none.
    """
    path = model_folder(model_name) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"policy.model_name = {model_name!r}: no tokenizer.json in it; "
            "give a model with its tokenizer in Hugging Face format"
        )
    return path

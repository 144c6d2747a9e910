"""The recipe's ``policy:`` and ``value:`` blocks: models, their optimizers, engines and ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from nemo_specrl.config import MAX_COUNT, Block, Count, SpecRLConfig, WrongKey, parse_path
from nemo_specrl.errors import ConfigError, last_line
from nemo_specrl.trainer.vllm_kwargs import check_vllm_kwargs

__all__ = [
    "MAX_PER_NODE",
    "LoraConfig",
    "Nodes",
    "OptimizerConfig",
    "PolicyConfig",
    "ValueConfig",
    "eos_token_ids",
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
    """dtype of the engine. For small models on a CPU, float32 is as fast as bfloat16 if the
    processor has bfloat16 instructions, and several times faster if it has none."""
    max_model_len: int = Field(default=512, ge=2, le=MAX_COUNT)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    enforce_eager: bool = True


class ColocatedConfig(Block):
    """The ``colocated:`` block: where the engine is."""

    enabled: bool = True
    """Must be true: one engine, in the trainer's process."""

    @model_validator(mode="after")
    def _one_engine(self) -> ColocatedConfig:
        if not self.enabled:
            raise WrongKey(
                "enabled",
                False,
                "this trainer has one engine, in its own process; leave it out, or train with "
                "NeMo-RL (nemo-specrl run)",
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

    @property
    def training_temperature(self) -> float:
        """Temperature of the log-probs that are trained on: that of sampling; 1 for greedy rows.

        As in NeMo-RL. Tokens cut off by top-p and top-k are not excluded from them.
        """
        return self.temperature or 1.0

    @model_validator(mode="after")
    def _with_spec_rl(self) -> GenerationConfig:
        if not self.spec_rl.enabled:
            return self
        if self.spec_rl.preset == "reuse":
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
                        "prefixes are verified by prompt log-probs, which are those of raw "
                        f"sampling; set {name}: {right}, or spec_rl.preset: lossless",
                    )
        for name in ("speculative_config", "additional_config"):
            if name in self.vllm_kwargs:
                raise WrongKey(
                    f"vllm_kwargs.{name}",
                    self.vllm_kwargs[name],
                    "is set by spec_rl; leave it out, or set spec_rl.enabled: false",
                )
        return self


class MegatronConfig(Block):
    """The ``megatron_cfg:`` block. Its other keys are NeMo-RL's and are not read."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    """Train a Megatron-Core model over several ranks instead of a torch model in this process."""
    tensor_model_parallel_size: Nodes = 1
    pipeline_model_parallel_size: Nodes = 1


class TokenizerConfig(Block):
    """The ``tokenizer:`` block."""

    chat_template: str | None = "default"
    """``default`` for the model's own, a file with another one, or null: prompts as they are."""


class LoraConfig(Block):
    """The ``lora_cfg:`` block: trains low-rank adapters (peft) instead of the weights."""

    enabled: bool = False
    target_modules: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Names of modules with an adapter, with ``match_all_linear: false``."""
    exclude_modules: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    match_all_linear: bool = True
    """Adapters for all linear layers except the output layer."""
    dim: int = Field(default=8, ge=1, le=65536)
    """Rank."""
    alpha: int = Field(default=32, ge=1, le=65536)
    """The adapters' product is scaled by ``alpha / dim``."""
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _targets(self) -> LoraConfig:
        if self.enabled and self.match_all_linear == bool(self.target_modules):
            raise WrongKey(
                "target_modules",
                self.target_modules,
                "must name modules with match_all_linear: false, and be empty without it",
            )
        return self


class DTensorConfig(Block):
    """The ``dtensor_cfg:`` block: the torch backend, which is one process here."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    lora_cfg: LoraConfig = LoraConfig()


class DynamicBatchingConfig(Block):
    """The ``dynamic_batching:`` block: micro-batches by tokens."""

    enabled: bool = False
    train_mb_tokens: Count = 2048
    """Tokens of a micro-batch, padding included; a longer sample is a micro-batch of its own."""


class PolicyConfig(Block):
    """The ``policy:`` block."""

    model_name: Annotated[str, BeforeValidator(lambda value: str(parse_path(value)))]
    """Folder of a model and its tokenizer in Hugging Face format, or its name on the hub."""
    train_global_batch_size: Count = 128
    """Rollouts in an optimizer step."""
    train_micro_batch_size: Count = 8
    precision: Literal["bfloat16", "float32"] = "float32"
    """Data type of the torch backend's arithmetic. Weights and optimizer state are float32."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    dtensor_cfg: DTensorConfig = DTensorConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    generation: GenerationConfig = GenerationConfig()

    @property
    def micro_batch_tokens(self) -> int | None:
        """The most tokens of a micro-batch; None if only its samples are bounded."""
        return self.dynamic_batching.train_mb_tokens if self.dynamic_batching.enabled else None

    @model_validator(mode="after")
    def _of_the_backend(self) -> PolicyConfig:
        if self.megatron_cfg.enabled:
            for key, value, plain in (
                ("precision", self.precision, "float32"),
                ("dynamic_batching.enabled", self.dynamic_batching.enabled, False),
                ("dtensor_cfg.lora_cfg.enabled", self.dtensor_cfg.lora_cfg.enabled, False),
                (
                    "dtensor_cfg.activation_checkpointing",
                    self.dtensor_cfg.activation_checkpointing,
                    False,
                ),
            ):
                if value != plain:
                    raise WrongKey(
                        key, value, f"is of the torch backend; with a Megatron policy, {plain}"
                    )
        return self


class ValueConfig(Block):
    """The ``value:`` block: PPO's value model, which starts from the policy's weights."""

    optimizer: OptimizerConfig = OptimizerConfig(kwargs=OptimizerKwargs(lr=3e-4))
    value_clip: float = Field(default=0.2, gt=0)


@functools.cache
def model_folder(model_name: str) -> Path:
    """Return the folder of a model in Hugging Face format; a hub model is downloaded first.

    Raises:
        ConfigError: there is no such folder, it has no config.json, or the hub cannot be reached.
    """
    folder = Path(model_name)
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model_name):
        folder = _downloaded(model_name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"policy.model_name = {model_name!r}: must be a folder with a config.json and weights "
            "in Hugging Face format, or a model's name on the hub"
        )
    return folder


def _downloaded(name: str) -> Path:
    """Return a hub model's folder in the cache of huggingface_hub."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    with contextlib.suppress(Exception):  # many kinds: it is not in the cache, or incomplete
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # from the hub, HTTP and the network, without a common base
        raise ConfigError(
            f"policy.model_name = {name!r}: is no folder here, and cannot be fetched from the hub "
            f"({last_line(error)[:200]}); give a folder, or HF_HOME with the model in its cache"
        ) from None


def read_model_config(model_name: str) -> dict[str, Any]:
    """Read the config.json in a model's folder.

    Raises:
        ConfigError: there is none, or it does not hold a JSON object.
    """
    path = model_folder(model_name) / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.model_name = {model_name!r}: config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"policy.model_name = {model_name!r}: config.json holds no object")
    return config


def eos_token_ids(model_name: str) -> list[int]:
    """A model's end-of-sequence tokens: those of config.json, then of generation_config.json.

    Raises:
        ConfigError: neither has one.
    """
    configs = [read_model_config(model_name)]
    with contextlib.suppress(OSError, ValueError):
        file = model_folder(model_name) / "generation_config.json"
        configs.append(json.loads(file.read_bytes()))
    found: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id") if isinstance(config, dict) else None
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found.setdefault(token)
    if not found:
        raise ConfigError(
            f"policy.model_name = {model_name!r}: its config.json has no eos_token_id"
        )
    return list(found)


def tokenizer_file(model_name: str) -> Path:
    """Return the tokenizer.json in a model's folder.

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

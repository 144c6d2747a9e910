"""Weights of Llama and Qwen3 models between Hugging Face's layout and Megatron-Core's.

A parameter of Megatron-Core, split over tensor-parallel ranks, is one or several tensors of a
Hugging Face checkpoint. :func:`parameters` lists both sides by name for a pipeline stage;
:func:`shard` makes a rank's part of a parameter, and :func:`assemble` puts the parts of all ranks
together again. Values are only moved, never changed.

This module needs only torch, so that the driver can assemble weights without importing megatron.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.policy_config import model_folder, read_model_config

__all__ = [
    "Architecture",
    "CheckpointReader",
    "Layout",
    "Parameter",
    "assemble",
    "parameters",
    "shard",
]

VOCABULARY_MULTIPLE = 16
"""The vocabulary is padded to a multiple of this, in all layouts, so that a checkpoint can be
loaded in another layout."""


@dataclass(frozen=True)
class Architecture:
    """A Llama or Qwen3 model, by the names of a Hugging Face config.

    Args:
        folder: folder of the model.
        layers: number of transformer layers.
        hidden: hidden size.
        intermediate: size of the feed-forward layer.
        heads: number of attention heads.
        kv_heads: number of heads of keys and values.
        head_dim: size of a head.
        vocabulary: number of tokens.
        positions: length of the longest sequence.
        rope_theta: base of the rotary embedding.
        norm_eps: epsilon of the RMS norms.
        qk_norm: whether queries and keys are normalized (Qwen3).
        tied: whether the output layer has the embedding's weights.
    """

    folder: Path
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    tied: bool

    @classmethod
    def read(cls, model_name: str) -> Architecture:
        """Read the config.json in a model's folder.

        Raises:
            ConfigError: it is not a Llama or Qwen3, or has an option that is not supported.
        """
        config = read_model_config(model_name)

        def refuse(what: str, right: str) -> ConfigError:
            return ConfigError(
                f"policy.model_name = {model_name!r}: {what} in config.json; the Megatron backend "
                f"takes {right}, policy.megatron_cfg.enabled: false takes others"
            )

        kind = config.get("model_type")
        if kind not in ("llama", "qwen3"):
            raise refuse(f"model_type = {kind!r}", "llama and qwen3")
        for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if config.get(name):
                raise refuse(f"{name} = {config[name]}", "false")
        if config.get("hidden_act", "silu") != "silu":
            raise refuse(f"hidden_act = {config['hidden_act']!r}", "silu")
        # Older configs have rope_theta at the top level and rope_scaling next to it.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type != "default":
            raise refuse(f"rope_type = {rope_type!r}", "default")
        try:
            return cls(
                folder=model_folder(model_name),
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                heads=config["num_attention_heads"],
                kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=config.get("head_dim")
                or config["hidden_size"] // config["num_attention_heads"],
                vocabulary=config["vocab_size"],
                positions=config["max_position_embeddings"],
                rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                norm_eps=config.get("rms_norm_eps", 1e-6),
                qk_norm=kind == "qwen3",
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise refuse(f"no {error.args[0]}", "models with it") from None

    @property
    def padded_vocabulary(self) -> int:
        """Number of rows of the padded embedding."""
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class Layout:
    """How a model is split over ranks, in Megatron's order: TP fastest, then DP, then PP.

    Args:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        dp: data-parallel size.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def rank(self, *, tp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """The rank at a place of the layout."""
        return tp + self.tp * (dp + self.dp * pp)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Tensor-, pipeline- and data-parallel index of a rank."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return tp, pp, dp

    def describe(self, rank: int) -> str:
        """Name of a rank in messages, with its place in the layout."""
        tp, pp, dp = self.place(rank)
        return f"rank {rank} (TP {tp}, PP {pp}, DP {dp})"

    def check(self, model: Architecture) -> None:
        """Refuse a layout that does not divide the model.

        Raises:
            ConfigError: one line that names the key.
        """
        for key, value, what, number in (
            ("tensor", self.tp, "attention heads", model.heads),
            ("tensor", self.tp, "KV heads", model.kv_heads),
            ("tensor", self.tp, "columns of the feed-forward layers", model.intermediate),
            ("tensor", self.tp, "rows of the padded vocabulary", model.padded_vocabulary),
            ("pipeline", self.pp, "layers", model.layers),
        ):
            if number % value:
                raise ConfigError(
                    f"policy.megatron_cfg.{key}_model_parallel_size = {value}: must divide the "
                    f"model's {number} {what}"
                )


@dataclass(frozen=True)
class Parameter:
    """A parameter of Megatron-Core's GPTModel, and the tensors that it consists of.

    Args:
        names: its name on its pipeline stage, with Megatron's own layers and, if it differs, with
            those of transformer-engine, which has the norms inside the linear layers.
        tensors: names of the Hugging Face tensors.
        split: how ranks share it: rows of the padded ``vocabulary``; ``qkv``, grouped by KV head;
            ``gate_up``, both halves by rows; ``columns``; or each rank has ``all`` of it.
        copy: whether it is the output layer of a tied model on the last pipeline stage, which
            repeats the embedding.
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    split: Literal["vocabulary", "qkv", "gate_up", "columns", "all"] = "all"
    copy: bool = False


def parameters(model: Architecture, layout: Layout, stage: int) -> list[Parameter]:
    """Return the parameters of a pipeline stage, in the order of a Hugging Face checkpoint.

    Layers are split evenly over the stages. Megatron's names count them from 0 on each stage.
    """
    found = []
    first, last = stage == 0, stage == layout.pp - 1
    embedding = "model.embed_tokens.weight"
    if first:
        found.append(
            Parameter(("embedding.word_embeddings.weight",), (embedding,), split="vocabulary")
        )
    each = model.layers // layout.pp
    for i in range(each):
        to, of = f"decoder.layers.{i}", f"model.layers.{stage * each + i}"
        attention, mlp = f"{to}.self_attention", f"{to}.mlp"
        qkv = tuple(f"{of}.self_attn.{x}_proj.weight" for x in "qkv")
        found += [
            Parameter((f"{attention}.linear_qkv.weight",), qkv, "qkv"),
            Parameter(
                (f"{attention}.linear_proj.weight",), (f"{of}.self_attn.o_proj.weight",), "columns"
            ),
        ]
        if model.qk_norm:
            for x in "qk":
                norm = f"{of}.self_attn.{x}_norm.weight"
                found.append(Parameter((f"{attention}.{x}_layernorm.weight",), (norm,)))
        found += [
            Parameter(
                (f"{mlp}.linear_fc1.weight",),
                (f"{of}.mlp.gate_proj.weight", f"{of}.mlp.up_proj.weight"),
                "gate_up",
            ),
            Parameter((f"{mlp}.linear_fc2.weight",), (f"{of}.mlp.down_proj.weight",), "columns"),
            Parameter(
                (f"{to}.input_layernorm.weight", f"{attention}.linear_qkv.layer_norm_weight"),
                (f"{of}.input_layernorm.weight",),
            ),
            Parameter(
                (f"{to}.pre_mlp_layernorm.weight", f"{mlp}.linear_fc1.layer_norm_weight"),
                (f"{of}.post_attention_layernorm.weight",),
            ),
        ]
    if last:
        found.append(Parameter(("decoder.final_layernorm.weight",), ("model.norm.weight",)))
        output = ("output_layer.weight",)
        if not model.tied:
            found.append(Parameter(output, ("lm_head.weight",), "vocabulary"))
        elif not first:
            found.append(Parameter(output, (embedding,), "vocabulary", copy=True))
    return found


def shard(
    parameter: Parameter, tensors: Sequence[torch.Tensor], model: Architecture, tp: int, rank: int
) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a parameter.

    Args:
        parameter: the parameter.
        tensors: the whole Hugging Face tensors, in the order of ``parameter.tensors``.
        model: the architecture.
        tp: tensor-parallel size.
        rank: tensor-parallel index of the rank.
    """
    match parameter.split:
        case "vocabulary":
            (whole,) = tensors
            padding = whole.new_zeros(model.padded_vocabulary - whole.shape[0], whole.shape[1])
            return torch.cat([whole, padding]).chunk(tp)[rank].contiguous()
        case "qkv":
            # A group is a KV head with the query heads that share it.
            groups = [t.view(model.kv_heads, -1, t.shape[1]) for t in tensors]
            return torch.cat(groups, 1).chunk(tp)[rank].reshape(-1, tensors[0].shape[1])
        case "gate_up":
            return torch.cat([t.chunk(tp)[rank] for t in tensors])
        case "columns":
            (whole,) = tensors
            return whole.chunk(tp, 1)[rank].contiguous()
        case "all":
            (whole,) = tensors
            return whole


def assemble(
    parameter: Parameter, shards: Sequence[torch.Tensor], model: Architecture
) -> list[torch.Tensor]:
    """Undo :func:`shard`: whole Hugging Face tensors from the parts of all ranks, in order."""
    match parameter.split:
        case "vocabulary":
            return [torch.cat(list(shards))[: model.vocabulary]]
        case "qkv":
            width, q = shards[0].shape[1], model.heads // model.kv_heads * model.head_dim
            groups = torch.cat(list(shards)).view(model.kv_heads, -1, width)
            k = q + model.head_dim
            parts = groups[:, :q], groups[:, q:k], groups[:, k:]
            return [part.reshape(-1, width) for part in parts]
        case "gate_up":
            halves = zip(*(s.chunk(2) for s in shards), strict=True)
            return [torch.cat(half) for half in halves]
        case "columns":
            return [torch.cat(list(shards), 1)]
        case "all":
            return [shards[0]]


class CheckpointReader:
    """Reads tensors of a Hugging Face checkpoint, one at a time.

    Args:
        folder: folder with model.safetensors, or with its parts and model.safetensors.index.json.

    Raises:
        ConfigError: the folder has neither, or the index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        self._files: dict[str, str] | None = None
        if index.is_file():
            try:
                self._files = dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"policy.model_name = {str(folder)!r}: cannot read {index.name}: {error}"
                ) from None
        elif not (folder / "model.safetensors").is_file():
            raise ConfigError(
                f"policy.model_name = {str(folder)!r}: no model.safetensors in it; the Megatron "
                "backend reads weights from safetensors files"
            )

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in float32.

        Raises:
            ConfigError: the checkpoint does not have it, or its file is damaged.
        """
        file = "model.safetensors" if self._files is None else self._files.get(name, "")
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"policy.model_name = {str(self.folder)!r}: cannot read {name}: {error}"
            ) from None
        return tensor.to(torch.float32)

"""The model of ``gpu_rollout.py``: a Qwen3 of random weights, and the engines that have it.

Nothing is downloaded or read from disk: vLLM makes the model from its configuration
(``load_format: dummy``), and its workers draw the weights. All layers compute as those of a trained
model do, but what attention and MLPs add to the residual stream is scaled down to next to nothing,
so that the next token depends on the last one alone, through an output layer whose scale sets the
entropy. A policy of that kind comes back to tokens that it was at before, as trained ones do, and
has drafts in its earlier responses; a transformer of purely random weights never does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUIET = 1e-4
"""Scale of the output projections of attention and MLPs, relative to the other weights."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model with an output layer of its own. ``used`` tokens of its vocabulary, the
    first ones, are likely to be sampled; a trained policy's responses do not use all either.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    used: int
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how much is measured with it; lengths are in tokens.

    Args:
        shape: of the model.
        prompt: length of prompts.
        response: length of responses.
        rows: numbers of rows that are rolled out at once.
        mean_p: probabilities of sampled tokens, on average, of the policies.
        drifts: how far the policy of a reused response is from the present one
            (:func:`set_weights`).
        repetitions: of each comparison.
    """

    shape: Shape
    prompt: int
    response: int
    rows: tuple[int, ...]
    mean_p: tuple[float, ...]
    drifts: tuple[float, ...]
    repetitions: int


SIZES = {
    "qwen3-8b": Size(
        Shape(4096, 12288, 36, 32, 8, 128, 151_936, 4096),
        *(128, 512, (1, 8, 64, 256), (0.7, 0.85, 0.95), (0.0, 0.02, 0.05, 0.2), 3),
    ),
    "tiny": Size(
        Shape(64, 128, 2, 2, 1, 32, 512, 128, "float32"), *(16, 32, (1, 8), (0.95,), (0.0,), 2)
    ),
}


@functools.cache
def on_gpu() -> bool:
    """Whether there is a GPU; asked of torch, since vLLM may only be imported later."""
    import torch

    return bool(torch.cuda.is_available())


def write_config(shape: Shape, folder: Path) -> None:
    """Write the configuration of a model without an end-of-sequence token."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_engine(folder: Path, shape: Shape, **options: Any) -> Any:
    """A ``vllm.LLM`` of the model whose configuration is in a folder."""
    from vllm import LLM

    usual = {} if on_gpu() else {"enforce_eager": True, "block_size": 32}
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype=shape.dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
        worker_extension_cls="nemo_specrl.engine.refit.RefitExtension",
        **usual | options,
    )
    give_weights(llm, shape, 10.0, 0.0, everything=True)
    return llm


def give_weights(
    llm: Any, shape: Shape, scale: float, drift: float, *, everything: bool = False
) -> None:
    """Make the workers of an engine draw weights with :func:`set_weights`."""
    # vLLM sends dataclasses as dictionaries.
    args = (dataclasses.asdict(shape), scale, drift, everything)
    llm.collective_rpc(set_weights, args=args)
    empty_prefix_cache(llm)


def empty_prefix_cache(llm: Any) -> None:
    """Empty an engine's prefix cache; without that, a second prefill would compute nothing.

    Raises:
        RuntimeError: blocks of it are in use.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache cannot be emptied: blocks of it are in use")


# The functions below run in vLLM's worker.


def set_weights(
    worker: Any, fields: dict[str, Any], scale: float, drift: float, everything: bool
) -> None:
    """Draw the weights of the output layer, or of the whole model.

    Args:
        worker: vLLM's.
        fields: of the model's :class:`Shape`.
        scale: standard deviation of the logits, nats.
        drift: 0 leaves the policy as it was drawn first; the further up to 1, the less its next
            token has to do with that. The entropy stays.
        everything: the whole model. CPU engines take nothing else.
    """
    import torch

    shape = Shape(**fields)
    device, dtype = worker.model_runner.device, getattr(torch, shape.dtype)
    on_cpu = device.type == "cpu"

    def drawn(seed: int, *size: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    with torch.inference_mode():
        new = weights(shape, scale, drift, drawn, everything or on_cpu)
        # Engines on GPUs take a part of the weights; on CPUs they pack them (engine/refit.py).
        if on_cpu:
            worker.specrl_refit(new)
        else:
            worker.get_model().load_weights(new)
            torch.cuda.empty_cache()  # there is another engine on this GPU


def weights(
    shape: Shape, scale: float, drift: float, drawn: Any, everything: bool
) -> Iterator[tuple[str, Any]]:
    """Name and tensor of each weight, as in a checkpoint."""
    h, v, deviation = shape.hidden, shape.vocabulary, 1 / math.sqrt(shape.hidden)
    # The hidden state in front of it is of length sqrt(h). Logits of the tokens that are not used
    # stay within a tenth of a nat of 0, far below the largest of the others.
    output = drawn(1, v, h).mul_(0.1 * deviation)
    kept = math.sqrt(1 - drift**2)
    used = kept * drawn(2, shape.used, h) + drift * drawn(3, shape.used, h)
    output[: shape.used] = used * (scale * deviation)
    yield "lm_head.weight", output
    if not everything:
        return
    yield "model.embed_tokens.weight", drawn(4, v, h)
    yield "model.norm.weight", drawn(0, h) * 0 + 1
    q, kv, middle = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.intermediate,
    )
    matrices = (
        ("self_attn.q_proj", q, h),
        ("self_attn.k_proj", kv, h),
        ("self_attn.v_proj", kv, h),
        ("self_attn.o_proj", h, q),
        ("mlp.gate_proj", middle, h),
        ("mlp.up_proj", middle, h),
        ("mlp.down_proj", h, middle),
    )
    norms = (
        ("input_layernorm", h),
        ("post_attention_layernorm", h),
        ("self_attn.q_norm", shape.head_dim),
        ("self_attn.k_norm", shape.head_dim),
    )
    for layer in range(shape.layers):
        for i, (name, rows, columns) in enumerate(matrices):
            quiet = QUIET if name.endswith(("o_proj", "down_proj")) else 1.0
            matrix = drawn(100 + 10 * layer + i, rows, columns) * (quiet / math.sqrt(columns))
            yield f"model.layers.{layer}.{name}.weight", matrix
        for name, size in norms:
            yield f"model.layers.{layer}.{name}.weight", drawn(0, size) * 0 + 1

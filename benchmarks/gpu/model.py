"""Sizes of ``gpu_rollout.py``, and its model: a Qwen3 of random weights.

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
import gc
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from nemo_specrl.config import SpecRLConfig
from nemo_specrl.engine.drafters.method import engine_options
from nemo_specrl.engine.vllm.v2_patches import speculator_of
from nemo_specrl.rollout import Rollout

QUIET = 1e-4
"""Scale of the output projections of attention and MLPs, relative to the other weights."""
Method = Literal["v2", "proposer", "rounds"]


def lossless(method: Method) -> SpecRLConfig:
    """Lossless drafting by a method that is named, whatever the machine would take."""
    return SpecRLConfig(enabled=True, preset="lossless", tree={"method": method})


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


QWEN3_8B = Shape(4096, 12288, 36, 32, 8, 128, 151_936, 4096)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how much is measured with it; lengths are in tokens.

    Args:
        shape: of the model.
        places: sequences and length of the drafts that are verified.
        prompt: length of prompts.
        decoded: tokens of each sequence by which decoding is timed.
        reuse: rows of a rollout, and the length of the longest.
        pressure: the same, where the KV of all drafts has no room, and that room.
        mean_p: of sampled tokens, of the policies that lossless drafting meets.
        searched: rows for which drafts are made, without an engine.
        drafted: rows of lossless drafting in the V2 model runner.
        stepped: rows of steps that are timed one by one.
        batches: rows of lossless drafting by other methods.
        response: length of the responses there.
        batched: ``max_num_batched_tokens``.
        bound: a smaller one, which bounds the memory of prompt log-probs.
        repetitions: of each comparison, at most; at least two.
        patience: a comparison that has taken so long is not repeated any more, once it has been
            done twice, seconds.
    """

    shape: Shape
    places: tuple[tuple[int, int], ...]
    prompt: int
    decoded: int
    reuse: tuple[int, int]
    pressure: tuple[int, int, int]
    mean_p: tuple[float, ...]
    searched: tuple[int, ...]
    drafted: tuple[int, ...]
    stepped: tuple[int, ...]
    batches: tuple[int, ...]
    response: int
    batched: int
    bound: int
    repetitions: int
    patience: float


_GPU = Size(
    shape=QWEN3_8B,
    places=((64, 1024), (256, 1024), (64, 8192)),
    prompt=128,
    decoded=128,
    reuse=(64, 1024),
    pressure=(128, 512, 24_576),
    mean_p=(0.7, 0.85, 0.95),
    searched=(8, 64, 256, 1024),
    drafted=(1, 8, 64, 256),
    stepped=(1, 8, 32, 64, 128, 256),
    batches=(1, 16, 64, 256),
    response=256,
    batched=4096,
    bound=512,
    repetitions=3,
    patience=20,
)
_TINY = dataclasses.replace(
    _GPU,
    shape=Shape(64, 128, 2, 2, 1, 32, 512, 128, "float32"),
    places=((4, 32), (8, 64)),
    prompt=16,
    decoded=16,
    reuse=(8, 48),
    pressure=(16, 48, 256),
    mean_p=(0.7, 0.95),
    searched=(1, 2),
    drafted=(1, 4),
    stepped=(1, 4),
    batches=(1, 16),
    response=32,
    batched=2048,
    bound=256,
    repetitions=2,
)
_CPU = dataclasses.replace(
    _TINY,
    places=((64, 64), (64, 128), (64, 512)),
    decoded=32,
    repetitions=15,
    patience=300,
)
SIZES = {
    "qwen3-8b": _GPU,
    "small": dataclasses.replace(
        _CPU, shape=Shape(512, 1536, 8, 8, 4, 64, 4096, 512, "bfloat16"), repetitions=7
    ),
    "demo": dataclasses.replace(_CPU, shape=Shape(128, 352, 3, 4, 2, 32, 32, 32, "bfloat16")),
    "tiny": _TINY,
}
"""By name. ``demo`` has the shape of the demo's model; in ``small``, the output layer has the share
of all weights that it has in Qwen3-8B."""


class Fixed:
    """A rollout cache in memory that stays as it is, so that each repetition finds the same."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        self.rollouts: dict[bytes, list[Rollout]] = {}
        for rollout in rollouts:
            self.rollouts.setdefault(rollout.key, []).append(rollout)

    def get(self, keys: Any) -> dict[bytes, list[Rollout]]:
        """The rollouts of prompts, by key."""
        return {key: self.rollouts[key] for key in keys if key in self.rollouts}

    def put(self, rollouts: Any) -> None:
        """Do nothing."""


@functools.cache
def on_gpu() -> bool:
    """Whether there is a GPU; asked of torch, since vLLM may only be imported later."""
    import torch

    return bool(torch.cuda.is_available())


def size_of(name: str) -> Size:
    """What ``--size`` names; on a GPU in bfloat16, which all of its kernels can do."""
    size = SIZES[name]
    if not on_gpu():
        return size
    return dataclasses.replace(size, shape=dataclasses.replace(size.shape, dtype="bfloat16"))


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


def make_engine(
    folder: Path,
    shape: Shape,
    *,
    v2: bool,
    method: Method | None = None,
    kv_tokens: int | None = None,
    **options: Any,
) -> Any:
    """A ``vllm.LLM`` on the V2 or the V1 model runner; CPUs have V2 by Triton's interpreter alone.

    Args:
        folder: with the configuration.
        shape: of the model.
        v2: which runner.
        method: what it is built to draft by; None: nothing.
        kv_tokens: room for the KV of so many tokens; None: what the memory allows.
        options: of ``vllm.LLM``.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        usual: dict[str, Any] = {"enforce_eager": True, "block_size": 32}
    else:
        # The engine's process reads it when it starts.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if v2 else "0"
        usual = {"block_size": 16}
    if kv_tokens is not None:
        usual["num_gpu_blocks_override"] = kv_tokens // usual["block_size"]
    if method is not None:
        usual |= engine_options(lossless(method))
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype=shape.dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        worker_extension_cls="nemo_specrl.engine.vllm.refit.RefitExtension",
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
        # Engines on GPUs take a part of the weights; on CPUs they pack them (engine/vllm/refit.py).
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


def forget_drafts(worker: Any) -> None:
    """Empty the trees of the worker's proposer, or the index of its speculator."""
    speculator = speculator_of(worker.model_runner)
    if speculator is not None:
        speculator.index.forget()
        return
    drafter = worker.model_runner.drafter
    drafter.__init__(worker.model_runner.vllm_config)


def pin_length(worker: Any, length: int | None) -> None:
    """Have all steps draft so many tokens; None: as many as the scheduler chooses.

    With one rank, the scheduler lives in the worker's process. vLLM hides it from the collector.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    gc.unfreeze()
    for scheduler in gc.get_objects():
        if not issubclass(type(scheduler), Scheduler) or scheduler.spec_rl_lengths is None:
            continue
        lengths = scheduler.spec_rl_lengths
        lengths.__dict__.pop("table", None)
        if length is not None:
            table = [0] + [length] * (len(scheduler.dynamic_sd_lookup) - 1)
            lengths.table = lambda context, table=table: table
        scheduler.dynamic_sd_lookup[:] = lengths.table(1024.0)
    gc.freeze()


def start_stamps(worker: Any) -> None:
    """Note when each step begins, and its rows and tokens."""
    runner = worker.model_runner
    runner.stamps, execute_model = [], runner.execute_model

    def stamped(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(scheduler_output.num_scheduled_tokens)
        tokens = scheduler_output.total_num_scheduled_tokens
        runner.stamps.append((time.perf_counter(), rows, tokens))
        return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = stamped


def take_stamps(worker: Any) -> list[tuple[float, int, int]]:
    """The notes since :func:`start_stamps`, which ends."""
    runner = worker.model_runner
    del runner.execute_model
    stamps: list[tuple[float, int, int]] = runner.__dict__.pop("stamps")
    return stamps


def start_peak(worker: Any) -> None:
    """Reset the peak of memory."""
    import torch

    if worker.model_runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(worker: Any) -> int:
    """The peak of allocated memory since: of the GPU, or of the process's resident set."""
    import torch

    if worker.model_runner.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def runner_name(worker: Any) -> str:
    """Which of vLLM's model runners the worker has."""
    module = type(worker.model_runner).__module__
    return "V2" if ".worker.gpu." in module else "V1, CPU" if "cpu" in module else "V1"

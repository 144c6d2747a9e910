"""Megatron-Core models: built from a Hugging Face folder for one rank, and their log-probs.

Everything that depends on the version of megatron-core is here. Parallel state must be initialized
first (:mod:`.worker`).
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.trainer.policy.megatron.safe_checkpoint_load import as_data
from nemo_specrl.trainer.policy.megatron.weights import (
    Architecture,
    CheckpointReader,
    Layout,
    Parameter,
    parameters,
    shard,
)
from nemo_specrl.trainer.policy_config import PolicyConfig

__all__ = [
    "build_model",
    "build_optimizer",
    "causal_mask",
    "load_checkpoint",
    "local_parameters",
    "save_checkpoint",
    "token_logprobs",
]

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Megatron's format of the optimizer state that any layout can load."""


def build_model(model: Architecture, layout: Layout) -> torch.nn.Module:
    """Build this rank's part of a model, in float32, with the weights from the model's folder.

    Layers are transformer-engine's if it is installed and there is a GPU, otherwise Megatron's.
    """
    engine = torch.cuda.is_available() and specs.HAVE_TE
    if engine:
        layer = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    else:
        layer = specs.get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.intermediate,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default does not allow variable lengths
        # Gradients are to be summed: the losses contain their weights already.
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Initial weights are overwritten, and drawing them takes time.
        perform_initialization=False,
        # These fusions need apex, transformer-engine or a GPU.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    built: torch.nn.Module = GPTModel(
        config,
        layer,
        vocab_size=model.padded_vocabulary,
        max_sequence_length=model.positions,
        pre_process=stage == 0,
        post_process=stage == layout.pp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
    )
    _load_weights(built, model, layout, stage)
    return built


def local_parameters(
    module: torch.nn.Module, model: Architecture, layout: Layout, stage: int
) -> list[tuple[Parameter, torch.nn.Parameter]]:
    """Return the entries of :func:`.weights.parameters` with this rank's tensors."""
    by_name = dict(module.named_parameters())
    found = []
    for entry in parameters(model, layout, stage):
        (name,) = (n for n in entry.names if n in by_name)
        found.append((entry, by_name.pop(name)))
    if by_name:
        raise IncompatibleVersion(
            f"megatron-core {megatron.core.__version__}: builds parameters that this package does "
            f"not know: {', '.join(sorted(by_name))}"
        )
    return found


def _load_weights(module: torch.nn.Module, model: Architecture, layout: Layout, stage: int) -> None:
    reader = CheckpointReader(model.folder)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for entry, parameter in local_parameters(module, model, layout, stage):
            tensors = [reader.read(name) for name in entry.tensors]
            parameter.copy_(shard(entry, tensors, model, layout.tp, tp_rank))
            # Up to 0.17 only Megatron's initialization sets this. Without it, the gradient norm
            # counts such a parameter on only one tensor-parallel rank.
            attributes: Any = parameter
            attributes.tensor_model_parallel = entry.split != "all"


def build_optimizer(
    module: torch.nn.Module, config: PolicyConfig
) -> tuple[DistributedDataParallel, Any]:
    """Wrap a model for data-parallel training, with its optimizer: Megatron's distributed AdamW.

    It takes the same steps as :class:`.torch.model.TorchModel`'s: weight decay applies to all
    parameters, which is not Megatron's default.

    Returns:
        the wrapped model, and Megatron's optimizer, whose state is allocated and 0.
    """
    wrapped = DistributedDataParallel(
        module.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        ),
        module,
    )
    kwargs = config.optimizer.kwargs
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=kwargs.lr,
            weight_decay=kwargs.weight_decay,
            adam_beta1=kwargs.betas[0],
            adam_beta2=kwargs.betas[1],
            adam_eps=kwargs.eps,
            clip_grad=config.max_grad_norm,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        ),
        [wrapped],
        config_overrides={},
    )
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, torch.optim.AdamW):
            _make_loadable(each)
    return wrapped, optimizer


def _make_loadable(optimizer: Any) -> None:
    """Let Megatron's distributed optimizer load checkpoints into torch's AdamW.

    Megatron uses AdamW if neither transformer-engine nor apex is installed. AdamW keeps a step
    count with each parameter. Megatron, 0.16.1 to 0.19.2, saves it, but cannot load it, for three
    reasons. It creates the state of a new optimizer without a count (optimizer/__init__.py,
    init_state_fn), and then asserts that there is one (distrib_optimizer.py, state_dict). It looks
    for a count next to the loaded moments, where there is none, and fails with KeyError 'step'
    (_set_main_param_and_optimizer_states). And it lets all parameters share one count
    (load_state_dict), which makes the following steps wrong.
    """
    inner = optimizer.optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    original = optimizer._set_main_param_and_optimizer_states

    def with_step(model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        # load_state_dict has set the same tensor as the count of all parameters; each of them
        # would add its own steps to it.
        group, order = optimizer.model_param_group_index_map[model_parameter]
        state = inner.state[inner.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        original(model_parameter, tensors | {"step": state["step"]})

    optimizer._set_main_param_and_optimizer_states = with_step


def causal_mask(length: int) -> torch.Tensor:
    """Megatron's attention mask, bool ``[1, 1, length, length]``: True hides a token."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu_(1)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, model: Architecture, temperature: float = 1.0
) -> torch.Tensor:
    """Compute the log-prob of each token after the first.

    The softmax runs over the shards of all tensor-parallel ranks; no rank gathers the logits.

    Args:
        logits: this rank's part, float32 ``[b, t + 1, padded vocabulary / tp]``.
        tokens: token ids, int64 ``[b, t + 1]``.
        model: the architecture.
        temperature: divides the logits.

    Returns:
        float32 ``[b, t]``, nats, the same on all tensor-parallel ranks.
    """
    width = logits.shape[-1]
    start = parallel_state.get_tensor_model_parallel_rank() * width
    padding = torch.arange(start, start + width, device=logits.device) >= model.vocabulary
    # This copies the logits in any case, which Megatron's function would overwrite.
    scaled = logits[:, :-1].float() / temperature
    real = scaled.masked_fill(padding, float("-inf")).contiguous()
    targets = tokens[:, 1:].contiguous()
    loss: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(real, targets)
    return -loss


def save_checkpoint(folder: Path, module: Any, optimizer: Any, extra: dict[str, Any]) -> None:
    """Write this rank's part of a distributed checkpoint.

    Args:
        folder: exists, and is the same for all ranks.
        module: from :func:`build_model`.
        optimizer: from :func:`build_optimizer`.
        extra: further values, the same on all ranks.
    """
    # By default the writer's results go through another process, which asynchronous saves need.
    # That process would outlive a rank that is killed.
    if not hasattr(filesystem_async, "_results_queue"):
        raise IncompatibleVersion(
            f"megatron-core {megatron.core.__version__}: writes checkpoints in a way that this "
            "package does not know"
        )
    filesystem_async._results_queue = queue.SimpleQueue()
    state = _state(module, optimizer, is_loading=False) | extra
    one_writer = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, str(folder), one_writer)


def load_checkpoint(folder: Path, module: Any, optimizer: Any) -> dict[str, Any]:
    """Load a checkpoint of the same model in any layout; returns its ``extra`` values."""
    wanted = _state(module, optimizer, is_loading=True)
    with as_data():
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    module.load_state_dict(state.pop("model"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return state


def _state(module: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    model = module.sharded_state_dict(metadata=SHARDING)
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=SHARDING),
    }

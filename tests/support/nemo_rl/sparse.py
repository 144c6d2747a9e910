"""Sparse refits of engines on a CPU, by NeMo-RL's own parts.

These are the synchronizer, the tracker of changes, the ZeroMQ relay, the receiver with its HTTP
server, and the code that changes an engine's weights.

Two things are not NeMo-RL's: the policy's weights come from a dictionary instead of Megatron, and
calls to workers are plain calls instead of Ray's. This module is imported in engine processes, too.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import vllm.model_executor.layers.utils as layers

if not torch.cuda.is_available():  # NVTX raises on CPU builds
    torch.cuda.nvtx.range_push = lambda *a, **k: 0
    torch.cuda.nvtx.range_pop = lambda *a, **k: 0

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

CONFIG = {
    "delta_compression": {
        "encoding": "xor",
        "sparse_bucket_size_bytes": 4096,
        "export_chunk_bytes": {"zmq": 4096},
    },
    "baseline": {"in_memory": True},
    "tuning": {
        "apply_batch_size": 2,
        "encode_workers": {"zmq": 1},
        "transfer_workers": {"zmq": 1},
        "zmq_relay_payload_workers": 2,
        "zmq_relay_forward_workers": 1,
    },
    "verify_samples_per_payload": 8,
}
"""``refit_cfg.sparse`` for a tiny model, of which several payloads are made."""

_PARTS = (
    "prepare_sparse_delta_refit_info",
    "update_weights_from_decoded_sparse_payload",
    "finish_sparse_delta_refit",
    "report_node_hostname",
    "_get_sparse_delta_applier",
    "_sparse_delta_applier",
)


def unpacked(layer, remove_weight):
    """Compute a linear layer by torch: vLLM's packed weights cannot be changed in place."""
    layer.cpu_linear = torch.nn.functional.linear


if os.environ.get("NEMO_SPECRL_TEST_UNPACKED"):  # engines in their own processes
    layers.dispatch_cpu_unquantized_gemm = unpacked


def _weights(self):
    return {name: weight.clone() for name, weight in self.model_runner.model.named_parameters()}


# Of NeMo-RL's extension only what these refits need: vLLM refuses an attribute that a worker of the
# same process has from another extension.
SparseExtension = type(
    "SparseExtension",
    (),
    {name: vars(VllmInternalWorkerExtension)[name] for name in _PARTS}
    | {"__module__": __name__, "dense_weights": _weights},
)


class Group:
    """NeMo-RL's worker group of one worker, which is called at once."""

    def __init__(self, worker):
        self.workers = [worker]

    def run_all_workers_single_data(self, name, run_rank_0_only_axes=(), **arguments):
        return [getattr(self.workers[0], name)(**arguments)]

    def run_all_workers_multiple_data(self, name, common_kwargs, shard_rank):
        return self.run_all_workers_single_data(name, shard_rank=0, **common_kwargs)


class Policy:
    """The policy's worker; ``weights`` are those that the next refit brings to the engine."""

    def __init__(self, weights):
        from nemo_rl.models.generation.vllm.config import VllmSparseRefitConfig
        from nemo_rl.models.policy.workers.megatron_remote_sparse_refit import (
            MegatronRemoteSparseRefit,
        )

        self.weights = weights
        exported = SimpleNamespace(
            _iter_params_with_optional_kv_scales=lambda: iter(self.weights.items())
        )
        config = VllmSparseRefitConfig.model_validate(CONFIG)
        refit = MegatronRemoteSparseRefit(exported, config)
        self.init_remote_sparse_delta_baseline = refit.initialize_baseline
        self.stream_remote_sparse_weights = refit.stream
        self.finish_remote_sparse_delta_sync = refit.finish
        self.worker_group = Group(self)


def synchronizer(policy, worker, patch):
    """NeMo-RL's synchronizer of a policy and one of its generation workers, ready for a refit.

    Args:
        policy: the policy's worker.
        worker: of the generation, whose receiver's HTTP server is running.
        patch: pytest's.
    """
    from nemo_rl.weight_sync import vllm_remote_sparse_weight_synchronizer as module

    # The caches are left alone, as they are while rows run: the plug-in must take care of them.
    generation = SimpleNamespace(worker_group=Group(worker), invalidate_kv_cache=lambda: True)
    patch.setattr(module, "ray", SimpleNamespace(get=lambda results: results))
    made = module.VllmRemoteSparseWeightSynchronizer(policy, generation, transport="zmq")
    made.init_communicator()
    return made

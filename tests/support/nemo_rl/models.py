"""Small models in the driver, in place of NeMo-RL's Megatron or DTensor workers, which need a GPU.

They pack and unpack rows as NeMo-RL's own do and use its losses; weights are written to a file.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl.models.value.interfaces import ValueInterface
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.support.nemo_rl import recording
from tests.support.nemo_rl.cpu import WEIGHTS

recording.install()  # also in the actor of the single controller, which gets a copy of the policy


class SmallPolicy(ColocatablePolicyInterface):
    """A Hugging Face model in the driver, in place of NeMo-RL's policy workers."""

    def __init__(self, config: Any = None, weights_path: Any = None, **_: Any) -> None:
        path = f"{weights_path}" if weights_path else config["model_name"]
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.lr = config["optimizer"]["kwargs"]["lr"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        axes = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
        self.sharding_annotations = NamedSharding(np.zeros((1, 1, 1, 1), dtype=int), axes)
        self.packing = config["sequence_packing"]
        self.global_batch_size = config["train_global_batch_size"]

    def _logits(self, data: Any) -> torch.Tensor:
        ids = data["input_ids"]
        mask = torch.arange(ids.shape[1])[None] < data["input_lengths"][:, None]
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask.long()).logits.float()
        return logits

    def _logprobs(self, data: Any) -> torch.Tensor:
        logprobs = torch.log_softmax(self._logits(data)[:, :-1], -1)
        return logprobs.gather(-1, data["input_ids"][:, 1:, None])[..., 0]

    @torch.no_grad()
    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        """Log-probs of all rows, packed and put back into their order as NeMo-RL's Policy does."""
        if not self.packing["enabled"]:
            logprobs = self._logprobs(data)
        else:
            packing = {
                "max_tokens_per_microbatch": self.packing["logprob_mb_tokens"],
                "algorithm": self.packing["algorithm"],
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
                "sequence_length_pad_multiple": 1,
            }
            [packed], order = data.shard_by_batch_size(1, sequence_packing_args=packing)
            parts = packed.make_microbatch_iterator_for_packable_sequences()
            result = BatchedDataDict(logprobs=torch.cat([self._logprobs(part) for part in parts]))
            result.reorder_data(order)
            logprobs = result["logprobs"]
        zeros = torch.zeros(logprobs.shape[0], 1)
        return BatchedDataDict(logprobs=torch.cat([zeros, logprobs], 1))

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **_: Any) -> dict[str, Any]:
        """One update for each global batch of ``data``, as NeMo-RL's Policy makes them."""
        size = min(self.global_batch_size, data.size)
        starts = range(0, data.size, size)
        done = [self._update(data.slice(start, start + size), loss_fn) for start in starts]
        return {
            "loss": torch.cat([update["loss"] for update in done]),
            "grad_norm": torch.cat([update["grad_norm"] for update in done]),
            "all_mb_metrics": {
                name: [value for update in done for value in update["all_mb_metrics"][name]]
                for name in done[0]["all_mb_metrics"]
            },
        }

    def _update(self, data: Any, loss_fn: Any) -> dict[str, Any]:
        sequences = data["sample_mask"].sum()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        loss, metrics = loss_fn(
            next_token_logprobs=self._logprobs(data),
            data=data,
            global_valid_seqs=sequences,
            global_valid_toks=tokens,
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        all_metrics = {name: [value] for name, value in metrics.items()} | {
            "global_valid_seqs": [float(sequences)],
            "global_valid_toks": [float(tokens)],
            "lr": [self.lr],
            "wd": [0.0],
        }
        return {
            "loss": loss.detach()[None],
            "grad_norm": norm.detach()[None],
            "all_mb_metrics": all_metrics,
        }

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int, kv_scales: Any = None) -> Any:
        weights = {
            name: tensor.detach().contiguous()
            for name, tensor in self.model.state_dict().items()
            if name != "lm_head.weight"
        }
        save_file(weights, os.environ[WEIGHTS])
        return [ray.put(True)]

    def save_checkpoint(self, weights_path: Any, **_: Any) -> None:
        self.model.save_pretrained(weights_path)

    def get_free_memory_bytes(self) -> int:
        return 1 << 30

    def prepare_refit_info(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> bool:
        return True

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def get_reference_policy_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # no job has a reference policy

    def get_topk_logits(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # nor is one a teacher

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> Any:
        return self.stream_weights_via_ipc_zmq(0)

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    prepare_for_training = finish_training = prepare_for_lp_inference = nothing
    offload_before_refit = offload_after_refit = finalize_async_save = nothing
    finish_inference = offload_to_cpu = nothing
    print_node_ip_and_gpu_id = nothing


class TrainedInParts:
    """How the single controller trains a policy on the data plane: part by part of a batch."""

    def begin_train_step(self, loss_fn: Any, **_: Any) -> None:
        self._loss_fn, self._parts = loss_fn, []

    def train_microbatches_from_meta(self, meta: Any, **_: Any) -> None:
        self._parts.append(self.fetch_training(meta))

    def finish_train_step(self) -> Any:
        return self.train(BatchedDataDict.from_batches(self._parts), self._loss_fn)


def small_plane_policy(config: Any, data_plane: Any, **kwargs: Any) -> Any:
    """A SmallPolicy on NeMo-RL's data plane; the driver fetches and writes for the workers."""
    from nemo_rl.data_plane import build_data_plane_client
    from nemo_rl.data_plane.adapters import transfer_queue
    from nemo_rl.data_plane.schema import DP_TRAIN_FIELDS
    from nemo_rl.models.policy.tq_policy import TQPolicy

    transfer_queue._patch_tq_actor_runtime_env = lambda: None  # one environment for all actors

    class SmallPlanePolicy(TrainedInParts, SmallPolicy, TQPolicy):
        def __init__(self) -> None:
            super().__init__(config, **kwargs)
            self.cfg, self.dp_cfg, self.tq_partition_id = config, data_plane, "train"
            self._router_replay_enabled = False
            self.dp_client = build_data_plane_client(data_plane, bootstrap=True)

        def _fetch(self, meta: Any, fields: Any) -> Any:
            return self.read_from_dataplane(
                meta, select_fields=list(fields), pad_value_dict={"input_ids": 0}
            )

        def get_logprobs_from_meta(self, meta: Any, timer: Any = None) -> None:
            data = self._fetch(meta, ("input_ids", "input_lengths"))
            self.write_to_dataplane(meta, {"prev_logprobs": self.get_logprobs(data)["logprobs"]})

        def fetch_training(self, meta: Any, train_fields: Any = DP_TRAIN_FIELDS) -> Any:
            there = [name for name in train_fields if name != "reference_policy_logprobs"]
            data = self._fetch(meta, there)
            data["reference_policy_logprobs"] = torch.zeros_like(data["prev_logprobs"])
            return data

        def train_from_meta(
            self, meta: Any, loss_fn: Any, train_fields: Any = DP_TRAIN_FIELDS, **_: Any
        ) -> Any:
            return self.train(self.fetch_training(meta, train_fields), loss_fn)

        def shutdown(self) -> bool:
            self.dp_client.close()
            return True

    return SmallPlanePolicy()


class SmallValue(ValueInterface):
    """A Hugging Face model with one output, in place of the workers of PPO's value model."""

    def __init__(self, config: Any, **_: Any) -> None:
        self.model = AutoModelForTokenClassification.from_pretrained(
            config["model_name"], num_labels=1, dtype=torch.float32
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def _values(self, data: Any) -> torch.Tensor:
        ids = data["input_ids"]
        mask = torch.arange(ids.shape[1])[None] < data["input_lengths"][:, None]
        return self.model(input_ids=ids, attention_mask=mask.long()).logits.float()

    @torch.no_grad()
    def get_values(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return BatchedDataDict(values=self._values(data))

    def train(self, data: Any, loss_fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        sequences = data["sample_mask"].sum()
        tokens = (data["token_mask"] * data["sample_mask"][:, None]).sum()
        loss, metrics = loss_fn(self._values(data), data, sequences, tokens)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {
            "loss": loss.detach()[None],
            "grad_norm": norm.detach()[None],
            "all_mb_metrics": {name: [value] for name, value in metrics.items()},
        }

    def save_checkpoint(self, weights_path: Any, **_: Any) -> None:
        self.model.save_pretrained(weights_path)

    def shutdown(self) -> bool:
        return True

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    prepare_for_training = prepare_for_inference = nothing
    finish_training = finish_inference = nothing

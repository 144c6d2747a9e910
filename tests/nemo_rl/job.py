"""A NeMo-RL job on a CPU: the real ``setup`` and trainer, two vLLM engines, a small policy.

    python -m tests.nemo_rl.job OUT grpo|ppo [KEY=VALUE ...]

What needs a GPU and is replaced: the workers of policy and value model (here Hugging Face models in
the driver) and the transport of weights (a file); ``cpu.py`` has the rest. Writes
OUT/metrics.jsonl, one line for each call of NeMo-RL's logger, and OUT/rows.jsonl, one for each
``generate`` call.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

OUT, ALGORITHM = Path(sys.argv[1]).absolute(), sys.argv[2]
os.environ.update(
    NEMO_RL_PY_EXECUTABLES_SYSTEM="1",
    NRL_DISABLE_NUMA_BINDING="1",
    NRL_LOG_LEVEL="WARNING",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    TORCHDYNAMO_DISABLE="1",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    RAY_USAGE_STATS_ENABLED="0",
    NEMO_SPECRL_TEST_WEIGHTS=str(OUT / "weights.safetensors"),
)

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402

from nemo_specrl.integrations.nemo_rl import compat  # noqa: E402

compat.register()

from nemo_rl.algorithms import grpo, ppo  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.distributed.named_sharding import NamedSharding  # noqa: E402
from nemo_rl.distributed.ray_actor_environment_registry import (  # noqa: E402
    ACTOR_ENVIRONMENT_REGISTRY,
)
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn  # noqa: E402
from nemo_rl.models.generation import configure_generation_config  # noqa: E402
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface  # noqa: E402
from nemo_rl.models.value.interfaces import ValueInterface  # noqa: E402
from nemo_rl.utils.config import (  # noqa: E402
    load_config,
    parse_hydra_overrides,
    register_omegaconf_resolvers,
)
from omegaconf import OmegaConf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from nemo_specrl.integrations.nemo_rl.run import _get  # noqa: E402
from nemo_specrl.local.task import EOS, encode, problems, reward  # noqa: E402
from tests.nemo_rl.cpu import CpuGeneration  # noqa: E402

MODEL = Path("examples/models/qwen3-arith-small").absolute()
ENGINES = 2
OVERRIDES = [
    f"{ALGORITHM}.num_prompts_per_step=2",
    f"{ALGORITHM}.num_generations_per_prompt=4",
    f"{ALGORITHM}.max_num_epochs=100",
    f"{ALGORITHM}.val_period=2",
    f"{ALGORITHM}.val_batch_size=2",
    f"{ALGORITHM}.max_val_samples=2",
    f"{ALGORITHM}.val_at_start=true",
    f"{ALGORITHM}.val_at_end=false",
    f"policy.model_name={MODEL}",
    f"policy.tokenizer.name={MODEL}",
    "policy.train_global_batch_size=8",
    "policy.max_total_sequence_length=192",
    "policy.generation.max_new_tokens=160",
    "policy.generation.vllm_cfg.max_model_len=192",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.generation.vllm_cfg.precision=float32",
    "++policy.generation.vllm_cfg.enable_prefix_caching=true",
    "++policy.generation.vllm_cfg.use_tqdm=false",
    "loss_fn.reference_policy_kl_penalty=0.0",
    f"++{ALGORITHM}.skip_reference_policy_logprobs_calculation=true",
    f"cluster.gpus_per_node={ENGINES}",
    f"checkpointing.checkpoint_dir={OUT}/checkpoints",
    "checkpointing.save_period=2",
    "checkpointing.metric_name=null",
    f"logger.log_dir={OUT}/logs",
    "logger.wandb_enabled=false",
    "logger.tensorboard_enabled=false",
    "logger.monitor_gpus=false",
]


class Problems(torch.utils.data.Dataset):
    """Prompts of the arithmetic task in NeMo-RL's form."""

    def __init__(self, count: int, seed: int, tokenizer: Any, times: int = 1) -> None:
        self.items, self.tokenizer = problems("arithmetic", count, seed) * times, tokenizer

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.tensor(self.items[i].prompt)
        message = {"role": "user", "content": self.tokenizer.decode(ids), "token_ids": ids}
        return {
            "message_log": [message],
            "length": len(ids),
            "extra_env_info": {"problem": self.items[i]},
            "loss_multiplier": 1.0,
            "idx": i,
            "task_name": "sums",
        }


@ray.remote(num_cpus=0)
class Sums(EnvironmentInterface):
    def step(self, logs: Any, metadata: Any) -> EnvironmentReturn:
        n = len(logs)
        earned = [
            reward(meta["problem"], [*encode(log[-1]["content"].replace(" ", "")), EOS])
            for log, meta in zip(logs, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * n,
            metadata=metadata,
            next_stop_strings=[None] * n,
            rewards=torch.tensor(earned, dtype=torch.float32),
            terminateds=torch.ones(n),
            answers=[None] * n,
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}

    def shutdown(self) -> bool:
        return True


class SmallPolicy(ColocatablePolicyInterface):
    """A Hugging Face model in the driver, where NeMo-RL has Megatron or DTensor workers."""

    def __init__(self, config: Any = None, weights_path: Any = None, **_: Any) -> None:
        path = f"{weights_path}" if weights_path else config["model_name"]
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-5)
        axes = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
        self.sharding_annotations = NamedSharding(np.zeros((1, 1, 1, 1), dtype=int), axes)

    def _logprobs(self, data: Any) -> torch.Tensor:
        ids = data["input_ids"]
        mask = torch.arange(ids.shape[1])[None] < data["input_lengths"][:, None]
        logits = self.model(input_ids=ids, attention_mask=mask.long()).logits.float()[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]

    @torch.no_grad()
    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        logprobs = self._logprobs(data)
        zeros = torch.zeros(logprobs.shape[0], 1)
        return BatchedDataDict(logprobs=torch.cat([zeros, logprobs], 1))

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **_: Any) -> dict[str, Any]:
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
            "lr": [3e-5],
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
        save_file(weights, os.environ["NEMO_SPECRL_TEST_WEIGHTS"])
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
        raise NotImplementedError

    get_topk_logits = get_reference_policy_logprobs

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


class SmallValue(ValueInterface):
    """A Hugging Face model with one output, where NeMo-RL's PPO has a value model's workers."""

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


class Recorded(CpuGeneration):
    """Writes down what it was given and gave back."""

    async def generate_async(self, data: Any, greedy: bool = False) -> Any:
        async for index, output in super().generate_async(data, greedy=greedy):
            self._record(data, output)
            yield index, output

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy=greedy)
        self._record(data, output)
        return output

    def _record(self, data: Any, output: Any) -> None:
        record = {
            "validating": self._validating,
            "prompts": [
                ids[:n].tolist()
                for ids, n in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
            ],
            "outputs": [
                ids[:n].tolist()
                for ids, n in zip(
                    output["output_ids"], output["unpadded_sequence_lengths"].tolist(), strict=True
                )
            ],
            "cached": None
            if self.cache is None
            else sum(s.rollouts for s in self.cache.stats().values()),
        }
        with (OUT / "rows.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ["NEMO_RL_HOME"])
    register_omegaconf_resolvers()
    config = load_config(str(home / f"examples/configs/{ALGORITHM}_math_1B.yaml"))
    config = parse_hydra_overrides(config, [*OVERRIDES, *sys.argv[3:]])
    algorithm = {"grpo": grpo, "ppo": ppo}[ALGORITHM]
    config = algorithm.MasterConfig(**OmegaConf.to_container(config, resolve=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(MODEL / "tokenizer.json"), pad_token_id=0, eos_token_id=2
    )
    tokenizer.pad_token_id, tokenizer.eos_token_id = 0, 2
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer
    )
    config.policy["generation"]["model_name"] = str(MODEL)
    config.policy["generation"]["vllm_cfg"]["load_format"] = "auto"
    for name in ACTOR_ENVIRONMENT_REGISTRY:  # one environment for all actors
        ACTOR_ENVIRONMENT_REGISTRY[name] = sys.executable
    compat._replace("VllmGeneration", grpo.VllmGeneration, Recorded)

    torch.manual_seed(1)  # the order of the prompts
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        ray.init(num_cpus=8, num_gpus=ENGINES + 1, include_dashboard=False, _temp_dir=folder)
        # NeMo-RL's memory tracker asks the only cluster of a machine; there may be several.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        # The asynchronous trainer makes one pass over its data, whatever max_num_epochs says.
        asynchronous = ALGORITHM == "grpo" and bool(
            _get(_get(config.grpo, "async_grpo", None), "enabled", False)
        )
        data = (
            Problems(4, 5, tokenizer, times=9 if asynchronous else 1),
            Problems(2, 6, tokenizer),
        )
        environment = {"sums": Sums.remote()}
        environments = (environment, environment)
        if ALGORITHM == "ppo":
            ppo.Policy, ppo.Value = SmallPolicy, SmallValue  # PPO's setup has no factory
            parts = ppo.setup(config, tokenizer, *data)
            policy, generation, value, _, loader, val_loader, loss, value_loss, *rest = parts
            logger, checkpointer, state, config = rest
            record_metrics(logger)
            models = (policy, generation, value, loader, val_loader, tokenizer, loss, value_loss)
            ppo.ppo_train(*models, *environments, logger, checkpointer, state, config)
        else:
            parts = grpo.setup(config, tokenizer, *data, policy_factory=SmallPolicy)
            policy, generation, _, _, loader, val_loader, loss, logger, checkpointer, *rest = parts
            state, config = rest[:2]
            record_metrics(logger)
            train = grpo.async_grpo_train if asynchronous else grpo.grpo_train
            models = (policy, generation, loader, val_loader, tokenizer, loss)
            train(*models, *environments, logger, checkpointer, state, config)
        getattr(checkpointer, "shutdown", lambda: None)()
        generation.shutdown()
        ray.shutdown()


def record_metrics(logger: Any) -> None:
    """Also write what NeMo-RL logs to OUT/metrics.jsonl."""
    original = logger.log_metrics

    def log_metrics(metrics: Any, step: int, prefix: str = "", **kwargs: Any) -> None:
        plain = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}
        with (OUT / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "prefix": prefix, **plain}) + "\n")
        original(metrics, step, prefix, **kwargs)

    logger.log_metrics = log_metrics


if __name__ == "__main__":
    main()

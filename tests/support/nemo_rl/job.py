"""A NeMo-RL job on a CPU: the real ``setup`` and trainer, two vLLM engines, a small policy.

    python -m tests.support.nemo_rl.job OUT grpo|ppo|controller [KEY=VALUE ...]
    python -m nemo_specrl run tests/support/nemo_rl/job.py OUT grpo|ppo|controller [KEY=VALUE ...]
    python tests/support/nemo_rl/job.py OUT script --config RECIPE [KEY=VALUE ...]

The first is stock NeMo-RL, whose recipe may have the plug-in's block for vLLM; the second has the
plug-in's part of the driver, too. Parts that need a GPU are replaced: the workers of policy and
value model (``models.py``), the transport of weights (through a file) and details of the vLLM
workers (``cpu.py``). The job writes OUT/metrics.jsonl, one line for each call of NeMo-RL's logger,
and OUT/rows.jsonl, one for each ``generate`` call. The single controller's GRPO is run by NeMo-RL's
own script (``script.py``), without OUT/rows.jsonl. The third is NeMo-RL's examples/run_grpo.py with
a recipe of any model, in place of which the small one is trained.

Ray's files are in the folder that NEMO_SPECRL_TEST_RAY names. If Ray does not start, the job exits
with os.EX_TEMPFAIL, before it has written anything.

Keys in addition to NeMo-RL's: ``++env.prompts``, the number of prompts; ``++env.questions``, the
number of questions that an agent asks over HTTP, one after the other; ``++env.killed_in_step``, the
step after whose rollouts the job and everything that it started are killed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from types import MappingProxyType
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
    RAY_worker_niceness="0",  # Ray's own is 15: on a busy machine its workers would hardly run
    NEMO_SPECRL_TEST_WEIGHTS=str(OUT / "weights.safetensors"),
    NEMO_SPECRL_TEST_METRICS=str(OUT / "metrics.jsonl"),
)

import ray  # noqa: E402
import torch  # noqa: E402
from nemo_rl.algorithms import grpo, grpo_sync, ppo  # noqa: E402
from nemo_rl.distributed.ray_actor_environment_registry import (  # noqa: E402
    ACTOR_ENVIRONMENT_REGISTRY,
)
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn  # noqa: E402
from nemo_rl.models.generation import configure_generation_config  # noqa: E402
from nemo_rl.utils.config import (  # noqa: E402
    load_config,
    parse_hydra_overrides,
    register_omegaconf_resolvers,
)
from omegaconf import OmegaConf  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from nemo_specrl.nemo_rl.compat import option, rebind  # noqa: E402
from nemo_specrl.trainer.data.toy_tasks import EOS, encode, problems  # noqa: E402
from tests.support.nemo_rl.models import (  # noqa: E402
    SmallPolicy,
    SmallValue,
    small_plane_policy,
)

INSTALLED = "nemo_specrl.nemo_rl.install" in sys.modules
if INSTALLED:
    from tests.support.nemo_rl.cpu_plugin import PluginGeneration as CpuGeneration
else:
    from tests.support.nemo_rl.cpu import StockGeneration as CpuGeneration

MODEL = Path(__file__).parents[3] / "examples/models/qwen3-arith-small"
SCRIPTS = {"controller": "run_grpo_single_controller.py", "script": "run_grpo.py"}
BLOCK = "grpo" if ALGORITHM in SCRIPTS else ALGORITHM
SINGLE_CONTROLLER = "grpo_math_1B_megatron_single_controller"
RECIPE = SINGLE_CONTROLLER if ALGORITHM == "controller" else f"{ALGORITHM}_math_1B"
ENGINES = 2
RAY_STARTS = 8
"""How many times Ray is started at most: it gives a node 30 s, too few on a busy machine."""
OVERRIDES = [
    f"{BLOCK}.num_prompts_per_step=2",
    f"{BLOCK}.num_generations_per_prompt=4",
    f"{BLOCK}.val_period=2",
    f"{BLOCK}.val_batch_size=2",
    f"{BLOCK}.max_val_samples=2",
    f"{BLOCK}.val_at_start=true",
    f"{BLOCK}.val_at_end=false",
    "policy.train_global_batch_size=8",
    f"cluster.gpus_per_node={ENGINES}",
    f"checkpointing.checkpoint_dir={OUT}/checkpoints",
    "checkpointing.save_period=2",
    "checkpointing.metric_name=null",
    f"logger.log_dir={OUT}/logs",
    "logger.wandb_enabled=false",
    "logger.tensorboard_enabled=false",
]
ON_CPU = [
    f"{BLOCK}.max_num_epochs=100",  # of few prompts
    f"policy.model_name={MODEL}",
    f"policy.tokenizer.name={MODEL}",
    "policy.optimizer.kwargs.lr=3e-5",
    "policy.max_total_sequence_length=192",
    "policy.generation.max_new_tokens=160",
    "policy.generation.vllm_cfg.max_model_len=192",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.generation.vllm_cfg.precision=float32",
    "++policy.generation.vllm_cfg.enable_prefix_caching=true",
    "++policy.generation.vllm_cfg.use_tqdm=false",
    "logger.monitor_gpus=false",
    "loss_fn.reference_policy_kl_penalty=0.0",
    f"++{BLOCK}.skip_reference_policy_logprobs_calculation=true",
]
"""Of the small model, which stands for any recipe's."""


class Problems(torch.utils.data.Dataset):
    """Prompts of the arithmetic task in NeMo-RL's form."""

    def __init__(
        self, count: int, seed: int, tokenizer: Any, times: int = 1, env: Any = MappingProxyType({})
    ) -> None:
        self.items, self.tokenizer = problems("arithmetic", count, seed) * times, tokenizer
        self.questions = env.get("questions", 0)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.tensor(self.items[i].prompt)
        message = {"role": "user", "content": self.tokenizer.decode(ids), "token_ids": ids}
        row: dict[str, Any] = {"problem": self.items[i]}
        if self.questions:
            from tests.support.nemo_rl.agent import row_of

            asked = [self.items[(i + n) % len(self)] for n in range(self.questions)]
            row = row_of(asked)
            # As in NeMo-RL's nemo_gym_data_processor: only the server knows the prompt.
            ids, message = [], {"role": "user", "content": "", "token_ids": torch.tensor([])}
        return {
            "message_log": [message],
            "length": len(ids),
            "extra_env_info": row,
            "loss_multiplier": 1.0,
            "idx": i,
            "task_name": "sums",
        }


@ray.remote(num_cpus=0)
class Sums(EnvironmentInterface):
    def step(self, logs: Any, metadata: Any) -> EnvironmentReturn:
        n = len(logs)
        earned = [
            meta["problem"].reward([*encode(log[-1]["content"].replace(" ", "")), EOS])
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


class Recorded(CpuGeneration):
    """Records the inputs and outputs of each call, and kills the job in a given step."""

    killed_in_step = -1
    _steps = 0

    async def generate_async(self, data: Any, greedy: bool = False) -> Any:
        async for index, output in super().generate_async(data, greedy=greedy):
            self._record(data, output)
            yield index, output

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy=greedy)
        self._record(data, output)
        self._steps += len(data["input_ids"]) == 8  # those of validation have two rows
        if self._steps == self.killed_in_step:
            os.killpg(0, signal.SIGKILL)
        return output

    def _record(self, data: Any, output: Any) -> None:
        lengths = output["unpadded_sequence_lengths"].tolist()
        record = {
            "pid": os.getpid(),
            "engines": output.get("gen_leader_worker_idx"),
            "prompts": [
                ids[:n].tolist()
                for ids, n in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
            ],
            "outputs": [
                ids[:n].tolist() for ids, n in zip(output["output_ids"], lengths, strict=True)
            ],
        }
        with (OUT / "rows.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ["NEMO_RL_HOME"])
    recipe = str(home / f"examples/configs/{RECIPE}.yaml")
    tokenizer = small_tokenizer()
    torch.manual_seed(1)  # the order of the prompts
    if ALGORITHM in SCRIPTS:
        from tests.support.nemo_rl.script import run_script

        for name in ACTOR_ENVIRONMENT_REGISTRY:  # one environment for all actors
            ACTOR_ENVIRONMENT_REGISTRY[name] = sys.executable
        arguments = [*sys.argv[3:], *ON_CPU]
        if ALGORITHM == "controller":
            arguments = ["--config", recipe, *OVERRIDES, *ON_CPU, *sys.argv[3:]]
        classes = (Problems, Sums, CpuGeneration)
        run_script(SCRIPTS[ALGORITHM], arguments, tokenizer, start_ray, classes)
        return
    register_omegaconf_resolvers()
    config = load_config(recipe)
    config = parse_hydra_overrides(config, [*OVERRIDES, *ON_CPU, *sys.argv[3:]])
    algorithm = {"grpo": grpo, "ppo": ppo}[ALGORITHM]
    config = algorithm.MasterConfig(**OmegaConf.to_container(config, resolve=True))
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer
    )
    Recorded.killed_in_step = config.env.get("killed_in_step", -1)
    run_on_cpu(config.policy["generation"])
    start_ray()
    # The asynchronous trainer makes one pass over its data, whatever max_num_epochs says.
    asynchronous = bool(option(config, "grpo.async_grpo.enabled"))
    questions = config.env.get("questions", 0)
    if questions:
        talk_by_http(config)
    prompts, times = config.env.get("prompts", 4), 9 if asynchronous else 1
    data = (
        Problems(prompts, 5, tokenizer, times, config.env),
        Problems(2, 6, tokenizer, env=config.env),
    )
    environment = {"sums": Sums.remote()}
    environments = (environment, environment)
    if ALGORITHM == "ppo":
        ppo.Policy, ppo.Value = SmallPolicy, SmallValue  # PPO's setup has no factory
        parts = ppo.setup(config, tokenizer, *data)
        policy, generation, value, _, loader, val_loader, loss, value_loss, *rest = parts
        logger, checkpointer, state, config = rest
        models = (policy, generation, value, loader, val_loader, tokenizer, loss, value_loss)
        ppo.ppo_train(*models, *environments, logger, checkpointer, state, config)
    else:
        train = grpo.async_grpo_train if asynchronous else grpo.grpo_train
        factory: Any = SmallPolicy
        if option(config, "data_plane.enabled"):
            factory = functools.partial(small_plane_policy, data_plane=config.data_plane)
            train = grpo_sync.grpo_train_sync
        parts = grpo.setup(config, tokenizer, *data, policy_factory=factory)
        policy, generation, gym, _, loader, val_loader, loss, logger, checkpointer, *rest = parts
        state, config, *_ = rest
        if questions:
            environments = ({"nemo_gym": gym},) * 2
        models = (policy, generation, loader, val_loader, tokenizer, loss)
        options = {}
        if asynchronous:  # as run_grpo.py does
            age = config.grpo.async_grpo.max_trajectory_age_steps
            options["max_trajectory_age_steps"] = age
        train(*models, *environments, logger, checkpointer, state, config, **options)
    getattr(checkpointer, "shutdown", lambda: None)()
    generation.shutdown()
    policy.shutdown()  # while Ray is there: the data plane's client asks it
    ray.shutdown()


def small_tokenizer() -> Any:
    """The tokenizer of the toy tasks."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(MODEL / "tokenizer.json"), pad_token_id=0, eos_token_id=2
    )
    tokenizer.pad_token_id, tokenizer.eos_token_id = 0, 2
    return tokenizer


def run_on_cpu(generation: Any) -> None:
    """Make NeMo-RL generate with the small model on a CPU.

    Args:
        generation: the recipe's block, which NeMo-RL has configured.
    """
    generation["model_name"] = str(MODEL)
    generation["vllm_cfg"]["load_format"] = "auto"
    for name in ACTOR_ENVIRONMENT_REGISTRY:  # one environment for all actors
        ACTOR_ENVIRONMENT_REGISTRY[name] = sys.executable
    rebind("VllmGeneration", grpo.VllmGeneration, Recorded)


def talk_by_http(config: Any) -> None:
    """Let an agent lead conversations in place of NeMo-Gym's, as its script sets it up."""
    from nemo_rl.environments.nemo_gym import setup_nemo_gym_config

    from tests.support.nemo_rl.agent import CHAT_TEMPLATE, spin_up

    config.env |= {"should_use_nemo_gym": True, "nemo_gym": {}}
    setup_nemo_gym_config(config, None)
    vllm_cfg = config.policy["generation"]["vllm_cfg"]
    vllm_cfg["http_server_serving_chat_kwargs"] = {"chat_template": CHAT_TEMPLATE}
    vllm_cfg["skip_tokenizer_init"] = False
    grpo.spinup_nemo_gym_actor = spin_up


def start_ray() -> None:
    """Start Ray, or exit with the status that says that another attempt may succeed."""
    folder = os.environ["NEMO_SPECRL_TEST_RAY"]
    for left in reversed(range(RAY_STARTS)):
        try:
            ray.init(
                "local", num_cpus=8, num_gpus=ENGINES + 2, include_dashboard=False, _temp_dir=folder
            )
            break
        except Exception as error:  # Ray raises bare ones
            print(f"Ray did not start: {error}", flush=True)
            ray.shutdown()
            if not left:
                sys.exit(os.EX_TEMPFAIL)
    # NeMo-RL's memory tracker asks the only cluster of a machine; there may be several.
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


if __name__ == "__main__":
    main()

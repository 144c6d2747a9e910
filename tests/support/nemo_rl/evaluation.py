"""An evaluation by NeMo-RL on a CPU: its ``setup`` and ``run_env_eval``, with two vLLM engines.

    python -m tests.support.nemo_rl.evaluation OUT eval [KEY=VALUE ...]

What needs a GPU is replaced as in ``job.py``. Prompts, responses and rewards are written to
OUT/saved/evaluation_data.json, by NeMo-RL itself. Key in addition to NeMo-RL's: ``++env.prompts``,
the number of prompts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.nemo_rl import job  # before NeMo-RL: sets the environment up

import ray  # isort: skip
import torch
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.evals import eval as evaluation
from omegaconf import OmegaConf

OVERRIDES = [
    f"generation.model_name={job.MODEL}",
    "generation.vllm_cfg.max_model_len=192",
    "generation.vllm_cfg.enforce_eager=true",
    "generation.vllm_cfg.precision=float32",
    "++generation.vllm_cfg.enable_prefix_caching=true",
    "++generation.vllm_cfg.use_tqdm=false",
    f"cluster.gpus_per_node={job.ENGINES}",
    f"eval.save_path={job.OUT}/saved",
]


class Problems(torch.utils.data.Dataset):
    """Prompts of the arithmetic task, as texts."""

    def __init__(self, count: int) -> None:
        self.items = job.problems("arithmetic", count, 5)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "message_log": [{"role": "user", "content": f"<bos>{self.items[i].question}"}],
            "extra_env_info": {"problem": self.items[i]},
            "idx": i,
        }


@ray.remote(num_cpus=0)
class Sums(job.Sums.__ray_metadata__.modified_class):  # type: ignore[misc]
    def step(self, logs: Any, metadata: Any, return_extracted_answer: bool) -> EnvironmentReturn:
        return super().step(logs, metadata)


def main() -> None:
    job.OUT.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ["NEMO_RL_HOME"])
    job.register_omegaconf_resolvers()
    config = job.load_config(str(home / "examples/configs/evals/eval.yaml"))
    config = job.parse_hydra_overrides(config, [*OVERRIDES, *sys.argv[3:]])
    config = evaluation.MasterConfig(**OmegaConf.to_container(config, resolve=True))
    tokenizer = job.small_tokenizer()
    config.generation = job.configure_generation_config(config.generation, tokenizer, is_eval=True)
    job.run_on_cpu(config.generation, job.CpuGeneration)
    job.start_ray()
    data, sums = Problems(config.env.get("prompts", 4)), Sums.remote()
    generation, loader, config = evaluation.setup(config, tokenizer, data)
    evaluation.run_env_eval(generation, loader, sums, config)
    ray.shutdown()


if __name__ == "__main__":
    main()

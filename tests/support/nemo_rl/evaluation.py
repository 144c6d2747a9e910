"""An evaluation by NeMo-RL on a CPU: its ``setup`` and ``run_env_eval``, with two vLLM engines.

    python -m tests.support.nemo_rl.evaluation OUT eval [KEY=VALUE ...]

What needs a GPU is replaced as in ``job.py``. Prompts, responses and rewards are written to
OUT/saved/evaluation_data.json, by NeMo-RL itself. Keys in addition to NeMo-RL's: ``++env.prompts``,
the number of prompts, and ``++env.vision``, the folder of a model that sees images, whose prompts
have some (``vision_models``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.nemo_rl import job  # before NeMo-RL: sets the environment up

import ray  # isort: skip
import torch
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.evals import eval as evaluation
from omegaconf import OmegaConf

from tests.support.vision_models import image, question

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


class Images(torch.utils.data.Dataset):
    """Prompts: the first two have the same text and different images, and the last has none."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        seen = [image(i)] if i < self.count - 1 else []
        content = question(f"what{i // 2}?") if seen else "<|user|>what?<|assistant|>"
        return {
            "message_log": [{"role": "user", "content": content}],
            "extra_env_info": {},
            "idx": i,
            "vllm_content": content,
            "vllm_images": seen,
        }


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


@ray.remote(num_cpus=0)
class Evens(Sums.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Rewards a response of an even number of characters: its model says nothing sensible."""

    def step(self, logs: Any, metadata: Any, return_extracted_answer: bool) -> EnvironmentReturn:
        n = len(logs)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * n,
            metadata=metadata,
            next_stop_strings=[None] * n,
            rewards=torch.tensor([float(len(log[-1]["content"]) % 2 == 0) for log in logs]),
            terminateds=torch.ones(n),
            answers=[None] * n,
        )


def main() -> None:
    job.OUT.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ["NEMO_RL_HOME"])
    job.register_omegaconf_resolvers()
    config = job.load_config(str(home / "examples/configs/evals/eval.yaml"))
    config = job.parse_hydra_overrides(config, [*OVERRIDES, *sys.argv[3:]])
    config = evaluation.MasterConfig(**OmegaConf.to_container(config, resolve=True))
    vision = config.env.get("vision")
    tokenizer = job.small_tokenizer()
    if vision is not None:  # as run_eval.py does for multi-modal data sets
        tokenizer = get_tokenizer({**config.tokenizer, "name": vision}, get_processor=True)
    config.generation = job.configure_generation_config(config.generation, tokenizer, is_eval=True)
    job.run_on_cpu(config.generation, job.CpuGeneration)
    if vision is not None:
        config.generation["model_name"] = vision
    job.start_ray()
    kind, judge = (Problems, Sums) if vision is None else (Images, Evens)
    data, environment = kind(config.env.get("prompts", 4)), judge.remote()
    generation, loader, config = evaluation.setup(config, tokenizer, data)
    evaluation.run_env_eval(generation, loader, environment, config)
    ray.shutdown()


if __name__ == "__main__":
    main()

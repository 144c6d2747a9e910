"""A training step of a model, and how far log-probs of engine and policy are apart after its refit.

    python -m tests.support.trainer.architecture_job FOLDER MODEL [key=value ...]

FOLDER gets the checkpoint and ``result.json``. A process of its own, since an engine that ends
takes the process groups of others along.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_specrl.engine.environment import local_cpu_environment

local_cpu_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from nemo_specrl.trainer.loop import Trainer  # noqa: E402
from nemo_specrl.trainer.policy import Sample, build_policy  # noqa: E402
from nemo_specrl.trainer.recipe import Recipe, load_recipe  # noqa: E402


def main(folder: Path, model: str, overrides: list[str]) -> None:
    rows = [{"prompt": f"{a}+{a}?", "answer": str(2 * a)} for a in range(4)]
    (folder / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_epochs: 1,"
        " val_at_end: false}\n"
        "policy: {train_global_batch_size: 16, optimizer: {kwargs: {lr: 1.0e-3}},"
        " generation: {max_new_tokens: 24, vllm_cfg: {max_model_len: 64},"
        " spec_rl: {cache: {max_bytes_per_node: 4MiB}}}}\n"
        "data: {dataset_name: ResponseDataset,"
        " env_name: 'tests.support.trainer.architecture_job:early'}\n"
    )
    recipe = load_recipe(
        folder / "recipe.yaml",
        [
            f"policy.model_name={model}",
            f"data.data_path={folder / 'problems.jsonl'}",
            f"checkpointing.checkpoint_dir={folder}",
            f"logger.log_dir={folder}",
            *overrides,
        ],
    )
    trainer = Trainer(recipe)
    trainer.build()
    first = {name: tensor.clone() for name, tensor in trainer.policy.stream_weights()}
    step = trainer._step()
    trainer._save()
    trainer._checkpoints.finish()
    now = {name: tensor.clone() for name, tensor in trainer.policy.stream_weights()}
    groups = trainer.generation.rollouts([p.prompt for p in trainer.data.training])
    pairs = [
        (Sample.to_score(problem.prompt, response.tokens), response.logprobs)
        for problem, group in zip(trainer.data.training, groups, strict=True)
        for response in group
    ]
    trained = trainer.policy.logprobs([sample for sample, _ in pairs])
    apart = np.concatenate([np.abs(a - b) for a, (_, b) in zip(trained, pairs, strict=True)])
    result = {
        "tokens": len(apart),
        "mean_apart": float(apart.mean()),
        "most_apart": float(apart.max()),
        "moved": max(float((now[name] - first[name]).abs().max()) for name in now),
        "resumed": same(now, resumed(recipe, folder)),
        "reward_failures": step["reward_failures"],
        "truncated_fraction": step["truncated_fraction"],
    }
    (folder / "result.json").write_text(json.dumps(result))
    trainer.generation.shutdown()


def early(response: str, row: dict[str, str]) -> float:
    """Rewards the byte that sorts before others, so that groups have an advantage."""
    return sum(ord(c) for c in response) % 7 / 7


def resumed(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    policy = build_policy(recipe)
    policy.load(folder / "step_1" / "policy")
    return {name: tensor.clone() for name, tensor in policy.stream_weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

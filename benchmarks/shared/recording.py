"""The weights of a plain GRPO training, epoch by epoch, for ``arms.py`` to measure on.

A recording is a folder: ``epoch_K.safetensors`` has the weights at the beginning of epoch K, and
``recording.json`` describes the training. Where adapters alone are trained, the folder ``epoch_K``
has those of every epoch but the first, as peft writes them. A recording is made once, and used
again if it is there. Nothing is measured here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_specrl.trainer.policy_config import model_folder
from nemo_specrl.trainer.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(__file__).resolve().parents[2]
ADAPTER_PREFIX = "base_model.model."
"""What peft puts before the names of the model's parameters."""


@dataclass(frozen=True)
class Task:
    """A task that a policy is trained on.

    Args:
        title: name in tables.
        config: the recipe.
        warm_up: options of scripts/train_tiny_model.py for the initial model, without the number of
            steps; empty: ``model``.
        model: folder of the initial model.
    """

    title: str
    config: str
    warm_up: tuple[str, ...] = ()
    model: str = "examples/models/qwen3-sort"


WORD_PROBLEMS = "word-problems"
SORTING = "examples/configs/grpo_sort_cpu.yaml"
TASKS = {
    "sorting": Task("sorting: one right wording", SORTING),
    # The demo's model, taught to take the letters in any order: as many right wordings as orders,
    # of which the reward prefers none, so that it stays unsure of every step as training goes on.
    "any-order": Task(
        "sorting in any order: many right wordings",
        SORTING,
        warm_up=(
            *("--task", "sorting", "--any-order", "--start", "examples/models/qwen3-sort"),
            *("--error-rate", "0.03"),
        ),
    ),
    WORD_PROBLEMS: Task(
        "word problems: real language",
        "examples/configs/grpo_gsm_smollm2_cpu.yaml",
        model="results/models/smollm2-gsm",  # `make language-model` makes it
    ),
}
TOY_TASKS = [task for task in TASKS if task != WORD_PROBLEMS]
"""Tasks whose models are small enough for tables of many points."""


def recipe_of(task: str, folder: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """The recipe of a task, whose runs and models lie in ``folder``."""
    it = TASKS[task]
    model = (f"policy.model_name={folder / 'model'}",) if it.warm_up else ()
    return load_recipe(
        REPOSITORY / it.config,
        [
            f"policy.model_name={REPOSITORY / it.model}",
            *model,
            f"checkpointing.checkpoint_dir={folder / 'run'}",
            f"logger.log_dir={folder / 'run'}",
            "checkpointing.enabled=false",
            "logger.tensorboard_enabled=false",
            *overrides,
        ],
    )


def record(
    task: str,
    folder: Path,
    epochs: int,
    warm_up_steps: int,
    overrides: tuple[str, ...] = (),
) -> None:
    """Train plainly and write the weights at the beginning of each epoch, unless they are there.

    Args:
        task: a task of ``TASKS``.
        folder: folder of the recording.
        epochs: number of sets of weights.
        warm_up_steps: training steps of the initial model, if it has to be made.
        overrides: overrides of the recipe.
    """
    steps = warm_up_steps if TASKS[task].warm_up else 0
    wanted = {"task": task, "warm_up_steps": steps, "overrides": list(overrides)}
    note = folder / "recording.json"
    if note.exists():
        had = json.loads(note.read_text())
        if any(had[name] != value for name, value in wanted.items()):
            raise SystemExit(
                f"{folder}: a recording with {had}, not {wanted}; give another folder, or remove it"
            )
        if had["epochs"] >= epochs:
            return
        shutil.rmtree(folder)  # of the same training, but too short
    _prepare(task, folder, steps)
    _train(task, folder, epochs, overrides)
    shutil.rmtree(folder / "run", ignore_errors=True)
    note.write_text(json.dumps({**wanted, "epochs": epochs}) + "\n")


def weights(
    folder: Path, epoch: int, temperature: float = 1.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights at the beginning of an epoch, by name.

    The policy's logits are divided by ``temperature``, by a scaled final norm, while the engine
    samples at temperature 1.
    """
    from safetensors.torch import load_file

    adapter = folder / f"epoch_{epoch}"
    loaded = load_file(folder / f"epoch_{0 if adapter.is_dir() else epoch}.safetensors")
    if adapter.is_dir():
        _add_adapter(loaded, adapter)
    loaded.pop("lm_head.weight", None)  # tied to the embedding
    loaded["model.norm.weight"] /= temperature  # the output layer has no bias
    yield from loaded.items()


def _add_adapter(loaded: dict[str, torch.Tensor], folder: Path) -> None:
    """Add a LoRA adapter to the weights, in float32 as for an engine of the training."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    adapter = load_file(folder / "adapter_model.safetensors")
    for name, down in adapter.items():
        if ".lora_A." in name:
            up = adapter[name.replace(".lora_A.", ".lora_B.")]
            to = name.removeprefix(ADAPTER_PREFIX).replace(".lora_A.", ".")
            loaded[to] = loaded[to] + up @ down * (config["lora_alpha"] / config["r"])


def _prepare(task: str, folder: Path, steps: int) -> None:
    """Make the initial model of a task, unless the repository has it."""
    folder.mkdir(parents=True, exist_ok=True)
    options = TASKS[task].warm_up
    if options and not (folder / "model" / "model.safetensors").exists():
        script = REPOSITORY / "scripts" / "train_tiny_model.py"
        command = [sys.executable, str(script), str(folder / "model"), *options]
        subprocess.run([*command, "--steps", str(steps)], check=True, cwd=REPOSITORY)


def _train(task: str, folder: Path, epochs: int, overrides: tuple[str, ...]) -> None:
    from safetensors.torch import save_file

    from nemo_specrl.trainer.loop import Trainer

    plain = (
        "policy.generation.spec_rl.enabled=false",
        "policy.generation.vllm_kwargs.max_num_seqs=64",
        f"grpo.max_num_epochs={max(1, epochs - 1)}",
        *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    )
    recipe = recipe_of(task, folder, (*overrides, *plain))
    trainer = Trainer(recipe)
    first = model_folder(recipe.policy.model_name) / "model.safetensors"
    shutil.copyfile(first, folder / "epoch_0.safetensors")

    def save(epoch: int) -> None:
        if recipe.policy.dtensor_cfg.lora_cfg.enabled:
            trainer.policy.model.save_pretrained(folder / f"epoch_{epoch}")  # type: ignore[attr-defined]
            return
        tensors = {
            name: tensor.detach().contiguous().clone()
            for name, tensor in trainer.policy.stream_weights(recipe.dtype)
        }
        save_file(tensors, folder / f"epoch_{epoch}.safetensors")

    for step in trainer.run():
        print(f"recording {task}: step {step['step']}, reward {step['reward']:.3f}", flush=True)
        if step["step"] % recipe.steps_per_epoch == 0:
            save(step["step"] // recipe.steps_per_epoch)

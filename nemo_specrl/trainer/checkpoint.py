"""Atomic checkpoints of the embedded trainer.

``checkpoint_dir/step_N/`` holds the policy, the value model, the rollout cache and the run's
progress. It is written as ``tmp_step_N`` and renamed after everything in it has reached the disk,
as in NeMo-RL (nemo_rl/utils/checkpoint.py).

Seeds are derived from the run's seed, policy version, prompt and row, so no state of a random
generator has to be saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from nemo_specrl.config import CACHE_FOLDER, knows, validated
from nemo_specrl.errors import CheckpointError, ConfigError, SpecRLError, last_line
from nemo_specrl.files import step_folders, sync
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.trainer.policy_config import model_folder
from nemo_specrl.trainer.recipe import Recipe

__all__ = [
    "CheckpointWriter",
    "Progress",
    "base_model",
    "check_same_recipe",
    "damaged",
    "latest",
    "resume_identity",
    "run_date",
    "save",
    "write_error",
]

FORMAT = 2

LENGTH_KEYS = ("max_num_epochs", "max_num_steps", "max_val_samples")
"""Keys of the algorithm's block that a resumed run may change, beside those in ``val_``."""

PATHS_OF_DATA = ("data.data_path", "data.prompt_file", "data.system_prompt_file")

logger = logging.getLogger(__name__)


class Progress(BaseModel):
    """Progress of a run, as a checkpoint's progress.json has it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int = Field(default=0, ge=0)
    """Number of training steps done; also the policy version."""
    position: int = Field(default=0, ge=0)
    """Number of batches of prompts drawn from the data so far (with dynamic sampling a step may
    draw several)."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """The keys that a resumed run must not change, with their values."""
    put_off: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(
        default_factory=list
    )
    """Prompts that partial rollouts put off (``partial_rollouts.PutOff``)."""
    data: str = ""
    """Hash of the training problems; empty: unknown."""
    model: str = ""
    """Hash of the model's weights, where a resumed run reads them again (:func:`base_model`);
    otherwise empty."""
    date: str = ""
    """ISO date that chat templates are given throughout the run; empty: unknown."""


def latest(folder: Path) -> tuple[Path, Progress] | None:
    """Find the newest checkpoint and read its progress; None if there is no checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    found = step_folders(folder)
    if not found:
        return None
    path = found[-1] / "progress.json"
    try:
        values = json.loads(path.read_bytes())
        if values.pop("format") > FORMAT:
            raise CheckpointError(f"{found[-1]}: written by a newer release of nemo_specrl")
        progress = validated(Progress, values)
        if progress.date:
            date.fromisoformat(progress.date)
    except ConfigError as error:
        raise damaged(found[-1], f"progress.json: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(found[-1], f"progress.json: {type(error).__name__}: {error}") from None
    if f"step_{progress.step}" != found[-1].name:
        raise damaged(found[-1], f"progress.json: is of step {progress.step}")
    return found[-1], progress


def run_date(recipe: Recipe) -> date:
    """The date for chat templates: today's, or in a resumed run that of its start.

    Otherwise every prompt of a template with a date, and its key in the cache, would change at
    midnight.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    made = recipe.checkpointing
    found = latest(made.checkpoint_dir) if made.enabled else None
    return date.fromisoformat(found[1].date) if found and found[1].date else date.today()


def base_model(recipe: Recipe) -> str:
    """Hash of the weights in the model's folder, if a resumed run would need them; or empty.

    It does with adapters, which are added to them, and with a KL penalty, which holds them as its
    reference. Otherwise all weights are in the checkpoint.
    """
    lora = recipe.policy.dtensor_cfg.lora_cfg.enabled
    needed = lora or recipe.loss_fn.reference_policy_kl_penalty
    if not needed or not recipe.checkpointing.enabled:
        return ""
    digest = xxhash.xxh3_128()
    for path in sorted(model_folder(recipe.policy.model_name).glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(2**24):
                digest.update(part)
    return digest.hexdigest()


def damaged(checkpoint: Path, problem: str) -> CheckpointError:
    """Make the error for a damaged checkpoint: what is wrong, and how the run can continue."""
    older = [path for path in step_folders(checkpoint.parent) if path != checkpoint]
    then = f"resume from {older[-1].name}" if older else "begin anew, as there is no other"
    return CheckpointError(f"{checkpoint}: damaged ({problem}); remove this folder to {then}")


def save(
    folder: Path, progress: Progress, write: Callable[[Path], None], *, keep: int | None
) -> Path:
    """Write a checkpoint and remove the oldest ones beyond ``keep``.

    Args:
        folder: ``checkpoint_dir``.
        progress: progress of the run, saved with it.
        write: writes everything else into the folder that it is given.
        keep: number of checkpoints to keep, None for all.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    final = folder / f"step_{progress.step}"
    temporary = folder / f"tmp_step_{progress.step}"
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(mode=0o700, parents=True)  # it holds prompts and rollouts
        write(temporary)
        (temporary / "progress.json").write_text(
            json.dumps({"format": FORMAT, **progress.model_dump()}, indent=1)
        )
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
        if final.exists():  # from a run whose newer or damaged checkpoints were removed
            shutil.rmtree(final)
        temporary.rename(final)
        sync(folder)
    except Exception as error:  # torch and safetensors raise many kinds if a disk fails
        unwritten = error if isinstance(error, SpecRLError) else write_error(final, error)
        shutil.rmtree(temporary, ignore_errors=True)
        raise unwritten from None
    if keep is not None:
        for old in step_folders(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return final


class CheckpointWriter:
    """Writes checkpoints in the background, while the rollouts of the next step are made.

    Args:
        folder: ``checkpoint_dir``.
        keep: number of checkpoints to keep, None for all.
    """

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        self._folder, self._keep = folder, keep
        self._pending: Future[Path] | None = None
        self._waited_s = 0.0

    def start(
        self,
        progress: Progress,
        *,
        copy_cache: Callable[[Path], None],
        save_models: Callable[[Path], None],
    ) -> None:
        """Begin a checkpoint, and return once the cache is copied.

        The models are written while the next rollouts are made. The update after them changes the
        weights: call :meth:`finish` before it.

        Args:
            progress: progress of the run; it may change afterwards.
            copy_cache: writes the cache into the folder that it is given.
            save_models: writes the models into the folder that it is given.
        """
        heartbeat.start("checkpoint")
        started = time.perf_counter()
        copied = threading.Event()

        def write(folder: Path) -> None:
            copy_cache(folder / CACHE_FOLDER)
            copied.set()
            save_models(folder)

        now = progress.model_copy(deep=True)
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = executor.submit(save, self._folder, now, write, keep=self._keep)
        executor.shutdown(wait=False)
        self._pending.add_done_callback(lambda _: copied.set())  # if it fails before the copy
        copied.wait()
        self._waited_s += time.perf_counter() - started

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is complete.

        Raises:
            CheckpointError: it cannot be written.
            PolicyError: a rank of the policy failed while it was written.
        """
        if self._pending is None:
            return
        started = time.perf_counter()
        pending, self._pending = self._pending, None
        pending.result()
        heartbeat.end("checkpoint")
        self._waited_s += time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the writing thread after another error, which is the one to be raised."""
        if self._pending is not None:
            wait([self._pending])

    def take_waited_s(self) -> float:
        """Return the seconds for which the run waited for checkpoints since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited


def write_error(path: Path, error: BaseException) -> CheckpointError:
    """Make the error for a checkpoint, or a part of one, that could not be written: the reason."""
    why = last_line(error)
    with contextlib.suppress(OSError):
        place = next(folder for folder in (path, *path.parents) if folder.exists())
        if shutil.disk_usage(place).free < 2**20:
            why = f"no space left on its disk ({why})"
    return CheckpointError(f"{path}: cannot be written: {why}")


def resume_identity(recipe: Recipe) -> dict[str, Any]:
    """The keys that a resumed run must not change: all except length, evaluation, folders, layout.

    In the Megatron block only ``enabled`` counts: a Megatron checkpoint can be loaded in any
    layout, but not by the torch policy.
    """
    values = recipe.model_dump(mode="json", exclude={"checkpointing", "logger", "cluster"})
    values["policy"]["megatron_cfg"] = {"enabled": recipe.policy.megatron_cfg.enabled}
    block = values["grpo"] or values["ppo"]
    for name in [n for n in block if n.startswith("val_") or n in LENGTH_KEYS]:
        del block[name]
    del values["policy"]["generation"]["spec_rl"]["cache"]["dir"]
    del values["data"]["validation"]
    values["data"]["num_prompts"] = recipe.data.prompts  # a release may change the default
    return values


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat


def check_same_recipe(folder: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Refuse to resume a run with another recipe.

    Another release may have more keys, or fewer. A key that is new must have its default; a key
    that this release no longer has is logged.

    Args:
        folder: the checkpoint.
        before: :func:`resume_identity` of the recipe with which it was made.
        recipe: the present recipe.

    Raises:
        CheckpointError: they differ; the message names the first key that does.
    """
    old, new = _flat(before), _flat(resume_identity(recipe))
    for name in sorted(old.keys() | new.keys()):
        if name in new and name not in old and _is_default(recipe, name):
            continue
        if name in old and name not in new and not knows(Recipe, name):
            value = f"{name} = {old[name]!r}"
            logger.warning("%s: was made with %s, which this release does not have", folder, value)
            continue
        if name in PATHS_OF_DATA:  # what the files hold is compared by Progress.data
            continue
        if old.get(name) != new.get(name):
            raise CheckpointError(
                f"{folder}: was made with {name} = {old.get(name)!r}, the recipe says "
                f"{new.get(name)!r}; set it back, or choose another checkpointing.checkpoint_dir"
            )


def _is_default(recipe: Recipe, name: str) -> bool:
    """Whether leaving the key out of the recipe changes nothing."""
    values = recipe.model_dump(mode="json")
    *blocks, key = name.split(".")
    inner = values
    for block in blocks:
        inner = inner.get(block, {})
    if key not in inner:
        return False
    del inner[key]
    try:
        return validated(Recipe, values) == recipe
    except ConfigError:  # the key is required
        return False

"""Checks of a recipe on this machine before models and engines are loaded.

Loading takes a minute; that a folder is a file, or that the model's context is shorter than
requested, can be found within a second. Nothing here needs torch or vLLM, or leaves files behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_specrl.errors import ConfigError
from nemo_specrl.trainer.policy_config import read_model_config, tokenizer_file
from nemo_specrl.trainer.recipe import Recipe

__all__ = ["LOCK", "check_start", "only_run"]

LOCK = ".lock"
"""File in the folders of a run, locked while the run lasts."""


def check_start(recipe: Recipe) -> None:
    """Refuse a recipe that cannot run on this machine; its prompts are checked when they are read.

    Raises:
        ConfigError: a folder cannot be written to, or the model does not fit the context length
            or the stop tokens.
    """
    _check_environment()
    _check_model(recipe)
    folders = {"logger.log_dir": recipe.logger.log_dir}
    if recipe.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = recipe.checkpointing.checkpoint_dir
    if recipe.spec_rl.enabled and recipe.spec_rl.cache.dir is not None:
        folders["policy.generation.spec_rl.cache.dir"] = recipe.spec_rl.cache.dir
    textfile, key = recipe.logger.prometheus_textfile, "logger.prometheus_textfile"
    if textfile is not None:
        if textfile.suffix != ".prom" or textfile.is_dir():
            raise ConfigError(f"{key} = {str(textfile)!r}: must be a file ending in .prom")
        folders[key] = textfile.parent
    for key, folder in folders.items():
        _check_folder(key, folder)


@contextlib.contextmanager
def only_run(recipe: Recipe) -> Iterator[None]:
    """Hold the folders of a run against a second one, to the end of the context or the process.

    Where the file system has no locks, nothing is held. Folders in which nothing was written are
    removed in the end.

    Raises:
        ConfigError: another run holds one of them.
    """
    with contextlib.ExitStack() as held:
        for folder in sorted({recipe.run_dir, recipe.logger.log_dir}):
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / LOCK).open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{folder}: another run is going on here; wait for its end, or set another "
                    "checkpointing.checkpoint_dir and logger.log_dir"
                ) from None
            except OSError:  # no locks here
                pass
            held.callback(_remove_empty, folder)
        yield


def _remove_empty(folder: Path) -> None:
    """Remove the file of a lock that this process holds, and the folder if it is empty then."""
    with contextlib.suppress(OSError):
        (folder / LOCK).unlink()
        folder.rmdir()


def _check_environment() -> None:
    """Refuse an engine in a process of its own, where vLLM cannot take the trainer's weights."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if (value := os.environ.get(name, "0")) != "0":
        raise ConfigError(f"{name} = {value[:100]!r}: must be 0, or unset, for training")


def _check_folder(key: str, folder: Path) -> None:
    """Refuse a folder that cannot be created or written to."""
    try:
        parents = folder.absolute().parents
        place = next(p for p in (folder, *parents) if p.exists() or p.is_symlink())
        if not place.is_dir():
            raise NotADirectoryError(0, f"{place} is no folder")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(folder)!r}: cannot be written to ({error.strerror}); give a folder "
            "that can"
        ) from None


def _check_model(recipe: Recipe) -> None:
    policy, generation = recipe.policy, recipe.policy.generation
    config = read_model_config(policy.model_name)
    if recipe.spec_rl.enabled or generation.stop_strings:
        tokenizer_file(policy.model_name)
    length, key = generation.vllm_cfg.max_model_len, "policy.generation.vllm_cfg.max_model_len"
    most = config.get("max_position_embeddings")
    if isinstance(most, int) and length > most and not _extends_positions(config):
        raise ConfigError(f"{key} = {length}: must be at most the model's {most} positions")
    vocabulary = config.get("vocab_size")
    for token in generation.stop_token_ids or ():
        if isinstance(vocabulary, int) and token >= vocabulary:
            raise ConfigError(
                f"policy.generation.stop_token_ids = {generation.stop_token_ids}: {token} is no "
                f"token of the model's {vocabulary}"
            )


def _extends_positions(config: dict[str, Any]) -> bool:
    """Whether a model's rotary embedding reaches beyond ``max_position_embeddings``.

    Transformers 5 writes ``rope_parameters`` with every model, of one type or, as for Gemma 3, of
    one for each type of layer; ``default`` extends nothing.
    """
    found = config.get("rope_parameters")
    found = found if isinstance(found, dict) else {}
    kinds = [each.get("rope_type") for each in (found, *found.values()) if isinstance(each, dict)]
    return bool(config.get("rope_scaling")) or any(k not in (None, "default") for k in kinds)

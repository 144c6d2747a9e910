"""Recorded rollouts of a run, for the simulator: tokens, log-probs, and the seconds they took.

Two kinds of runs leave enough on disk:

- NeMo-RL, with or without the plug-in: ``train_data_step<N>.jsonl`` has each row's tokens and
  log-probs; ``timing/train/generation`` in TensorBoard's event files has the seconds.
- The embedded trainer with ``spec_rl.enabled``: the rollout cache has the rollouts,
  ``metrics.jsonl`` the seconds, and the checkpoint the recipe.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import validated
from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import METRICS, left_out, read_lines, read_metrics
from nemo_specrl.rollout import Finish, Rollout, prompt_key

__all__ = ["RecordedRun", "RecordedSample", "read_run"]

GENERATION_TAG = "timing/train/generation"
ACCEPTANCE_TAG = "vllm/spec_acceptance_length"
"""End of what NeMo-RL itself calls the tokens of a row and step, where an engine drafts."""
_STEP_FILE = re.compile(r"train_data_step(\d+)\.jsonl")
_COLUMNS = ("token_ids", "token_loss_mask", "input_lengths", "generation_logprobs")

logger = logging.getLogger(__name__)


class RecordedSample(NamedTuple):
    """A recorded rollout.

    Args:
        key: key of its prompt.
        prompt: number of tokens of the prompt.
        tokens: tokens of the response, int32 ``[n]``.
        logprobs: their log-probs under the policy that sampled them, float32 ``[n]``, nats. None:
            not recorded, as in the cache of a lossless run.
    """

    key: bytes
    prompt: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None

    @property
    def known_logprobs(self) -> npt.NDArray[np.float32]:
        """The log-probs, of a sample that has them."""
        assert self.logprobs is not None
        return self.logprobs


@dataclass(frozen=True)
class RecordedRun:
    """What a run left on disk.

    Args:
        steps: the rollouts of each step, the oldest step first; a group's are contiguous.
        seconds: duration of each step's rollout phase, seconds; NaN where not known.
        preset: preset with which it ran; ``plain`` without speculation.
        max_num_seqs: number of rows that an engine ran at once, if it was recorded.
        max_draft_tokens: ``draft.max_tokens`` of its recipe, if it was recorded.
    """

    steps: list[list[RecordedSample]]
    seconds: npt.NDArray[np.float64]
    preset: str = "plain"
    max_num_seqs: int | None = None
    max_draft_tokens: int | None = None


def read_run(folder: Path) -> RecordedRun:
    """Read what a run left on disk.

    For NeMo-RL, the files of the newest epoch are read, of the two newest epochs where the run
    drafted, and of the step before them. Rows that are damaged, or have no response, are left out
    with a warning.

    Raises:
        ConfigError: the folder holds no recorded rollouts, or a package to read them is missing.
        CacheError: the rollout cache cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    files = sorted(
        (int(match[1]), path)
        for path in folder.rglob("train_data_step*.jsonl")
        if (match := _STEP_FILE.fullmatch(path.name))
    )
    if files:
        return _read_nemo_rl(folder, files)
    if (folder / METRICS).is_file():
        return _read_embedded(folder)
    raise ConfigError(
        f"{folder}: neither train_data_step<N>.jsonl of NeMo-RL (written unless "
        "env.should_log_nemo_gym_responses is true) nor metrics.jsonl of nemo-specrl train"
    )


def _read_nemo_rl(folder: Path, files: list[tuple[int, Path]]) -> RecordedRun:
    steps: dict[int, list[RecordedSample]] = {}
    seconds, preset = _tensorboard(folder)
    # Costs are fitted to steps whose seconds and drafts are both known.
    epochs = 1 if preset == "plain" else 2
    seen: Counter[bytes] = Counter()
    damaged: list[str] = []
    for number, path in reversed(files):
        try:
            samples, wrong = read_lines(path, _sample)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        damaged += [f"{path.name}, {line}" for line in wrong]
        several = samples.count(None)
        if several:
            raise ConfigError(f"{path}: {several} rows have several turns, which are not simulated")
        steps[number] = [sample for sample in samples if sample is not None]
        if not steps[number]:  # the run ended while the file was written
            del steps[number]
            continue
        keys = {sample.key for sample in steps[number]}
        if len(steps) > 1 and all(seen[key] >= epochs for key in keys):
            break
        seen.update(keys)
    if not steps:
        raise ConfigError(f"{folder}: no row with {', '.join(_COLUMNS)} ({[*damaged, 'empty'][0]})")
    if damaged:
        logger.warning("%s", left_out(folder, damaged))
    numbers = sorted(steps)
    return RecordedRun(
        [steps[number] for number in numbers],
        np.array([seconds.get(number, np.nan) for number in numbers]),
        preset,
    )


def _sample(line: str) -> RecordedSample | None:
    """Parse a line of ``train_data_step<N>.jsonl``, in which each value is a list of one.

    Returns:
        the sample; None for a row with several turns.

    Raises:
        ValueError: the line is not such a row; the message says what is wrong with it.
    """
    try:
        row = json.loads(line)
        tokens, mask, [length], logprobs = (np.ravel(row[name]) for name in _COLUMNS)
        sampled = np.flatnonzero(mask[: int(length)])
        shortest = min(len(tokens), len(logprobs))
        tokens, logprobs = tokens.astype(np.int64), logprobs.astype(np.float32)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ValueError(f"not a row with {', '.join(_COLUMNS)}") from None
    if not len(sampled):
        raise ValueError("no response")
    begin, end = int(sampled[0]), int(sampled[-1]) + 1
    response = tokens[begin:end]
    if end > shortest or (response < 0).any() or not np.isfinite(logprobs[begin:end]).all():
        raise ValueError("a token or log-prob of the response is missing or invalid")
    if end - begin != len(sampled):
        return None
    return RecordedSample(
        prompt_key(tokens[:begin]), begin, response.astype(np.int32), logprobs[begin:end]
    )


def _tensorboard(folder: Path) -> tuple[dict[int, float], str]:
    """Return seconds of generation by step, and the preset, from event files if there are any.

    Raises:
        ConfigError: there are event files, and tensorboard is not installed. Without reading them,
            a run with drafts would be mistaken for a plain one.
    """
    seconds: dict[int, float] = {}
    tags: set[str] = set()
    events = sorted(p for p in folder.rglob("events.out.tfevents.*") if p.is_file())
    if events:
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            raise ConfigError(
                f"{folder}: whether this run was a plain one is in {events[0].name}, which needs "
                "tensorboard to be read: pip install tensorboard"
            ) from None
        for path in events:
            accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
            found = set(accumulator.Tags()["scalars"])
            tags |= found
            if GENERATION_TAG in found:
                seconds |= {e.step: e.value for e in accumulator.Scalars(GENERATION_TAG)}
    if f"train/{metric.REUSED_TOKEN_FRACTION}" in tags:
        return seconds, "reuse"
    drafts = (metric.TOKENS_PER_STEP, ACCEPTANCE_TAG)
    return seconds, "lossless" if any(tag.endswith(drafts) for tag in tags) else "plain"


def _read_embedded(folder: Path) -> RecordedRun:
    """Return the steps whose rollouts the newest checkpoint's cache still has, the newest steps.

    The cache keeps a prompt's responses in order, and the log names each step's prompts: the last
    step took the newest responses, and so on backwards.
    """
    from nemo_specrl.cache.inspection import open_source
    from nemo_specrl.trainer import checkpoint
    from nemo_specrl.trainer.data.dataset import open_dataset
    from nemo_specrl.trainer.data_config import DataConfig
    from nemo_specrl.trainer.policy_config import PolicyConfig

    found = checkpoint.latest(folder)
    if found is None:
        raise ConfigError(
            f"{folder}: no checkpoint here, which has the recipe and the rollouts of nemo-specrl "
            "train, and no train_data_step<N>.jsonl, which has the rollouts of NeMo-RL"
        )
    path, progress = found
    recipe = progress.recipe
    generation = recipe["policy"]["generation"]
    if not generation["spec_rl"]["enabled"]:
        raise ConfigError(
            f"{folder}: a plain run keeps no rollouts; give one with spec_rl.enabled=true"
        )
    data, policy = validated(DataConfig, recipe["data"]), validated(PolicyConfig, recipe["policy"])
    day = date.fromisoformat(progress.date) if progress.date else None
    prompts = [problem.prompt for problem in open_dataset(data, policy, 0, day).training]
    keys = [prompt_key(prompt) for prompt in prompts]
    left: dict[bytes, list[Rollout]] = defaultdict(list)  # the newest first
    with open_source(path) as source:
        for rollout in source.rollouts:
            if isinstance(rollout, Rollout) and rollout.finish is not Finish.PARTIAL:
                left[rollout.key].append(rollout)
    group = (recipe["grpo"] or recipe["ppo"])["num_generations_per_prompt"]
    steps: list[list[RecordedSample]] = []
    seconds: list[float] = []
    for row in reversed(read_metrics(folder / METRICS)):
        if row[metric.STEP] > progress.step:
            continue
        drawn = [int(i) for i in row[metric.PROMPTS]]
        if any(len(left[keys[i]]) < group for i in drawn):
            break
        step = []
        for i in drawn:
            newest, left[keys[i]] = left[keys[i]][:group], left[keys[i]][group:]
            step += [
                RecordedSample(keys[i], len(prompts[i]), r.tokens, r.logprobs)
                for r in reversed(newest)
            ]
        steps.insert(0, step)
        seconds.insert(0, row.get(metric.ROLLOUT_S) or np.nan)
    if not steps:
        raise ConfigError(f"{path}: its cache does not have all rollouts of the last step")
    return RecordedRun(
        steps,
        np.array(seconds),
        generation["spec_rl"]["preset"],
        generation["vllm_kwargs"].get("max_num_seqs"),
        generation["spec_rl"]["draft"]["max_tokens"],
    )

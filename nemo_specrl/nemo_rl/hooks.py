"""Everything that the plug-in wraps around NeMo-RL's policy, logger and checkpoint manager.

``setup`` of NeMo-RL's algorithms returns these objects and the trainers call them in every step.
Each of their methods below is wrapped once, and does these things in this order:

``policy.train(batch)``
    1. NeMo-Gym: the batch's conversations are put into the cache, once, however often the batch is
       trained on
    2. PPO: the drift monitor compares the batch's rows, likewise once
    3. ``clip_anchor: birth``: the log-probs from which reused tokens start are replaced, in a copy
    4. NeMo-RL's method

``checkpointer.begin_finalization``, ``finalize_checkpoint``
    1. the cache, and then the monitor's state, are written into the step's temporary folder
    2. NeMo-RL's method, which renames that folder

``logger.log_batched_dict_as_jsonl(rows)``
    1. NeMo-RL's method
    2. GRPO: the drift monitor compares the rows, and its metrics are logged

``logger.log_metrics(metrics)``
    1. with prefix ``train``: PPO's monitor adds its metrics.
       With prefix ``timing/train``, which every trainer logs last in a step: the engines' counts
       are logged under ``train``, their times are added, the step's records are dropped, the
       step's metrics go to metrics.jsonl and to Ray's endpoint for Prometheus, and under
       ``ft_launcher`` or a batch script, its monitor gets a heartbeat
    2. NeMo-RL's method

The single controller trains on a step's batch in parts that are in the data plane. It calls
:meth:`Hooks.take_part` with each part and :meth:`Hooks.end_batch` after the last, instead of the
first of the methods above (:mod:`.single_controller`).
"""

from __future__ import annotations

import copy
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.monitoring import names as metric
from nemo_specrl.nemo_rl import job_state
from nemo_specrl.nemo_rl.birth_anchor import anchored_logprobs
from nemo_specrl.nemo_rl.context import RunContext
from nemo_specrl.nemo_rl.conversations import conversations
from nemo_specrl.nemo_rl.drift_monitor import StepMonitor
from nemo_specrl.nemo_rl.metrics_log import StepLog, metrics_file
from nemo_specrl.nemo_rl.rollout_metadata import MetadataTable
from nemo_specrl.rollout import Rollout

__all__ = ["Hooks", "make_hooks"]

TRAIN, VALIDATION, END_OF_STEP = "train", "validation", "timing/train"

logger = logging.getLogger(__name__)


class Generation(Protocol):
    """The methods of ``SpecVllmGeneration`` that the hooks call."""

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float]] | None:
        """Return counts and seconds since the last call; None once the generation is shut down."""

    def save_cache(self, folder: Path) -> None:
        """Write the cache into a checkpoint."""

    def store(self, rollouts: list[Rollout]) -> None:
        """Put rollouts into the cache that no engine has put there."""


class Hooks:
    """The plug-in's part in the trainer's calls to policy, logger and checkpoint manager.

    Args:
        generation: the run's generation.
        records: records of the rollouts of each step.
        monitor: the drift monitor, or None if it is disabled.
        anchor_at_birth: whether ``clip_anchor`` is ``birth``.
        rewards_in_batch: whether the batches on which the policy is trained have rewards, as PPO's
            do; the monitor then compares these instead of the logged rows.
        log: log of the run's steps.
        served: whether conversations are led over HTTP, and come back in the batches.
    """

    def __init__(
        self,
        generation: Generation,
        records: MetadataTable,
        monitor: StepMonitor | None,
        *,
        anchor_at_birth: bool,
        rewards_in_batch: bool,
        log: StepLog,
        served: bool = False,
    ) -> None:
        self._generation = generation
        self._records = records
        self._monitor = monitor
        self._anchor_at_birth = anchor_at_birth
        self._rewards_in_batch = rewards_in_batch
        self._batch: weakref.ref[Any] | None = None
        self._anchored: torch.Tensor | None = None
        self._compared: dict[str, float] = {}
        self._rows: dict[str, list[Any]] = {}
        self._log = log
        self._served = served
        self._uncached = 0  # conversations of the step that are not in the cache
        self._keeps_records = monitor is not None or anchor_at_birth or served

    def install(self, policy: Any, logger: Any, checkpointer: Any) -> None:
        """Wrap the methods of the three objects."""
        compares = self._monitor is not None and self._rewards_in_batch
        if self._anchor_at_birth or compares or self._served:
            self._train = policy.train
            policy.train = _WrappedTrain(self.train, policy.train)
        self.install_logger(logger)
        if self._monitor is not None and not self._rewards_in_batch:
            self._log_rows = logger.log_batched_dict_as_jsonl
            logger.log_batched_dict_as_jsonl = self.log_rows
        for name in ("begin_finalization", "finalize_checkpoint"):  # main has both, v0.7.0 one
            if hasattr(checkpointer, name):
                setattr(checkpointer, name, self._finalizing(getattr(checkpointer, name)))

    def install_logger(self, logger: Any) -> None:
        """Wrap the method through which the logger gets metrics."""
        self._log_metrics = logger.log_metrics
        logger.log_metrics = self.log_metrics

    def train(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``policy.train``."""
        if self._batch is None or self._batch() is not batch:  # else PPO's next pass over it
            self._batch = weakref.ref(batch)
            if self._served:
                self._store_conversations(batch)
            if self._monitor is not None and self._rewards_in_batch:
                self._compared = self._monitor.compare_batch(batch)
            if self._anchor_at_birth:
                self._anchored = anchored_logprobs(batch, self._records)
        if self._anchored is not None:
            batch = copy.copy(batch)  # the trainer continues to use its own columns
            batch["prev_logprobs"] = self._anchored
        return self._train(batch, *args, **kwargs)

    def take_part(self, batch: Any) -> torch.Tensor | None:
        """Look at a part of a step's batch before the policy is trained on it.

        Args:
            batch: whole groups, with the columns that the drift monitor reads
                (:attr:`.StepMonitor.columns`), ``generation_logprobs`` and, for an anchor,
                ``prev_logprobs``.

        Returns:
            The required ``prev_logprobs``; None if they remain unchanged.
        """
        if self._served or self._anchor_at_birth:
            self._records.collect()  # its rows may have been made since the previous part
        if self._served:
            self._store_conversations(batch)
        if self._monitor is not None:
            for name, column in self._monitor.columns.items():
                self._rows.setdefault(name, []).extend(batch[column].numpy())
        return anchored_logprobs(batch, self._records) if self._anchor_at_birth else None

    def end_batch(self) -> None:
        """Compare the rows of the step's batch, all of which have been taken."""
        rows, self._rows = self._rows, {}
        if self._monitor is not None and rows.get("rewards"):
            self._compared = self._monitor.compare(rows)

    def log_rows(self, rows: Any, filename: str) -> Any:
        """Stand in for ``logger.log_batched_dict_as_jsonl``."""
        result = self._log_rows(rows, filename)
        step = re.fullmatch(r"train_data_step(\d+)\.jsonl", filename)
        if self._monitor is not None and step is not None and "token_ids" in rows:
            compared = self._monitor.compare(rows)
            if compared:
                self._log_own(compared, int(step[1]))
        return result

    def log_metrics(self, metrics: Any, step: int, prefix: str | None = "", **kwargs: Any) -> None:
        """Stand in for ``logger.log_metrics``."""
        if prefix == TRAIN:
            self._log.note_trainer(metrics)
            self._log.note(self._compared)
            metrics = {**metrics, **self._compared}
            self._compared = {}
        elif prefix == VALIDATION:
            self._log.note_validation(metrics, step)
        elif prefix == END_OF_STEP:
            heartbeat.heartbeat()
            job_state.heartbeat()
            if self._keeps_records:
                self._records.end_step()
            taken = self._generation.take_metrics()
            if taken is not None:
                counts, seconds = taken
                if self._served:
                    counts = {**counts, metric.UNCACHED_CONVERSATIONS: float(self._uncached)}
                    self._uncached = 0
                self._log_own(counts, step)
                metrics = {**metrics, **seconds}
            self._log.end_step(step, metrics)
        self._log_metrics(metrics, step, prefix, **kwargs)

    def _store_conversations(self, batch: Any) -> None:
        try:
            known = conversations(batch, self._records)
            self._uncached += len(batch["input_ids"]) - len(known)
            self._generation.store(known)
        except Exception as error:  # the cache can only cost speed, never a step
            logger.warning("the step's conversations are not in the rollout cache: %s", error)

    def _log_own(self, metrics: dict[str, float], step: int) -> None:
        self._log_metrics(metrics, step, prefix=TRAIN)
        self._log.note(metrics)

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs from the plug-in; failures do not harm the checkpoint."""
        try:
            self._generation.save_cache(folder)
            if self._monitor is not None:
                self._monitor.save(folder)
        except Exception as error:  # the cache can only cost speed, never a checkpoint
            logger.warning("%s was not written (%s); resuming from it starts cold", folder, error)

    def _finalizing(self, original: Any) -> Any:
        def finalize(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            self.save(Path(checkpoint_path) / CACHE_FOLDER)
            return original(checkpoint_path, *args, **kwargs)

        return finalize


class _WrappedTrain:
    """Stands in for ``policy.train`` in this process; in a copy of the policy it is NeMo-RL's.

    A generation whose weight synchronizer holds the policy is sent to the asynchronous collector,
    which does not train; hooks, with their open files, cannot be sent.

    Args:
        train: the hooks' method.
        original: the policy's own method.
    """

    def __init__(self, train: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._train, self._original = train, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._train(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._original,)


def _itself(train: Callable[..., Any]) -> Callable[..., Any]:
    return train


def make_hooks(
    run: RunContext,
    generation: Any,
    *,
    loader_length: int,
    total_steps: int,
    rewards_in_batch: bool,
) -> Hooks:
    """Make the plug-in's part in a run's steps, not yet installed.

    Args:
        run: the run, from its recipe.
        generation: object with the methods that ``Hooks``, the records and the drift monitor call.
        loader_length: number of batches in a pass over the training data.
        total_steps: number of steps after which the run ends.
        rewards_in_batch: whether the batches trained on have rewards (``Hooks``).
    """
    records = MetadataTable(generation.take_records, later=run.trains_later)
    monitor = None
    if run.spec_rl.monitors_drift:
        monitor = StepMonitor(
            records,
            run.spec_rl,
            loader_length=loader_length,
            logprobs=run.policy_logprobs,
            set_fresh_fraction=generation.set_fresh_fraction,
            state=run.checkpoint and run.checkpoint / CACHE_FOLDER,
        )
    return Hooks(
        generation,
        records,
        monitor,
        anchor_at_birth=run.spec_rl.clip_anchor == "birth",
        rewards_in_batch=rewards_in_batch,
        log=StepLog(run.label, metrics_file(run), total_steps),
        served=run.served,
    )

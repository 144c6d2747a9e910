"""What the plug-in does in each step: metrics, and the cache in the checkpoint.

NeMo-RL's trainers call two objects that are wrapped here:

``logger.log_metrics(metrics)``
    With prefix ``timing/train``, which every trainer logs last in a step, the counts of engines and
    cache are logged under ``train``, the step's record goes to metrics.jsonl and to Ray's endpoint
    for Prometheus, and a launcher or batch script gets its heartbeat.

``checkpointer.begin_finalization(path, wait_fn)``
    The cache is written into the step's temporary folder while training goes on. NeMo-RL renames
    that folder in a thread, once ``wait_fn`` has returned, which now waits for the cache, too.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from nemo_specrl.cache.cluster.checkpoint import ClusterCheckpoint
from nemo_specrl.cache.local import store_metrics
from nemo_specrl.cache.store import StoreStats
from nemo_specrl.config import CACHE_FOLDER
from nemo_specrl.monitoring import heartbeat
from nemo_specrl.monitoring import names as metric
from nemo_specrl.nemo_rl import compat, job_state
from nemo_specrl.nemo_rl.metrics import Alarm, StepLog
from nemo_specrl.nemo_rl.recipe import Run

__all__ = ["FROM_ENGINES", "StepHooks", "restore"]

FROM_ENGINES = {
    metric.HISTORIES_FOUND,
    metric.HISTORIES_LATE,
    metric.HISTORIES_REFUSED,
    metric.RESPONSES_KEPT,
    metric.RESPONSES_DROPPED,
    metric.ENGINE_FAILURES,
    metric.REFITS_WITHOUT_ACCEPTANCE,
}
"""The engines' counts that are logged, as they grew since the last step's end; they are some
seconds old."""
TRAIN, VALIDATION, END_OF_STEP = "train", "validation", "timing/train"

SHARD_SECONDS, SETTLED_SECONDS = 120.0, 3.0
"""How long a resumed run waits for the shards of the engines' nodes: at most so long, and until
their number has been the same for so long."""

logger = logging.getLogger(__name__)


class Generation(Protocol):
    """The methods of ``SpecVllmGeneration`` that are called in a step."""

    def take_metrics(self) -> dict[str, float]:
        """Return what the engines did since the last call."""

    def save_lengths(self, folder: Path) -> None:
        """Write what is known about lengths into a checkpoint."""


class StepHooks:
    """The plug-in's part in the trainer's calls to logger and checkpoint manager.

    Args:
        run: the training.
        generation: its generation, or a copy of it.
        in_thread: whether engines and cache are asked in a thread, because the trainer runs in an
            event loop. The step's metrics are then logged a little later.
    """

    def __init__(self, run: Run, generation: Generation, *, in_thread: bool = False) -> None:
        self._run, self._generation, self._cache = run, generation, cache_of(run)
        self._log, self._alarm = StepLog(run), Alarm()
        self._thread = ThreadPoolExecutor(1) if in_thread else None
        self._prompts: int | None = None
        self._once = False  # each prompt of the data is met once
        self._counted: dict[str, float] = {}

    def install(self, parts: Iterable[Any]) -> None:
        """Wrap logger and checkpoint manager, which are among the parts of a run."""
        parts = list(parts)
        self._prompts = _prompts_of(parts)
        self._once = self._run.epochs <= 1 or self._run.drawn <= (self._prompts or 0)
        if self._once:
            print(
                "nemo_specrl: the run passes over its data once at most (max_num_epochs, "
                "max_num_steps): a prompt that it holds once drafts from its siblings alone; "
                "checkpoints get the cache from when a prompt has been met again",
                flush=True,
            )
        self.install_logger(compat.first_of(parts, compat.LOGGER))
        self.install_checkpointer(compat.first_of(parts, compat.CHECKPOINT_MANAGER))

    def install_logger(self, logger: Any) -> None:
        """Wrap the method through which the logger gets metrics."""
        self._log_metrics = logger.log_metrics
        logger.log_metrics = self.log_metrics

    def install_checkpointer(self, checkpointer: Any) -> None:
        """Wrap the method that ends a checkpoint."""
        original = checkpointer.begin_finalization

        @functools.wraps(original)
        def begin_finalization(checkpoint_path: Any, wait_fn: Any = None) -> Any:
            written = self._save(Path(checkpoint_path) / CACHE_FOLDER)

            def wait() -> None:
                if wait_fn is not None:
                    wait_fn()
                written()

            return original(checkpoint_path, wait_fn=wait)

        checkpointer.begin_finalization = begin_finalization

    def log_metrics(self, metrics: Any, step: int, prefix: str | None = "", **kwargs: Any) -> None:
        """Stand in for ``logger.log_metrics``."""
        if prefix == TRAIN:
            self._log.note_trainer(metrics)
        elif prefix == VALIDATION:
            self._log.note_validation(metrics, step)
        elif prefix == END_OF_STEP:
            heartbeat.heartbeat()
            job_state.heartbeat()
            if self._thread is None:
                self._end_step(step, metrics)
            else:
                self._thread.submit(self._end_step, step, metrics)
        self._log_metrics(metrics, step, prefix, **kwargs)

    def _end_step(self, step: int, seconds: Any) -> None:
        try:
            own = self._generation.take_metrics()
            shards = [StoreStats(**stats) for stats in self._cache.stats().values()]  # type: ignore[arg-type]
            own |= {metric.CACHE_NODES: float(len(shards)), **store_metrics(shards)}
            counts = self._cache.engine_counts()
            for name in FROM_ENGINES:  # engines that start again begin at zero
                own[name] = max(0.0, counts.get(name, 0.0) - self._counted.get(name, 0.0))
            self._counted = counts
            self._alarm.look_at(own)
            self._log_metrics(own, step, prefix=TRAIN)
            self._log.end_step(step, own, seconds)
        except Exception as error:  # metrics must not end a training
            logger.warning("spec_rl: the metrics of step %d are missing: %s", step, error)

    def _save(self, folder: Path) -> Callable[[], None]:
        """Begin to write the cache; return what waits for it. Neither harms the checkpoint."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._generation.save_lengths(folder)
            if not self._once or self._counted.get(metric.HISTORIES_FOUND):
                self._cache.save(folder, self._prompts)
        except Exception as error:  # the cache can only cost speed
            logger.warning("%s was not written (%s); resuming from it starts cold", folder, error)

        def wait() -> None:
            try:
                self._cache.wait()
            except Exception as error:  # likewise
                logger.warning("%s is not complete: %s", folder, error)

        return wait


def cache_of(run: Run) -> ClusterCheckpoint:
    """The run's cache, on all nodes, as the driver sees it."""
    vocabulary = run.spec_rl.cache.vocabulary
    assert vocabulary is not None  # run_of computes it
    return ClusterCheckpoint(run.spec_rl.cache, vocabulary)


def restore(run: Run) -> None:
    """Give the cache of the checkpoint from which a run resumes to the nodes of its engines."""
    if run.checkpoint is None or not (folder := run.checkpoint / CACHE_FOLDER).is_dir():
        return
    cache = cache_of(run)
    until, nodes, settled = time.monotonic() + SHARD_SECONDS, 0, 0.0
    while time.monotonic() < until and settled < SETTLED_SECONDS:
        time.sleep(1)
        before, nodes = nodes, len(cache.stats())
        settled = settled + 1 if nodes and nodes == before else 0
    print(f"nemo_specrl: {cache.restore(folder)} responses from {folder}", flush=True)


def _prompts_of(parts: Iterable[Any]) -> int | None:
    """Number of prompts of the training data, whose loader comes before that of validation."""
    for part in parts:
        data = getattr(part, "dataset", None)
        if data is not None and hasattr(part, "state_dict"):
            return len(data) if hasattr(data, "__len__") else None
    return None

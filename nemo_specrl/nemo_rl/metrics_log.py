"""The steps of a NeMo-RL run in the plug-in's own log: metrics.jsonl, and Ray's endpoint.

What NeMo-RL's trainer logs in several calls becomes one record per step, with the names used in the
embedded trainer's records. Pages and plots of a run are made from these records.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring import prometheus
from nemo_specrl.monitoring.metrics_file import METRICS, MetricsFile
from nemo_specrl.nemo_rl.context import RunContext
from nemo_specrl.nemo_rl.metrics import step_record

__all__ = ["StepLog", "metrics_file"]

FROM_TRAINER = (metric.REWARD, metric.LOSS, metric.GRAD_NORM)
"""The metrics taken from NeMo-RL's own under ``train``."""

logger = logging.getLogger(__name__)


class StepLog:
    """Collects the metrics of a step, and writes its record when the step has ended.

    A disk that accepts no line does not end a training; one warning is logged until a line is
    written.

    Args:
        label: label of the run in Prometheus.
        file: the run's metrics.jsonl; None: records go only to Ray's endpoint.
        total_steps: number of steps after which the run will end; None if that is not known.
    """

    def __init__(
        self, label: str, file: MetricsFile | None = None, total_steps: int | None = None
    ) -> None:
        self._file, self._failed = file, False
        self._always = {} if total_steps is None else {metric.TOTAL_STEPS: total_steps}
        self._values: dict[str, float] = {}
        self._accuracy: tuple[int, float] | None = None
        self._endpoint = prometheus.RayEndpoint(label)
        self._endpoint.write(prometheus.started())

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add the plug-in's own metrics of the step."""
        self._values.update(metrics)

    def note_trainer(self, metrics: Mapping[str, Any]) -> None:
        """Add what NeMo-RL logged about the step under ``train``."""
        self._values |= {
            name: float(metrics[name])
            for name in FROM_TRAINER
            if isinstance(metrics.get(name), Real)
        }

    def note_validation(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add the result of a validation after this many steps."""
        if isinstance(metrics.get("accuracy"), Real):
            self._accuracy = step, float(metrics["accuracy"])

    def end_step(self, step: int, seconds: Mapping[str, Any]) -> None:
        """Write the record of a step.

        Args:
            step: number of the step.
            seconds: what is logged under ``timing/train``.
        """
        if self._accuracy is not None:
            after, accuracy = self._accuracy
            at_start = "" if after == step else metric.AT_START  # before this process's first step
            self._values[metric.HELDOUT_ACCURACY + at_start] = accuracy
        record = step_record(step, self._always | self._values, seconds)
        self._values, self._accuracy = {}, None
        self._endpoint.write(prometheus.of_step(record))
        if self._file is None:
            return
        try:
            self._file.write(record)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.warning("%s: a step is left out (%s)", self._file.path, error)
            self._failed = True


def metrics_file(run: RunContext) -> MetricsFile | None:
    """Open the metrics.jsonl of a run, in NeMo-RL's ``logger.log_dir``; None if that fails.

    A resumed run continues with the lines up to its checkpoint. NeMo-RL's scripts give each process
    its own log folder (``exp_001``, ``exp_002``, ...), and a checkpoint has the recipe of the
    process that wrote it: a new folder's file begins with the lines of that process.
    """
    before, step = None, 0
    assert run.log_folder is not None  # a training has one
    try:
        if run.checkpoint is not None:
            step = int(run.checkpoint.name.removeprefix("step_"))
            recipe = run.checkpoint / "config.yaml"
            if recipe.is_file():
                logged = yaml.safe_load(recipe.read_text())["logger"]["log_dir"]
                before = Path(logged) / METRICS
        return MetricsFile(run.log_folder, step, before)
    except Exception as error:  # a log must not end a training
        logger.warning(
            "%s: steps are not written (%s: %s)",
            run.log_folder / METRICS,
            type(error).__name__,
            error,
        )
        return None

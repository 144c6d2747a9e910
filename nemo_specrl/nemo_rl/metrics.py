"""The metrics of a step: what engines and cache report, under the names of ``monitoring.names``.

What NeMo-RL's trainer logs in several calls, and what the plug-in adds, becomes one record per step
in the plug-in's own log (metrics.jsonl, and Ray's endpoint for Prometheus), with the names used in
the embedded trainer's records. Pages and plots of a run are made from these records.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring import prometheus
from nemo_specrl.monitoring.metrics_file import METRICS, MetricsFile
from nemo_specrl.nemo_rl.recipe import Run

__all__ = [
    "SLOWER",
    "SLOW_STEPS",
    "Alarm",
    "StepLog",
    "Stragglers",
    "engine_metrics",
    "reuse_metrics",
    "summed",
]

FROM_TRAINER = (metric.REWARD, metric.LOSS, metric.GRAD_NORM)
"""The metrics taken from NeMo-RL's own under ``train``."""
STEP_TIMES = {
    "total_step_time": metric.STEP_S,
    "policy_training": metric.TRAIN_S,
    "generation": metric.ROLLOUT_S,
}
"""The seconds taken from NeMo-RL's own under ``timing/train``."""
PLAIN = {
    metric.ENGINE_DECODED_TOKENS: metric.DECODED_TOKENS,
    metric.ENGINE_RESPONSE_TOKENS: metric.RESPONSE_TOKENS,
}
"""What the embedded trainer's records have in addition to the engines' metrics."""
NOISE = "noise_prefix_tokens"
"""The count of a reuse worker that is no sum."""
ENOUGH_TOKENS, STEPS = 100, 2
"""Draft tokens of a step from which its acceptance means something, and steps before a warning."""

SLOWER, SLOW_STEPS = 1.3, 3
"""An engine is slow that takes so many times the others' median in so many steps on end. Where a
long response holds one up, it is another one in each step."""

logger = logging.getLogger(__name__)


def engine_metrics(grown: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics from the growth of vLLM's own counters, summed over engines.

    An engine without a drafter has no counters of drafts.
    """
    if not grown:
        return {}
    tokens = grown.get("vllm:generation_tokens", 0.0)
    accepted = grown.get("vllm:spec_decode_num_accepted_tokens", 0.0)
    drafted = grown.get("vllm:spec_decode_num_draft_tokens")
    steps = tokens - accepted  # each step of a row yields one token besides the accepted ones
    metrics = {
        metric.ENGINE_RESPONSE_TOKENS: tokens,
        metric.ENGINE_DECODED_TOKENS: tokens,
        metric.DRAFTING: float(drafted is not None),
    }
    if drafted is not None and steps > 0:
        metrics |= {
            metric.TOKENS_PER_STEP: tokens / steps,
            metric.DRAFT_LENGTH: drafted / steps,
            metric.DRAFTED_TOKENS: drafted,
            metric.ACCEPTED_TOKENS: accepted,
        }
        if drafted:
            metrics[metric.DRAFT_ACCEPTED_FRACTION] = accepted / drafted
    return metrics


def summed(engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Add the counters of engines up, without those that count by position."""
    total: dict[str, float] = {}
    for counters in engines:
        for name, value in counters.items():
            if not isinstance(value, list):
                total[name] = total.get(name, 0.0) + value
    return total


def reuse_metrics(calls: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return a step's metrics from the counts of reuse workers (``reuse.metrics.ReuseMetrics``)."""
    from nemo_specrl.reuse.metrics import ReuseMetrics

    noises = [noise for counts in calls if (noise := counts.pop(NOISE, None)) is not None]
    total: dict[str, Any] = summed(calls)
    return ReuseMetrics(**total, noise_prefix_tokens=min(noises, default=None)).as_dict()


class Alarm:
    """Warns once where drafting does not work, which nobody would see but by the time."""

    def __init__(self) -> None:
        self._fruitless = 0
        self._told = False

    def look_at(self, metrics: Mapping[str, float]) -> None:
        """Look at a step's metrics."""
        if metrics.get(metric.DRAFTING) == 0 and not self._told:
            self._told = True
            logger.warning(
                "spec_rl: the engines do not draft; their logs say why, such as a vLLM that this "
                "release does not know"
            )
        enough = metrics.get(metric.DRAFTED_TOKENS, 0) >= ENOUGH_TOKENS
        fruitless = enough and not metrics.get(metric.ACCEPTED_TOKENS)
        self._fruitless = self._fruitless + 1 if fruitless else 0
        if self._fruitless == STEPS:
            logger.warning(
                "spec_rl: no draft token was accepted in %d steps; the engines' weights may not be "
                "those of the policy",
                STEPS,
            )


class Stragglers:
    """Finds engines that are slow step after step, though all have rows of about equal cost."""

    def __init__(self) -> None:
        self._slow: Counter[int] = Counter()

    def look_at(self, seconds: Sequence[float]) -> list[int]:
        """Return the engines that have just turned out to be slow, given the seconds of each."""
        for engine, took in enumerate(seconds):
            others = [*seconds[:engine], *seconds[engine + 1 :]]
            slow = bool(others) and took > SLOWER * median(others)
            self._slow[engine] = self._slow[engine] + 1 if slow else 0
        return [engine for engine, steps in self._slow.items() if steps == SLOW_STEPS]


class StepLog:
    """Collects the metrics of a step, and writes its record when the step has ended.

    A disk that accepts no line does not end a training; one warning is logged until a line is
    written.

    Args:
        run: the training.
    """

    def __init__(self, run: Run) -> None:
        self._file, self._failed = metrics_file(run), False
        self._total = run.steps
        self._values: dict[str, float] = {}
        self._accuracy: tuple[int, float] | None = None
        self._endpoint = prometheus.RayEndpoint(run.label)
        self._endpoint.write(prometheus.started())

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

    def end_step(
        self, step: int, own: Mapping[str, float], seconds: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the record of a step, and return it.

        Args:
            step: number of the step.
            own: the plug-in's metrics of the step.
            seconds: what is logged under ``timing/train``.
        """
        if self._accuracy is not None:
            after, accuracy = self._accuracy
            at_start = "" if after == step else metric.AT_START  # before this process's first step
            self._values[metric.HELDOUT_ACCURACY + at_start] = accuracy
        timed = {name: seconds[key] for key, name in STEP_TIMES.items() if key in seconds}
        record: dict[str, Any] = {metric.STEP: step, metric.TOTAL_STEPS: self._total}
        record |= {**self._values, **own, **timed}
        record |= {name: own[engines] for engines, name in PLAIN.items() if engines in own}
        self._values, self._accuracy = {}, None
        self._endpoint.write(prometheus.of_step(record))
        if self._file is not None:
            try:
                self._file.write(record)
                self._failed = False
            except OSError as error:
                if not self._failed:
                    logger.warning("%s: a step is left out (%s)", self._file.path, error)
                self._failed = True
        return record


def metrics_file(run: Run) -> MetricsFile | None:
    """Open the metrics.jsonl of a run, in NeMo-RL's ``logger.log_dir``; None if that fails.

    A resumed run continues with the lines up to its checkpoint. NeMo-RL's scripts give each process
    its own log folder (``exp_001``, ``exp_002``, ...), and a checkpoint has the recipe of the
    process that wrote it: a new folder's file begins with the lines of that process.
    """
    before, step = None, 0
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

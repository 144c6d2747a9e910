"""A run's metrics for Prometheus, under the same names in a textfile and at Ray's endpoint.

Quantities that add up over steps are counters, so that rates are right whether a step is shorter or
longer than the scrape interval: names of durations end in ``_seconds_total``, those of the counts
in ``names.COUNTS`` in ``_total``. Everything else is a gauge with the newest value. All have the
label ``run`` (https://prometheus.io/docs/practices/naming).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_specrl.monitoring import names as metric

__all__ = ["RayEndpoint", "Samples", "Textfile", "ended", "of_step", "started"]

PREFIX = "nemo_specrl_"
COUNTED = frozenset(name.removeprefix(metric.PREFIX) for name in metric.COUNTS)
Samples = tuple[dict[str, float], dict[str, float]]
"""Gauges, and increments of counters, by their names in Prometheus."""


def started() -> Samples:
    """Return the samples of a run that starts or resumes."""
    now = PREFIX + "last_progress_timestamp_seconds"
    return {PREFIX + "running": 1.0, now: time.time()}, {}


def ended() -> Samples:
    """Return the samples of a run that has ended, so that alerts stop expecting progress."""
    return {PREFIX + "running": 0.0}, {}


def of_step(record: Mapping[str, Any]) -> Samples:
    """Return the samples of a completed step.

    Args:
        record: the step's metrics by name; names of durations in seconds end in ``_s``. Values that
            are not finite numbers are left out.
    """
    gauges, increments = started()
    increments[PREFIX + "steps_total"] = 1.0
    # The trainer and the engine both report some quantities; the engine's, under spec_rl/, are
    # used.
    values: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Real) and math.isfinite(value):
            values[name.removeprefix(metric.PREFIX)] = float(value)
    for name, value in values.items():
        plain = name.removesuffix(metric.AT_START)
        if plain.endswith("_s"):
            counter = PREFIX + plain[:-2] + "_seconds_total"
        elif plain in COUNTED:
            counter = PREFIX + plain + "_total"
        else:
            gauges[PREFIX + plain] = value
            continue
        increments[counter] = increments.get(counter, 0.0) + value
    return gauges, increments


class Textfile:
    """A file for the textfile collector of node_exporter.

    Args:
        path: the file, ending in .prom; replaced atomically.
        run: the label.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._run = path, run
        self._gauges: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def write(self, samples: Samples) -> None:
        """Set the gauges, add to the counters, and write the file.

        Raises:
            OSError: the file cannot be written.
        """
        gauges, increments = samples
        self._gauges |= gauges
        for name, value in increments.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        from prometheus_client import CollectorRegistry, write_to_textfile

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(self.path), registry)

    def collect(self) -> Iterator[Any]:
        """The metrics in the form of ``prometheus_client``, which calls this."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for kind, values, what in (
            (GaugeMetricFamily, self._gauges, "newest value"),
            (CounterMetricFamily, self._totals, "since the process started"),
        ):
            for name, value in values.items():
                family = kind(name, _help(name, what), labels=["run"])
                family.add_metric([self._run], value)
                yield family


class RayEndpoint:
    """The metrics endpoint of the Ray node on which this process runs; Ray must be initialized.

    Ray puts ``ray_`` before every name; examples/monitoring/prometheus.yml removes it. A node
    exports metrics only if ``ray[default]`` is installed.

    Args:
        run: the label.
    """

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._metrics: dict[str, Any] = {}

    def write(self, samples: Samples) -> None:
        """Set the gauges and add to the counters."""
        from ray.util.metrics import Counter, Gauge

        gauges, increments = samples
        for name, value in gauges.items():
            self._metric(Gauge, name, "newest value").set(value, tags=self._tags)
        for name, value in increments.items():
            counter = self._metric(Counter, name, "since the process started")
            if value > 0:  # Ray refuses 0
                counter.inc(value, tags=self._tags)

    def _metric(self, kind: Any, name: str, what: str) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, description=_help(name, what), tag_keys=("run",))
        return self._metrics[name]


def _help(name: str, what: str) -> str:
    return f"{name.removeprefix(PREFIX).removesuffix('_total').replace('_', ' ')}, {what}"

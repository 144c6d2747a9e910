"""The metrics of a run, written to metrics.jsonl, TensorBoard and Prometheus at each step."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

__all__ = ["MetricsLog", "read_metrics", "write_prometheus"]

logger = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a metrics.jsonl; an incomplete last line is ignored."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # cut off by a crash
            break
    return records


class MetricsLog:
    """Writes a run's metrics.

    Args:
        folder: ``logger.log_dir``.
        step: steps done. Lines of later steps, left by a run that was killed, are dropped, since
            their steps are repeated.
        tensorboard: write event files too.
        prometheus: file ending in .prom for the newest step's scalars as gauges, for
            node_exporter's textfile collector; replaced atomically at each step. A failure to write
            it is logged once, until a write succeeds. None: no such file.
    """

    def __init__(
        self, folder: Path, step: int, *, tensorboard: bool, prometheus: Path | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = [record for record in read_metrics(self.path) if record["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, self.path)
        self._file = self.path.open("a")
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._prometheus = prometheus
        self._prometheus_failed = False
        self._run = folder.name

    def write(self, record: dict[str, Any]) -> None:
        """Add the record of a step; its scalars go to TensorBoard as ``train/<key>``."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(f"train/{name}", value, record["step"])
        if self._prometheus is not None:
            try:
                write_prometheus(self._prometheus, record, self._run)
                self._prometheus_failed = False
            except OSError as error:  # monitoring must not end a run
                if not self._prometheus_failed:
                    logger.warning("%s: cannot be written (%s)", self._prometheus, error)
                self._prometheus_failed = True

    def close(self) -> None:
        """Flush and close; closing again does nothing."""
        if self._file.closed:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def write_prometheus(path: Path, record: dict[str, Any], run: str) -> None:
    """Write the scalars of a step as gauges ``nemo_specrl_<name>`` with the label ``run``.

    The alert in examples/monitoring/alerts.yaml uses those that end in ``_drifts``.

    Raises:
        OSError: the file cannot be written.
    """
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()
    for name, value in record.items():
        if isinstance(value, (int, float)):
            metric = "nemo_specrl_" + name.removeprefix("spec_rl/")
            Gauge(metric, f"{name} of the last step", ["run"], registry=registry).labels(run).set(
                value
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(path), registry)

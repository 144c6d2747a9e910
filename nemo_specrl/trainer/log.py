"""The metrics of a run, written to metrics.jsonl, TensorBoard and Prometheus at each step."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from nemo_specrl import prometheus as exported

__all__ = ["METRICS", "MetricsFile", "MetricsLog", "read_metrics"]

METRICS = "metrics.jsonl"

logger = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a metrics.jsonl; an incomplete last line is ignored."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut off by a crash
            break
        if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
            break
        records.append(record)
    return records


class MetricsFile:
    """The metrics.jsonl of a run: a line of JSON for each step, and no incomplete one.

    Args:
        folder: in which the file is; created if missing.
        step: steps done. Lines of later steps, left by a run that was killed, are dropped, since
            their steps are repeated.
        before: the run's file in another folder, whose lines are taken where this folder has no
            file yet; it may be missing.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, step: int, before: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        source = self.path if before is None or self.path.exists() else before
        kept = [record for record in read_metrics(source) if record["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Add the record of a step.

        Raises:
            OSError: the disk does not take the line, of which nothing is left then.
        """
        left = json.dumps(record).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        """Flush and close; closing again does nothing."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


class MetricsLog:
    """Writes a run's metrics. Where this process is connected to Ray, its endpoint has them, too.

    Args:
        folder: ``logger.log_dir``.
        step: steps done; what is there of later steps is dropped.
        tensorboard: write event files too.
        prometheus: file ending in .prom for node_exporter's textfile collector; replaced atomically
            at each step. A failure to write it is logged once, until a write succeeds. None: no
            such file.
    """

    def __init__(
        self, folder: Path, step: int, *, tensorboard: bool, prometheus: Path | None = None
    ) -> None:
        self._file = MetricsFile(folder, step)
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._textfile = None if prometheus is None else exported.Textfile(prometheus, folder.name)
        self._textfile_failed = False
        ray = sys.modules.get("ray")
        connected = ray is not None and ray.is_initialized()
        self._ray = exported.RayEndpoint(folder.name) if connected else None
        self._export(exported.started())

    def write(self, record: dict[str, Any]) -> None:
        """Add the record of a step; its scalars go to TensorBoard as ``train/<key>``."""
        self._file.write(record)
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(f"train/{name}", value, record["step"])
        self._export(exported.of_step(record))

    def finish(self) -> None:
        """Say that the run ended well; Prometheus then no longer expects a next step."""
        self._export(exported.ended())

    def _export(self, samples: exported.Samples) -> None:
        if self._ray is not None:
            self._ray.write(samples)
        if self._textfile is None:
            return
        try:
            self._textfile.write(samples)
            self._textfile_failed = False
        except OSError as error:  # monitoring must not end a run
            if not self._textfile_failed:
                logger.warning("%s: cannot be written (%s)", self._textfile.path, error)
            self._textfile_failed = True

    def close(self) -> None:
        """Flush and close; closing again does nothing."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()

"""Writes a run's metrics to metrics.jsonl, TensorBoard and Prometheus, and reads metrics.jsonl."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nemo_specrl.errors import ConfigError
from nemo_specrl.files import replacing
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring import prometheus as exported

__all__ = [
    "METRICS",
    "MetricsFile",
    "MetricsLog",
    "left_out",
    "read_lines",
    "read_metrics",
    "read_steps",
]

METRICS, EARLIER = "metrics.jsonl", "metrics.earlier-{}.jsonl"
CUT_OFF = "cut off"
T = TypeVar("T")

logger = logging.getLogger(__name__)


def read_lines(path: Path, parse: Callable[[str], T]) -> tuple[list[T], list[str]]:
    """Read a log line by line; damaged lines are left out.

    Args:
        path: the file. Empty lines are skipped.
        parse: makes a row from a line, or raises a ``ValueError`` that says what is wrong with it.

    Returns:
        the rows; and for each line that was left out, its number and what is wrong with it. If the
        last line has no end, because its process was killed or is still writing it, that is called
        "cut off".

    Raises:
        OSError: the file cannot be read.
    """
    rows, wrong = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(parse(line.decode()))
            except (ValueError, RecursionError) as error:
                reason = " ".join(str(error).split()) if line.endswith(b"\n") else CUT_OFF
                wrong.append(f"line {number}: {reason}")
    return rows, wrong


def left_out(path: Path, wrong: Sequence[str]) -> str:
    """Return a sentence on the lines of a file that were left out; empty if there were none."""
    if not wrong:
        return ""
    count = "1 line is" if len(wrong) == 1 else f"{len(wrong):,} lines are"
    return f"{path}: {count} left out ({wrong[0]}{', ...' if len(wrong) > 1 else ''})"


def read_steps(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the steps of a metrics.jsonl in order.

    If a resumed run repeated steps, the newer records replace the older ones. Numbers that are not
    finite become None.

    Returns:
        the records; and a sentence on damaged lines, which are left out. A line that is cut off is
        not mentioned: its step is not complete, or will be repeated.

    Raises:
        ConfigError: no line is the record of a step, so this is some other file.
        OSError: the file cannot be read.
    """
    found, wrong = read_lines(path, _step)
    damaged = [line for line in wrong if not line.endswith(CUT_OFF)]
    if damaged and not found:
        raise ConfigError(f"{path}: holds no steps of a run ({damaged[0]})")
    records: list[dict[str, Any]] = []
    for record in found:
        while records and records[-1][metric.STEP] >= record[metric.STEP]:
            records.pop()
        records.append(record)
    return records, left_out(path, damaged)


def _step(line: str) -> dict[str, Any]:
    record: Any = None
    with contextlib.suppress(ValueError):
        record = json.loads(line, parse_constant=lambda _: None)
    if isinstance(record, dict):
        step = record.get(metric.STEP)
        if isinstance(step, int) and abs(step) < 2**53:
            return record
    raise ValueError("not a step's JSON object")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the steps of a metrics.jsonl, none if there is no file; logs which lines are damaged."""
    if not path.exists():
        return []
    records, damaged = read_steps(path)
    if damaged:
        logger.warning("%s", damaged)
    return records


class MetricsFile:
    """The metrics.jsonl of a run: a line of JSON for each step, and no incomplete one.

    Args:
        folder: folder of the file; created if missing.
        step: number of completed steps. Lines of later steps, left by a run that was killed, are
            dropped, since these steps are repeated.
        before: the run's file in another folder, from which lines are copied if this folder has no
            file yet; it may be missing.

    Raises:
        ConfigError: there is a file of another program.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, step: int, before: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        source = self.path if before is None or self.path.exists() else before
        found = read_metrics(source)
        kept = [record for record in found if record[metric.STEP] <= step]
        if found and not kept and source == self.path:  # of a run without checkpoints
            names = (folder / EARLIER.format(number) for number in itertools.count(1))
            earlier = next(path for path in names if not path.exists())
            os.replace(source, earlier)
            logger.warning("%s: the steps of an earlier run are now in %s", source, earlier.name)
        temporary = self.path.with_suffix(".tmp")
        with replacing(self.path, temporary, private=False) as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in kept)
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Add the record of a step.

        Raises:
            OSError: the line cannot be written; a part that was written is removed again.
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
    """Writes a run's metrics, including to Ray's endpoint if this process is connected to Ray.

    Args:
        folder: ``logger.log_dir``.
        step: number of completed steps; records of later ones are dropped.
        tensorboard: whether event files are written as well.
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
                if isinstance(value, (int, float)) and name != metric.STEP:
                    self._writer.add_scalar(f"train/{name}", value, record[metric.STEP])
        self._export(exported.of_step(record))

    def finish(self) -> None:
        """Export that the run has ended, so that alerts stop expecting progress."""
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

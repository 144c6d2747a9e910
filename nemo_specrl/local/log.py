"""metrics.jsonl and TensorBoard: a line and a set of scalars for each training step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["MetricsLog", "read_metrics"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl; a torn last line is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # cut off by a crash, within a character or at a block of zeros
            break
    return records


class MetricsLog:
    """Writes a run's metrics.

    Args:
        folder: ``logger.log_dir``.
        step: steps done; lines of later ones, of a run that was killed, are dropped: their steps
            are done again.
        tensorboard: write event files too.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool) -> None:
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

    def write(self, record: dict[str, Any]) -> None:
        """Add the record of a step; its scalars go to TensorBoard as ``train/<key>``."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(f"train/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close; closing again does nothing."""
        if self._file.closed:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        if self._writer is not None:
            self._writer.close()

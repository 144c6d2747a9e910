"""Writes what NeMo-RL logs to a file, from whichever process of a test job logs it.

Each call of the logger appends a line to the file that ``NEMO_SPECRL_TEST_METRICS`` names; without
the variable nothing is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nemo_rl.utils.logger import Logger

METRICS = "NEMO_SPECRL_TEST_METRICS"


def install() -> None:
    """Record the metrics that this process logs from now on."""
    if METRICS not in os.environ:
        return
    original = Logger.log_metrics

    def log_metrics(
        self: Any, metrics: Any, step: int, prefix: str | None = "", *args: Any, **kwargs: Any
    ) -> None:
        plain = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}
        with Path(os.environ[METRICS]).open("a") as file:
            file.write(json.dumps({"step": step, "prefix": prefix, **plain}) + "\n")
        original(self, metrics, step, prefix, *args, **kwargs)

    Logger.log_metrics = log_metrics

"""Reads the steps of a run from its metrics.jsonl, for plots, pages and tables."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_specrl.config import clipped
from nemo_specrl.errors import ConfigError
from nemo_specrl.monitoring import names as metric
from nemo_specrl.monitoring.metrics_file import METRICS, read_steps

__all__ = ["column", "logged_steps", "number", "run_steps"]

logger = logging.getLogger(__name__)


def run_steps(run_dir: Path) -> tuple[list[dict[str, Any]], str]:
    """Read the steps of a run in order.

    Returns:
        the steps; and a sentence on damaged lines, empty if there are none (:func:`.read_steps`).

    Raises:
        ConfigError: there is no metrics.jsonl, or it has no complete step.
    """
    path = Path(run_dir) / METRICS
    try:
        rows, damaged = read_steps(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{run_dir}: no {METRICS} here; give the folder of a run") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if not rows:
        raise ConfigError(f"{path}: holds no complete step yet")
    return rows, damaged


def logged_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Read the steps of a run in order; damaged lines are left out with a warning."""
    rows, damaged = run_steps(run_dir)
    if damaged:
        logger.warning("%s", damaged)
    return rows


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    """Return the values of a metric by step, None if a step has none.

    Raises:
        ConfigError: a value is not a number; the message names the step.
    """
    return [number(row.get(name), f"step {row[metric.STEP]}: {name}") for row in rows]


def number(value: Any, where: str) -> float | None:
    """Return a number from a metrics file; None if it is missing or not finite.

    Raises:
        ConfigError: ``value`` is not a number; the message begins with ``where``.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if not isinstance(value, int | float) or abs(value) >= 1e300:
        raise ConfigError(f"{where} must be a number, got {clipped(value)}")
    return value

"""A sequential test of whether reused rows still earn what fresh ones do.

If reuse were exact, fresh and reused rows of a prompt would have the same expected reward. Training
on rows that are reused repeatedly breaks this: the policy memorizes them, and their reward rises
above that of fresh rows. Rows are compared within their group, because prompts differ in difficulty
(Mantel and Haenszel, doi:10.1093/jnci/22.4.719). The test may be looked at after every step,
because its bound is a normal-mixture confidence sequence (Robbins, doi:10.1214/aoms/1177696786;
Howard et al., arXiv 1810.08240, section 3.2).

This module knows arrays of rows. It does not know engines, losses or logs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.monitoring import names as metric

__all__ = ["DriftMonitor"]

FloatArray = npt.NDArray[np.floating[Any]]

WINDOW = 4096.0
"""Information (roughly the number of fresh rows) after which the comparison starts again."""
TIGHTEST_AT = 64.0
"""Information at which the confidence sequence is tightest."""
ROWS_TO_JUDGE = 64
"""Degrees of freedom from which the variance of rewards counts as known."""


class DriftMonitor:
    """Compares the rewards of fresh and reused rows, step by step, and warns once a window.

    A group with ``f`` fresh and ``r`` reused rows has weight ``f r / (f + r)``, its information.

    Args:
        tolerance: largest acceptable difference, in units of reward.
        error_rate: probability of a false alarm in a window.
    """

    def __init__(self, tolerance: float = 0.05, error_rate: float = 1e-3) -> None:
        self.tolerance, self.error_rate = tolerance, error_rate
        self._begin()

    def _begin(self) -> None:
        self._information = self._difference = self._squares = 0.0
        self._degrees_of_freedom = 0
        self._warned = False

    def update(
        self, groups: Sequence[Any], fresh: npt.NDArray[np.bool_], rewards: FloatArray
    ) -> str:
        """Add the rows of a step and test for drift.

        Args:
            groups: an identifier of each row's group, ``[rows]``.
            fresh: which rows were decoded without a reused prefix, bool ``[rows]``.
            rewards: float ``[rows]``.

        Returns:
            A warning of one line at the first drift of a window, otherwise an empty string.
        """
        if self._information >= WINDOW:
            self._begin()
        members: dict[Any, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        for rows in members.values():
            self._compare(rewards[rows][fresh[rows]], rewards[rows][~fresh[rows]])
        if not self.drifts or self._warned:
            return ""
        self._warned = True
        return (
            f"reused rows no longer earn what fresh ones do (fresh minus reused: {self.gap:+.3f}, "
            f"{self.gap / self.standard_error:+.1f} standard errors); raise spec_rl.reuse."
            "fresh_fraction, lower spec_rl.reuse.lenience, or take preset: lossless"
        )

    def _compare(self, fresh: FloatArray, reused: FloatArray) -> None:
        """Add the rewards of a group."""
        if not len(fresh) or not len(reused):
            return
        weight = len(fresh) * len(reused) / (len(fresh) + len(reused))
        self._information += weight
        self._difference += weight * float(fresh.mean() - reused.mean())
        for kind in (fresh, reused):
            self._squares += float(((kind - kind.mean()) ** 2).sum())
            self._degrees_of_freedom += len(kind) - 1

    @property
    def gap(self) -> float:
        """Mean reward of fresh rows minus that of reused ones; 0 if none were compared."""
        return self._difference / self._information if self._information else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of ``gap``; infinite while there are too few rows for a variance."""
        if self._degrees_of_freedom < ROWS_TO_JUDGE or not self._information:
            return math.inf
        return math.sqrt(self._squares / self._degrees_of_freedom / self._information)

    @property
    def drifts(self) -> bool:
        """Whether the gap exceeds its tolerance by more than chance, whenever one looks."""
        if math.isinf(self.standard_error):
            return False
        v = self._information
        log = math.log((v + TIGHTEST_AT) / TIGHTEST_AT / self.error_rate**2)
        half_width = self.standard_error * math.sqrt((v + TIGHTEST_AT) / v * log)
        return abs(self.gap) - half_width > self.tolerance

    def as_dict(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {
            metric.REWARD_GAP: self.gap,
            metric.REWARD_GAP_Z: self.gap / self.standard_error if self.standard_error else 0.0,
            metric.DRIFTS: float(self.drifts),
        }

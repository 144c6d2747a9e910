"""A sequential test of whether reused rows still behave like fresh ones.

If reuse were exact, fresh and reused rows of a prompt would have the same distribution, and so the
same expected reward, length and mean log-prob. Training on rows that are drafted repeatedly breaks
this: the policy memorizes reused rows, and their log-prob and reward rise above those of fresh
ones. Rows are compared within their group, because prompts differ in difficulty (Mantel and
Haenszel, doi:10.1093/jnci/22.4.719). The test can be evaluated after every step at its nominal
error rate, because its bound is a normal-mixture confidence sequence (Robbins,
doi:10.1214/aoms/1177696786; Howard et al., arXiv 1810.08240, section 3.2).

The reused tokens by themselves allow a second test. For rows from the current policy's
distribution, the mean of the sum over tokens of log p_now - log p_birth is not negative, by
Jensen's inequality with E[p_birth / p_now] <= 1. If it is negative, the policy has moved away from
the rows that it is trained on. This is evaluated once per epoch, so that no row counts twice.

This module knows arrays of rows. It does not know engines, losses or logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import QUANTITIES, MonitorConfig
from nemo_specrl.monitoring import names as metric

__all__ = ["DriftMonitor", "Gap"]

FloatArray = npt.NDArray[np.floating[Any]]

# Information (roughly the number of fresh rows) at which the confidence sequence is tightest.
TIGHTEST_AT = 64.0
# Degrees of freedom from which the variance of a quantity counts as known.
ROWS_TO_JUDGE = 64


@dataclass
class Estimate:
    """A weighted mean and its standard error, accumulated batch by batch.

    Args:
        information: sum of the weights.
        difference: weighted sum of the values.
        squares: sum of squared deviations from the means of the batches.
        degrees_of_freedom: degrees of freedom of ``squares``.
    """

    information: float = 0.0
    difference: float = 0.0
    squares: float = 0.0
    degrees_of_freedom: float = 0.0

    @property
    def mean(self) -> float:
        """The mean, in the quantity's units; 0 if nothing was counted."""
        return self.difference / self.information if self.information else 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of ``mean``; infinite while there are too few rows for a variance."""
        if self.degrees_of_freedom < ROWS_TO_JUDGE or not self.information:
            return math.inf
        return math.sqrt(self.squares / self.degrees_of_freedom / self.information)

    @property
    def z(self) -> float:
        """``mean`` in standard errors; 0 if these are not known."""
        error = self.standard_error
        return self.mean / error if 0 < error < math.inf else 0.0

    def count(self, values: FloatArray) -> None:
        """Add the squared deviations of values, float ``[n]``, from their mean."""
        if len(values):
            self.squares += float(((values - values.mean()) ** 2).sum())
            self.degrees_of_freedom += len(values) - 1


class Gap(Estimate):
    """Mean difference between fresh and reused rows in one quantity, over groups.

    A group with ``f`` fresh and ``r`` reused rows has weight ``f r / (f + r)``, its information.
    """

    def add(self, values: FloatArray, fresh: npt.NDArray[np.bool_]) -> None:
        """Add a group.

        Args:
            values: the quantity's value for each row, float ``[n]``.
            fresh: which rows were decoded plainly, bool ``[n]``.
        """
        one, other = values[fresh], values[~fresh]
        if not len(one) or not len(other):
            return
        weight = len(one) * len(other) / len(values)
        self.information += weight
        self.difference += weight * float(one.mean() - other.mean())
        for kind in (one, other):
            self.count(kind)

    def half_width(self, error_rate: float) -> float:
        """Return the half width of the confidence sequence around ``mean``, valid at all steps.

        Args:
            error_rate: probability that the true gap is ever outside.
        """
        error, v = self.standard_error, self.information
        if math.isinf(error):
            return math.inf
        stretch = (v + TIGHTEST_AT) / v * math.log((v + TIGHTEST_AT) / TIGHTEST_AT / error_rate**2)
        return error * math.sqrt(stretch)


class Staleness(Estimate):
    """Mean loss of log-prob of a row's reused tokens since birth, nats per row."""

    def add(self, values: FloatArray) -> None:
        """Add the rows of a step.

        Args:
            values: sum over a row's reused tokens of log p_birth - log p_now, float ``[n]``.
        """
        self.information += len(values)
        self.difference += float(values.sum())
        self.count(values)


class DriftMonitor:
    """Compares fresh and reused rows step by step, and adapts ``fresh_fraction`` if configured to.

    Args:
        config: the ``spec_rl.monitor:`` block.
        fresh_fraction: ``spec_rl.fresh_fraction``.
        steps_per_epoch: number of :meth:`update` calls in an epoch. None: not known yet; until
            :meth:`begin_epochs` provides it, staleness is not judged and the window does not end.
        quantities: quantities in which rows are compared, some of ``config.QUANTITIES``.

    Attributes:
        fresh_fraction: the fraction for the next step; differs from the configured one only with
            ``auto``.
        gaps: gap of each quantity in the current window.
        staleness: staleness in the last complete epoch.
        drifting: quantities that drift as of the last update.
        warning: one line naming the quantities that drift, if they differ from those at the
            previous update; otherwise empty.
    """

    def __init__(
        self,
        config: MonitorConfig,
        *,
        fresh_fraction: float,
        steps_per_epoch: int | None,
        quantities: Sequence[str] = QUANTITIES,
    ) -> None:
        self.config = config
        self.quantities = tuple(quantities)
        self.steps_per_epoch = steps_per_epoch
        self.configured = self.fresh_fraction = fresh_fraction
        self.drifting: list[str] = []
        self.warning = ""
        self._warned_of: list[str] = []
        self._restart()

    def _restart(self) -> None:
        self.steps = 0
        self.alarmed = False
        self.gaps = {name: Gap() for name in self.quantities}
        self.staleness, self._this_epoch = Staleness(), Staleness()

    @property
    def window(self) -> float:
        """Number of :meth:`update` calls in a window; infinite while epochs are not known."""
        if self.steps_per_epoch is None:
            return math.inf
        return self.config.window_epochs * self.steps_per_epoch

    def begin_epochs(self, steps_per_epoch: int) -> None:
        """Set the length of an epoch, once it is known.

        The steps so far belong to the first epoch, and end it if there are exactly that many. If
        there are more, as after restoring a state of a run that assumed longer epochs, their
        staleness has counted rows several times, and is dropped. A window that would be over by now
        ends with the next step.
        """
        self.steps_per_epoch = steps_per_epoch
        if self.steps == steps_per_epoch:
            self.staleness, self._this_epoch = self._this_epoch, Staleness()
        elif self.steps > steps_per_epoch:
            self.staleness, self._this_epoch = Staleness(), Staleness()

    def update(
        self,
        groups: Sequence[Any],
        fresh: npt.NDArray[np.bool_],
        values: Mapping[str, FloatArray],
        stale: FloatArray,
    ) -> list[str]:
        """Add the rows of a step and test for drift.

        Args:
            groups: an identifier of each row's group, ``[rows]``.
            fresh: which rows were decoded plainly, bool ``[rows]``.
            values: float ``[rows]`` for each of the monitor's quantities: ``reward``; ``length`` in
                tokens; ``logprob``, the mean over a row's tokens under the current policy, nats.
            stale: for each row that has reused tokens, the sum over these of log p_birth - log
                p_now, float ``[any]``, nats.

        Returns:
            The quantities whose gap exceeds its tolerance by more than chance.
        """
        if self.steps >= self.window:
            if not self.alarmed:
                self.fresh_fraction = max(self.configured, self.fresh_fraction / 2)
            self._restart()
        self.steps += 1
        members: dict[Any, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        for name, gap in self.gaps.items():
            scaled = np.asarray(values[name], dtype=np.float64)
            if name == "length":
                scaled = scaled / max(1.0, float(scaled.mean()))
            for rows in members.values():
                gap.add(scaled[rows], fresh[rows])
        self._this_epoch.add(np.asarray(stale, dtype=np.float64))
        if self.steps_per_epoch is not None and self.steps % self.steps_per_epoch == 0:
            self.staleness, self._this_epoch = self._this_epoch, Staleness()
        each = self.config.error_rate / (len(self.gaps) + 1)
        self.drifting = [
            name
            for name, gap in self.gaps.items()
            if abs(gap.mean) - gap.half_width(each) > self.config.tolerance[name]
        ]
        if self._stale(each / self.config.window_epochs):
            self.drifting.append("staleness")
        self.warning = self._describe() if self.drifting != self._warned_of else ""
        self._warned_of = self.drifting
        self.alarmed = self.alarmed or bool(self.drifting)
        if self.drifting and self.config.auto:
            self.fresh_fraction = min(1.0, max(0.05, 2 * self.fresh_fraction))
            self._restart()
            self.alarmed = True
        return self.drifting

    def _stale(self, error_rate: float) -> bool:
        """Whether staleness is beyond its tolerance by more than chance."""
        if self.steps_per_epoch is None:
            return False
        beyond = self.staleness.mean - self.config.staleness_tolerance
        return beyond > NormalDist().inv_cdf(1 - error_rate) * self.staleness.standard_error

    def as_dict(self) -> dict[str, float]:
        """Return the metrics: each gap, the gap in standard errors, and 1 if it drifts, else 0.

        Those of staleness are included once the length of an epoch is known.
        """
        out: dict[str, float] = {}
        for name, gap in self.gaps.items():
            out[metric.drift(name)] = gap.mean
            out[metric.drift_z(name)] = gap.z
            out[metric.drifts(name)] = float(name in self.drifting)
        if self.steps_per_epoch is not None:
            out[metric.drift(metric.STALENESS)] = self.staleness.mean
            out[metric.drift_z(metric.STALENESS)] = self.staleness.z
            out[metric.drifts(metric.STALENESS)] = float("staleness" in self.drifting)
        return out | {metric.FRESH_FRACTION: self.fresh_fraction}

    def _describe(self) -> str:
        if not self.drifting:
            return ""
        seen = {name: gap.mean for name, gap in self.gaps.items()}
        seen["staleness"] = self.staleness.mean
        what = ", ".join(f"{name} {seen[name]:+.3f}" for name in self.drifting)
        return (
            f"drift detected: reused rollouts no longer match the current policy ({what}); raise "
            "spec_rl.fresh_fraction, lower spec_rl.lenience, or switch to preset: lossless"
        )

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs, as JSON values."""
        return {
            "fresh_fraction": self.fresh_fraction,
            "steps": self.steps,
            "alarmed": self.alarmed,
            "drifting": self.drifting,
            "gaps": {name: asdict(gap) for name, gap in self.gaps.items()},
            "staleness": [asdict(self.staleness), asdict(self._this_epoch)],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self.fresh_fraction = float(state["fresh_fraction"])
        self.steps, self.alarmed = int(state["steps"]), bool(state["alarmed"])
        self.drifting = list(state["drifting"])
        self.gaps = {name: Gap(**state["gaps"][name]) for name in self.gaps}
        self.staleness, self._this_epoch = (Staleness(**values) for values in state["staleness"])

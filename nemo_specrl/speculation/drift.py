"""Does reuse still give what fresh rollouts give? A sequential test of fresh against reused rows.

Were reuse exact, the two kinds of rows of a prompt would have one law, and so the same expected
reward, length and mean log-prob. Training on what is drafted again breaks that first where it
hurts: reused rows are remembered, so their log-prob and their reward rise above those of fresh
ones. Rows are compared within their group, because prompts differ in difficulty (Mantel and
Haenszel, doi:10.1093/jnci/22.4.719). The test may be looked at after every step without losing its
error rate: its bound is a normal-mixture confidence sequence (Robbins, doi:10.1214/aoms/1177696786;
Howard et al., arXiv 1810.08240, section 3.2).

Knows arrays of rows; nothing of engines, losses or logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import MonitorConfig

__all__ = ["DriftMonitor", "Gap"]

FloatArray = npt.NDArray[np.floating[Any]]

# Where the confidence sequence is at its tightest, in units of information (about fresh rows).
TIGHTEST_AT = 64.0


@dataclass
class Gap:
    """By how much fresh rows exceed reused ones in one quantity, summed over groups.

    Args:
        information: sum over groups of ``f r / (f + r)`` with ``f`` fresh and ``r`` reused rows.
        difference: sum over groups of ``f r / (f + r)`` times the difference of their means.
        squares: sum of squared deviations from the mean of a row's kind in its group.
        freedom: degrees of freedom of ``squares``.
    """

    information: float = 0.0
    difference: float = 0.0
    squares: float = 0.0
    freedom: float = 0.0

    def add(self, values: FloatArray, fresh: npt.NDArray[np.bool_]) -> None:
        """Count a group.

        Args:
            values: of its rows, float ``[n]``.
            fresh: which of them were decoded plainly, bool ``[n]``.
        """
        one, other = values[fresh], values[~fresh]
        if not len(one) or not len(other):
            return
        weight = len(one) * len(other) / len(values)
        self.information += weight
        self.difference += weight * float(one.mean() - other.mean())
        for kind in (one, other):
            self.squares += float(((kind - kind.mean()) ** 2).sum())
            self.freedom += len(kind) - 1

    @property
    def mean(self) -> float:
        """Fresh minus reused, in the quantity's units; 0 where nothing was compared."""
        return self.difference / self.information if self.information else 0.0

    @property
    def standard_error(self) -> float:
        """Of ``mean``; infinite where nothing was compared or the spread is not known yet."""
        if not self.information or not self.freedom:
            return math.inf
        return math.sqrt(self.squares / self.freedom / self.information)

    def half_width(self, error_rate: float) -> float:
        """Of the confidence sequence about ``mean``: it holds at all looks at once.

        Args:
            error_rate: chance that the true gap is ever outside.
        """
        error, v = self.standard_error, self.information
        if math.isinf(error):
            return math.inf
        stretch = (v + TIGHTEST_AT) / v * math.log((v + TIGHTEST_AT) / TIGHTEST_AT / error_rate**2)
        return error * math.sqrt(stretch)


class DriftMonitor:
    """Compares fresh and reused rows step by step, and turns ``fresh_fraction`` where asked to.

    Args:
        config: the ``spec_rl.monitor:`` block.
        fresh_fraction: ``spec_rl.fresh_fraction``.
        steps_per_epoch: how many :meth:`update` calls make an epoch.

    Attributes:
        fresh_fraction: to be used for the next step; other than configured only with ``auto``.
        gaps: what was seen in the present window, by quantity.
        drifting: quantities that drift as of the last update.
    """

    def __init__(
        self, config: MonitorConfig, *, fresh_fraction: float, steps_per_epoch: int
    ) -> None:
        self.config = config
        self.window = config.window_epochs * steps_per_epoch
        self.configured = self.fresh_fraction = fresh_fraction
        self.drifting: list[str] = []
        self._restart()

    def _restart(self) -> None:
        self.steps = 0
        self.alarmed = False
        self.gaps = {name: Gap() for name in self.config.tolerance}

    def update(
        self,
        groups: Sequence[Any],
        fresh: npt.NDArray[np.bool_],
        values: Mapping[str, FloatArray],
    ) -> list[str]:
        """Count the rows of a step; the quantities that drift, beyond tolerance and chance.

        Args:
            groups: what the rows of a group have in common, ``[rows]``.
            fresh: which rows were decoded plainly, bool ``[rows]``.
            values: float ``[rows]`` each: ``reward``; ``length`` in tokens; ``logprob``, the mean
                over a row's tokens under the current policy, nats.
        """
        if self.steps >= self.window:
            if not self.alarmed:
                self.fresh_fraction = max(self.configured, self.fresh_fraction / 2)
            self._restart()
        self.steps += 1
        members: dict[Any, list[int]] = {}
        for row, group in enumerate(groups):
            members.setdefault(group, []).append(row)
        unit = {"length": max(1.0, float(np.mean(values["length"])))}
        for name, gap in self.gaps.items():
            scaled = np.asarray(values[name], dtype=np.float64) / unit.get(name, 1.0)
            for rows in members.values():
                gap.add(scaled[rows], fresh[rows])
        each = self.config.error_rate / len(self.gaps)
        self.drifting = [
            name
            for name, gap in self.gaps.items()
            if abs(gap.mean) - gap.half_width(each) > self.config.tolerance[name]
        ]
        self.alarmed = self.alarmed or bool(self.drifting)
        if self.drifting and self.config.auto:
            self.fresh_fraction = min(1.0, max(0.05, 2 * self.fresh_fraction))
            self._restart()
            self.alarmed = True
        return self.drifting

    def as_dict(self) -> dict[str, float]:
        """By metric name: the gaps, also in standard errors, and whether each drifts (0 or 1)."""
        out: dict[str, float] = {}
        for name, gap in self.gaps.items():
            error = gap.standard_error
            out[f"spec_rl/{name}_gap"] = gap.mean
            out[f"spec_rl/{name}_gap_z"] = gap.mean / error if 0 < error < math.inf else 0.0
            out[f"spec_rl/{name}_drifts"] = float(name in self.drifting)
        return out | {"spec_rl/fresh_fraction": self.fresh_fraction}

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` needs, as JSON values."""
        return {
            "fresh_fraction": self.fresh_fraction,
            "steps": self.steps,
            "alarmed": self.alarmed,
            "drifting": self.drifting,
            "gaps": {name: asdict(gap) for name, gap in self.gaps.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        self.fresh_fraction = float(state["fresh_fraction"])
        self.steps, self.alarmed = int(state["steps"]), bool(state["alarmed"])
        self.drifting = list(state["drifting"])
        self.gaps = {name: Gap(**state["gaps"][name]) for name in self.gaps}

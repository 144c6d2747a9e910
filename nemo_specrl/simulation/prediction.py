"""The speed-up that each preset would have on a recorded run, with an interval.

The interval covers the choice of prompts (a bootstrap over groups), the uncertainty of the costs of
an engine's steps (a bootstrap over the run's steps, or the ranges that were measured), and how
often prefix reuse rejects tokens (``REJECTIONS``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_specrl.config import ReuseConfig
from nemo_specrl.errors import ConfigError
from nemo_specrl.simulation.recorded_run import RecordedRun, RecordedSample
from nemo_specrl.simulation.replays import (
    LOSSLESS,
    PLAIN,
    REUSE,
    History,
    SimulatedRow,
    acceptance_rates,
    groups_of,
    histories_of,
    phase,
    rejecting,
    rows_of,
)
from nemo_specrl.simulation.simulated_engine import FEATURES, SimulatedEngine, fit_costs

__all__ = ["predict", "read_costs"]

Float64Array = npt.NDArray[np.float64]
Case = tuple[str, bool]
"""A preset, and whether prompts have occurred before."""
Ways = list[list[SimulatedRow]]
"""The rows of a step, once for each rate of acceptance."""

_ROLLOUTS = 256
"""At least this many of the newest rollouts are simulated, in whole steps."""
_DRAWS = 20
"""Number of draws of prompts and costs for the interval."""
_LEAST_STEPS = 4
"""Costs are fitted if the seconds of at least this many steps are known."""
REJECTIONS = (1.0, 0.7, 1.4, 2.0)
"""Multiples of the estimated rejection rate of prefix reuse that the interval covers. The estimate
is from contexts that rollouts of both epochs reached. In other contexts, tokens of the same
log-prob were rejected as often with one policy and twice as often with another."""


@dataclass(frozen=True)
class Prediction:
    """The predicted speed-up of a preset.

    Args:
        preset: name of the preset.
        later: whether prompts have occurred before, so that the cache has rollouts for them.
        speed_up: seconds of plain rollouts divided by seconds with the preset.
        low: lower end of the interval that holds 90 % of the draws.
        high: upper end of that interval.
        steps: steps of the slowest engine, divided by those of plain rollouts.
    """

    preset: str
    later: bool
    speed_up: float
    low: float
    high: float
    steps: float


def predict(
    run: RecordedRun, engine: SimulatedEngine, engines: int = 1, costs: Float64Array | None = None
) -> tuple[list[Prediction], list[str]]:
    """Predict the speed-up of each preset over plain rollouts.

    The newest steps of the run are simulated, as in a first epoch and, if the run has earlier
    rollouts of their prompts, as in a later one.

    Args:
        run: recorded rollouts.
        engine: limits of an engine.
        engines: number of engines.
        costs: draws of the seconds of each feature, float64 ``[n, len(FEATURES)]``. None: fitted to
            the seconds of the run.

    Returns:
        Predictions, and the assumptions, one sentence each.

    Raises:
        ConfigError: the engine cannot hold the rollouts.
    """
    rng = np.random.default_rng(0)
    histories = list(histories_of(run.steps))
    first = _first_step(run, histories)
    steps, earlier = run.steps[first:], histories[first:]
    later = all(_complete(*each) for each in zip(steps, earlier, strict=True))
    assumed = []
    if costs is None:
        costs, how = _fitted(run, histories, engine, engines, rng)
        assumed.append(how)
    if not later:
        assumed.append(
            "no prompt was recorded twice, so that only a first epoch is simulated: record two "
            "epochs"
        )
    logprobs = later and all(s.logprobs is not None for step in run.steps for s in step)
    if logprobs:
        assumed.append(
            "acceptance of reuse is estimated where rollouts of two epochs went the same way, "
            f"which is near their beginnings; the interval reaches from {min(REJECTIONS):g} to "
            f"{max(REJECTIONS):g} times as many rejections"
        )
    elif later:
        assumed.append("reuse is not predicted: the rollouts were recorded without log-probs")
    simulated: dict[Case, list[Ways]] = {}
    for preset, again in [(PLAIN, False), (LOSSLESS, False), (LOSSLESS, True), (REUSE, True)]:
        if (later or not again) and (logprobs or preset != REUSE):
            simulated[preset, again] = [
                _ways(preset, step, history if again else {}, engine, engines)
                for step, history in zip(steps, earlier, strict=True)
            ]
    return _bootstrap(steps, simulated, engine, engines, costs, rng), assumed


def _first_step(run: RecordedRun, histories: Sequence[History]) -> int:
    """Return the step from which steps are simulated: the newest ones, with ``_ROLLOUTS`` in total.

    If there are steps whose prompts were all recorded before, it is one of these.
    """
    first = len(run.steps) - 1
    while first and sum(map(len, run.steps[first:])) < _ROLLOUTS:
        first -= 1
    if any(_complete(*each) for each in zip(run.steps, histories, strict=True)):
        while first < len(run.steps) - 1 and not _complete(run.steps[first], histories[first]):
            first += 1
    return first


def _ways(
    preset: str,
    step: Sequence[RecordedSample],
    history: History,
    engine: SimulatedEngine,
    engines: int,
) -> Ways:
    """Return the rows of a step with a preset, for each of ``REJECTIONS`` if these matter."""
    rates = None
    if preset == REUSE:
        groups = groups_of(step)
        pairs = [(history[key][-1], group) for key, group in groups.items()]
        rates = acceptance_rates(pairs, ReuseConfig().lenience)
    if rates is not None:
        ways = [rows_of(preset, step, history, rejecting(rates, times)) for times in REJECTIONS]
    else:
        ways = [rows_of(preset, step, history)]
    if preset != PLAIN:
        for rows in ways:
            phase(preset, rows, engine, engines, history)  # fills in the traces
    return ways


def _bootstrap(
    steps: Sequence[Sequence[RecordedSample]],
    simulated: dict[Case, list[Ways]],
    engine: SimulatedEngine,
    engines: int,
    costs: Float64Array,
    rng: np.random.Generator,
) -> list[Prediction]:
    """Compare each case with plain rollouts, with the recorded groups and with draws of them."""
    ratios: dict[Case, list[float]] = defaultdict(list)
    shares: dict[Case, float] = {}
    for draw in range(_DRAWS + 1):  # the first has every group once, and the mean of the costs
        chosen = [_drawn(step, rng if draw else None) for step in steps]
        counts = {
            case: [
                phase(case[0], _taken(ways[draw % len(ways)], groups), engine, engines)
                for ways, groups in zip(of_steps, chosen, strict=True)
            ]
            for case, of_steps in simulated.items()
        }
        cost = costs[rng.integers(len(costs))] if draw else costs.mean(axis=0)
        seconds = {
            case: sum(float((each @ cost).max()) for each in of_steps)
            for case, of_steps in counts.items()
        }
        for case, value in seconds.items():
            ratios[case].append(seconds[PLAIN, False] / value)
        if not draw:
            slowest = {
                case: sum(each[:, :2].sum(axis=1).max() for each in of_steps)
                for case, of_steps in counts.items()
            }
            shares = {case: float(n / slowest[PLAIN, False]) for case, n in slowest.items()}
    predictions = []
    for case, (ratio, *drawn) in ratios.items():
        if case[0] != PLAIN:
            low, high = np.percentile(drawn, [5, 95])
            predictions.append(Prediction(*case, ratio, low, high, shares[case]))
    return predictions


def _complete(step: Sequence[RecordedSample], history: History) -> bool:
    return all(sample.key in history for sample in step)


def _drawn(step: Sequence[RecordedSample], rng: np.random.Generator | None) -> list[int]:
    """Return indices of a step's groups: drawn with replacement, or each once without ``rng``."""
    n = len(groups_of(step))
    return list(range(n)) if rng is None else rng.integers(n, size=n).tolist()


def _taken(rows: Sequence[SimulatedRow], groups: Sequence[int]) -> list[SimulatedRow]:
    """Return the rows of the chosen groups; a group that was drawn twice counts as two."""
    by_group: dict[int, list[SimulatedRow]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    return [replace(row, group=i) for i, group in enumerate(groups) for row in by_group[group]]


def _fitted(
    run: RecordedRun,
    histories: Sequence[History],
    engine: SimulatedEngine,
    engines: int,
    rng: np.random.Generator,
) -> tuple[Float64Array, str]:
    """Return draws of the costs, fitted to the run's seconds, and the assumptions of the fit."""
    preset = run.preset if run.preset in (PLAIN, LOSSLESS) else ""
    counts, seconds = [], []
    for step, history, took in zip(run.steps, histories, run.seconds, strict=True):
        if preset and took > 0 and (preset == PLAIN or _complete(step, history)):
            rows = rows_of(preset, step, history)
            of_engines = phase(preset, rows, engine, engines, history)
            counts.append(of_engines[of_engines[:, FEATURES.index("rows")].argmax()])
            seconds.append(float(took))
    if len(seconds) < _LEAST_STEPS:
        only_steps = np.array([[1.0 if "steps" in name else 0.0 for name in FEATURES]])
        return only_steps, (
            f"costs are not known: they are fitted to {_LEAST_STEPS} or more plain or lossless "
            f"steps with seconds, and the run has {len(seconds)}; every step of the engine is "
            "taken to cost the same"
        )
    vectors, times = np.array(counts), np.array(seconds)
    step_at, drafting_at, row_at, token_at = range(4)
    if preset == PLAIN:
        vectors[:, token_at:] = 0  # in plain steps tokens are proportional to rows
    draws = []
    for i in range(_DRAWS):
        some = rng.integers(len(times), size=len(times))
        cost = fit_costs(vectors[some], times[some])
        if preset == PLAIN:
            cost[drafting_at] = cost[step_at]
            if i % 2:
                cost[[row_at, token_at]] = cost[[token_at, row_at]]
        else:
            cost[step_at] = cost[drafting_at]
        draws.append(cost)
    return np.array(draws), (
        f"costs are fitted to the seconds of {len(times)} {preset} steps; a step that drafts costs "
        "what one without drafts does"
        + (
            ", and a drafted token between nothing and what a row does; --costs narrows it down"
            if preset == PLAIN
            else ""
        )
    )


def read_costs(path: Path) -> Float64Array:
    """Read measured costs: a JSON object with seconds, or [low, high], for each of ``FEATURES``.

    Returns:
        Draws, float64 ``[_DRAWS, len(FEATURES)]``.

    Raises:
        ConfigError: the file cannot be read, or says something else.
    """
    try:
        values = json.loads(path.read_text())
        unknown = sorted(set(values) - set(FEATURES))
        given = [values.get(name, 0) for name in FEATURES]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON object with seconds ({error})") from None
    try:
        ranges = np.array([np.broadcast_to(value, 2) for value in given], float)
    except (ValueError, TypeError):  # text, or a list of another length
        ranges = np.full((len(FEATURES), 2), np.nan)
    right = np.isfinite(ranges).all() and (ranges[:, 0] >= 0).all()
    if unknown or not right or not (ranges[:, 0] <= ranges[:, 1]).all():
        raise ConfigError(
            f"{path}: must have seconds, or [low, high], for {', '.join(FEATURES)}"
            + (f", not for {', '.join(unknown)}" if unknown else "")
        )
    if not ranges[:2].any(axis=1).all():
        raise ConfigError(f"{path}: steps and drafting_steps must cost something")
    rng = np.random.default_rng(0)
    draws: Float64Array = rng.uniform(ranges[:, 0], ranges[:, 1], size=(_DRAWS, len(FEATURES)))
    return draws

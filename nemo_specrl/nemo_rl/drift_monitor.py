"""Feeds the drift monitor with the rows of each step of a NeMo-RL run.

Which rows were fresh, and how stale their reused tokens are, comes with the rollouts from the
engines (:mod:`.rollout_metadata`); rewards and the policy's log-probs come from the trainer. The
length of an epoch is known once prompts recur (:class:`Recurrence`).
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_specrl.config import QUANTITIES, SpecRLConfig
from nemo_specrl.files import replacing
from nemo_specrl.nemo_rl.rollout_metadata import MetadataTable
from nemo_specrl.speculation.drift import DriftMonitor

__all__ = ["StepMonitor"]

STATE = "monitor.json"
"""Name of the state's file in the cache's folder of a checkpoint."""

BATCH_COLUMNS = {
    "token_ids": "input_ids",
    "token_loss_mask": "token_mask",
    "input_lengths": "input_lengths",
    "rewards": "rewards",
}
"""The columns of a batch that has rewards, by the names under which NeMo-RL logs them; one with
log-probs has the same name in both."""

KEY_BYTES = 8
"""Number of a prompt key's first bytes by which it is recognized, enough for any data set."""

logger = logging.getLogger(__name__)


class Recurrence:
    """Learns after how many steps prompts recur.

    The loader's length does not tell: a data set may contain a problem a hundred times, and with
    dynamic sampling a step takes several batches.

    Args:
        at_most: number of steps after which all prompts have occurred, as far as the loader knows.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._steps = 0
        self._seen: set[bytes] = set()

    def step(self, keys: Collection[bytes]) -> int | None:
        """Note a step; return the number of steps in an epoch once it is known.

        It is the number of steps before this one, if at least half of this step's prompts were in
        them; otherwise it is ``at_most`` if this step is the last of that many.

        Args:
            keys: keys of the step's prompts.
        """
        prompts = {key[:KEY_BYTES] for key in keys}
        known = None
        if 2 * len(prompts & self._seen) >= len(prompts):
            known = min(self._steps, self._at_most)
        elif self._steps + 1 >= self._at_most:
            known = self._at_most
        self._steps += 1
        if known is None:
            self._seen |= prompts
        else:
            self._seen = set()
        return known

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs, as JSON values."""
        seen = base64.b64encode(b"".join(sorted(self._seen))).decode()
        return {"steps": self._steps, "seen": seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        steps, seen = int(state["steps"]), base64.b64decode(state["seen"])
        self._seen = {seen[i : i + KEY_BYTES] for i in range(0, len(seen), KEY_BYTES)}
        self._steps = steps


class StepMonitor:
    """Compares fresh and reused rows of each step, and adapts ``fresh_fraction`` if configured.

    Args:
        records: records of the rollouts of each step.
        config: the ``spec_rl:`` block.
        loader_length: number of the loader's batches in a pass over the data set.
        logprobs: name of the column with the log-probs of the policy that is trained; None: there
            is none, and log-probs are not compared.
        set_fresh_fraction: called with the new ``fresh_fraction`` when ``monitor.auto`` changes it.
        state: folder into which :meth:`save` wrote the state from which to continue, or None.
    """

    def __init__(
        self,
        records: MetadataTable,
        config: SpecRLConfig,
        *,
        loader_length: int,
        logprobs: str | None,
        set_fresh_fraction: Callable[[float], None],
        state: Path | None = None,
    ) -> None:
        self._records = records
        self._set_fresh_fraction = set_fresh_fraction
        self._logprobs = logprobs
        self.monitor = DriftMonitor(
            config.monitor,
            fresh_fraction=config.effective_fresh_fraction,
            steps_per_epoch=None,
            quantities=[name for name in QUANTITIES if logprobs is not None or name != "logprob"],
        )
        self._recurrence = Recurrence(loader_length)
        if state is not None and (state / STATE).exists():
            self._restore(state / STATE)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a batch that the monitor reads, by the names of logged rows' columns."""
        own = {} if self._logprobs is None else {self._logprobs: self._logprobs}
        return BATCH_COLUMNS | own

    def save(self, folder: Path) -> None:
        """Write the state from which a resumed run continues."""
        with replacing(folder / STATE, folder / f"{STATE}.tmp") as file:
            file.write(json.dumps(self._state()).encode())

    def _state(self) -> dict[str, Any]:
        steps = self.monitor.steps_per_epoch
        epochs = {"steps_per_epoch": steps, "recurrence": self._recurrence.state()}
        return self.monitor.state() | epochs

    def _restore(self, file: Path) -> None:
        """Continue from what :meth:`save` wrote; if it is damaged, start over."""
        fresh = self.monitor.state()
        try:
            state = json.loads(file.read_text())
            self.monitor.restore(state)
            steps = state.get("steps_per_epoch")
            self.monitor.steps_per_epoch = None if steps is None else int(steps)
            if "recurrence" in state:  # older states have neither
                self._recurrence.restore(state["recurrence"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.monitor.restore(fresh)
            self.monitor.steps_per_epoch = None
            logger.warning(
                "%s: damaged (%s: %s); the drift monitor begins anew",
                file,
                type(error).__name__,
                error,
            )
            return
        self._set_fresh_fraction(self.monitor.fresh_fraction)

    def compare(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Add the rows of a step to the comparison and return its metrics.

        A row whose record is missing is left out. A failure is logged and does not affect the step.

        Args:
            rows: columns under the names by which NeMo-RL logs them: ``token_ids``,
                ``input_lengths``, ``token_loss_mask``, the one with the log-probs, and ``rewards``
                (``filtered_rewards`` under dynamic sampling).
        """
        return self._guarded(lambda: rows)

    def compare_batch(self, batch: Any) -> dict[str, float]:
        """Do the same with the batch on which PPO trains, which has the rewards."""
        return self._guarded(lambda: {n: batch[c].numpy() for n, c in self.columns.items()})

    def _guarded(self, rows: Callable[[], Mapping[str, Sequence[Any]]]) -> dict[str, float]:
        try:
            return self._compare(rows())
        except Exception as error:  # a monitor must not end the run that it watches
            logger.warning("the drift monitor failed: %s: %s", type(error).__name__, error)
            return {}

    def _compare(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        rewards = columns.get("filtered_rewards", columns.get("rewards"))
        if rewards is None:
            raise KeyError("rewards")
        masks = columns["token_loss_mask"]
        rows = self._records.find(columns["token_ids"], masks, columns["input_lengths"])
        groups: list[bytes] = []
        fresh: list[bool] = []
        values: dict[str, list[float]] = {name: [] for name in self.monitor.quantities}
        stale: list[float] = []
        for i, responses in enumerate(rows):
            record = responses[0].record if responses else None
            if record is None:
                continue
            mask = np.asarray(masks[i]) > 0
            groups.append(record.key)
            fresh.append(record.fresh)
            values["reward"].append(float(rewards[i]))
            values["length"].append(float(mask.sum()))
            if self._logprobs is not None:
                logprobs = np.asarray(columns[self._logprobs][i], dtype=np.float64)
                values["logprob"].append(float(logprobs[mask].mean()))
            if record.staleness is not None:
                stale.append(record.staleness)
        fraction = self.monitor.fresh_fraction
        if groups:
            self._learn_epochs(groups)
            self.monitor.update(
                groups,
                np.array(fresh),
                {name: np.array(v) for name, v in values.items()},
                np.array(stale),
            )
            if self.monitor.warning:
                logger.warning(
                    "%s (spec_rl.fresh_fraction is %.2f)", self.monitor.warning, fraction
                )
        if self.monitor.fresh_fraction != fraction:
            self._set_fresh_fraction(self.monitor.fresh_fraction)
        return self.monitor.as_dict()

    def _learn_epochs(self, keys: Collection[bytes]) -> None:
        """Tell the monitor the length of an epoch as soon as prompts recur."""
        if self.monitor.steps_per_epoch is None:
            steps = self._recurrence.step(keys)
            if steps is not None:
                self.monitor.begin_epochs(steps)

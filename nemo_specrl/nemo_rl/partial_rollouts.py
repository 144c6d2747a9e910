"""Active partial rollouts under dynamic sampling: which prompts a batch requests and completes.

A batch consists of the prompts that earlier batches have put off, followed by the loader's batch.
Its generation ends when enough groups are complete; the other prompts are put off, and what has
been decoded for them stays in the cache. Dynamic sampling then sees only the complete groups, and
fills a step from as many batches as it needs, as it does without partial rollouts. The number of
prompts put off stays the same from batch to batch, since each batch completes as many as the loader
gives. The last batch of an epoch waits for all of its groups.

Source: APRIL, arXiv 2509.18521, which continues partial rollouts without verifying them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_specrl.config import PartialRolloutsConfig
from nemo_specrl.files import replacing
from nemo_specrl.nemo_rl.look_ahead import LookAhead, prompts_of
from nemo_specrl.nemo_rl.phase_end import Phase, start_counter
from nemo_specrl.rollout import prompt_key

__all__ = ["PartialRollouts"]

STATE = "put_off.json"

logger = logging.getLogger(__name__)


class PartialRollouts:
    """A data loader whose batches begin with the prompts that were put off. All else is unchanged.

    Args:
        loader: a ``StatefulDataLoader``.
        config: the ``grpo.partial_rollouts:`` block.
        group_size: number of rows of a prompt.
        tell: called before each batch with the prompts of the loader's next one, as
            :class:`LookAhead` does.
    """

    def __init__(
        self,
        loader: Any,
        config: PartialRolloutsConfig,
        group_size: int,
        tell: Callable[[list[list[int]]], None],
    ) -> None:
        self._loader = LookAhead(loader, self._note_upcoming)
        self._config, self._group_size, self._tell = config, group_size, tell
        self._counter: Any = None
        self._last = False  # the loader's batch is an epoch's last
        self._put_off: Any = None  # rows of the loader, as in its batches
        self._times: list[int] = []  # how often each of these was put off
        self._asked: Any = None  # the last batch that was returned, ...
        self._asked_times: list[int] = []
        self._new = 0  # ... how many of its prompts are from the loader
        self._complete: torch.Tensor | None = None  # which of its groups are complete
        self._counts = [0, 0]

    def _note_upcoming(self, prompts: list[list[int]]) -> None:
        self._last = not prompts
        self._tell(prompts)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the rest of an epoch."""
        for batch in self._loader:
            self._new = batch.size
            self._asked_times = [*self._times, *[0] * batch.size]
            if self._put_off is not None:
                batch = type(batch).from_batches([self._put_off, batch])
            self._asked, self._put_off, self._times = batch, None, []
            self._complete = None
            yield batch

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def begin(self, rows: int) -> Phase | None:
        """Begin the generation of the last batch that was returned.

        Args:
            rows: number of rows of the generation.

        Returns:
            What to tell the engines; None if all rows are awaited.
        """
        asked = len(self._asked_times)
        if self._asked is None or rows != asked * self._group_size:
            return None
        surplus = round((self._config.over_provision - 1) * self._new)
        if self._last or not surplus:
            return None
        # At most as many are put off as the loader gives, so there are never more prompts that must
        # not be put off again than are completed.
        awaited = sum(times >= self._config.max_put_off for times in self._asked_times)
        if self._counter is None:
            self._counter = start_counter()
        begin = self._counter.begin.remote(self._group_size, asked - surplus, awaited)
        try:
            return Phase(self._counter, ray.get(begin), asked - self._new)
        except ray.exceptions.RayError as error:
            logger.warning("the counter of complete groups is gone (%s); no row is put off", error)
            self._counter = None
            return None

    def settle(self, ended: torch.Tensor, lengths: torch.Tensor) -> None:
        """Put off the prompts whose groups are not complete.

        Args:
            ended: bool ``[rows]``, in the order of the batch.
            lengths: number of tokens of each row, int64 ``[rows]``.
        """
        most = self._config.max_put_off
        groups = ended.view(-1, self._group_size).all(dim=1).tolist()
        # Rows that an engine gave up of its own accord are taken as they are.
        complete = [done or t >= most for done, t in zip(groups, self._asked_times, strict=True)]
        again = [group for group, done in enumerate(complete) if not done]
        again.sort(key=lambda group: -self._asked_times[group])
        self._complete = torch.tensor(complete).repeat_interleave(self._group_size)
        self._times = [self._asked_times[group] + 1 for group in again]
        self._put_off = self._asked.select_indices(again) if again else None
        self._counts[0] += len(again)
        self._counts[1] += int(lengths[~self._complete].sum())

    def completed(self, batch: Any, *columns: torch.Tensor) -> tuple[Any, ...]:
        """Remove the rows of groups that were put off; called once for each generation.

        Args:
            batch: the rows of the generation.
            columns: tensors with an entry for each of them.
        """
        complete, self._complete = self._complete, None
        if complete is None or bool(complete.all()) or batch.size != len(complete):
            return batch, *columns
        rows = complete.nonzero().flatten()
        return batch.select_indices(rows.tolist()), *(c[rows.to(c.device)] for c in columns)

    def take_counts(self) -> tuple[int, int]:
        """Numbers of prompts put off since the last call, and of their rows' tokens so far."""
        (prompts, tokens), self._counts = self._counts, [0, 0]
        return prompts, tokens

    def save(self, folder: Path) -> None:
        """Write the prompts that are put off, by their indices in the data set."""
        with replacing(folder / STATE, folder / f"{STATE}.tmp") as file:
            file.write(json.dumps(self._records()).encode())

    def restore(self, folder: Path) -> None:
        """Read the prompts that were put off when a checkpoint was written.

        What cannot be read is logged and does not end the run: these prompts recur in the next
        epoch.
        """
        file = folder / STATE
        if not file.exists():
            return
        try:
            saved = json.loads(file.read_text())
            dataset = self._loader.dataset
            rows = [dataset[r["index"]] for r in saved if r["index"] < len(dataset)]
            if rows:
                self._put_off = self._loader.collate_fn(rows)
                self._times = [record["put_off"] for record in saved[: len(rows)]]
            if self._records() == saved:
                return
            problem = "the data set has other prompts than it had when this was written"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"damaged ({type(error).__name__}: {error})"
        logger.warning(
            "%s: %s; those that were put off come again in the next epoch", file, problem
        )
        self._put_off, self._times = None, []

    def _records(self) -> list[Mapping[str, Any]]:
        """For each prompt put off: index in the data set, key, and how often it was put off."""
        if self._put_off is None:
            return []
        keys = [prompt_key(torch.tensor(ids).numpy()).hex() for ids in prompts_of(self._put_off)]
        indices = [int(index) for index in self._put_off["idx"]]
        rows = zip(indices, keys, self._times, strict=True)
        return [{"index": i, "key": key, "put_off": times} for i, key, times in rows]

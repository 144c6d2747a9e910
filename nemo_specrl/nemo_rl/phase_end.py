"""The end of a generation before all of its rows have ended, over several engines.

A group's rows are on different engines, so none of them knows which groups are complete. A small
actor counts for all of them. An engine tells it about rows that have ended, and sees from a Ray
reference whether enough groups are complete; it waits for neither. If the actor is gone, engines
continue until their rows have ended, as they do without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray

__all__ = ["Phase", "PhaseEnd", "start_counter"]

ENGINES = 2**16
"""Number of calls that the counter handles at once: each engine has one waiting for the end of a
generation, and with Ray's own limit of 1000 the others, and all counts, would wait for those."""

logger = logging.getLogger(__name__)


class GroupCounter:
    """Counts the complete groups of one generation at a time; runs as a Ray actor."""

    def __init__(self) -> None:
        self._number = 0
        self._group_size = self._groups = self._awaited = 0
        self._ended: Counter[int] = Counter()
        self._reached = asyncio.Event()

    async def begin(self, group_size: int, groups: int, awaited: int) -> int:
        """Begin a generation, and end the previous one for all that still ask about it.

        Args:
            group_size: number of rows of a group.
            groups: number of groups that must be complete.
            awaited: number of the first groups that must be among them.

        Returns:
            The number by which engines name this generation.
        """
        self._reached.set()
        self._number += 1
        self._group_size, self._groups, self._awaited = group_size, groups, awaited
        self._ended, self._reached = Counter(), asyncio.Event()
        return self._number

    async def ended(self, number: int, groups: list[int]) -> None:
        """Count rows that have ended.

        Args:
            number: number of their generation; rows of an earlier one are not counted.
            groups: the group of each row.
        """
        if number != self._number:
            return
        self._ended.update(groups)
        complete = {g for g, rows in self._ended.items() if rows == self._group_size}
        if len(complete) >= self._groups and complete.issuperset(range(self._awaited)):
            self._reached.set()

    async def reached(self, number: int) -> None:
        """Return once enough groups of a generation are complete, or the next one has begun."""
        if number == self._number:
            await self._reached.wait()


def start_counter() -> Any:
    """Start the actor of :class:`GroupCounter`, and return its handle."""
    return ray.remote(GroupCounter).options(num_cpus=0, max_concurrency=ENGINES).remote()


@dataclass(frozen=True)
class Phase:
    """A generation that ends early, as described to the engines.

    Args:
        counter: handle of the actor of :class:`GroupCounter`.
        number: number of the generation.
        put_off: number of its first groups that earlier ones have put off: their rows go to the
            engines before all others.
    """

    counter: Any
    number: int
    put_off: int


class PhaseEnd:
    """Decides when an engine gives up the remaining rows (``engine.early_end.EndOfCall``).

    Args:
        phase: the generation.
        groups: the group of each row of this engine, in order.
    """

    def __init__(self, phase: Phase, groups: list[int]) -> None:
        self._phase, self._groups = phase, groups
        self._told: set[int] = set()
        self._end: Any = None  # Ray's reference, ready once enough groups are complete
        self._lost = False

    @property
    def first_rows(self) -> int:
        """Number of rows of groups that were put off, which are this engine's first rows."""
        return sum(group < self._phase.put_off for group in self._groups)

    def reached(self, ended: Collection[int]) -> bool:
        """Whether enough groups are complete, over all engines.

        Args:
            ended: indices of this engine's rows that have ended.
        """
        if self._lost:
            return False
        counter, number = self._phase.counter, self._phase.number
        if self._end is None:
            self._end = counter.reached.remote(number)
        if len(ended) > len(self._told):
            new = set(ended) - self._told
            self._told |= new
            counter.ended.remote(number, [self._groups[row] for row in sorted(new)])
        done, _ = ray.wait([self._end], timeout=0)
        if not done:
            return False
        try:
            ray.get(self._end)
        except ray.exceptions.RayError as error:
            self._lost = True
            logger.warning(
                "the actor that counts complete groups died (%s); this batch runs to completion",
                error,
            )
            return False
        return True

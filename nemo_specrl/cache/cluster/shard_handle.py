"""What a coordinator knows about a shard: its description of itself, and how it is called."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["LEAVE_OUT_SECONDS", "ShardHandle", "ShardInfo"]

MISSES_TO_LEAVE_OUT = 3
"""Number of missed writes, each within ``LEAVE_OUT_SECONDS`` of the one before, after which a shard
is left out."""
SAME_SECONDS = 5.0
"""Reports within this many seconds concern the same miss, which many clients see."""
LEAVE_OUT_SECONDS, LONGEST_LEFT_OUT = 60.0, 3600.0
"""How long a shard that keeps missing writes is left out, doubled each time, and the longest
time."""


class ShardInfo(NamedTuple):
    """A shard's description of itself.

    Args:
        name: the same for as long as its folder exists.
        store_id: a new one each time the store is opened or starts empty.
        holds: partitions of which the store has something.
        incarnation: the largest one with which anything in the store was put.
        remarks: lines for the user on how the store began and where it is.
    """

    name: str
    store_id: str
    holds: tuple[int, ...]
    incarnation: int = 0
    remarks: tuple[str, ...] = ()


@dataclass
class ShardHandle:
    """A shard that the coordinator has started."""

    node: str  # Ray's id of its node
    actor: Any
    machine: str  # address of the node; nodes of one machine share its disk
    index: int  # among the shards of the machine
    call: Any  # a call without an answer yet; None: there is none
    called_at: float = 0.0  # when that was made, or the last one before it
    heard_at: float = 0.0  # when an answer last came
    info: ShardInfo | None = None  # set once the shard has described itself
    answers: int = 0  # number of its last answer to a heartbeat
    epoch: int = -1  # of the last routing that it confirmed
    sent_epoch: int = -1  # of the last routing that was sent to it
    member: bool = False  # whether the membership counts it
    misses: int = 0  # number of writes missed in close succession
    missed_at: float = -math.inf  # when the last of them was noted
    left_out_for: float = LEAVE_OUT_SECONDS  # how long it is left out next time
    left_out_until: float = -math.inf

    def note_missed_write(self, now: float) -> None:
        """Note that clients could not write to the shard. Many of them report the same failure."""
        if now - self.missed_at >= SAME_SECONDS:
            together = now - self.missed_at < LEAVE_OUT_SECONDS
            self.misses, self.missed_at = self.misses + 1 if together else 1, now

    def is_to_be_left_out(self, now: float) -> bool:
        """Whether it has missed so many writes that it is left out for a while from now on.

        A shard whose disk is full would otherwise be filled again each time, and everything being
        copied would start again.
        """
        if self.misses < MISSES_TO_LEAVE_OUT:
            return False
        self.misses, self.left_out_until = 0, now + self.left_out_for
        self.left_out_for = min(2 * self.left_out_for, LONGEST_LEFT_OUT)
        return True

    @property
    def name(self) -> str:
        """The shard's own name; empty until it has described itself."""
        return self.info.name if self.info else ""

    @property
    def place(self) -> str:
        """The node, as named in messages."""
        return f"node {self.machine} ({self.node})"

"""What a coordinator knows of a shard: what the shard says of itself, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["ShardHandle", "ShardInfo"]


class ShardInfo(NamedTuple):
    """A shard's description of itself.

    Args:
        name: the same for as long as its folder is there.
        store_id: a new one each time that the store is opened, or starts empty.
        holds: partitions of which there is something in the store.
        incarnation: the largest one that anything in the store was put with.
        remarks: lines for the user on how the store began and where it lies.
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
    call: Any  # that has no answer yet; None: there is none
    called_at: float = 0.0  # when that was made, or the last one before it
    heard_at: float = 0.0  # when an answer last came
    info: ShardInfo | None = None  # once the shard has described itself
    answers: int = 0  # number of its last answer to a heartbeat
    epoch: int = -1  # of the last routing that it confirmed
    sent_epoch: int = -1  # of the last routing that was sent to it
    member: bool = False  # whether the membership counts it

    @property
    def name(self) -> str:
        """The shard's own name; empty until it has described itself."""
        return self.info.name if self.info else ""

    @property
    def place(self) -> str:
        """The node as messages name it."""
        return f"node {self.machine} ({self.node})"

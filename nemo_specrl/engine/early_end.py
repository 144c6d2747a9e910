"""The end of a call before all of its rows have ended: once enough groups are complete.

The decoded part of the other rows is kept as partial rollouts, which the next weights verify or
draft from. Source: active partial rollouts (APRIL, arXiv 2509.18521, section 3), except that no
token is trained on under weights other than those that made or verified it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_specrl.engine.interrupts import keep_decoded
from nemo_specrl.engine.requests import RolloutRequest
from nemo_specrl.errors import ConfigError

__all__ = ["EarlyEnd", "EndOfCall", "check_early_end", "give_up"]

logger = logging.getLogger(__name__)


class EndOfCall(Protocol):
    """Decides when a call ends before all of its rows have.

    A row that was given up has ``finish_reason`` "abort", like any request that vLLM aborts.
    """

    @property
    def first_rows(self) -> int:
        """How many of the call's first rows go to the engine before all others."""

    def reached(self, ended: Collection[int]) -> bool:
        """Whether to give up the remaining rows now; called before each step of the engine.

        Args:
            ended: indices of the rows that have ended.
        """


@dataclass(frozen=True)
class EarlyEnd:
    """The end of a call whose rows are all in one engine: enough of its groups are complete.

    The rows of a call are regarded as consecutive groups of ``group_size``.

    Args:
        group_size: number of rows of a group.
        groups: number of groups that must be complete.
        put_off: number of the call's first groups that earlier calls have put off: their rows go to
            the engine before all others.
        awaited: number of the call's first groups that must be among the complete ones.
    """

    group_size: int
    groups: int
    put_off: int = 0
    awaited: int = 0

    @property
    def first_rows(self) -> int:
        """Number of rows of the groups that earlier calls have put off."""
        return self.put_off * self.group_size

    def complete(self, ended: Collection[int]) -> list[int]:
        """Indices of the groups whose rows have all ended.

        Args:
            ended: indices of the rows that have ended.
        """
        counts = Counter(index // self.group_size for index in ended)
        return sorted(group for group, count in counts.items() if count == self.group_size)

    def reached(self, ended: Collection[int]) -> bool:
        """Whether enough groups are complete, including all those that are awaited.

        Args:
            ended: indices of the rows that have ended.
        """
        if len(ended) < self.groups * self.group_size:
            return False
        complete = self.complete(ended)
        return len(complete) >= self.groups and complete[: self.awaited] == [*range(self.awaited)]


def check_early_end(early_end: EndOfCall | None, enabled: bool, environment: Any) -> None:
    """Raise ConfigError for a call whose partial rollouts nothing could continue.

    Args:
        early_end: of the call.
        enabled: whether speculation is switched on.
        environment: what answers the turns of a conversation, or None.
    """
    if early_end is None:
        return
    if not enabled:
        raise ConfigError(
            "early_end: partial rollouts are kept in the cache; set spec_rl.enabled: true"
        )
    if environment is not None:
        raise ConfigError("early_end: a conversation that is cut off cannot be continued")


def give_up(engine: Any, inflight: Mapping[str, RolloutRequest], vocabulary: int) -> int:
    """Abort rows after setting their responses to what has been decoded so far.

    Args:
        engine: vLLM's ``LLMEngine``.
        inflight: requests by their id in the engine.
        vocabulary: number of tokens in the model's vocabulary.

    Returns:
        Number of tokens of these responses that had not come with any output yet.
    """
    decoded = 0
    for request_id, request in inflight.items():
        before = len(request.tokens)
        try:
            keep_decoded(engine, request_id, request, vocabulary)
        except KeyError:  # it has been aborted in the engine by another caller
            logger.debug("nothing is kept of request %s, which the engine has not", request_id)
        decoded += len(request.tokens) - before
    engine.abort_request(list(inflight))
    return decoded

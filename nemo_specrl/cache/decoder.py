"""What is served of the records of prompts: the newest that are sound, and a count of the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_specrl.cache.codec import decode_all
from nemo_specrl.cache.tables import visible
from nemo_specrl.rollout import Rollout

__all__ = ["Decoder"]

DECODED_AT_ONCE = 32  # records: more leave the processor's caches, fewer wait for numpy's calls

_log = logging.getLogger(__name__)


class Decoder:
    """Records to rollouts; damaged ones are skipped, counted, and logged once.

    Args:
        path: of the store, for the log.
        groups: rollouts that are served of each slot, newest first.

    Attributes:
        corrupt: db keys of damaged records, for the store to delete.
        damaged: how many there were so far.
    """

    def __init__(self, path: Path, groups: int) -> None:
        self._path = path
        self._groups = groups
        self.corrupt: set[bytes] = set()
        self.damaged = 0

    def decoded(
        self, prompts: Iterable[tuple[bytes, Mapping[bytes, bytes]]]
    ) -> dict[bytes, list[Rollout]]:
        """What is served of prompts, without those of which nothing is.

        Args:
            prompts: key and, by db key, records of each.
        """
        found: dict[bytes, list[Rollout]] = {}
        waiting: dict[bytes, Mapping[bytes, bytes]] = {}
        count = 0
        for key, records in prompts:
            waiting[key] = records
            count += len(records)
            if count >= DECODED_AT_ONCE:
                found |= self._some(waiting)
                waiting, count = {}, 0
        return found | self._some(waiting)

    def _some(self, prompts: Mapping[bytes, Mapping[bytes, bytes]]) -> dict[bytes, list[Rollout]]:
        while True:
            named = [
                (name, records[name])
                for records in prompts.values()
                for name in visible(records.keys() - self.corrupt, self._groups)
            ]
            found: dict[bytes, list[Rollout]] = {}
            sound = True
            for (name, _), result in zip(named, decode_all(named), strict=True):
                if isinstance(result, Rollout):
                    found.setdefault(result.key, []).append(result)
                    continue
                if not self.damaged:
                    _log.warning("rollout store %s: %s; such are skipped", self._path, result)
                self.damaged += 1
                self.corrupt.add(name)
                sound = False
            if sound:
                return found
            # Once more: an older rollout of the slot may take the place of a damaged one.

"""Choice and decoding of the records that a store serves: the newest intact ones of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_specrl.cache.codec import decode
from nemo_specrl.cache.storage.schema import newest_keys
from nemo_specrl.errors import CorruptRecord
from nemo_specrl.rollout import Rollout

__all__ = ["Decoder"]

logger = logging.getLogger(__name__)


class Decoder:
    """Decodes records; damaged ones are skipped, counted, and logged once.

    Args:
        path: path of the store, for the log.
        groups: number of rollouts served for each sample index, newest first.

    Attributes:
        corrupt: db keys of damaged records, for the store to delete.
        damaged: how many there have been so far.
    """

    def __init__(self, path: Path, groups: int) -> None:
        self._path = path
        self._groups = groups
        self.corrupt: set[bytes] = set()
        self.damaged = 0

    def decoded(
        self, prompts: Iterable[tuple[bytes, Mapping[bytes, bytes]]]
    ) -> dict[bytes, list[Rollout]]:
        """Decode the newest intact records of prompts.

        Args:
            prompts: key of each prompt, and its records by db key.
        """
        found = {key: self._sound(records) for key, records in prompts}
        return {key: rollouts for key, rollouts in found.items() if rollouts}

    def _sound(self, records: Mapping[bytes, bytes]) -> list[Rollout]:
        while True:
            rollouts: list[Rollout] = []
            damaged = set()
            for name in newest_keys(records.keys() - self.corrupt, self._groups):
                try:
                    rollouts.append(decode(name, records[name]))
                except CorruptRecord as error:
                    damaged.add(name)
                    if not self.damaged:
                        logger.warning(
                            "rollout store %s: %s; damaged records are skipped", self._path, error
                        )
                    self.damaged += 1
            if not damaged:
                return rollouts
            # Try again: an older rollout of the sample index may take the place of a damaged one.
            self.corrupt |= damaged

"""The write buffer of a store, and the transactions that commit it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import lmdb

from nemo_specrl.cache.storage.lmdb_tables import Tables
from nemo_specrl.rollout import KEY_BYTES

__all__ = ["WriteBuffer"]


class WriteBuffer:
    """Holds records that were put, and uses of prompts, until they are in the tables.

    Args:
        groups: rollouts kept for each sample index of a prompt, at least 1.
    """

    def __init__(self, groups: int) -> None:
        self.records: dict[bytes, dict[bytes, bytes]] = {}
        """Prompt key to db key to record."""
        self.touched: dict[bytes, int] = {}
        """Prompt key to the clock of its last use."""
        self.pages = 0
        """Number of pages that writing the records dirties."""
        self._bytes = 0
        self._groups = groups

    def add(
        self, key: bytes, clock: int, name: bytes, record: bytes, size: tuple[int, int]
    ) -> None:
        """Take a record.

        Args:
            key: of the prompt.
            clock: of the put.
            name: the record's db key.
            record: of a rollout.
            size: what ``Tables.size_of`` says of it.
        """
        self.records.setdefault(key, {})[name] = record
        self._bytes += size[0]
        self.pages += size[1]
        self.touched[key] = clock

    def clear(self) -> None:
        """Forget everything."""
        self.records.clear()
        self.touched.clear()
        self.pages = self._bytes = 0

    def commit(self, tables: Tables, corrupt: set[bytes], start_over: Callable[[], Tables]) -> int:
        """Commit uses, records and deletions. If that fails they stay, to be tried again.

        Args:
            tables: to write to.
            corrupt: db keys of records to delete; emptied.
            start_over: makes empty tables and returns them, where LMDB has no page left even for a
                deletion.

        Returns:
            Rollouts that were dropped, since no eviction made room for them.

        Raises:
            lmdb.Error: writing failed.
        """
        uses = [key for key in self.touched if key not in self.records]
        for i in range(0, len(uses), tables.touch_batch):
            some = {key: self.touched[key] for key in uses[i : i + tables.touch_batch]}
            tables, _ = self._commit(tables, some, {}, (), start_over)
            for key in some:
                del self.touched[key]
        if not self.records and not corrupt:
            return 0
        _, done = self._commit(tables, self.touched, self.records, corrupt, start_over)
        dropped = 0 if done else sum(map(len, self.records.values()))
        self.clear()
        corrupt.clear()
        return dropped

    def _commit(
        self,
        tables: Tables,
        touched: Mapping[bytes, int],
        records: Mapping[bytes, Mapping[bytes, bytes]],
        corrupt: Collection[bytes],
        start_over: Callable[[], Tables],
    ) -> tuple[Tables, bool]:
        """Write in one transaction, evicting prompts until there is room for it.

        Returns:
            The tables to go on with, and whether it was written.
        """
        for keep in (0.75, 0.5, 0.25, 0.0, None):
            try:
                self._write(tables, touched, records, corrupt)
                return tables, True
            except lmdb.MapFullError:
                if keep is not None and not _make_room(tables, int(keep * tables.budget)):
                    tables = start_over()
        return tables, False

    def _write(
        self,
        tables: Tables,
        touched: Mapping[bytes, int],
        records: Mapping[bytes, Mapping[bytes, bytes]],
        corrupt: Collection[bytes],
    ) -> None:
        with tables.writing() as writer:
            for key, clock in touched.items():
                writer.touch(key, clock)
            if records:
                writer.evict_down_to(tables.budget - self._bytes)
            for key in dict.fromkeys([*records, *(name[:KEY_BYTES] for name in corrupt)]):
                clock = touched.get(key) or tables.tick()
                writer.update(key, clock, records.get(key, {}), corrupt, self._groups)


def _make_room(tables: Tables, target: int) -> bool:
    """Evict until ``target`` bytes are in use, for a transaction that found the file full.

    Returns:
        False if there is not even a page for a deletion; then all prompts count as evicted.
    """
    try:
        tables.evict_down_to(target)
        for _ in range(2):  # LMDB reuses what a transaction freed only after the next one
            with tables.writing():
                pass
    except lmdb.MapFullError:
        with tables.reading() as reader:
            tables.evicted += reader.prompts()
        return False
    return True

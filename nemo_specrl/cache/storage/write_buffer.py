"""The write buffer of a store."""

from __future__ import annotations

from nemo_specrl.cache.storage.tables import Tables

__all__ = ["WriteBuffer"]


class WriteBuffer:
    """Holds records that were put, and uses of prompts, until they are in the tables."""

    def __init__(self) -> None:
        self.records: dict[bytes, dict[bytes, bytes]] = {}
        """Prompt key to db key to record."""
        self.touched: dict[bytes, int] = {}
        """Prompt key to the clock of its last use."""
        self.bytes = 0
        """Bytes that the records take in the tables."""

    def add(self, key: bytes, clock: int, name: bytes, record: bytes, size: int) -> None:
        """Take a record.

        Args:
            key: key of the prompt.
            clock: clock of the put.
            name: the record's db key.
            record: record of a rollout.
            size: its size by ``Tables.size_of``.
        """
        self.records.setdefault(key, {})[name] = record
        self.bytes += size
        self.touched[key] = clock

    def clear(self) -> None:
        """Forget everything."""
        self.records.clear()
        self.touched.clear()
        self.bytes = 0

    def commit(self, tables: Tables, corrupt: set[bytes], groups: int) -> None:
        """Commit uses, records and deletions. If that fails they stay, to be tried again.

        Args:
            tables: to write to.
            corrupt: db keys of records to delete; emptied.
            groups: rollouts kept for each sample index of a prompt, at least 1.

        Raises:
            sqlite3.Error: writing failed.
        """
        if self.touched or corrupt:
            tables.write(self.touched, self.records, corrupt, groups)
            self.clear()
            corrupt.clear()

"""A store with a journal of the rollouts that were made since the last checkpoint.

After a crash the store is restored from the checkpoint; the journal is not. When the lost steps are
repeated under the same weights, their rollouts are taken from the journal instead of being decoded
again. The caller identifies weights by their fingerprint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.cache.store import MIN_BYTES, RolloutStore
from nemo_specrl.errors import ForeignStore
from nemo_specrl.rollout import Finish, Rollout

__all__ = ["JournaledStore"]

_ALL = 2**16  # groups of a prompt, which may come up often between two checkpoints


class JournaledStore:
    """A :class:`RolloutStore` and its journal, which has a quarter of the bytes.

    The journal consists of two stores that keep every rollout and every bit of the log-probs, so
    that a repeated step trains on exactly what the lost step had. Rollouts that their cap evicts
    are decoded again. The two stores take turns: while a checkpoint is written, new rollouts go
    into one, and when the checkpoint is complete, the other one is emptied.

    Args:
        folder: folder of the store.
        journal: folder of the journal.
        run: identity of the run. Runs whose rollouts must not be mixed up need different ones; the
            journal of another run is emptied.
        max_bytes: hard cap of all stores together, bytes (each has at least 1 MiB).
        tokenizer_id: identity of the tokenizer.
        groups_per_prompt: rollouts that the store keeps for each sample index.

    Raises:
        CacheError: see :class:`RolloutStore`.
    """

    def __init__(
        self,
        folder: Path,
        journal: Path,
        *,
        run: str,
        max_bytes: int,
        tokenizer_id: str,
        groups_per_prompt: int = 1,
    ) -> None:
        share = max(MIN_BYTES, max_bytes // 8)
        self._store = RolloutStore(
            folder,
            max_bytes=max(MIN_BYTES, max_bytes - 2 * share),
            tokenizer_id=tokenizer_id,
            groups_per_prompt=groups_per_prompt,
        )
        self._journal: deque[RolloutStore] = deque()
        """The last one is written to."""
        try:
            for part in ("0", "1"):
                store = _open_journal(Path(journal, part), share, f"{tokenizer_id} {run}")
                self._journal.append(store)
        except BaseException:
            self.close()
            raise
        # By key, sample index and policy version.
        self._asked: Counter[tuple[bytes, int, int]] = Counter()
        self._put: Counter[tuple[bytes, int, int]] = Counter()

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Look up rollouts in the store alone, as :meth:`RolloutStore.get` does."""
        return self._store.get(keys)

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Put rollouts into the store and the journal, as :meth:`RolloutStore.put` does."""
        rollouts = list(rollouts)
        self._store.put(rollouts)
        for rollout in rollouts:
            self._put[rollout.key, rollout.sample_index, rollout.policy_version] += 1
        self._journal[-1].put(rollouts)

    def take(
        self, rows: Sequence[tuple[bytes, int]], policy_version: int, fingerprint: int
    ) -> list[Rollout | None]:
        """Return the rollouts that a process that died had made for the same step.

        Rollouts of the same weights are returned for the whole batch or not at all, because
        decoding fewer rows at a time changes roundings, and so would not repeat the lost step.
        They are put into the store as well. If the weights are others, because an earlier step
        could not be repeated exactly, only some of the rows may have a rollout.

        A row that is asked for a second time in a step gets the rollout of its second occurrence.

        Args:
            rows: key and sample index of each row.
            policy_version: version of the weights that generate, which identifies the step.
            fingerprint: fingerprint of these weights.

        Returns:
            a rollout for each row, or None. Its fingerprint may be that of other weights.
        """
        keys = dict.fromkeys(key for key, _ in rows)
        found: dict[bytes, list[Rollout]] = {}
        for part in reversed(self._journal):  # newest first, as each store returns them
            for key, rollouts in part.get(keys).items():
                found.setdefault(key, []).extend(rollouts)
        taken: list[Rollout | None] = []
        for key, sample_index in rows:
            place = key, sample_index, policy_version
            earlier = [
                rollout
                for rollout in reversed(found.get(key, ()))  # now the oldest first
                if (rollout.sample_index, rollout.policy_version) == (sample_index, policy_version)
            ]
            # Leave out what this process has put itself. If the cap has evicted some of it, all
            # earlier rollouts of the prompt are gone as well, since a prompt is evicted as a whole.
            earlier = earlier[: max(0, len(earlier) - self._put[place])]
            whole = [rollout for rollout in earlier if rollout.finish is not Finish.PARTIAL]
            index = self._asked[place]
            taken.append(whole[index] if index < len(whole) else None)
            self._asked[place] += 1
        same = [r for r in taken if r is not None and r.fingerprint == fingerprint]
        if same and len(same) < len(rows):
            return [None] * len(rows)
        self._store.put(same)
        return taken

    def snapshot(self, folder: str | os.PathLike[str]) -> None:
        """Write a snapshot of the store alone, as :meth:`RolloutStore.snapshot` does.

        Call it between two steps. Rollouts that are put afterwards belong to later steps, and
        :meth:`forget` leaves them in the journal.
        """
        self._store.snapshot(folder)
        self._journal.rotate()
        self._asked.clear()
        self._put.clear()

    def forget(self) -> None:
        """Remove what the journal had at the last snapshot.

        Call it once the checkpoint with that snapshot is complete.
        """
        self._journal[0].clear()

    def sync(self) -> None:
        """Commit all, as :meth:`RolloutStore.sync` does."""
        for part in self._journal:
            part.sync()
        self._store.sync()

    def stats(self) -> StoreStats:
        """Return the statistics of the store alone."""
        return self._store.stats()

    def close(self) -> None:
        """Close all, as :meth:`RolloutStore.close` does."""
        with contextlib.ExitStack() as stack:
            for store in (self._store, *self._journal):
                stack.callback(store.close)


def _open_journal(folder: Path, max_bytes: int, identity: str) -> RolloutStore:
    def opened() -> RolloutStore:
        return RolloutStore(
            folder,
            max_bytes=max_bytes,
            tokenizer_id=identity,
            groups_per_prompt=_ALL,
            exact_logprobs=True,
        )

    try:
        return opened()
    except ForeignStore:  # the journal of another run
        shutil.rmtree(folder)
        return opened()

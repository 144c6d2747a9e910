"""A store with a journal of the rollouts that were made since the last checkpoint.

After a crash the store goes back to what the checkpoint has; the journal does not. What a lost step
had made is there to be taken as it is, by the same step under the same weights. Knows stores and
rollouts; which weights are the same is the caller's to say, by their fingerprint.
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

_ALL = 2**16  # groups: a prompt may come often between two checkpoints


class JournaledStore:
    """A :class:`RolloutStore` and its journal; a quarter of the bytes is the journal's.

    The journal is two stores, in which nothing replaces anything and log-probs keep every bit, so
    that what is trained on it is trained on what the lost step was. Where its cap makes it forget,
    rollouts are made again. The two take turns: while a checkpoint is written, what is made goes
    into the one of which nothing will be forgotten when the checkpoint is complete.

    Args:
        folder: of the store.
        journal: folder of the journal.
        run: whose journal it is: anything in which two runs differ whose rollouts must not be
            taken for one another's. The journal of another run is emptied.
        max_bytes: hard cap of all together, bytes (each store has at least 1 MiB).
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
        """The last is the one that is written to."""
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

        All of the batch or nothing: what is decoded beside fewer rows than at first comes out with
        other roundings, and would not be what the lost step had. What is of these very weights
        goes into the store, as when it was made. Of other weights, as where a step could not be
        repeated to the bit, there may be a part.

        A row that asks a second time in a step gets what its second occurrence had made.

        Args:
            rows: key and sample index of each.
            policy_version: of the weights that generate, which says the step.
            fingerprint: of the same weights.
        """
        keys = dict.fromkeys(key for key, _ in rows)
        found: dict[bytes, list[Rollout]] = {}
        for part in reversed(self._journal):  # newest first, as each of them gives them
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
            # Of this process's own, the cap may have made the journal forget some, but then all
            # that were there before are forgotten, too: a prompt goes as a whole.
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

        It has what the journal has. Call it between two steps: what is put afterwards is of later
        ones, and :meth:`forget` leaves it in the journal.
        """
        self._store.snapshot(folder)
        self._journal.rotate()
        self._asked.clear()
        self._put.clear()

    def forget(self) -> None:
        """Forget what the journal had at the last snapshot.

        For when the checkpoint with that snapshot is complete: its steps can be lost no more.
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
    except ForeignStore:  # of a run that this one is not
        shutil.rmtree(folder)
        return opened()

"""A store with a journal of the rollouts that were made since the last checkpoint.

After a crash the store is restored from the checkpoint; the journal is not. When the lost steps are
repeated under the same weights, their rollouts are taken from the journal instead of being decoded
again. The caller identifies weights by their fingerprint.

A step may be lost several times, by one process after the other, and each may have decoded it
differently (the length of lossless drafts depends on measured times). The journal therefore notes
which process made a rollout, and at which draw of its prompt in the step, in the field
``incarnation`` of its records, which the store of a single engine does not use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.cache.snapshot import Manifest
from nemo_specrl.cache.store import MIN_BYTES, RolloutStore
from nemo_specrl.errors import ForeignStore
from nemo_specrl.rollout import Finish, Rollout

__all__ = ["JournaledStore"]

_ALL = 2**16  # groups of a prompt, which may occur often between two checkpoints
_DRAWS = 2**20  # of a prompt in a step, at most; a record's incarnation: process * _DRAWS + draw


class JournaledStore:
    """A :class:`RolloutStore` and its journal, which has a quarter of the bytes.

    The journal consists of two stores that keep every rollout and every bit of the log-probs, so
    that a repeated step trains on exactly what the lost step had. Rollouts that their cap evicts
    are decoded again. The two stores take turns: while a checkpoint is written, new rollouts go
    into one, and when the checkpoint is complete, the other one is emptied.

    Args:
        folder: folder of the store.
        journal: folder of the journal.
        run: identity of the run. Runs whose rollouts must not be mixed need different ones; the
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
        self._process = time.time_ns() // 10**6
        # How often a row has been requested, by key, sample index and policy version.
        self._draws: Counter[tuple[bytes, int, int]] = Counter()

    def get(self, keys: Iterable[bytes]) -> dict[bytes, list[Rollout]]:
        """Look up rollouts in the store only, as :meth:`RolloutStore.get` does."""
        return self._store.get(keys)

    def put(self, rollouts: Iterable[Rollout]) -> None:
        """Put rollouts into the store and the journal, as :meth:`RolloutStore.put` does.

        If one of them fails, the other one still gets them.
        """
        rollouts = list(rollouts)
        places = [(r.key, r.sample_index, r.policy_version) for r in rollouts]
        made = [self._process * _DRAWS + self._draws[place] for place in places]
        journaled = (r.changed(incarnation=i) for r, i in zip(rollouts, made, strict=True))
        with contextlib.ExitStack() as stack:
            stack.callback(self._journal[-1].put, journaled)
            self._store.put(rollouts)

    def take(
        self,
        rows: Sequence[tuple[bytes, int]],
        policy_version: int,
        fingerprint: int,
        enough: Callable[[Sequence[bool]], bool] = all,
    ) -> list[Rollout | None]:
        """Return the rollouts that a process had made for the same step before it died.

        Rollouts of the same weights are returned for the whole batch or not at all, and all from
        one process: decoding fewer rows at a time changes roundings, and the rows that several
        processes had finished when each of them died are the short ones. The latest process that
        had them all counts, since it may have logged the step. They are put into the store as well.

        If the weights differ, because an earlier step could not be repeated exactly, only some of
        the rows may have a rollout, each the latest one.

        A row that is requested a second time in a step gets the rollout of its second draw.

        Args:
            rows: key and sample index of each row.
            policy_version: version of the weights that generate, which identifies the step.
            fingerprint: fingerprint of these weights.
            enough: given one bool per row, True if it ended, says whether these rows are a whole
                batch. A step that ended early has partial rollouts of other rows, which are put
                into the store.

        Returns:
            a rollout for each row, or None. Its fingerprint may be that of other weights.
        """
        made = self._made(rows, policy_version)
        processes = sorted({process for found in made for process in found}, reverse=True)
        for process in processes:
            taken = [found.get(process) for found in made]
            same = [None if r is None or r.fingerprint != fingerprint else r for r in taken]
            if enough([_ended(r) for r in same]):
                self._store.put(r for r in same if r is not None)
                return [r if _ended(r) else None for r in same]
        ended = [{p: r for p, r in found.items() if _ended(r)} for found in made]
        if any(r.fingerprint == fingerprint for found in ended for r in found.values()):
            return [None] * len(rows)
        return [found[max(found)] if found else None for found in ended]

    def _made(
        self, rows: Sequence[tuple[bytes, int]], policy_version: int
    ) -> list[dict[int, Rollout]]:
        """Return what earlier processes made for the next draw of each row, by process."""
        places = [(key, sample_index, policy_version) for key, sample_index in rows]
        self._draws.update(places)
        recorded: dict[tuple[bytes, int, int], dict[int, Rollout]] = defaultdict(dict)
        keys = dict.fromkeys(key for key, _ in rows)
        groups = [group for part in self._journal for group in part.get(keys).values()]
        for rollout in itertools.chain.from_iterable(groups):
            if rollout.policy_version != policy_version:
                continue
            process, draw = divmod(rollout.incarnation, _DRAWS)
            if process != self._process:
                found = recorded[rollout.key, rollout.sample_index, draw]
                if _ended(rollout) or process not in found:
                    found[process] = rollout.changed(incarnation=0)
        return [recorded.get((*place[:2], self._draws[place]), {}) for place in places]

    def restore(self, folder: str | os.PathLike[str]) -> tuple[Manifest, list[str]]:
        """Restore the store only, as :meth:`RolloutStore.restore` does."""
        return self._store.restore(folder)

    def snapshot(self, folder: str | os.PathLike[str], policy_version: int = 0) -> None:
        """Write a snapshot of the store only, as :meth:`RolloutStore.snapshot` does.

        Call it between two steps. Rollouts that are put afterwards belong to later steps, and
        :meth:`forget` leaves them in the journal.
        """
        self._store.snapshot(folder, policy_version)
        self._journal.rotate()
        self._draws.clear()

    def forget(self) -> None:
        """Remove what the journal had at the last snapshot.

        Call it once the checkpoint with that snapshot is complete.
        """
        self._journal[0].clear()

    def sync(self) -> None:
        """Commit all stores, as :meth:`RolloutStore.sync` does, each even if another one fails."""
        with contextlib.ExitStack() as stack:
            for store in (self._store, *self._journal):
                stack.callback(store.sync)

    def stats(self) -> StoreStats:
        """Return the statistics of the store only."""
        return self._store.stats()

    def close(self) -> None:
        """Close all stores, as :meth:`RolloutStore.close` does."""
        with contextlib.ExitStack() as stack:
            for store in (self._store, *self._journal):
                stack.callback(store.close)


def _ended(rollout: Rollout | None) -> bool:
    return rollout is not None and rollout.finish is not Finish.PARTIAL


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

"""Which of two rollouts of one sample index is newer, and the merge of two stores' rollouts.

The order depends only on the rollouts, so that copies can be merged in any order and any number of
times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from nemo_specrl.rollout import Finish, Rollout

__all__ = ["merge_newest", "oldest_first", "recency"]

Recency = tuple[int, int, int, bool, int]


def recency(rollout: Rollout) -> Recency:
    """Order the rollouts of one sample index: the newer one compares greater.

    The incarnation comes first, because policy versions go back when a run resumes from a
    checkpoint: what the resumed run makes is newer than what its disks have from the lost steps,
    whatever its version. For the same rollout (same version, same occurrence), the finished form is
    newer than a partial one, and a longer partial one is newer than a shorter one.
    """
    finished = rollout.finish is not Finish.PARTIAL
    return (
        rollout.incarnation,
        rollout.policy_version,
        rollout.occurrence,
        finished,
        0 if finished else len(rollout),
    )


def oldest_first(rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
    """Reverse the rollouts of each prompt: stores list the newest first, but must be given the
    newest last.
    """
    for _, group in itertools.groupby(rollouts, lambda rollout: rollout.key):
        yield from reversed(list(group))


def merge_newest(
    incoming: Iterable[Rollout], present: Iterable[Rollout], groups: int
) -> list[Rollout]:
    """Merge two sets of rollouts of one sample index.

    A partial rollout counts only while it is the newest: only the newest can be continued, and an
    older partial one would take the place of a finished one.

    Args:
        incoming: rollouts of another store, in any order.
        present: what the store has. It cannot delete single rollouts, so an outdated partial one
            that it has already stays while there is room.
        groups: number of rollouts to keep.

    Returns:
        The rollouts to keep, newest first.
    """
    old: dict[Recency, Rollout] = {}
    for rollout in present:
        old.setdefault(recency(rollout), rollout)
    found = {recency(rollout): rollout for rollout in incoming} | old
    ordered = sorted(found, reverse=True)
    outdated = [when for when in ordered[1:] if found[when].finish is Finish.PARTIAL]
    kept = [when for when in ordered if when not in outdated]
    kept += [when for when in outdated if when in old]
    return [found[when] for when in kept[:groups]]

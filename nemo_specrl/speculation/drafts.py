"""Which cached rollout serves which request.

Knows rollouts, rows and policy versions; nothing of engines, stores or tokenizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_specrl.rollout import Rollout
from nemo_specrl.speculation.acceptance import row_uniform

__all__ = ["Row", "assign_slots", "is_fresh", "select_drafts"]


@dataclass(frozen=True)
class Row:
    """One rollout to make: the key of its prompt and its slot in the group."""

    key: bytes
    slot: int


def assign_slots(keys: Sequence[bytes]) -> list[int]:
    """The k-th row of a prompt in a batch has slot k."""
    seen: dict[bytes, int] = defaultdict(int)
    slots = []
    for key in keys:
        slots.append(seen[key])
        seen[key] += 1
    return slots


def is_fresh(row: Row, *, seed: int, policy_version: int, fresh_fraction: float) -> bool:
    """Whether a row is decoded plainly although a draft may be there (design, rule 10)."""
    if fresh_fraction <= 0:
        return False
    return row_uniform("fresh", seed, policy_version, row.key, row.slot) < fresh_fraction


def select_drafts(
    rows: Sequence[Row],
    cached: Mapping[bytes, Sequence[Rollout]],
    *,
    policy_version: int,
    oldest_birth: int = 0,
) -> list[Rollout | None]:
    """A draft for each row, or None.

    The row with slot k takes the newest draft of its prompt's slot k and no other, so that no draft
    is given to two rows, whether the rows of a group come in one batch, in several, or on several
    engines. A slot that the present weights have served gets no draft: its uniforms have been used,
    and the same draft would only come out as a copy.

    A draft is cut at its first token that was born before ``oldest_birth``; one that is then empty
    is no draft.

    Args:
        rows: what is asked for.
        cached: rollouts by prompt key, newest first within a slot.
        policy_version: of the weights that will judge.
        oldest_birth: the earliest policy version whose tokens may still be reused.
    """
    newest: dict[Row, Rollout] = {}
    served: set[Row] = set()
    for key, rollouts in cached.items():
        for rollout in rollouts:
            place = Row(key, rollout.slot)
            newest.setdefault(place, rollout)
            if rollout.policy_version == policy_version:
                served.add(place)
    drafts: list[Rollout | None] = []
    for row in rows:
        draft = newest.get(row)
        if draft is None or row in served:
            drafts.append(None)
            continue
        old = np.flatnonzero(draft.birth_versions < oldest_birth)
        draft = draft.prefix(int(old[0])) if len(old) else draft
        drafts.append(draft if len(draft) else None)
    return drafts

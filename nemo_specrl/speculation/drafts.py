"""Which cached rollout serves which request.

Knows rollouts, rows and policy versions; nothing of engines, stores or tokenizers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from nemo_specrl.rollout import Finish, Outline, Rollout
from nemo_specrl.speculation.acceptance import row_uniform

__all__ = ["Choice", "Row", "assign_slots", "is_fresh", "select_drafts"]


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


Draft = TypeVar("Draft", Rollout, Outline)


class Choice(NamedTuple, Generic[Draft]):
    """What a row gets: a draft, or None to be decoded plainly, and how often it came before."""

    draft: Draft | None
    visit: int


def is_fresh(row: Row, visit: int, *, seed: int, fresh_fraction: float) -> bool:
    """Whether a row is decoded plainly although a draft may be there (design, rule 10).

    Rows take turns: each one's share of plain visits is ``fresh_fraction`` over every stretch of
    visits, and it never waits longer than ``ceil(1 / fresh_fraction)`` visits for its turn. The
    wait bounds how often a token can be trained on, and for a given number of decoded tokens no
    rule has a lower bound. Where in the turn a row begins is random, so that a step has its share,
    too.

    Args:
        row: prompt and slot.
        visit: how many rollouts the slot had before.
        seed: of the run.
        fresh_fraction: in [0, 1].
    """
    phase = row_uniform("fresh", seed, 0, row.key, row.slot)
    turns = math.floor(visit * fresh_fraction + phase)
    return turns > math.floor((visit - 1) * fresh_fraction + phase)


def select_drafts(
    rows: Sequence[Row],
    cached: Mapping[bytes, Sequence[Draft]],
    *,
    policy_version: int,
    seed: int = 0,
    fresh_fraction: float = 0.0,
) -> list[Choice[Draft]]:
    """A draft for each row, or None.

    The row with slot k takes the newest draft of its prompt's slot k and no other, so that no draft
    is given to two rows, whether the rows of a group come in one batch, in several, or on several
    engines. A slot that the present weights have served gets no draft: its uniforms have been used,
    and the same draft would only come out as a copy. Not so a rollout that was interrupted: it is
    continued, as the visit that it is.

    Args:
        rows: what is asked for.
        cached: rollouts, or outlines of them, by prompt key, newest first within a slot.
        policy_version: of the weights that will judge.
        seed: of the run; the turns of fresh rows depend on it.
        fresh_fraction: share of rows that get none although there is one.
    """
    newest: dict[Row, Draft] = {}
    served: set[Row] = set()
    for key, rollouts in cached.items():
        for rollout in rollouts:
            place = Row(key, rollout.slot)
            newest.setdefault(place, rollout)
            if rollout.policy_version == policy_version and rollout.finish is not Finish.PARTIAL:
                served.add(place)
    choices: list[Choice[Draft]] = []
    for row in rows:
        draft = newest.get(row)
        if draft is None:
            choices.append(Choice(None, 0))
        elif row in served:
            choices.append(Choice(None, draft.visit))
        else:
            unfinished = draft.finish is Finish.PARTIAL
            visit = draft.visit + (not unfinished)
            plain = is_fresh(row, visit, seed=seed, fresh_fraction=fresh_fraction)
            # Where these weights were at it, it is as fresh as what they would decode now.
            plain &= not (unfinished and draft.policy_version == policy_version)
            choices.append(Choice(None if plain or not len(draft) else draft, visit))
    return choices

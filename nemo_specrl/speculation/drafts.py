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

__all__ = ["Choice", "Row", "assign_sample_indices", "is_fresh", "select_drafts"]


@dataclass(frozen=True)
class Row:
    """One rollout to make: the key of its prompt and its sample index in the group."""

    key: bytes
    sample_index: int


def assign_sample_indices(keys: Sequence[bytes]) -> list[int]:
    """The k-th row of a prompt in a batch has sample index k."""
    seen: dict[bytes, int] = defaultdict(int)
    sample_indices = []
    for key in keys:
        sample_indices.append(seen[key])
        seen[key] += 1
    return sample_indices


Draft = TypeVar("Draft", Rollout, Outline)


class Choice(NamedTuple, Generic[Draft]):
    """What a row gets: a draft, or None to be decoded plainly, and how often it came before."""

    draft: Draft | None
    occurrence: int


def is_fresh(row: Row, occurrence: int, *, seed: int, fresh_fraction: float) -> bool:
    """Whether a row is decoded plainly although a draft may be there (design, rule 10).

    Rows take turns: each one's share of plain occurrences is ``fresh_fraction`` over every stretch
    of occurrences, and it never waits longer than ``ceil(1 / fresh_fraction)`` occurrences for its
    turn. The wait bounds how often a token can be trained on, and for a given number of decoded
    tokens no rule has a lower bound. Where in the turn a row begins is random, so that a step has
    its share, too.

    Args:
        row: prompt and sample index.
        occurrence: how many rollouts the sample index had before.
        seed: of the run.
        fresh_fraction: in [0, 1].
    """
    phase = row_uniform("fresh", seed, 0, row.key, row.sample_index)
    turns = math.floor(occurrence * fresh_fraction + phase)
    return turns > math.floor((occurrence - 1) * fresh_fraction + phase)


def select_drafts(
    rows: Sequence[Row],
    cached: Mapping[bytes, Sequence[Draft]],
    *,
    policy_version: int,
    seed: int = 0,
    fresh_fraction: float = 0.0,
) -> list[Choice[Draft]]:
    """A draft for each row, or None.

    The row with sample index k takes the newest draft of its prompt's sample index k and no other,
    so that no draft is given to two rows, whether the rows of a group come in one batch, in
    several, or on several engines. A sample index that the present weights have served gets no
    draft: its uniforms have been used, and the same draft would only come out as a copy. Not so a
        rollout that was
    interrupted: it is continued, as the occurrence that it is.

    Args:
        rows: what is asked for.
        cached: rollouts, or outlines of them, by prompt key, newest first within a sample index.
        policy_version: of the weights that will judge.
        seed: of the run; the turns of fresh rows depend on it.
        fresh_fraction: share of rows that get none although there is one.
    """
    newest: dict[Row, Draft] = {}
    served: set[Row] = set()
    for key, rollouts in cached.items():
        for rollout in rollouts:
            place = Row(key, rollout.sample_index)
            newest.setdefault(place, rollout)
            if rollout.policy_version == policy_version and rollout.finish is not Finish.PARTIAL:
                served.add(place)
    choices: list[Choice[Draft]] = []
    for row in rows:
        draft = newest.get(row)
        if draft is None:
            choices.append(Choice(None, 0))
        elif row in served:
            choices.append(Choice(None, draft.occurrence))
        else:
            unfinished = draft.finish is Finish.PARTIAL
            occurrence = draft.occurrence + (not unfinished)
            plain = is_fresh(row, occurrence, seed=seed, fresh_fraction=fresh_fraction)
            # Where these weights were at it, it is as fresh as what they would decode now.
            plain &= not (unfinished and draft.policy_version == policy_version)
            choices.append(Choice(None if plain or not len(draft) else draft, occurrence))
    return choices

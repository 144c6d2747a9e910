"""Choice of the cached rollout that each row verifies.

This module knows rollouts, rows and policy versions. It does not know engines, stores or
tokenizers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from nemo_specrl.rollout import MAX_SAMPLE_INDEX, Finish, Rollout, RolloutSummary
from nemo_specrl.speculation.acceptance import row_uniform

__all__ = [
    "RUN_AHEAD_INDEX",
    "Draft",
    "Row",
    "assign_sample_indices",
    "is_fresh",
    "mean_lengths",
    "response_id",
    "select_drafts",
]


@dataclass(frozen=True)
class Row:
    """A rollout to be made: its prompt's key, and its sample index in the group."""

    key: bytes
    sample_index: int


def assign_sample_indices(keys: Sequence[bytes]) -> list[int]:
    """Give the k-th row of a prompt in a batch sample index k.

    Args:
        keys: keys of the rows' prompts.
    """
    seen: dict[bytes, int] = defaultdict(int)
    sample_indices = []
    for key in keys:
        sample_indices.append(seen[key])
        seen[key] += 1
    return sample_indices


RUN_AHEAD_INDEX = MAX_SAMPLE_INDEX
"""Replaces the sample index in responses that belong to no group: those of run-ahead."""


def response_id(sample_index: int, policy_version: int) -> int:
    """Return a number that identifies a response among those of its prompt, ``0 .. 2**63 - 1``."""
    return (policy_version << 16 | sample_index) & (2**63 - 1)


Draft = TypeVar("Draft", Rollout, RolloutSummary)


def mean_lengths(cached: Mapping[bytes, Sequence[Draft]]) -> dict[bytes, float]:
    """Return the mean length of the cached responses to each prompt, tokens.

    An interrupted response would have become longer, so it counts only if a prompt has no complete
    one.
    """
    lengths = {}
    for key, rollouts in cached.items():
        whole = [len(r) for r in rollouts if r.finish is not Finish.PARTIAL]
        known = whole or [len(r) for r in rollouts]
        if known:
            lengths[key] = sum(known) / len(known)
    return lengths


class DraftChoice(NamedTuple, Generic[Draft]):
    """The draft of a row.

    Args:
        draft: the draft; None if the row is decoded without a draft.
        occurrence: how many rollouts its sample index had before this one.
    """

    draft: Draft | None
    occurrence: int


def is_fresh(row: Row, occurrence: int, *, seed: int, fresh_fraction: float) -> bool:
    """Decide whether a row is decoded without a draft even if there is one.

    Reuse is not exact, and what the policy would write without it must stay visible, so a fraction
    of the rows is decoded plainly, without drafts, at each step. Rows take turns. A row is plain at
    every ``1 / fresh_fraction``-th occurrence, rounded up or down, so it is never drafted more than
    ``ceil(1 / fresh_fraction) - 1`` times in a row. That bounds how often a token can be trained
    on; no other rule has a lower bound for the same number of decoded tokens. The occurrence at
    which a row's first turn comes is random, so that each step has about the same share of plain
    rows. With ``fresh_fraction`` 0.25, for example, a row is plain at every fourth occurrence.

    Args:
        row: prompt and sample index.
        occurrence: how many rollouts the sample index had before this one.
        seed: seed of the run.
        fresh_fraction: share of plain rows, in [0, 1].
    """
    phase = row_uniform("fresh", seed, 0, row.key, row.sample_index)
    fresh_count = math.floor(occurrence * fresh_fraction + phase)
    return fresh_count > math.floor((occurrence - 1) * fresh_fraction + phase)


def select_drafts(
    rows: Sequence[Row],
    cached: Mapping[bytes, Sequence[Draft]],
    *,
    policy_version: int,
    incarnation: int = 0,
    seed: int = 0,
    fresh_fraction: float = 0.0,
) -> list[DraftChoice[Draft]]:
    """Choose a draft for each row, or none.

    The row with sample index k gets the newest rollout of its prompt's sample index k and no other
    one. In this way no draft is given to two rows, whether the rows of a group come in one batch,
    in several, or on several engines.

    A sample index that already has a rollout of the current weights gets no draft: its uniforms
    would be the same again, and so would the result. There are two exceptions. An interrupted
    rollout is continued, and counts as the same occurrence. And a rollout of a step that was lost
    when the run was interrupted is the draft for the one that replaces it.

    Args:
        rows: the rows to be made.
        cached: rollouts, or summaries of them, by prompt key, newest first within a sample index.
        policy_version: version of the weights that will verify.
        incarnation: incarnation of the run, which distinguishes rollouts of this policy version
            from those of a lost step.
        seed: seed of the run; it determines at which occurrences a row is plain.
        fresh_fraction: fraction of the rows that get no draft even if there is one
            (:func:`is_fresh`).

    Returns:
        A choice for each row.
    """
    newest: dict[Row, Draft] = {}
    served: set[Row] = set()
    for key, rollouts in cached.items():
        for rollout in rollouts:
            place = Row(key, rollout.sample_index)
            newest.setdefault(place, rollout)
            made = rollout.policy_version, rollout.incarnation
            if made == (policy_version, incarnation) and rollout.finish is not Finish.PARTIAL:
                served.add(place)
    choices: list[DraftChoice[Draft]] = []
    for row in rows:
        draft = newest.get(row)
        if draft is None:
            choices.append(DraftChoice(None, 0))
        elif row in served:
            choices.append(DraftChoice(None, draft.occurrence))
        else:
            unfinished = draft.finish is Finish.PARTIAL
            occurrence = draft.occurrence + (not unfinished)
            plain = is_fresh(row, occurrence, seed=seed, fresh_fraction=fresh_fraction)
            # A part that these weights decoded is as fresh as what they would decode now.
            plain &= not (unfinished and draft.policy_version == policy_version)
            choices.append(DraftChoice(None if plain or not len(draft) else draft, occurrence))
    return choices

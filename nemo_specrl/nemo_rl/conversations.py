"""Conversations that were led over HTTP, on their way back into the cache.

NeMo-Gym asks engines for turns, and NeMo-RL assembles the conversations from its answers. The
plug-in sees them when a batch is passed to ``policy.train``: a row is a conversation's root and
everything said after it, with a mask of what the policy wrote. The workers' records say which
weights made each turn, and that it was a turn at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_specrl.nemo_rl.rollout_metadata import MetadataTable, ResponseSpan
from nemo_specrl.rollout import Finish, Rollout
from nemo_specrl.speculation.draft_selection import assign_sample_indices

__all__ = ["conversations"]


def conversations(batch: Any, records: MetadataTable) -> list[Rollout]:
    """Return the rollouts of a batch's conversations, each a response to its first prompt.

    A row is left out if some of its turns are not known, such as those that other engines made.

    Args:
        batch: the columns ``input_ids`` and ``token_mask``, ``[rows, length]``, and
            ``input_lengths``, ``[rows]``.
        records: records of the step.

    Returns:
        The rollouts, with the sample indices of a group for each root. The tokens of an environment
        get the version of the weights that were asked next. A log-prob is that of
        ``generation_logprobs`` if the batch has this column, otherwise 0. They are not raw: prefix
        reuse must not draft from a conversation.
    """
    token_ids, masks = batch["input_ids"].numpy(), batch["token_mask"].numpy()
    logprobs = batch["generation_logprobs"].numpy() if "generation_logprobs" in batch else None
    known = [
        (turns[0].record.key, row, turns[0].start, turns[-1].end, versions)
        for row, turns in enumerate(records.find(token_ids, masks, batch["input_lengths"].tolist()))
        if (versions := _versions(turns)) is not None and turns[0].record is not None
    ]
    keys = [key for key, *_ in known]  # the workers': only they know that of a root with images
    return [
        Rollout(
            key,
            sample_index,
            token_ids[row][start:end],
            np.zeros(end - start, np.float32) if logprobs is None else logprobs[row][start:end],
            Finish.STOP,
            int(versions[-1]),
            birth_versions=versions,
            raw=False,
        )
        for sample_index, (key, row, start, end, versions) in zip(
            assign_sample_indices(keys), known, strict=True
        )
    ]


def _versions(turns: list[ResponseSpan]) -> npt.NDArray[np.int64] | None:
    """Policy versions of all tokens of a conversation; None: not all of them are known."""
    parts: list[Any] = []
    end = turns[0].start if turns else 0
    for turn in turns:
        if turn.record is None or turn.record.versions is None:
            return None
        made = turn.record.versions.of(turn.end - turn.start, 0)
        parts += [np.full(turn.start - end, made[0]), made]
        end = turn.end
    return np.concatenate(parts) if parts else None

"""Starts the clipped ratio of the loss from birth log-probs (``clip_anchor: birth``).

NeMo-RL computes ``prev_logprobs`` with the policy before each update and passes them to
``policy.train`` (algorithms/grpo.py and ppo.py). Only the argument of that call is changed:
everything else that the trainers do with ``prev_logprobs`` (masking of rows on which engines and
policy disagree, the KL penalty in PPO's rewards, logging) sees the policy's own.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_specrl.nemo_rl.rollout_metadata import MetadataTable

__all__ = ["anchored_logprobs"]


def anchored_logprobs(batch: Any, records: MetadataTable) -> torch.Tensor:
    """Return a copy of a batch's ``prev_logprobs``, with birth log-probs for reused tokens.

    Args:
        batch: the columns ``input_ids``, ``token_mask`` and ``prev_logprobs``, ``[rows, length]``,
            and ``input_lengths``, ``[rows]``.
        records: records of the step's rollouts.

    Returns:
        float ``[rows, length]``, nats. A row without a record keeps its own.
    """
    logprobs: torch.Tensor = batch["prev_logprobs"].clone()
    rows = records.find(
        batch["input_ids"].numpy(), batch["token_mask"].numpy(), batch["input_lengths"].tolist()
    )
    for row, responses in enumerate(rows):
        for start, _, record in responses:
            if record is None or record.births is None:
                continue
            births = torch.from_numpy(record.births)
            logprobs[row, start : start + len(births)] = births.to(logprobs.dtype)
    return logprobs

"""A bound for the memory of vLLM's rejection sampler: a patch like those in ``patches``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_specrl.engine.vllm.patches import wrap_functions

if TYPE_CHECKING:
    import torch

__all__ = ["DRAFT_LOGIT_BYTES", "SAMPLER_BYTES", "bound_sampler_memory"]

SAMPLER_BYTES = 2 * 2**30
"""Memory for the logits of a step's draft tokens, which vLLM's memory profile does not include: a
quarter of what ``gpu_memory_utilization`` 0.9 leaves of 80 GiB."""
DRAFT_LOGIT_BYTES = 16
"""Memory held at once for each draft token and vocabulary entry, in the V1 runner: the model's
logits (2 or 4 bytes), two float32 copies of them and their probabilities
(v1/sample/rejection_sampler.py, ``forward``)."""

SAMPLED_LOGPROBS_SOURCES = {"b6440432a4dbc4b0": "0.25.1 to 0.32.0"}
"""XXH3 of the source of ``RejectionSampler._get_logprobs_tensors``, and versions that have it."""
SAMPLED_TOKENS_AT_ONCE = 512
"""Number of sampled or drafted tokens whose log-probs are computed at once."""


def bound_sampler_memory() -> None:
    """Compute the log-probs of sampled tokens for the existing drafts only, part by part.

    ``RejectionSampler._get_logprobs_tensors`` of vLLM makes two float32 tensors of the vocabulary
    for rows x (longest draft + 1) tokens, however few of these exist (v1/sample/
    rejection_sampler.py, 0.25.1 to 0.32): with 256 rows, one of which has a draft of 24, and the
    vocabulary of Qwen3, 7.8 GB that none of vLLM's profiles has seen. Results are the same.

    The function is replaced as a whole, and therefore only if its source is known.

    Raises:
        IncompatibleVersion: its source is that of no version in ``SAMPLED_LOGPROBS_SOURCES``.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    def logprobs_tensors(
        original: Any,
        self: Any,
        max_num_logprobs: int,
        metadata: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
    ) -> Any:
        import torch
        from vllm.v1.outputs import LogprobsTensors

        if self.is_logits_logprobs_mode:  # its requests are not drafted for
            return original(
                self, max_num_logprobs, metadata, logits, target_logits, bonus_logits,
                sampled_token_ids,
            )  # fmt: skip
        if self.is_processed_logprobs_mode:
            processed = torch.zeros_like(logits, dtype=torch.float32)
            processed[metadata.target_logits_indices] = target_logits.to(torch.float32)
            processed[metadata.bonus_logits_indices] = bonus_logits.to(torch.float32)
            logits = processed
        position, tokens = _sampled_positions(
            metadata.cu_num_sampled_tokens, sampled_token_ids, len(logits)
        )
        pieces = []
        for part, of_part in zip(
            torch.split(logits, SAMPLED_TOKENS_AT_ONCE),
            torch.split(tokens, SAMPLED_TOKENS_AT_ONCE),
            strict=True,
        ):
            logprobs = self.sampler.compute_logprobs(part)
            pieces.append(self.sampler.gather_logprobs(logprobs, max_num_logprobs, of_part)[:3])
        columns = [torch.cat(column)[position] for column in zip(*pieces, strict=True)]
        return LogprobsTensors(*columns)

    name = "_get_logprobs_tensors"
    wrap_functions([(RejectionSampler, name, logprobs_tensors)], {name: SAMPLED_LOGPROBS_SOURCES})


def _sampled_positions(
    cumulative: torch.Tensor, sampled_token_ids: torch.Tensor, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the logits of each sampled token are, and the token at each position.

    A row has as many positions as the step computed for it, and as many cells of
    ``sampled_token_ids`` as the row with the longest draft. A cell is -1 if nothing was sampled.

    Args:
        cumulative: positions of a row and of those before it, int ``[rows]``.
        sampled_token_ids: int ``[rows, longest draft + 1]``.
        positions: number of positions of all rows.

    Returns:
        The position of each cell, int ``[rows * (longest draft + 1)]``, and token ids,
        int64 ``[positions]``.
    """
    import torch

    starts = torch.zeros_like(cumulative)
    starts[1:] = cumulative[:-1]
    width = sampled_token_ids.shape[-1]
    cells = torch.arange(width, device=starts.device, dtype=starts.dtype)
    position = (starts.unsqueeze(1) + cells).flatten().clamp_(max=positions - 1)
    # Several cells beyond a row's end share the position of another row, whose token is kept.
    sampled = sampled_token_ids.flatten()
    tokens = torch.zeros(positions, dtype=torch.int64, device=sampled.device)
    tokens.scatter_reduce_(0, position.long(), sampled.clamp(min=0).long(), "amax")
    return position, tokens

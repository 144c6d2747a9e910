"""Counts of prefix reuse, reported under ``spec_rl/``."""

from __future__ import annotations

import dataclasses

from nemo_specrl.monitoring import names as metric
from nemo_specrl.reuse.row import Row

__all__ = ["ReuseMetrics"]


@dataclasses.dataclass
class ReuseMetrics:
    """Counts of a call of ``PrefixReuse.generate``, or of all rows of an ``AsyncPrefixReuse``.

    Args:
        rows: responses that were asked for, without those that vLLM decodes alone.
        drafts: rows of which a draft was verified.
        full_reuses: those that were accepted whole and needed no decoding.
        draft_tokens: tokens of these drafts.
        verified_tokens: those of them that were verified.
        accepted_tokens: those of them that begin the responses.
        prefilled_tokens: tokens that verification prefilled, prompts included.
        prefilled_again_tokens: tokens in front of continuations that were not in the prefix cache.
        decoded_tokens: tokens that the engine decoded.
        response_tokens: tokens of all responses.
        refused_drafts: drafts that could not be verified; their rows were decoded plainly.
        uncached_rows: rows kept out of the cache because their tokens or log-probs are invalid.
        noise_prefix_tokens: accepted prefix that rounding alone allows; None: not measured.
    """

    rows: int = 0
    drafts: int = 0
    full_reuses: int = 0
    draft_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    prefilled_tokens: int = 0
    prefilled_again_tokens: int = 0
    decoded_tokens: int = 0
    response_tokens: int = 0
    refused_drafts: int = 0
    uncached_rows: int = 0
    noise_prefix_tokens: float | None = None

    def add(self, row: Row) -> None:
        """Count a row that has ended."""
        assert row.completion is not None
        length = len(row.completion.token_ids)
        judged = row.verified > 0
        self.rows += 1
        self.drafts += judged
        self.full_reuses += judged and row.accepted == length and not row.decoded
        self.draft_tokens += row.drafted * judged
        self.verified_tokens += row.verified
        self.accepted_tokens += row.accepted
        self.prefilled_tokens += row.prefilled
        self.prefilled_again_tokens += row.prefilled_again
        self.decoded_tokens += row.decoded
        self.response_tokens += length
        self.refused_drafts += row.drafted > 0 and not judged
        self.uncached_rows += not row.valid

    def as_dict(self) -> dict[str, float]:
        """Scalars by metric name."""
        drafts = max(1, self.drafts)
        out = {
            metric.REUSE_COVERAGE: self.drafts / max(1, self.rows),
            metric.REUSED_WHOLE_FRACTION: self.full_reuses / drafts,
            metric.REUSE_ACCEPTED_FRACTION: self.accepted_tokens / max(1, self.draft_tokens),
            metric.VERIFIED_FRACTION: self.verified_tokens / max(1, self.draft_tokens),
            metric.REUSED_TOKEN_FRACTION: self.accepted_tokens / max(1, self.response_tokens),
            metric.ENGINE_DECODED_TOKENS: float(self.decoded_tokens),
            metric.ENGINE_RESPONSE_TOKENS: float(self.response_tokens),
            metric.PREFILLED_TOKENS: float(self.prefilled_tokens),
            metric.RECOMPUTED_TOKENS: float(self.prefilled_again_tokens),
            metric.REFUSED_DRAFTS: float(self.refused_drafts),
        }
        if self.noise_prefix_tokens is not None:
            out[metric.NOISE_PREFIX_TOKENS] = min(self.noise_prefix_tokens, 1e9)
        return out

"""What a call of the engine did and how long each part took, under ``spec_rl/``."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["EngineMetrics"]


@dataclass
class EngineMetrics:
    """Counts and seconds of one ``generate`` call, or the sum of several.

    A step of the engine that verifies and decodes at once is charged to both in proportion to the
    tokens of each that it holds; ``lookup_s + verify_s + decode_s + assembly_s`` is the whole.
    ``tree_s``, the time of the tree proposer, is part of ``decode_s``. ``tree_steps`` counts each
    row once for each step in which it decoded, with a draft or without.
    """

    rows: int = 0
    drafts: int = 0
    full_reuses: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    decoded_tokens: int = 0
    response_tokens: int = 0
    recomputed_tokens: int = 0
    refused_drafts: int = 0
    replayed_rows: int = 0
    cache_errors: int = 0
    tree_steps: int = 0
    tree_drafted_tokens: int = 0
    tree_accepted_tokens: int = 0
    tree_s: float = 0.0
    lookup_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0
    assembly_s: float = 0.0

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        """Of both calls together."""
        return EngineMetrics(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def as_dict(self) -> dict[str, float]:
        """Scalars by metric name; token counts are of tokens, times are seconds."""
        drafts, rows = max(1, self.drafts), max(1, self.rows)
        return {
            "spec_rl/draft_coverage": self.drafts / rows,
            "spec_rl/full_reuse_ratio": self.full_reuses / drafts,
            "spec_rl/accepted_tokens_mean": self.accepted_tokens / drafts,
            "spec_rl/accepted_fraction": self.accepted_tokens / max(1, self.draft_tokens),
            "spec_rl/reused_token_fraction": self.accepted_tokens / max(1, self.response_tokens),
            "spec_rl/decoded_tokens": float(self.decoded_tokens),
            "spec_rl/response_tokens": float(self.response_tokens),
            "spec_rl/recomputed_tokens": float(self.recomputed_tokens),
            "spec_rl/refused_drafts": float(self.refused_drafts),
            "spec_rl/replayed_rows": float(self.replayed_rows),
            "spec_rl/cache_errors": float(self.cache_errors),
            **self._of_trees(),
            "spec_rl/lookup_s": self.lookup_s,
            "spec_rl/verify_s": self.verify_s,
            "spec_rl/decode_s": self.decode_s,
            "spec_rl/assembly_s": self.assembly_s,
        }

    def _of_trees(self) -> dict[str, float]:
        """Of lossless drafting; nothing where the engine has no tree proposer."""
        if not self.tree_steps:
            return {}
        return {
            "spec_rl/tree_tokens_per_step": 1 + self.tree_accepted_tokens / self.tree_steps,
            "spec_rl/tree_drafted_tokens": float(self.tree_drafted_tokens),
            "spec_rl/tree_accepted_fraction": self.tree_accepted_tokens
            / max(1, self.tree_drafted_tokens),
            "spec_rl/tree_s": self.tree_s,
        }

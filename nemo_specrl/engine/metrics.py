"""Counts and times of the engine, reported under ``spec_rl/``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from nemo_specrl.monitoring import names as metric

__all__ = ["DraftCounts", "EngineMetrics"]


@dataclass
class DraftCounts:
    """Counts of a drafter's work.

    Only tokens that requests receive are counted: what a step samples after the end of a response
    is in none of these counts. Run-ahead rows are not counted.

    Args:
        steps: steps that yielded tokens of a row, including its first token, summed over rows.
        tokens: tokens that these steps yielded.
        drafted: draft tokens that they verified.
        accepted: those of them that were accepted.
        least_chance: chance at which the next drafts ended, 1 if no token was drafted, summed over
            ``steps``.
        seconds: seconds spent on it.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    least_chance: float = 0.0
    seconds: float = 0.0


@dataclass
class EngineMetrics:
    """Counts and seconds of one ``generate`` call, or the sum over several.

    The time of an engine step that verifies and decodes at once is divided in proportion to the
    tokens of each; ``lookup_s + verify_s + decode_s + assembly_s`` is the time of the call.

    Attributes:
        rows: rollouts that were asked for.
        drafts: rows whose draft was verified.
        full_reuses: drafts that were the whole response, with nothing left to decode.
        draft_tokens: verified tokens.
        accepted_tokens: those of them that were accepted.
        decoded_tokens: tokens that the engine decoded.
        response_tokens: tokens of all responses.
        recomputed_tokens: tokens of prompts and accepted prefixes that continuations had to prefill
            again because the prefix cache did not have them.
        refused_drafts: drafts that could not be verified; their rows were decoded plainly.
        uncached_rows: rows that were returned as the engine gave them and kept out of the cache,
            because the engine's tokens or log-probs are invalid (NaN, for example).
        replayed_rows: rows taken from the journal of a process that died.
        cache_errors: failed calls to the cache.
        noise_tokens: tokens whose log-probs the same weights computed twice, in decoding and in
            prefill.
        noise_rejected: those of them that are expected to be rejected for that reason
            (``PrefillNoise``).
        lookup_s: time of looking drafts up.
        verify_s: time of verification.
        decode_s: time of decoding.
        assembly_s: time of judging, assembling outputs and caching them.
        tree_steps: steps of the engine for rows that may draft from trees, summed over rows.
        tree_tokens: tokens that these steps yielded for the rows' responses, excluding what follows
            an end-of-sequence token or another stop.
        tree_drafted_tokens: tokens from trees that were verified.
        tree_accepted_tokens: those of them that were accepted.
        tree_least_chance: chance of being accepted at which drafts ended, 1 if no token was
            drafted, summed over ``tree_steps``. 0 in rounds, where it is fixed.
        tree_requests: requests that verified in rounds, or decoded between them.
        tree_s: time spent on trees, a part of ``decode_s``.
        run_ahead_rows: rollouts of upcoming prompts that were begun. They are included in no other
            count.
        run_ahead_tokens: tokens decoded for them.
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
    uncached_rows: int = 0
    replayed_rows: int = 0
    cache_errors: int = 0
    tree_steps: int = 0
    tree_tokens: int = 0
    tree_drafted_tokens: int = 0
    tree_accepted_tokens: int = 0
    tree_least_chance: float = 0.0
    tree_requests: int = 0
    tree_s: float = 0.0
    run_ahead_rows: int = 0
    run_ahead_tokens: int = 0
    noise_tokens: int = 0
    noise_rejected: float = 0.0
    lookup_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0
    assembly_s: float = 0.0

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        """Return the sum of both."""
        return EngineMetrics(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def of_engines(self, engines: int) -> EngineMetrics:
        """Return these counts with mean seconds, given the sum over engines that ran at once."""
        seconds = (f.name for f in fields(self) if f.name.endswith("_s"))
        return replace(self, **{name: getattr(self, name) / engines for name in seconds})

    def as_dict(self) -> dict[str, float]:
        """Scalars by metric name: counts, fractions, and seconds in names that end in ``_s``."""
        drafts, rows = max(1, self.drafts), max(1, self.rows)
        return {
            metric.DRAFT_COVERAGE: self.drafts / rows,
            metric.FULL_REUSE_RATIO: self.full_reuses / drafts,
            metric.ACCEPTED_TOKENS_MEAN: self.accepted_tokens / drafts,
            metric.ACCEPTED_FRACTION: self.accepted_tokens / max(1, self.draft_tokens),
            metric.REUSED_TOKEN_FRACTION: self.accepted_tokens / max(1, self.response_tokens),
            metric.ENGINE_DECODED_TOKENS: float(self.decoded_tokens),
            metric.ENGINE_RESPONSE_TOKENS: float(self.response_tokens),
            metric.RECOMPUTED_TOKENS: float(self.recomputed_tokens),
            metric.REFUSED_DRAFTS: float(self.refused_drafts),
            metric.UNCACHED_ROWS: float(self.uncached_rows),
            metric.REPLAYED_ROWS: float(self.replayed_rows),
            metric.CACHE_ERRORS: float(self.cache_errors),
            **self._of_trees(rows),
            **(
                {metric.NOISE_PREFIX_TOKENS: self.noise_tokens / max(self.noise_rejected, 1e-9)}
                if self.noise_tokens
                else {}
            ),
            metric.LOOKUP_S: self.lookup_s,
            metric.ENGINE_VERIFY_S: self.verify_s,
            metric.DECODE_S: self.decode_s,
            metric.ASSEMBLY_S: self.assembly_s,
        }

    def add_draft_counts(self, of_workers: Iterable[DraftCounts | None]) -> None:
        """Add what the tree proposers did, for each worker whose drafts count.

        Args:
            of_workers: what ``take_counts`` returned in each worker.
        """
        for counts in of_workers:
            if counts is None:
                continue
            self.tree_steps += counts.steps
            self.tree_tokens += counts.tokens
            self.tree_drafted_tokens += counts.drafted
            self.tree_accepted_tokens += counts.accepted
            self.tree_least_chance += counts.least_chance
            self.tree_s += counts.seconds

    def _of_trees(self, rows: int) -> dict[str, float]:
        """The metrics of lossless drafting; empty without it."""
        if not self.tree_steps:
            return {}
        return {
            metric.TREE_TOKENS_PER_STEP: self.tree_tokens / self.tree_steps,
            metric.TREE_DRAFTED_TOKENS: float(self.tree_drafted_tokens),
            metric.TREE_ACCEPTED_FRACTION: self.tree_accepted_tokens
            / max(1, self.tree_drafted_tokens),
            metric.TREE_DRAFT_LENGTH: self.tree_drafted_tokens / self.tree_steps,
            metric.TREE_LEAST_CHANCE: self.tree_least_chance / self.tree_steps,
            metric.TREE_S: self.tree_s,
            **(
                {metric.TREE_REQUESTS_PER_ROW: self.tree_requests / rows}
                if self.tree_requests
                else {}
            ),
            metric.RUN_AHEAD_ROWS: float(self.run_ahead_rows),
            metric.RUN_AHEAD_TOKENS: float(self.run_ahead_tokens),
        }

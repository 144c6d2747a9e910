"""The length of drafts in vLLM's V2 runner, as its scheduler chooses it before each step.

vLLM looks the length up by the number of rows, in the table ``Scheduler.dynamic_sd_lookup``.
:class:`LengthsOfSteps` keeps that table up to date, and a scheduler tells it what happens::

    class HistoryScheduler(Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.lengths = LengthsOfSteps.of(self)        # None: one length for all steps

        def schedule(self, *args, **kwargs):
            if self.lengths is not None:
                self.lengths.before_step(self.running)
            return super().schedule(*args, **kwargs)

        def add_request(self, request):                   # a batch begins when an idle engine
            if self.lengths is not None and not self.requests:         # gets a request,
                self.lengths.begin_batch()
            super().add_request(request)

        def reset_prefix_cache(self, *args, **kwargs):    # and at a refit
            if self.lengths is not None:
                self.lengths.begin_batch()
            return super().reset_prefix_cache(*args, **kwargs)

        def update_draft_token_ids(self, draft_token_ids):
            if self.lengths is not None:
                self.lengths.cut(draft_token_ids.draft_token_ids)
            super().update_draft_token_ids(draft_token_ids)

        def make_spec_decoding_stats(self, *args, **kwargs):           # of requests with drafts
            if self.lengths is not None and ...:
                self.lengths.observe(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
            return super().make_spec_decoding_stats(*args, **kwargs)

Only the scheduler chooses, so that all ranks of an engine draft alike. No clock is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nemo_specrl.drafting.uniform_length import UniformLengths
from nemo_specrl.engine.step_costs import max_drafted, step_costs

__all__ = ["OBSERVED", "PROBE", "RENEWED", "LengthsOfSteps", "first_table"]

RENEWED = 32
"""Steps after which the table is made again, since contexts have grown."""
OBSERVED = 512
"""Drafts after which it is made again, since chances may have changed."""
PROBE = 200
"""After this many steps without drafts, one drafts all the same: otherwise nothing would be learned
any more."""


def first_table(vllm_config: Any, lengths: Sequence[int], rows: int) -> list[int]:
    """The length for each number of rows, 0 (not used) to ``rows``, while nothing is known."""
    return _uniform(vllm_config, lengths, rows).table(_half_of_longest(vllm_config))


class LengthsOfSteps:
    """Keeps a scheduler's table of lengths up to date.

    Args:
        uniform: the choice of lengths.
        table: the scheduler's table, which is changed in place.
        context: tokens of a row's prompt and response, on average, before any row is known.
    """

    def __init__(self, uniform: UniformLengths, table: list[int], context: float) -> None:
        self.uniform, self.table = uniform, table
        self._context = context
        self._steps = self._drafts = self._without = 0
        self._renew()

    @classmethod
    def of(cls, scheduler: Any) -> LengthsOfSteps | None:
        """Those of a vLLM scheduler; None if all its steps have one length."""
        table, config = scheduler.dynamic_sd_lookup, scheduler.vllm_config
        if table is None:
            return None
        ranges = config.speculative_config.num_speculative_tokens_per_batch_size
        uniform = _uniform(config, sorted({length for *_, length in ranges}), len(table) - 1)
        return cls(uniform, table, _half_of_longest(config))

    def before_step(self, running: Sequence[Any]) -> None:
        """A step is about to be scheduled.

        Args:
            running: the rows that run, vLLM's ``Request``.
        """
        self._steps += 1
        rows = min(len(running), len(self.table) - 1)
        if not rows:
            return
        if self._steps >= RENEWED or self._drafts >= OBSERVED:
            self._context = sum(row.num_tokens for row in running) / len(running)
            self._renew()
        self._without = 0 if self.table[rows] else self._without + 1
        if self._without >= PROBE:
            self._without = 0
            self.table[:] = self.uniform.probing(self.table)
            self._steps = RENEWED  # the next step has its own table again

    def begin_batch(self) -> None:
        """A batch or a new policy begins: what was observed before counts half.

        The next step of rows renews the table, by their contexts, and drafts even if it says none:
        what was observed may no longer be true.
        """
        self.uniform.begin_batch()
        self._steps, self._without = RENEWED, PROBE

    def observe(self, drafted: int, accepted: int) -> None:
        """A step verified a row's draft, and accepted that many of its tokens."""
        self.uniform.observe(drafted, accepted)
        self._drafts += 1

    def cut(self, drafts: list[list[int]]) -> None:
        """Cut the drafts of a step to the table's length.

        Without asynchronous scheduling, vLLM 0.25.1 does not.
        """
        length = self.table[len(drafts)]
        for tokens in drafts:
            del tokens[length:]

    def _renew(self) -> None:
        self.table[:] = self.uniform.table(self._context)
        self._steps = self._drafts = 0


def _uniform(vllm_config: Any, lengths: Iterable[int], rows: int) -> UniformLengths:
    return UniformLengths(step_costs(vllm_config), list(lengths), rows, max_drafted(vllm_config))


def _half_of_longest(vllm_config: Any) -> float:
    return float(vllm_config.model_config.max_model_len) / 2

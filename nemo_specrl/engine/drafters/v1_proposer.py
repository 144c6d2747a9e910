"""TreeProposer: drafts for vLLM's speculative decoding from the earlier responses to a prompt.

vLLM makes one in each worker if ``speculative_config`` says ``method="custom_class"`` and names it
(v1/spec_decode/custom_class_proposer.py). It proposes tokens after every step; vLLM verifies them
in the next step and keeps each by rejection sampling, so that responses have exactly the policy's
distribution whatever is proposed (Leviathan et al., arXiv 2211.17192).

The request itself brings what drafting needs, in ``SamplingParams.extra_args`` (``histories``), so
that nothing else has to be sent to workers: the prompt's key, an identity of the response, earlier
responses as pairs of identity and int32 tokens, and the length of the prompt, after which the
request's prompt may hold the beginning of the response; the length is None if all of it is the
prompt. Rows without it are not drafted for. Those whose prompt begins with a known one, as later
turns of a conversation do, draft from the tree of that prompt (``roots``).

vLLM takes the drafts of one worker, the first one of the last pipeline stage (``output_rank``), and
sends them to all workers with the next step. The proposers of the others do nothing.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from typing import Any

from nemo_specrl.engine.drafters.roots import ROOTS, Roots
from nemo_specrl.engine.metrics import DraftCounts
from nemo_specrl.engine.vllm.compat import EXTRA_ARG, drafts_count_here, media_of, stop_tokens
from nemo_specrl.engine.vllm.cpu_sampler import fix_cpu_rejection_sampler
from nemo_specrl.engine.vllm.patches import bind_proposer
from nemo_specrl.engine.vllm.sampler_memory import (
    DRAFT_LOGIT_BYTES,
    SAMPLER_BYTES,
    bound_sampler_memory,
)
from nemo_specrl.errors import IncompatibleVersion
from nemo_specrl.media import content_tokens
from nemo_specrl.rollout import MAX_SAMPLE_INDEX
from nemo_specrl.speculation.adaptive_length import DraftLengths, Step, likeliest
from nemo_specrl.speculation.draft_selection import RUN_AHEAD_INDEX
from nemo_specrl.speculation.suffix_tree import CHANCES, MIN_PROBABILITY, DraftTrees, TreeRow

__all__ = ["TreeProposer"]

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 4 * 2**30
PADDED_LOGIT_BYTES = 8
"""In addition, for each of rows x (longest draft + 1) tokens, if ``bound_sampler_memory`` was not
possible."""


class _Row:
    """A request for which drafts are made."""

    def __init__(
        self, row: TreeRow, start: int, max_length: int, stops: frozenset[int], run_ahead: bool
    ) -> None:
        self.row = row
        self.start = start  # of the response, in tokens of the prompt
        self.max_length = max_length  # of the response
        self.stops = stops
        self.run_ahead = run_ahead  # not counted: no caller asked for it
        self.ended = False
        self.cells = b""  # of the last draft's tokens

    def kept(self, sampled: list[int]) -> int:
        """How many of a step's tokens belong to the response, which ends at its first stop token.

        Its budget cannot be exceeded, since drafts leave room for the token after them.
        ``min_tokens`` does not occur: such requests are not drafted for (``sampling``).
        """
        if self.stops.isdisjoint(sampled):
            return len(sampled)
        return next(i for i, token in enumerate(sampled, 1) if token in self.stops)

    def room(self) -> int:
        """Number of tokens that a draft may have, leaving room for one after it."""
        return 0 if self.ended else self.max_length - self.row.length - 1


class TreeProposer:
    """Proposes along the most likely path of each row's tree.

    Args:
        vllm_config: configuration of the engine. ``additional_config["spec_rl"]`` has
            ``max_bytes``, which bounds the memory of the trees in bytes, and ``adaptive``: whether
            drafts end when a token is not worth its verification (``adaptive_length``), or at
            ``MIN_PROBABILITY``.

    Attributes:
        counting: whether the drafts that are made here count.
        runner: vLLM's model runner, which knows the requests; it is set before each proposal.
        verified: draft tokens that the last step verified, by request; set like ``runner``.
        lengths: decides how long drafts are; None: ``MIN_PROBABILITY`` does.
        longest: the most tokens that the draft of a row may have.
        max_drafted: the most tokens that the drafts of a step may have together.
        counts: counts since they were last taken.
        roots: prompts whose later turns draft from their trees.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = (vllm_config.additional_config or {}).get(EXTRA_ARG) or {}
        self.counting, on_several = drafts_count_here(vllm_config)
        self.trees = DraftTrees(int(options.get("max_bytes", DEFAULT_MAX_BYTES)))
        self.roots = Roots(ROOTS)
        self._max_step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_drafted = self._draft_limit(vllm_config)
        self.lengths: DraftLengths | None = None
        # If several ranks draft, all must make the same drafts, which measured times would prevent.
        if options.get("adaptive", True) and not on_several:
            self.lengths = DraftLengths(
                CHANCES,
                MIN_PROBABILITY,
                self._max_step_tokens,
                longest=self.longest,
                max_drafted=self.max_drafted,
            )
        self.runner: Any = None
        self.verified: dict[str, list[int]] = {}
        self.counts = DraftCounts()
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._rows: dict[str, _Row | None] = {}
        self._names: list[str] = []
        self._last = 0.0  # time of the last proposal
        bind_proposer(TreeProposer)
        fix_cpu_rejection_sampler()

    def take_counts(self) -> DraftCounts | None:
        """What was drafted since the last call; None if the drafts of another worker count."""
        if not self.counting:
            return None
        counts, self.counts = self.counts, DraftCounts()
        return counts

    def _draft_limit(self, vllm_config: Any) -> int:
        """Draft tokens for which there is memory in a step; ``longest`` is cut to it, too.

        Log-probs are computed in every step that has drafts, since all requests with drafts request
        them.
        """
        of_token = int(vllm_config.model_config.get_vocab_size())
        try:
            bound_sampler_memory()
        except IncompatibleVersion as error:
            rows = int(vllm_config.scheduler_config.max_num_seqs)
            longest = SAMPLER_BYTES // (PADDED_LOGIT_BYTES * of_token * rows) - 1
            self.longest = max(0, min(self.longest, longest))
            logger.warning("%s; drafts have at most %d tokens", error, self.longest)
        return SAMPLER_BYTES // (DRAFT_LOGIT_BYTES * of_token)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this, but there is no model."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Propose drafts for the rows of the step that was just sampled.

        Args:
            sampled_token_ids: by row, the tokens that the step yielded; empty in mid-prefill.
            num_tokens: by row, tokens of prompt and response, int ``[rows]``.
            token_ids: prompt and response of each row, int ``[rows, max_model_len]``.
            kwargs: not used here.

        Returns:
            Tokens by row; none if nothing is likely enough.
        """
        if not self.counting:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        names = self.runner.input_batch.req_ids
        if names != self._names:
            self._forget_ended(names)
        first_token_rows = sum(name not in self._rows for name in names)
        verified = [len(tokens) for tokens in self.verified.values()]
        rows = [
            self._extend_row(name, sampled, token_ids[i], int(num_tokens[i]))
            for i, (name, sampled) in enumerate(zip(names, sampled_token_ids, strict=True))
        ]
        last, self._last = self._last, started
        if not any(rows):  # no row drafts, as in the evaluation of a policy
            return [[] for _ in rows]
        if self.lengths is not None:
            # If all rows have begun, the engine may have waited for them.
            if first_token_rows < len(names) and all(sampled_token_ids):
                step = Step(len(names), sum(verified), max(verified, default=0), first_token_rows)
                self.lengths.observe(step, started - last)
            self.lengths.prepare(len(names), sum(verified))
        drafts = self._drafts(rows)
        self.counts.seconds += time.perf_counter() - started
        return drafts

    def _extend_row(
        self, name: str, sampled: list[int], token_ids: Any, length: int
    ) -> _Row | None:
        """Return a request's row with all that it has yielded; None if there is nothing to draft.

        The row takes in whatever the engine has appended since it was last seen, which is more than
        the tokens of this step if vLLM did not ask for drafts after every step.
        """
        if not sampled:
            return None
        if name not in self._rows:
            self._rows[name] = self._open_row(name)
        row = self._rows[name]
        if row is None or row.ended:
            return None
        known = row.start + row.row.length
        if known > length - len(sampled):  # vLLM has taken tokens back, and resampled them
            row = self._rows[name] = self._open_row(name)
            assert row is not None
            known = row.start
        kept = row.kept(sampled)
        row.row.extend(token_ids[known : length - len(sampled) + kept].tolist())
        row.ended = sampled[kept - 1] in row.stops or row.row.length >= row.max_length
        # The step that verifies a draft yields one more token than it accepts.
        drafted, accepted = len(self.verified.get(name, ())), len(sampled) - 1
        if drafted and self.lengths is not None:
            self.lengths.learn(row.cells[:drafted], accepted)
        if not row.run_ahead:
            self.counts.steps += 1
            self.counts.tokens += kept
            self.counts.drafted += drafted
            self.counts.accepted += min(accepted, kept)
        return row

    def _drafts(self, rows: Sequence[_Row | None]) -> list[list[int]]:
        """Draft tokens for each row; none for rows without a tree."""
        lengths = self.lengths
        least, table, longest = MIN_PROBABILITY, CHANCES, self.longest
        if lengths is not None:
            least, table, longest = lengths.min_probability, lengths.table, lengths.looked_up
        proposals = [
            (b"", b"", b"")
            if row is None or least > 1
            else row.row.proposal(min(longest, row.room()), least, table)
            for row in rows
        ]
        of_rows = [chances for _, _, chances in proposals]
        if lengths is not None and lengths.searching:
            taken = lengths.choose(of_rows)
            least = lengths.cutoff
        else:
            taken = likeliest(of_rows, min(self.max_drafted, self._max_step_tokens - len(rows)))
        drafts = []
        for row, (tokens, cells, _), n in zip(rows, proposals, taken, strict=True):
            draft = array("i", tokens)[:n].tolist()
            drafts.append(draft)
            if row is None:
                continue
            del draft[row.kept(draft) :]
            row.cells = cells[: len(draft)]
            if not row.run_ahead:
                self.counts.least_chance += min(least, 1.0)
        return drafts

    def _forget_ended(self, names: list[str]) -> None:
        """Release rows whose requests have ended, so that their trees can make room."""
        requests = self.runner.requests
        for name in [name for name in self._rows if name not in requests]:
            del self._rows[name]
        self._names = names.copy()

    def _open_row(self, name: str) -> _Row | None:
        """Make a request's row, without its response yet; None if it has nothing to draft from."""
        request = self.runner.requests[name]
        params = request.sampling_params
        args = ((params.extra_args if params is not None else None) or {}).get(EXTRA_ARG)
        if args is None:
            return None
        key, identity, history, start = args
        run_ahead = identity & MAX_SAMPLE_INDEX == RUN_AHEAD_INDEX
        tokens = content_tokens(request.prompt_token_ids[:start], media_of(request))
        root, start = self.roots.find(tokens, key)
        assert root is not None
        if root != key:  # a later turn, whose identities are those of its own prompt
            turn = int.from_bytes(key, "little") << 64
            identity, history = turn | identity, [(turn | i, tokens) for i, tokens in history]
        most = len(request.prompt_token_ids) + (params.max_tokens or self._max_model_len)
        return _Row(
            self.trees.open(root, identity, history),
            start,
            min(most, self._max_model_len) - start,
            stop_tokens(params),
            run_ahead,
        )

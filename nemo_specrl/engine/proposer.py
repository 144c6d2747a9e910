"""HistoryProposer: drafts for vLLM's V1 model runner, which runs on CPUs.

vLLM makes one in each worker if ``speculative_config`` says ``method="custom_class"`` and names it
(v1/spec_decode/custom_class_proposer.py). It proposes tokens after every step; vLLM verifies them
in the next step and keeps each by rejection sampling, so that responses have exactly the policy's
distribution whatever is proposed (Leviathan et al., arXiv 2211.17192).

A request brings what drafting needs (``row``). vLLM takes the drafts of one worker, the first one
of the last pipeline stage (``output_rank``), and sends them to all workers with the next step. The
proposers of the others do nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

from nemo_specrl.drafting.adaptive_length import DraftLengths, Step, likeliest
from nemo_specrl.drafting.chances import CHANCES, MIN_PROBABILITY
from nemo_specrl.drafting.suffix_tree import DraftTrees, TreeRow
from nemo_specrl.engine import patches, v1_patches
from nemo_specrl.engine.request_seeds import Foreign
from nemo_specrl.engine.row import config_of, row_of

__all__ = ["HistoryProposer"]

SAMPLER_BYTES = 2 * 2**30
"""Memory for the log-probs of a step's draft tokens, which vLLM's profile does not include."""
LOGIT_BYTES = 8
"""Memory for each of rows x (longest draft + 1) tokens and vocabulary entry, if log-probs are asked
for (v1/sample/rejection_sampler.py, ``_get_logprobs_tensors``)."""


class _Row:
    """A request for which drafts are made."""

    def __init__(self, row: TreeRow, start: int, max_length: int, stops: frozenset[int]) -> None:
        self.row = row
        self.start = start  # of the response, in tokens of the prompt
        self.max_length = max_length  # of the response
        self.stops = stops
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


class HistoryProposer:
    """Proposes along the most likely path of each row's tree.

    Args:
        vllm_config: configuration of the engine; its ``spec_rl`` block has ``draft.max_bytes``, the
            memory of the trees, and ``draft.adaptive``: whether drafts end when a token is not
            worth its verification (``adaptive_length``), or at ``MIN_PROBABILITY``.

    Attributes:
        runner: vLLM's model runner, which knows the requests; it is set before each proposal.
        verified: draft tokens that the last step verified, by request; set like ``runner``.
        lengths: decides how long drafts are; None: ``MIN_PROBABILITY`` does.
        longest: the most tokens that the draft of a row may have.
    """

    def __init__(self, vllm_config: Any) -> None:
        draft = config_of(vllm_config).draft
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        self.trees = DraftTrees(draft.max_bytes)
        self._counting, on_several = _drafts_count_here(vllm_config)
        self._max_step_tokens = int(scheduler.max_num_batched_tokens)
        of_row = LOGIT_BYTES * int(model.get_vocab_size()) * int(scheduler.max_num_seqs)
        most = int(vllm_config.speculative_config.num_speculative_tokens)
        self.longest = max(1, min(most, SAMPLER_BYTES // of_row - 1))
        self.lengths: DraftLengths | None = None
        # If several ranks draft, all must make the same drafts, which measured times would prevent.
        if draft.adaptive and not on_several:
            self.lengths = DraftLengths(
                CHANCES, MIN_PROBABILITY, self._max_step_tokens, longest=self.longest
            )
        self.runner: Any = None
        self.verified: dict[str, list[int]] = {}
        self._max_model_len = int(model.max_model_len)
        self._foreign = Foreign(int(model.seed or 0))
        self._rows: dict[str, _Row | None] = {}
        self._names: list[str] = []
        self._last = 0.0  # time of the last proposal
        patches.install(v1_patches.PATCHES)

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
        started = time.perf_counter()
        names = self.runner.input_batch.req_ids
        self._foreign.see(self.runner.requests[name] for name in names if name not in self._rows)
        if not self._counting:
            return [[] for _ in sampled_token_ids]
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
        return self._drafts(rows)

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
            taken = likeliest(of_rows, self._max_step_tokens - len(rows))
        drafts = []
        for row, (tokens, cells, _), n in zip(rows, proposals, taken, strict=True):
            draft = array("i", tokens)[:n].tolist()
            drafts.append(draft)
            if row is None:
                continue
            del draft[row.kept(draft) :]
            row.cells = cells[: len(draft)]
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
        known = row_of(request)
        if known is None:
            return None
        params = request.sampling_params
        most = len(request.prompt_token_ids) + (params.max_tokens or self._max_model_len)
        return _Row(
            self.trees.open(known.key, known.identity, known.history),
            known.start,
            min(most, self._max_model_len) - known.start,
            _stop_tokens(params),
        )


def _stop_tokens(params: Any) -> frozenset[int]:
    """Tokens that end a request's response; none if ``min_tokens`` lets it continue past some."""
    if params.min_tokens:
        return frozenset()
    eos = params.eos_token_id  # unset if it is ignored
    return frozenset(params.stop_token_ids or ()) | ({eos} if eos is not None else frozenset())


def _drafts_count_here(vllm_config: Any) -> tuple[bool, bool]:
    """Whether vLLM takes the drafts of this worker, and whether it takes those of others, too.

    All tensor-parallel ranks sample, and each asks its proposer. The executor takes those of the
    first one (``_get_output_rank``, v1/executor/multiproc_executor.py). With ``external_launcher``
    each rank has its own scheduler, which takes the drafts of its rank, and all must be alike.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        return True, parallel.world_size > 1
    return get_tensor_model_parallel_rank() == 0, False

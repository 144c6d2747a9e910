"""TreeProposer: drafts for vLLM's speculative decoding from the earlier responses to a prompt.

vLLM makes one where ``speculative_config`` says ``method="custom_class"`` and names it
(v1/spec_decode/custom_class_proposer.py), in each worker. It proposes tokens after every step; vLLM
verifies them with the next one and keeps each by rejection sampling, so that responses have exactly
the policy's distribution whatever is proposed (Leviathan et al., arXiv 2211.17192).

The request itself brings what drafting needs, in ``SamplingParams.extra_args`` (``drafting``), so
that nothing has to be sent to workers beside it: the prompt's key, an identity of the response,
earlier responses as pairs of identity and int32 tokens, and the length of the prompt, behind which
the request's prompt may hold a beginning of the response. Rows without it are not drafted for.
"""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Sequence
from typing import Any

from nemo_specrl.engine.drafting import EXTRA_ARG
from nemo_specrl.engine.patches import bind_proposer, mend_cpu_rejection_sampler
from nemo_specrl.rollout import MAX_SAMPLE_INDEX
from nemo_specrl.speculation.drafts import RUN_AHEAD_INDEX
from nemo_specrl.speculation.lengths import DraftLengths
from nemo_specrl.speculation.trees import CHANCES, MIN_PROBABILITY, DraftTrees, TreeRow

__all__ = ["DraftCounts", "TreeProposer", "take_counts"]

DEFAULT_MAX_BYTES = 4 * 2**30


@dataclasses.dataclass
class DraftCounts:
    """Counts of a proposer's work.

    Args:
        steps: proposals for a row, empty ones included. Run-ahead rows are not counted here.
        drafted: tokens proposed.
        accepted: tokens of these that were accepted.
        least_chance: chance at which drafts ended, 1 where none was taken, summed over ``steps``.
        seconds: spent on it.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    least_chance: float = 0.0
    seconds: float = 0.0


def take_counts(worker: Any) -> DraftCounts:
    """The counts of a worker's proposer since they were last taken; to be run in the worker."""
    proposer: TreeProposer = worker.model_runner.drafter
    counts, proposer.counts = proposer.counts, DraftCounts()
    return counts


class _Row:
    """A request for which drafts are made."""

    def __init__(self, row: TreeRow, max_length: int, run_ahead: bool) -> None:
        self.row = row
        self.max_length = max_length  # of the response
        self.run_ahead = run_ahead  # not counted: nobody has asked for it
        self.cells = b""  # of the last draft's tokens


class TreeProposer:
    """Proposes along the most likely path of each row's tree.

    Args:
        vllm_config: of the engine. ``additional_config["spec_rl"]`` has ``max_bytes``, which bounds
            the memory of the trees, bytes, and ``adaptive``: whether drafts end where a token is
            not worth its verification (``lengths``), or at ``MIN_PROBABILITY``.

    Attributes:
        runner: vLLM's model runner, which knows the requests; it is set before each proposal.
        lengths: decides how long drafts are; None: ``MIN_PROBABILITY`` does.
        counts: since they were last taken.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = (vllm_config.additional_config or {}).get(EXTRA_ARG) or {}
        self.trees = DraftTrees(int(options.get("max_bytes", DEFAULT_MAX_BYTES)))
        self._max_step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.lengths: DraftLengths | None = None
        if options.get("adaptive", True):
            self.lengths = DraftLengths(CHANCES, MIN_PROBABILITY, self._max_step_tokens)
        self.runner: Any = None
        self.counts = DraftCounts()
        self._max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._rows: dict[str, _Row | None] = {}
        self._names: list[str] = []
        self._last = 0.0  # time of the last proposal
        bind_proposer(TreeProposer)
        mend_cpu_rejection_sampler()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM; there is no model."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Drafts for the rows of the step that was just sampled.

        Args:
            sampled_token_ids: by row, the tokens that the step yielded; empty in mid-prefill.
            num_tokens: by row, tokens of prompt and response, int ``[rows]``.
            token_ids: prompt and response of each row, int ``[rows, max_model_len]``.
            kwargs: not used here.

        Returns:
            Tokens by row, none where nothing is likely enough.
        """
        started = time.perf_counter()
        names = self.runner.input_batch.req_ids
        if names != self._names:
            self._forget_ended(names)
        begun = sum(name not in self._rows for name in names)
        drafted = sum(len(row.cells) for row in map(self._rows.get, names) if row is not None)
        # Where the tokens of a step do not suffice, vLLM shortens drafts, unseen from here.
        whole = len(names) + drafted <= self._max_step_tokens
        rows = [
            self._extended(name, sampled, token_ids[i], int(num_tokens[i]), whole)
            for i, (name, sampled) in enumerate(zip(names, sampled_token_ids, strict=True))
        ]
        last, self._last = self._last, started
        if not any(rows):  # nobody's drafts, as in the evaluation of a policy
            return [[] for _ in rows]
        if self.lengths is not None:
            # Where all rows have begun, the engine may have waited for them.
            if begun < len(names) and all(sampled_token_ids):
                self.lengths.observe(len(names), drafted, begun, started - last)
            self.lengths.prepare(len(names), drafted)
        drafts = self._drafts(rows)
        self.counts.seconds += time.perf_counter() - started
        return drafts

    def _extended(
        self, name: str, sampled: list[int], token_ids: Any, length: int, whole: bool
    ) -> _Row | None:
        """The row of a request with what the step has yielded; None: there is nothing to draft.

        ``whole``: the step verified all that was proposed for it.
        """
        if not sampled:
            return None
        if name not in self._rows:
            self._rows[name] = self._opened(name, token_ids, length)
            return self._rows[name]
        row = self._rows[name]
        if row is None:
            return None
        # The step that verifies a draft yields one token more than it accepts.
        if row.cells:
            accepted = len(sampled) - 1
            if not row.run_ahead:
                self.counts.accepted += accepted
            if self.lengths is not None and whole:
                self.lengths.learn(row.cells, accepted)
        row.row.extend(sampled)
        return row

    def _drafts(self, rows: Sequence[_Row | None]) -> list[list[int]]:
        """Tokens for each row, none for those without a tree."""
        lengths = self.lengths
        least, table = MIN_PROBABILITY, CHANCES
        if lengths is not None:
            least, table = lengths.least, lengths.table
        proposals = [
            (b"", b"", b"")
            if row is None or least > 1
            else row.row.proposal(
                min(self._max_tokens, row.max_length - row.row.length - 1), least, table
            )
            for row in rows
        ]
        if lengths is not None and lengths.searching:
            taken = lengths.choose([chances for _, _, chances in proposals])
            least = lengths.cut
        else:
            taken = [len(cells) for _, cells, _ in proposals]
        drafts = []
        for row, (tokens, cells, _), n in zip(rows, proposals, taken, strict=True):
            drafts.append(array("i", tokens)[:n].tolist())
            if row is None:
                continue
            row.cells = cells[:n]
            if not row.run_ahead:
                self.counts.steps += 1
                self.counts.drafted += n
                self.counts.least_chance += min(least, 1.0)
        return drafts

    def _forget_ended(self, names: list[str]) -> None:
        """Let go of rows whose requests have ended, so that their trees can make room."""
        requests = self.runner.requests
        for name in [name for name in self._rows if name not in requests]:
            del self._rows[name]
        self._names = names.copy()

    def _opened(self, name: str, token_ids: Any, length: int) -> _Row | None:
        """A row for a request that has yielded its first token; None: nothing to draft from."""
        request = self.runner.requests[name]
        params = request.sampling_params
        args = ((params.extra_args if params is not None else None) or {}).get(EXTRA_ARG)
        if args is None:
            return None
        key, identity, history, prompt_length = args
        most = len(request.prompt_token_ids) + (params.max_tokens or self._max_model_len)
        row = self.trees.open(key, identity, history)
        row.extend(token_ids[prompt_length:length].tolist())
        run_ahead = identity & MAX_SAMPLE_INDEX == RUN_AHEAD_INDEX
        return _Row(row, min(most, self._max_model_len) - prompt_length, run_ahead)

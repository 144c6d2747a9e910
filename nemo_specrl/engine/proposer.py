"""TreeProposer: drafts for vLLM's speculative decoding from the earlier responses to a prompt.

vLLM makes one where ``speculative_config`` says ``method="custom_class"`` and names it
(v1/spec_decode/custom_class_proposer.py), in each worker. It proposes tokens after every step; vLLM
verifies them with the next one and keeps each by rejection sampling, so that responses have exactly
the policy's distribution whatever is proposed (Leviathan et al., arXiv 2211.17192).

The request itself brings what drafting needs, in ``SamplingParams.extra_args`` (``drafting``), so
that nothing has to be sent to workers beside it: the prompt's key, an identity of the response,
earlier responses as pairs of identity and int32 tokens, and the length of the prompt, behind which
the request's prompt may hold a beginning of the response. Rows without it are not drafted for.

How long drafts are is the controller's decision (``speculation.controller``), which has to know
what a step costs. The time from one proposal to the next is what a step takes with all that comes
with it, scheduling and the client's own work included; sampled tokens are on the host by then, so
that it covers a GPU's kernels, too. Only steps without prefill are taken, and so waiting between
batches is not. On a CPU the thread's time is taken rather than the clock's: it leaves out what
other processes take, and waits for requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from nemo_specrl.engine.compat import bind_proposer, mend_cpu_rejection_sampler
from nemo_specrl.engine.drafting import EXTRA_ARG
from nemo_specrl.rollout import MAX_SAMPLE_INDEX
from nemo_specrl.speculation.controller import Controller
from nemo_specrl.speculation.drafts import RUN_AHEAD_INDEX
from nemo_specrl.speculation.trees import CHANCES, Draft, DraftTrees, TreeRow

__all__ = ["DraftCounts", "TreeProposer", "take_counts"]

DEFAULT_MAX_BYTES = 4 * 2**30


@dataclasses.dataclass
class DraftCounts:
    """Counts of a proposer's work.

    Args:
        steps: proposals for a row, empty ones included. Run-ahead rows are not counted here.
        drafted: tokens proposed.
        accepted: tokens of these that were accepted.
        seconds: spent on it.
        batches: proposals for all rows of a step.
        plain_batches: those of them in which nothing was proposed.
        price: sum over batches of the price of a draft token, in tokens.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    batches: int = 0
    plain_batches: int = 0
    price: float = 0.0


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
        self.cells = b""  # of the last draft


class TreeProposer:
    """Proposes along the most likely path of each row's tree.

    Args:
        vllm_config: of the engine. ``additional_config["spec_rl"]["max_bytes"]`` bounds the memory
            of the trees, bytes.

    Attributes:
        runner: vLLM's model runner, which knows the requests; it is set before each proposal, and
            ``scheduled``, the scheduler's output for the step that was just sampled.
        counts: since they were last taken.
        clock: seconds, for the cost of steps.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = (vllm_config.additional_config or {}).get(EXTRA_ARG) or {}
        self.trees = DraftTrees(int(options.get("max_bytes", DEFAULT_MAX_BYTES)))
        self.controller = Controller(CHANCES)
        self.runner: Any = None
        self.scheduled: Any = None
        self.counts = DraftCounts()
        on_cpu = vllm_config.device_config.device_type == "cpu"
        self.clock = time.thread_time if on_cpu else time.perf_counter
        self._max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._rows: dict[str, _Row | None] = {}
        self._names: list[str] = []
        self._proposed_at: float | None = None
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
        self._observe_step(len(names))
        if names != self._names:
            self._forget_ended(names)
        rows: list[_Row | None] = []
        for i, (name, sampled) in enumerate(zip(names, sampled_token_ids, strict=True)):
            if not sampled:
                rows.append(None)
            elif name in self._rows:
                row = self._rows[name]
                rows.append(row)
                if row is not None:
                    self._take_in(row, name, sampled)
            else:
                self._rows[name] = row = self._opened(name, token_ids[i], int(num_tokens[i]))
                rows.append(row)
        drafts = self._drafts(rows)
        self.counts.seconds += time.perf_counter() - started
        return drafts

    def _observe_step(self, rows: int) -> None:
        """Tell the controller of the step that has ended, unless it had prefill."""
        now = self.clock()
        drafted = sum(map(len, self.scheduled.scheduled_spec_decode_tokens.values()))
        if (
            self._proposed_at is not None
            and self.scheduled.total_num_scheduled_tokens == rows + drafted
        ):
            self.controller.observe(rows, drafted, now - self._proposed_at)
        self._proposed_at = now

    def _take_in(self, row: _Row, name: str, sampled: list[int]) -> None:
        """Append what a step yielded to a row, and count what was accepted of its draft."""
        if row.cells:
            # The step that verifies a draft yields one token more than it accepts. The scheduler
            # may have cut the draft, or left it out where the row was preempted.
            drafted = len(self.scheduled.scheduled_spec_decode_tokens.get(name, ()))
            if not row.run_ahead:
                self.counts.accepted += len(sampled) - 1
            self.controller.outcome(row.cells[:drafted], len(sampled) - 1)
            row.cells = b""
        row.row.extend(sampled)

    def _drafts(self, rows: Sequence[_Row | None]) -> list[list[int]]:
        """Drafts for the rows, as long as the controller has them."""
        counts, controller = self.counts, self.controller
        drafting = [row for row in rows if row is not None]
        nothing: list[list[int]] = [[] for _ in rows]
        if not drafting:
            return nothing
        counts.steps += sum(not row.run_ahead for row in drafting)
        counts.batches += 1
        lookup = controller.prepare(len(rows))
        counts.price += controller.price
        if not lookup:
            counts.plain_batches += 1
            return nothing
        made: list[Draft] = []
        least, table = controller.least, controller.chances.table
        for row in drafting:
            room = row.max_length - row.row.length - 1
            made.append(row.row.propose(min(self._max_tokens, room), least, table))
        lengths = controller.lengths(len(rows), [draft.chances for draft in made])
        if lengths is None:
            counts.plain_batches += 1
            return nothing
        for row, draft, length in zip(drafting, made, lengths, strict=True):
            counts.drafted += 0 if row.run_ahead else length
            row.cells = draft.cells[:length]
            del draft.tokens[length:]
        drafts = iter(made)
        return [[] if row is None else next(drafts).tokens for row in rows]

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
        self.controller.wake()
        run_ahead = identity & MAX_SAMPLE_INDEX == RUN_AHEAD_INDEX
        return _Row(row, min(most, self._max_model_len) - prompt_length, run_ahead)

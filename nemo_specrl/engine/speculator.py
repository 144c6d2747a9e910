"""HistorySpeculator: the source of drafts for vLLM's V2 model runner.

vLLM verifies the drafts in the next step and keeps each by rejection sampling, so that responses
have exactly the policy's distribution whatever is drafted. There is no draft model, so a draft has
no probabilities (``draft_logits`` None): it is verified as certain.

The engine core sends what drafting needs with each request (``row.Row``). A request without it gets
worthless drafts, which does not affect its correctness.

Beside a drafter of the user's own (:class:`HistoryBeside`), both draft in each step, and each row
takes the draft of which more is likely to be accepted.

``propose`` reads no value from the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from nemo_specrl.drafting.chances import CHANCES
from nemo_specrl.drafting.device_arrays import STOPS
from nemo_specrl.drafting.device_index import DeviceIndex
from nemo_specrl.engine.request_seeds import Foreign
from nemo_specrl.engine.row import config_of, row_of

__all__ = ["HistorySpeculator", "least_of_ranks"]

LAST_SAMPLED = 6
"""Position of the last sampled tokens among the arguments of ``propose`` behind the batch."""


class _History:
    """Drafts from the earlier responses to a prompt.

    Args:
        vllm_config: configuration of the engine, with the block ``spec_rl`` in
            ``additional_config``.
        device: the device that the engine computes on.
        learning: see :class:`~nemo_specrl.drafting.device_arrays.DeviceArrays`.

    Attributes:
        index: the responses.
        req_states: vLLM's state of requests, set when the first one is added.
        length: how many draft tokens of each row the next step will verify.
        foreign: begins the runner's random numbers anew where their like may have made a history.
    """

    def __init__(self, vllm_config: Any, device: torch.device, learning: int) -> None:
        self.length = int(vllm_config.speculative_config.num_speculative_tokens)
        self.req_states: Any = None
        self.foreign = Foreign(int(vllm_config.model_config.seed or 0))
        self._longest = int(vllm_config.model_config.max_model_len)
        self.index = DeviceIndex(
            device,
            int(vllm_config.scheduler_config.max_num_seqs),
            self._longest,
            int(vllm_config.model_config.get_vocab_size()),
            config_of(vllm_config).draft.max_bytes,
            self.length,
            CHANCES,
            learning,
            least_of_ranks,
        )

    def add_request(self, row: int, request: Any, req_states: Any) -> None:
        """Take in a request; called when the runner has given it a row.

        Args:
            row: the request's row.
            request: vLLM's ``NewRequestData``.
            req_states: the runner's state of requests.
        """
        self.req_states = req_states
        sent = row_of(request)
        if sent is None:
            return
        params, tokens = request.sampling_params, request.prefill_token_ids
        prompt_length = len(request.prompt_token_ids or tokens)
        longest = min(prompt_length + (params.max_tokens or self._longest), self._longest)
        self.index.open_row(
            row,
            sent.key,
            sent.identity,
            sent.history,
            sent.start,
            brought=max(0, len(tokens) - sent.start),
            most=longest - sent.start,
            stops=_stop_tokens(params),
        )

    def remove_request(self, row: int) -> None:
        """Release a request that has ended or was preempted."""
        self.index.close_row(row)

    def from_history(self, input_batch: Any, last_sampled: torch.Tensor) -> torch.Tensor:
        """The drafts of a step's rows: see :meth:`HistorySpeculator.propose`."""
        n = input_batch.num_reqs
        # Upper bounds: under asynchronous scheduling the host does not know what was accepted.
        computed = input_batch.num_computed_tokens_np[:n] + input_batch.num_scheduled_tokens[:n]
        return self.index.draft(
            input_batch.idx_mapping[:n],
            input_batch.idx_mapping_np[:n],
            np.maximum(computed + 1, input_batch.prefill_len_np[:n]),
            self.req_states.all_token_ids.gpu,
            self.req_states.total_len.gpu,
            last_sampled.view(-1),
            self.length,
        )


class HistorySpeculator(_History, BaseSpeculator):  # type: ignore[misc]
    """Drafts from history alone.

    Attributes:
        enable_adaptive_verification: whether vLLM chooses the tokens that are verified.
        draft_token_confidence_probs: chance of each draft token to be accepted if those before it
            are, float32 ``[max_num_seqs, K]``, in the order of the last batch. With adaptive
            verification it is learned from what followed earlier drafts.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        adaptive = config_of(vllm_config).draft.adaptive_verification
        self.vllm_config = vllm_config
        super().__init__(vllm_config, device, int(adaptive))
        self.num_speculative_steps = self.length
        self.model = torch.nn.Module()  # vLLM 0.25 looks for modules of a drafter's model
        self.draft_token_confidence_probs = self.index.confidences
        # vLLM's runner reads it, and verifies the tokens that are worth their time.
        self.enable_adaptive_verification = adaptive

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Compile the kernels; there are no graphs. vLLM calls this once it knows its memory."""
        self.index.warm_up()

    def capture(self, *args: Any) -> None:
        """Do nothing: vLLM calls this, but there is no model."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Propose drafts for the rows of the step that was just sampled.

        Args:
            input_batch: vLLM's ``InputBatch``.
            last_sampled: last sampled token by row of the runner, int64 ``[max_num_seqs, 1]``.
            dummy_run: nothing was sampled.
            attn_metadata: not used here.
            slot_mappings: not used here.
            last_hidden_states: not used here.
            aux_hidden_states: not used here.
            num_sampled: not used here.
            num_rejected: not used here.
            *args: not used here.
            **kwargs: not used here.

        Returns:
            int64 ``[num_reqs, K]`` on the device, in the order of the batch; only the first
            ``length`` columns are of this step.
        """
        n = input_batch.num_reqs
        if dummy_run or self.req_states is None:
            return self.index.drafts[:n]
        return self.from_history(input_batch, last_sampled)


class HistoryBeside(_History):
    """History beside a speculator that vLLM has made: each row takes the better draft.

    Both drafts are compared with what followed, whichever was verified, and so are the chances
    learned by which they are judged: of the history's tokens by their evidence, of the drafter's by
    place.

    Args:
        drafter: the speculator. Two of its methods are replaced, and its attribute ``history`` is
            this.
        vllm_config: see above.
        device: likewise.
    """

    def __init__(self, drafter: Any, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device, learning=2)
        self._propose, self._init_graphs = drafter.propose, drafter.init_cudagraph_manager
        drafter.propose, drafter.init_cudagraph_manager = self.propose, self.init_cudagraph_manager
        drafter.history = self

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Compile the kernels, and prepare the drafter's graphs."""
        self.index.warm_up()
        self._init_graphs(cudagraph_mode)

    @torch.inference_mode()
    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        """See :meth:`HistorySpeculator.propose`; the drafter needs all of its arguments."""
        theirs = self._propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        if dummy_run or self.req_states is None:
            return theirs
        ours = self.from_history(input_batch, args[LAST_SAMPLED])
        self.index.drafted[1, input_batch.idx_mapping[: len(ours)].long()] = theirs.int()
        return torch.where(self.history_is_better(len(ours))[:, None], ours, theirs)

    def history_is_better(self, rows: int) -> torch.Tensor:
        """Whether more tokens of the history's draft are likely to be accepted, bool ``[rows]``."""
        of_drafter = self.index.chances[-self.length :].cumprod(0).sum()
        return self.index.confidences[:rows].cumprod(1).sum(1) > of_drafter


def _stop_tokens(params: Any) -> list[int]:
    """Tokens that end a request's response; none if ``min_tokens`` lets it continue past some."""
    if params.min_tokens:
        return []
    eos = getattr(params, "eos_token_id", None)  # unset if it is ignored
    stops = set(params.stop_token_ids or ()) | ({eos} if eos is not None else set())
    return sorted(stops)[:STOPS]


def least_of_ranks(number: int) -> int:
    """The least of a number over an engine's tensor-parallel ranks; all of them must call this."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return number
    least = torch.tensor(number, dtype=torch.int64)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)

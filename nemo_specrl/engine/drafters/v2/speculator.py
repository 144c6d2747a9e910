"""HistorySpeculator: the source of drafts for vLLM's V2 model runner.

vLLM verifies the drafts in the next step and keeps each by rejection sampling, so that responses
have exactly the policy's distribution whatever is drafted. There is no draft model, so a draft has
no probabilities (``draft_logits`` None): it is verified as certain.

A request brings what drafting needs in ``SamplingParams.extra_args``, as for the V1 proposer: the
prompt's key, an identity of the response, earlier responses as pairs of identity and int32 tokens,
and the length of the prompt, after which the request's prompt may hold the beginning of the
response; the length is None if all of it is the prompt. A request that brings nothing drafts if its
prompt begins with a known one, as later turns of a conversation do (``roots``), or with one whose
responses were sent ahead (``sent_histories``). Others get worthless drafts, which does not affect
their correctness.

``propose`` reads no value from the device.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from nemo_specrl.engine.drafters.roots import Roots
from nemo_specrl.engine.drafters.sent_histories import received
from nemo_specrl.engine.drafters.v2.arrays import PROMPTS
from nemo_specrl.engine.drafters.v2.index import DeviceIndex
from nemo_specrl.engine.metrics import DraftCounts
from nemo_specrl.engine.vllm.compat import (
    EXTRA_ARG,
    drafts_count_here,
    least_of_ranks,
    media_of,
    stop_tokens,
)
from nemo_specrl.media import content_tokens
from nemo_specrl.rollout import MAX_SAMPLE_INDEX, prompt_key
from nemo_specrl.speculation.draft_selection import RUN_AHEAD_INDEX
from nemo_specrl.speculation.suffix_tree import CHANCES

__all__ = ["HistorySpeculator"]

MAX_BYTES = 2**29
"""Device memory for responses if nothing is configured."""


class HistorySpeculator(BaseSpeculator):  # type: ignore[misc]
    """Drafts from the earlier responses to a prompt.

    Args:
        vllm_config: configuration of the engine. ``additional_config["spec_rl"]["max_bytes"]``
            bounds the memory on the device in bytes.
        device: the device that the engine computes on.

    Attributes:
        index: the responses.
        roots: prompts whose later turns share their index.
        req_states: vLLM's state of requests, set when the first one is added.
        enable_adaptive_verification: whether vLLM chooses the tokens that are verified.
        draft_token_confidence_probs: chance of each draft token to be accepted if those before it
            are, float32 ``[max_num_seqs, K]``, in the order of the last batch.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        options = (vllm_config.additional_config or {}).get(EXTRA_ARG) or {}
        self.vllm_config = vllm_config
        self.num_speculative_steps = int(vllm_config.speculative_config.num_speculative_tokens)
        self.model = torch.nn.Module()  # vLLM 0.25 looks for modules of a drafter's model
        self.req_states: Any = None
        self._seconds = 0.0
        self.roots = Roots(PROMPTS)
        self._longest = int(vllm_config.model_config.max_model_len)
        self.index = DeviceIndex(
            device,
            int(vllm_config.scheduler_config.max_num_seqs),
            self._longest,
            int(vllm_config.model_config.get_vocab_size()),
            int(options.get("max_bytes", MAX_BYTES)),
            self.num_speculative_steps,
            CHANCES,
            least_of_ranks,
        )
        self.draft_token_confidence_probs = self.index.confidences
        # vLLM's runner reads it, and verifies the tokens that are worth their time.
        self.enable_adaptive_verification = bool(options.get("by_chance"))

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Compile the kernels; there are no graphs. vLLM calls this once it knows its memory."""
        self.index.warm_up()

    def capture(self, *args: Any) -> None:
        """Do nothing: vLLM calls this, but there is no model."""

    def add_request(self, row: int, request: Any, req_states: Any) -> None:
        """Take in a request; called when the runner has given it a row.

        Args:
            row: the request's row.
            request: vLLM's ``NewRequestData``.
            req_states: the runner's state of requests.
        """
        self.req_states = req_states
        params = request.sampling_params
        if params is None or params.prompt_logprobs is not None:  # it verifies, and does not decode
            return
        started = time.perf_counter()
        tokens = request.prefill_token_ids
        prompt_length = len(request.prompt_token_ids or tokens)
        args = (params.extra_args or {}).get(EXTRA_ARG)
        own, identity, history, start = args or (None, None, (), prompt_length)
        start = prompt_length if start is None else start
        key = self.roots.key_of(content_tokens(tokens[:start], media_of(request)), own)
        if key is not None:
            if args is not None and key != args[0]:  # a later turn's identities are its prompt's
                turn = int.from_bytes(args[0], "little") << 64
                identity = turn | args[1]
                history = [(turn | i, data) for i, data in args[2]]
            longest = min(prompt_length + (params.max_tokens or self._longest), self._longest)
            self.index.open_row(
                row,
                key,
                identity,
                history,
                start,
                brought=max(0, len(tokens) - start),
                most=longest - start,
                stops=stop_tokens(params),
                counted=args is None or args[1] & MAX_SAMPLE_INDEX != RUN_AHEAD_INDEX,
            )
        self._seconds += time.perf_counter() - started

    def add_histories(self, histories: Any) -> dict[str, int]:
        """Make prompts draft from earlier responses before any of their requests arrives.

        All ranks of an engine get the same histories, between the same two steps.

        Args:
            histories: pairs of a prompt and the responses to it, oldest first (``sent_histories``).

        Returns:
            For how many of the ``prompts`` there is room, and how many ``responses`` these have.

        Raises:
            ConfigError: ``histories`` is not such pairs. Nothing was taken in.
        """
        prompts = {}
        for tokens, history in received(histories, self.index.vocabulary):
            key = self.roots.key_of(tokens.tolist(), prompt_key(tokens))
            assert key is not None
            prompts[key] = self.index.add_history(key, history)
        placed = [responses for responses in prompts.values() if responses is not None]
        return {"prompts": len(placed), "responses": sum(placed)}

    def remove_request(self, row: int) -> None:
        """Release a request that has ended or was preempted."""
        self.index.close_row(row)

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
            num_sampled: by row of the batch, tokens that the step yielded, int32 ``[num_reqs]``.
            num_rejected: likewise, draft tokens that it rejected.
            last_sampled: last sampled token by row of the runner, int64 ``[max_num_seqs, 1]``.
            dummy_run: nothing was sampled.
            attn_metadata: not used here.
            slot_mappings: not used here.
            last_hidden_states: not used here.
            aux_hidden_states: not used here.
            *args: not used here.
            **kwargs: not used here.

        Returns:
            int64 ``[num_reqs, K]`` on the device, in the order of the batch.
        """
        n = input_batch.num_reqs
        if dummy_run or self.req_states is None:
            return self.index.drafts[:n]
        started = time.perf_counter()
        # Upper bounds: under asynchronous scheduling the host does not know what was accepted.
        computed = input_batch.num_computed_tokens_np[:n] + input_batch.num_scheduled_tokens[:n]
        drafts = self.index.draft(
            input_batch.idx_mapping[:n],
            input_batch.idx_mapping_np[:n],
            np.maximum(computed + 1, input_batch.prefill_len_np[:n]),
            self.req_states.all_token_ids.gpu,
            self.req_states.total_len.gpu,
            num_sampled,
            num_rejected,
            last_sampled.view(-1),
        )
        self._seconds += time.perf_counter() - started
        return drafts

    def take_counts(self) -> DraftCounts | None:
        """What was drafted since the last call; reads from the device, once a batch.

        None if another rank counts: all of them make the same drafts.
        """
        if not drafts_count_here(self.vllm_config)[0]:
            return None
        counts = DraftCounts(*self.index.take_totals(), seconds=self._seconds)
        self._seconds = 0.0
        return counts

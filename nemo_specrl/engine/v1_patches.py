"""What is wrapped in vLLM's V1 model runner, which runs on CPUs.

Drafting needs the first four. The others change nothing that a request gets, up to rounding, and
save much of the time of a step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nemo_specrl.engine.patches import Patch

if TYPE_CHECKING:
    import torch

__all__ = ["PATCHES"]

TOKENS_EXACT, TOKENS_MULTIPLE = 32, 16
"""Linear layers run unchanged up to this many tokens; above, in multiples of the second."""
PROMPT_TOKENS_AT_ONCE = 1024
"""Number of prompt tokens whose log-probs are computed at once; the V2 model runner's value."""


def _drafter_of(runner: Any) -> Any | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if type(drafter).__name__ == "HistoryProposer" else None


def _propose(original: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    drafter = _drafter_of(self)
    if drafter is not None:
        drafter.runner = self
        drafter.verified = scheduler_output.scheduled_spec_decode_tokens
    return original(self, scheduler_output, *args, **kwargs)


def _input_fits(original: Any, self: Any, common_attn_metadata: Any) -> bool:
    if _drafter_of(self) is not None:
        return common_attn_metadata is not None
    return bool(original(self, common_attn_metadata))


def _expand_to_tokens(
    original: Any,
    values: torch.Tensor,
    cumulative: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each row's value for each of its tokens: what ``expand_batch_to_tokens`` documents.

    Args:
        original: not called.
        values: by row, ``[rows]``.
        cumulative: tokens of a row and of those before it, int ``[rows]``.
        num_tokens: number of tokens of all rows.
        replace_from: a value to replace.
        replace_to: its replacement.
    """
    import torch

    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).long()
    if replace_from != replace_to:
        values = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)


def _apply_top_k_top_p(original: Any, logits: torch.Tensor, *args: Any) -> torch.Tensor:
    result: torch.Tensor = original(logits, *args) if len(logits) else logits
    return result


def _forward_cpu(
    original: Any, self: Any, logits: torch.Tensor, generators: dict[int, Any], *args: Any
) -> Any:
    import torch

    if 0 < len(generators) < len(logits):
        every_row = range(len(logits))
        generators = {row: generators.get(row, torch.default_generator) for row in every_row}
    return original(self, logits, generators, *args)


def _onednn_mm(
    original: Any, handler: Any, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    import torch

    # torch.compile must not see a branch that depends on the number of tokens.
    if torch.compiler.is_compiling() or x.dim() != 2 or len(x) <= TOKENS_EXACT:
        exact: torch.Tensor = original(handler, x, bias)
        return exact
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % TOKENS_MULTIPLE))
    y: torch.Tensor = original(handler, padded, bias)
    return y[: len(x)]


class _PromptPart(NamedTuple):
    """Positions of one prompt whose log-probs a step yields.

    Args:
        tensors: tensors for the whole prompt, which are filled part by part.
        start: the first of these positions.
        hidden: where their hidden states begin among those of the step.
        targets: the token that follows each position, whose log-prob is wanted.
    """

    tensors: Any
    start: int
    hidden: int
    targets: list[int]


def _prompt_logprobs(
    original: Any, self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, Any]:
    wanted = self.num_prompt_logprobs
    scheduled = [request_id for request_id in wanted if request_id in num_scheduled_tokens]
    if (
        len(scheduled) < 2
        or self.model_config.logprobs_mode not in ("raw_logprobs", "processed_logprobs")
        or any(self.requests[i].prompt_token_ids is None for i in scheduled)  # embeddings
    ):
        result: dict[str, Any] = original(self, hidden_states, num_scheduled_tokens)
        return result
    completed: dict[str, Any] = {}
    parts: dict[int, list[_PromptPart]] = defaultdict(list)  # by the number of tokens wanted
    for request_id in scheduled:
        tokens = num_scheduled_tokens[request_id]
        part = _prompt_part(self, request_id, tokens)
        if part.targets:
            parts[wanted[request_id]].append(part)
        if len(part.targets) < tokens:  # no token follows the last one of a prompt
            completed[request_id] = part.tensors
    for num_logprobs, group in parts.items():
        _fill_prompt_logprobs(self, hidden_states, num_logprobs, group)
    for request_id in completed:
        del wanted[request_id]
        self.requests[request_id].in_progress_prompt_logprobs_cpu = None
    return completed


def _prompt_part(runner: Any, request_id: str, num_tokens: int) -> _PromptPart:
    """The part that a step with the next ``num_tokens`` of a request's prompt yields."""
    from vllm.v1.outputs import LogprobsTensors

    request = runner.requests[request_id]
    prompt = request.prompt_token_ids
    if request.in_progress_prompt_logprobs_cpu is None:
        request.in_progress_prompt_logprobs_cpu = LogprobsTensors.empty_cpu(
            len(prompt) - 1, runner.num_prompt_logprobs[request_id] + 1
        )
    start = request.num_computed_tokens
    row = runner.input_batch.req_id_to_index[request_id]
    return _PromptPart(
        tensors=request.in_progress_prompt_logprobs_cpu,
        start=start,
        hidden=int(runner.query_start_loc.np[row]),
        targets=prompt[start + 1 : start + 1 + num_tokens],
    )


def _fill_prompt_logprobs(
    runner: Any, hidden_states: torch.Tensor, num_logprobs: int, parts: list[_PromptPart]
) -> None:
    """Compute the log-probs of parts of prompts and write them into their tensors."""
    import torch

    lengths = [len(part.targets) for part in parts]
    targets = torch.tensor(list(itertools.chain.from_iterable(part.targets for part in parts)))
    spans = [np.arange(part.hidden, part.hidden + len(part.targets)) for part in parts]
    positions = torch.from_numpy(np.concatenate(spans))
    at_once = min(PROMPT_TOKENS_AT_ONCE, runner.max_model_len)
    pieces = []
    each = zip(torch.split(positions, at_once), torch.split(targets, at_once), strict=True)
    for where, tokens in each:
        logits = runner.model.compute_logits(hidden_states[where])
        logprobs = runner.sampler.compute_logprobs(logits)
        pieces.append(runner.sampler.gather_logprobs(logprobs, num_logprobs, tokens)[:3])
    columns = zip(*pieces, strict=True)
    token_ids, values, ranks = (torch.split(torch.cat(column), lengths) for column in columns)
    for i, part in enumerate(parts):
        here = slice(part.start, part.start + lengths[i])
        part.tensors.logprob_token_ids[here].copy_(token_ids[i])
        part.tensors.logprobs[here].copy_(values[i])
        part.tensors.selected_token_ranks[here].copy_(ranks[i])


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

PATCHES = (
    Patch(
        _RUNNER,
        "propose_draft_token_ids",
        _propose,
        "vLLM gives a custom proposer the tokens of each row, but neither its request nor which of "
        "its drafts the step verified.",
    ),
    Patch(
        _RUNNER,
        "_input_fits_in_drafter",
        _input_fits,
        "If the longest row and the longest possible draft do not fit into max_model_len together, "
        "vLLM asks no proposer and schedules zeros as drafts. That is meant for draft models; "
        "drafts from history end where their response must.",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        _expand_to_tokens,
        "CPU builds write temperatures, top-k and top-p into a copy that is discarded and return "
        "memory that was never written: accepted tokens come from another distribution "
        "(utils/cpu_triton_utils.py, _expand_kernel_impl; all versions up to 0.33).",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler",
        "apply_top_k_top_p",
        _apply_top_k_top_p,
        "With top-k, a step in which no row has a draft ends the engine: there is no largest k.",
    ),
    Patch(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
        "forward_cpu",
        _forward_cpu,
        "Rows with seeds are sampled by the generator of the process if one row of the step has no "
        "seed.",
        before=(0, 29),
    ),
    Patch(
        "vllm._custom_ops",
        "onednn_mm",
        _onednn_mm,
        "oneDNN compiles a kernel for each number of tokens and shape of weights, which takes a "
        "millisecond, and keeps 1,024 of them. Steps that verify drafts have another number of "
        "tokens nearly every time, and spent a fifth of their time on kernels. Rows of zeros are "
        "added, and cut off again.",
    ),
    Patch(
        _RUNNER,
        "_get_prompt_logprobs_dict",
        _prompt_logprobs,
        "Handles one prompt after the other, with a dozen operations each. Prefix reuse verifies "
        "many in a step; their log-probs are computed together.",
        {"a7451a6d24ea1922": "0.25.1", "c6f2327c5bbb4c51": "0.29.0, 0.32.0"},
    ),
)

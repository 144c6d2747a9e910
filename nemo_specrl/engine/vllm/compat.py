"""Differences between vLLM versions and devices, and private names of vLLM that are read.

Covers vLLM 0.20 to 0.32; docs/reference/versions.md says which of them have been run. Each function
states what it works around and in which versions, and fails with a clear error when its target has
changed. Features are detected where that is possible. What is replaced in vLLM is in ``patches``.
The rest of the engine layer uses only vLLM's public interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from nemo_specrl.errors import IncompatibleVersion

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm import CompletionOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

__all__ = [
    "EXTRA_ARG",
    "OLDEST",
    "VERSIONS_RUN",
    "assigns_own_ids",
    "check_version",
    "drafts_count_here",
    "engine_of",
    "eos_token_ids",
    "forget_broken_step",
    "has_unfinished_requests",
    "in_this_process",
    "interrupts_deferred",
    "keeps_tokens_at_reset",
    "least_of_ranks",
    "logprobs_slice",
    "made_so_far",
    "media_of",
    "new_logprobs",
    "no_logprobs",
    "routes_shape",
    "routes_so_far",
    "stop_tokens",
    "take_in_outputs",
    "tokenizer_of",
    "tokens_so_far",
    "unknown_requests",
    "version_numbers",
]

logger = logging.getLogger(__name__)

EXTRA_ARG = "spec_rl"
"""This package's key in ``SamplingParams.extra_args`` and in vLLM's ``additional_config``."""
FORGET_SECONDS = 10.0
"""The longest time allowed for asking workers to forget a broken step."""
TAKE_IN_SECONDS = 0.001
"""Interval for checking whether outputs have been taken in."""
OLDEST = (0, 20)
VERSIONS_RUN = ("0.20.0", "0.25.1", "0.26.0", "0.29.0", "0.32.0")
"""Versions on which the engine's tests and a training have passed (docs/reference/versions.md)."""


def version_numbers(version: str) -> tuple[int, ...] | None:
    """The numbers of a release, ``(0, 25, 1)`` for ``0.25.1+cu129``; None for other versions.

    Builds from source have versions such as ``dev`` or ``0.1.dev1+g1234``: these do not say what
    they contain.
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


def engine_of(llm: Any) -> Any:
    """Return the engine in a ``vllm.LLM``; an ``LLMEngine`` or an ``AsyncLLM`` is one itself."""
    return getattr(llm, "llm_engine", llm)


def eos_token_ids(engine: Any) -> tuple[int | None, frozenset[int]]:
    """Return the engine's end-of-sequence token, and the others that its generation config names.

    The first comes from the tokenizer and is None when the engine has none. A request that does
    not ignore end-of-sequence stops at any of them (v1/engine/input_processor.py).
    """
    processor = engine.input_processor
    if hasattr(processor, "renderer"):
        eos = processor.renderer.get_eos_token_id()
    else:  # versions before the renderers
        eos = getattr(processor.tokenizer, "eos_token_id", None)
    extra = processor.generation_config_fields.get("eos_token_id") or ()
    extra = {extra} if isinstance(extra, int) else set(extra)
    return eos, frozenset(extra - {eos})


def tokenizer_of(engine: Any) -> Any:
    """Return the tokenizer of an ``LLMEngine`` or ``AsyncLLM`` that has one.

    ``AsyncLLM.get_tokenizer`` is a coroutine in some versions; the renderer's method is not.
    """
    processor = engine.input_processor
    if hasattr(processor, "renderer"):
        return processor.renderer.get_tokenizer()
    return processor.tokenizer  # versions before the renderers


def logprobs_slice(logprobs: FlatLogprobs, start: int, stop: int) -> FlatLogprobs:
    """Return positions ``start`` to ``stop`` of log-probs, as ``logprobs[start:stop]``.

    Up to vLLM 0.28, an empty slice of ``FlatLogprobs`` raises IndexError (vllm/logprobs.py; fixed
    in 0.29.0).
    """
    if stop <= start:
        return type(logprobs)()
    return logprobs[start:stop]


def no_logprobs() -> FlatLogprobs:
    """Return log-probs without positions."""
    from vllm.logprobs import FlatLogprobs

    return FlatLogprobs()


def new_logprobs(completion: CompletionOutput) -> FlatLogprobs:
    """The log-probs of exactly the tokens that an output brings, or fewer if it has fewer.

    Up to vLLM 0.28, an output of kind DELTA without a token, such as an abort's, carries the log-
    probs of the whole response: it takes ``logprobs[-0:]`` (v1/engine/output_processor.py).
    """
    logprobs: Any = completion.logprobs
    if logprobs is None:
        return no_logprobs()
    n = len(logprobs)
    return logprobs_slice(logprobs, max(0, n - len(completion.token_ids)), n)


def tokens_so_far(engine: Any, request_id: str) -> tuple[list[int], FlatLogprobs]:
    """The tokens that an engine has decoded for a running request, and their log-probs.

    vLLM drops them when a request is aborted (v1/engine/output_processor.py). Since 0.24 or so a
    request has a second, internal id.

    Raises:
        KeyError: the engine has no such request.
    """
    state = _request_state(engine, request_id)
    if state is None:
        raise KeyError(request_id)
    tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
    n = min(len(tokens), len(logprobs))  # an interrupt may come between the two
    return list(tokens[:n]), logprobs_slice(logprobs, 0, n)


def made_so_far(engine: Any, request_id: str) -> int | None:
    """How many tokens an engine has decoded for a request; None if it has no such request."""
    state = _request_state(engine, request_id)
    return None if state is None else int(state.detokenizer.num_output_tokens())


def routes_so_far(engine: Any, request_id: str) -> npt.NDArray[np.integer[Any]] | None:
    """The routed experts of a running request's tokens, which vLLM returns with the last output.

    Integers ``[tokens, layers, experts of a token]``, of prompt and response except for the last
    token; None if the engine returns none. vLLM 0.20 has none before the end of a request.
    """
    import numpy as np

    chunks = getattr(_request_state(engine, request_id), "routed_experts_chunks", None)
    return np.concatenate(chunks) if chunks else None


def routes_shape(config: Any) -> tuple[int, int] | None:
    """Layers, and experts of a token in each, of the routes that an engine returns; None if it does
    not return any.

    The option has been in another place since about 0.30, and there has been a method for the
    number of experts since about 0.28.

    Args:
        config: a ``VllmConfig``.
    """
    model = config.model_config
    options = getattr(config, "aux_output_config", model)
    if not getattr(options, "enable_return_routed_experts", False):
        return None
    layers, text = model.get_total_num_hidden_layers(), model.hf_text_config
    if hasattr(model, "get_num_experts_per_tok"):
        return layers, model.get_num_experts_per_tok()
    chosen = getattr(text, "num_experts_per_tok", None)
    return layers, text.top_k_experts if chosen is None else chosen


def _request_state(engine: Any, request_id: str) -> Any:
    """The state that an engine's output processor has of a request that has not ended, or None."""
    processor = engine.output_processor
    internal = getattr(processor, "external_req_ids", {}).get(request_id) or [request_id]
    return processor.request_states.get(internal[0])


async def take_in_outputs(engine: Any) -> None:
    """Wait until an ``AsyncLLM`` has taken in everything that its paused core has sent.

    One task takes the outputs from a queue and processes them one after the other
    (v1/engine/async_llm.py, ``output_handler``): when it takes an empty one, it has finished all
    that came before. ``pause_generation`` itself just waits 20 ms and hopes for the best.
    """
    from vllm.v1.engine import EngineCoreOutputs

    handler, queue = engine.output_handler, engine.engine_core.outputs_queue
    if handler is None:  # it has never had a request
        return
    queue.put_nowait(EngineCoreOutputs())
    while not (queue.empty() or handler.done()):
        await asyncio.sleep(TAKE_IN_SECONDS)


def keeps_tokens_at_reset(engine: Any) -> bool:
    """Whether requests keep their tokens if KV blocks are reset while they run.

    With asynchronous scheduling, vLLM 0.20 discards the next token of each as one that was on its
    way, even if none was (``discard_latest_async_tokens`` in v1/core/sched/scheduler.py).
    """
    from vllm.v1.request import Request

    discards = "discard_latest_async_tokens" in inspect.getsource(Request.__init__)
    return not (discards and engine.vllm_config.scheduler_config.async_scheduling)


def stop_tokens(params: SamplingParams) -> frozenset[int]:
    """Tokens that end a request's response; none if ``min_tokens`` lets it continue past some."""
    if params.min_tokens:
        return frozenset()
    eos = getattr(params, "eos_token_id", None)  # a property since 0.2x; unset if eos is ignored
    return frozenset(params.stop_token_ids or ()) | ({eos} if eos is not None else frozenset())


def media_of(request: Any) -> list[tuple[str, int, int]]:
    """Content name, first position and number of placeholders of a request's media.

    Args:
        request: as a model runner knows it, ``NewRequestData`` or ``CachedRequestState``.
    """
    return [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    ]


def assigns_own_ids() -> bool:
    """Whether vLLM gives each request a unique id of its own in addition to its caller's."""
    from vllm import envs

    return not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)


def unknown_requests(engine: Any, request_ids: Iterable[str]) -> list[str]:
    """Return those of some requests that an ``LLMEngine`` does not have, or no longer has.

    An engine that is asked to abort a request forgets it without an output.
    """
    processor = engine.output_processor
    known = getattr(processor, "external_req_ids", processor.request_states)
    return [request_id for request_id in request_ids if request_id not in known]


@contextlib.contextmanager
def interrupts_deferred(engine: Any) -> Iterator[None]:
    """Make Ctrl-C wait for the end of a step of an engine whose core is in this process.

    A step that is interrupted anywhere can leave its scheduler and its model runner with different
    requests, even if the model runner is in its own process (vLLM 0.20 on CPUs). A second Ctrl-C
    does not wait. Nothing is changed outside of the main thread, or if SIGINT has a handler other
    than Python's own.
    """
    own = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not (own and _core_here(engine)):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            signal.default_int_handler(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def forget_broken_step(engine: Any) -> None:
    """Make an engine whose core is in this process forget a step that an exception interrupted.

    The V1 model runner keeps what the first half of a step has computed for the second half
    (``execute_model_state`` in v1/worker/gpu_model_runner.py), and if that never came it would
    refuse every further step.
    """
    if _core_here(engine):
        engine.collective_rpc(_forget_broken_step, timeout=FORGET_SECONDS)


def _forget_broken_step(worker: Any) -> None:
    """Forget a broken step, in the process of a worker."""
    runner = worker.model_runner
    if getattr(runner, "execute_model_state", None) is not None:
        runner.execute_model_state = None


def drafts_count_here(vllm_config: Any) -> tuple[bool, bool]:
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


def least_of_ranks(number: int) -> int:
    """The least of a number over an engine's tensor-parallel ranks; all of them must call this."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return number
    least = torch.tensor(number, dtype=torch.int64)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)


def has_unfinished_requests(engine: Any) -> bool:
    """Whether any request that this process sent to an ``LLMEngine`` or ``AsyncLLM`` is unfinished.

    Covers all of its data-parallel engines; ``AsyncLLM`` has no method of its own for this.
    """
    return bool(engine.output_processor.has_unfinished_requests())


def in_this_process(engine: Any) -> bool:
    """Whether an ``LLMEngine`` or ``AsyncLLM`` has its core and its worker in this process."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return _core_here(engine) and isinstance(engine.model_executor, UniProcExecutor)


def _core_here(engine: Any) -> bool:
    """Whether an engine has its core, with the scheduler, in this process."""
    # LLMEngine sets it only there (v1/engine/llm_engine.py).
    return getattr(engine, "model_executor", None) is not None

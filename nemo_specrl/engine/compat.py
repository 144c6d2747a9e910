"""Differences between vLLM versions and devices; every touch of a name that vLLM keeps private.

vLLM 0.20 to 0.32. Each piece states what it works around and fails loudly when its target has
changed. The rest of the engine layer uses vLLM's public interface alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nemo_specrl.errors import ConfigError, IncompatibleVersion

if TYPE_CHECKING:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.logprobs import FlatLogprobs

__all__ = [
    "Detokenizer",
    "RefitExtension",
    "bind_proposer",
    "check_version",
    "eos_token_ids",
    "expanded_to_tokens",
    "local_cpu_environment",
    "mend_cpu_rejection_sampler",
    "prompt_logprob_bytes",
    "refit",
    "tokenizer_of",
    "tokens_so_far",
]

OLDEST, NEWEST = (0, 20), (0, 32)


def check_version() -> str:
    """The version of the installed vLLM.

    Raises:
        IncompatibleVersion: vLLM is missing, or older or newer than this release knows.
    """
    try:
        import vllm
    except ImportError as error:
        raise IncompatibleVersion(f"vLLM cannot be imported: {error}") from None
    version = str(vllm.__version__)
    try:
        major_minor = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return version  # a build from source; what it lacks will say so when it is used
    if not OLDEST <= major_minor <= NEWEST:
        raise IncompatibleVersion(
            f"vLLM {version}: this release of nemo_specrl works with "
            f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        )
    return version


def local_cpu_environment(threads: int = 1) -> None:
    """Set what a small in-process CPU engine needs; to be called before vLLM is imported.

    One thread is the fastest for small models: with two, each waits for the other more than it
    works. ``torch.compile`` of a helper for log-probs alone would take 10 s (v1/sample/ops).
    Values that the user has set stay.
    """
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


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
    """The tokenizer of an engine that has one, synchronous or not.

    ``AsyncLLM.get_tokenizer`` is a coroutine in some versions; what it asks is not.
    """
    processor = engine.input_processor
    if hasattr(processor, "renderer"):
        return processor.renderer.get_tokenizer()
    return processor.tokenizer  # before the renderers


def tokens_so_far(engine: Any, request_id: str) -> tuple[list[int], FlatLogprobs]:
    """What an engine has decoded of a request that is under way, with its log-probs.

    vLLM drops it when a request is aborted (v1/engine/output_processor.py). Since 0.24 or so a
    request has a second id inside.
    """
    processor = engine.output_processor
    inside = getattr(processor, "external_req_ids", {}).get(request_id) or [request_id]
    state = processor.request_states[inside[0]]
    tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
    n = min(len(tokens), len(logprobs))  # an interrupt may come between the two
    return list(tokens[:n]), logprobs[:n]


class Detokenizer:
    """vLLM's incremental detokenizer, fed with a response that two requests made.

    vLLM looks for stop strings in the text of one request; here the text runs on from the draft
    into its continuation, so that a stop string across the seam is found as in one piece.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request: Any = SimpleNamespace(
            request_id="specrl", prompt_token_ids=list(prompt), sampling_params=params
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def feed(self, tokens: Sequence[int], *, stop_terminated: bool) -> str | None:
        """Add tokens; returns the stop string that they complete.

        Tokens behind the one that completes it are left out. With ``stop_terminated`` the last
        token is a stop token, whose text belongs to the response only where the parameters say so.
        """
        return self._detokenizer.update(list(tokens), stop_terminated)

    @property
    def tokens(self) -> list[int]:
        """What was fed, up to the end of a stop string."""
        return list(self._detokenizer.output_token_ids)

    @property
    def text(self) -> str:
        """The text of what was fed, as a finished request reports it."""
        return self._detokenizer.get_next_output_text(finished=True, delta=False)


def prompt_logprob_bytes(llm: LLM) -> int:
    """Bound of the memory that verification takes in a worker beside the KV cache, bytes.

    vLLM's V1 model runner turns the scheduled tokens of one draft at a time into logits of the
    whole vocabulary and those into float32 log-probs (v1/worker/gpu_model_runner.py,
    ``_get_prompt_logprobs_dict``). A draft's scheduled tokens are at most
    ``max_num_batched_tokens``; ``long_prefill_token_threshold`` is no bound, since newer vLLMs do
    not hold a request to it that is alone in the engine (v1/core/sched/scheduler.py). The newer
    model runner works in pieces of 1,024 tokens and stays below this.
    """
    config = llm.llm_engine.vllm_config
    rows = config.scheduler_config.max_num_batched_tokens
    rows = min(rows, config.model_config.max_model_len)
    vocabulary = config.model_config.get_vocab_size()
    return rows * vocabulary * (config.model_config.dtype.itemsize + 4)


class RefitExtension:
    """Mixed into vLLM's worker (``worker_extension_cls``): new weights for a running engine.

    ``model.load_weights``, which GPU engines use, fails halfway on CPU, where the packed GEMM has
    freed the parameters (model_executor/layers/utils.py); ``reload_weights`` repacks them, but
    leaves a tied output layer with its old packed copy, silently
    (model_executor/layers/vocab_parallel_embedding.py).
    """

    def specrl_refit(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load ``weights``, named as in the checkpoint; tied output weights may be left out."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # vLLM's worker has it
        runner.reload_weights(weights_iterator=iter(weights))
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            return
        model = runner.model
        head, body = getattr(model, "lm_head", None), getattr(model, "model", None)
        embedding = getattr(body, "embed_tokens", None)
        if head is None or embedding is None or not model.config.tie_word_embeddings:
            return
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
        _check_tied(head, embedding)


def _check_tied(head: Any, embedding: Any) -> None:
    import torch

    probe = torch.ones(1, embedding.weight.shape[1], dtype=embedding.weight.dtype)
    expected = probe.float() @ embedding.weight.float().t()
    actual = head.quant_method.apply(head, probe).float()
    if not torch.allclose(actual, expected, rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise IncompatibleVersion(
            "refit: the tied output layer kept its old weights; this vLLM packs it in a way that "
            "nemo_specrl.engine.compat does not know"
        )


def refit(llm: LLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give a running engine new weights and forget the KV blocks of the old ones.

    For engines built with ``worker_extension_cls="nemo_specrl.engine.compat.RefitExtension"`` in
    the caller's process. Host frameworks with a refit of their own do not need it.

    Raises:
        ConfigError: requests are still running, so that the prefix cache cannot be cleared.
    """
    llm.collective_rpc("specrl_refit", args=(list(weights),))
    if not llm.reset_prefix_cache():
        raise ConfigError("refit: requests are still running; let them end or abort them first")


def bind_proposer(proposer: type[Any]) -> None:
    """Have model runners tell proposers of this class who they are, before each proposal.

    vLLM gives a custom proposer the tokens of each row, but not its request
    (v1/worker/gpu_model_runner.py, ``propose_draft_token_ids``; 0.25 to 0.33).

    Raises:
        IncompatibleVersion: this vLLM's runner has no such method.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, "propose_draft_token_ids", None)
    if original is None:
        raise IncompatibleVersion(
            "this vLLM's GPUModelRunner has no propose_draft_token_ids; set spec_rl.tree.enabled: "
            "false"
        )
    if getattr(original, "binds_proposer", False):
        return

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, proposer):
            self.drafter.runner = self
        return original(self, *args, **kwargs)

    propose_draft_token_ids.binds_proposer = True  # type: ignore[attr-defined]
    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def mend_cpu_rejection_sampler(vllm_config: Any) -> None:
    """On a CPU, make sampled speculative decoding divide logits by the temperature it was given.

    ``expand_batch_to_tokens`` of vLLM's CPU builds writes temperatures (and top-k, top-p) into a
    copy that is thrown away and returns memory that was never written, so that accepted tokens
    come from another distribution (utils/cpu_triton_utils.py, ``_expand_kernel_impl``; 0.20 to
    0.33). Greedy decoding is not affected.
    """
    if vllm_config.device_config.device_type != "cpu":
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

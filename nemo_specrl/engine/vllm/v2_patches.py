"""What is replaced in vLLM so that its V2 model runner drafts from history.

Functions of the runner, the scheduler and the configuration are wrapped; none is copied. Engines
that were not built with :func:`speculator_options` behave as before. The known versions are those
in ``SOURCES``; with others, :func:`install` raises IncompatibleVersion, which names the function.

- ``init_speculator`` makes the speculator, which ``_get_v2_model_runner_unsupported_features`` has
  to permit before 0.32.
- ``add_requests`` and ``_remove_request`` tell it about requests, and ``finish_requests`` makes all
  ranks remove them in the same order.
- ``VllmConfig.__post_init__`` has graphs captured for each length of drafts and for steps that are
  as large as drafts make them, and refuses engines that would not run V2: vLLM would draft n-grams
  in their V1 runner instead.
- ``CudaGraphManager._init_candidates`` makes each step find the graph of its length
  (``v2_graphs``).
- ``Scheduler`` chooses the length of drafts by the rows of a step (``v2_lengths``). It learns of
  accepted drafts in ``make_spec_decoding_stats``, and uses the new table from the next step on.
- Workers get one additional method, ``ADD_HISTORIES``, for ``collective_rpc`` to name: vLLM sends
  functions to other processes only with VLLM_ALLOW_INSECURE_SERIALIZATION.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from typing import Any

from nemo_specrl.engine.vllm.compat import EXTRA_ARG
from nemo_specrl.engine.vllm.environment import Engines, why_not_v2
from nemo_specrl.engine.vllm.patches import wrap_functions
from nemo_specrl.engine.vllm.sampler_memory import SAMPLER_BYTES
from nemo_specrl.engine.vllm.v2_bad_words import patch_bad_words
from nemo_specrl.engine.vllm.v2_graphs import graphs_by_tokens, set_graph_sizes
from nemo_specrl.engine.vllm.v2_lengths import (
    WRAPPERS,
    choose_by_rows,
    first_table,
    max_drafted,
)
from nemo_specrl.engine.vllm.v2_states import patch_states, set_prefix_cache, warn_of_fewer_rows
from nemo_specrl.errors import ConfigError, IncompatibleVersion
from nemo_specrl.speculation.uniform_length import LENGTHS

__all__ = [
    "ADD_HISTORIES",
    "drafts_from_history",
    "install",
    "speculator_of",
    "speculator_options",
]

logger = logging.getLogger(__name__)

DRAFTER = "v2"
SPECULATOR = "nemo_specrl.engine.drafters.v2.speculator.HistorySpeculator"
"""A class in a layer above this module, which therefore refers to it by name, as engines do with
V1's proposer."""
MAX_WITH_STATES = 3
"""Length of the longest drafts if lengths are chosen and layers other than attention keep a state
for each drafted token of each row: in Nemotron 3 Nano about 48 MB, as much as 8,000 tokens of its
KV cache."""
ADD_HISTORIES = "spec_rl_add_histories"
"""Method that :func:`install` gives vLLM's workers: it takes histories sent ahead of requests."""

SOURCES: dict[str, dict[str, str]] = {
    "init_speculator": {
        "f4cfdd06537c0f84": "0.25.1, 0.26.0",
        "1f9a18dc380bf36e": "0.29.0",
        "b5854375c89a8dd1": "0.32.0",
        "6ef897bd22492f9a": "0.33.0",
    },
    "add_requests": {
        "37ced69082168d1a": "0.25.1, 0.26.0",
        "f13266b750450235": "0.29.0",
        "5c0348221ed2e87f": "0.32.0, 0.33.0",
    },
    "_remove_request": {
        "a87e6efafc82f59b": "0.25.1, 0.26.0",
        "86f1b21e7787064e": "0.29.0 to 0.33.0",
    },
    "_get_v2_model_runner_unsupported_features": {
        "4110550e86c8419c": "0.25.1",
        "876da7a1cb687720": "0.26.0",
        "7c4a49959dacb9e0": "0.29.0",
        "bcd9027fd2112355": "0.32.0",
        "a52cc7637f6d4a44": "0.33.0",
    },
    "_init_candidates": {
        "2e3009d8d6249f99": "0.25.1",
        "3bfcb749e344aa04": "0.26.0",
        "6848b02831344044": "0.29.0",
        "f23597574e533720": "0.32.0, 0.33.0",
    },
    "make_spec_decoding_stats": {"15061fa40c8de7a3": "0.25.1 to 0.33.0"},
    "update_draft_token_ids": {
        "54b0036e1d3b57d4": "0.25.1 to 0.29.0",
        "b4d5a8c59df7b8a9": "0.32.0, 0.33.0",
    },
}
"""XXH3 of the source of each function that must be a known one, and the versions that have it.
0.33.0 was read but not run."""


def speculator_options(
    max_draft_tokens: int, max_bytes: int, *, adaptive: bool, by_chance: bool = False
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an engine that drafts from history in its V2 runner.

    To vLLM the method is ``ngram_gpu``, which asynchronous scheduling and, from 0.32 on, the V2
    runner support; the speculator is put in its place.

    Args:
        max_draft_tokens: the most tokens that a row drafts in a step.
        max_bytes: memory on the device for responses.
        adaptive: rows draft as many tokens as pay off, one of ``LENGTHS``, by the number of rows
            and by what was accepted; otherwise all draft ``max_draft_tokens``.
        by_chance: all rows draft the longest of these, and vLLM's adaptive verification chooses
            which of their tokens are verified.
    """
    longest = min(max_draft_tokens, LENGTHS[-1]) if adaptive else max_draft_tokens
    chosen = adaptive and not by_chance
    lengths = [n for n in LENGTHS if n < longest] + [longest] if chosen else [longest]
    options = {"drafter": DRAFTER, "max_bytes": max_bytes, "lengths": lengths}
    if by_chance:
        options["by_chance"] = True
    return {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": longest,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 1,
        },
        "additional_config": {EXTRA_ARG: options},
    }


def drafts_from_history(vllm_config: Any) -> bool:
    """Whether an engine was built with :func:`speculator_options`."""
    options = getattr(vllm_config, "additional_config", None)
    ours = options.get(EXTRA_ARG) if isinstance(options, dict) else None
    return vllm_config.speculative_config is not None and (ours or {}).get("drafter") == DRAFTER


def speculator_of(runner: Any) -> Any | None:
    """The HistorySpeculator of a model runner, or None."""
    speculator = getattr(runner, "speculator", None)
    return speculator if type(speculator).__name__ == SPECULATOR.rsplit(".", 1)[1] else None


def install() -> None:
    """Make V2 runners draft from history if their engine asks for it. May be called repeatedly.

    Raises:
        IncompatibleVersion: a function to be wrapped is missing, or is not a known one.
    """
    try:
        from vllm.config import VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        raise IncompatibleVersion(f"this vLLM has no V2 model runner ({error})") from None
    wrappers: tuple[tuple[Any, str, Any], ...] = (
        (model_runner, "init_speculator", _init_speculator),
        (GPUModelRunner, "add_requests", _add_requests),
        (GPUModelRunner, "_remove_request", _remove_request),
        (GPUModelRunner, "finish_requests", _finish_requests),
        (VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_features),
        (VllmConfig, "__post_init__", _post_init),
        (CudaGraphManager, "_init_candidates", _init_candidates),
        (Scheduler, "__init__", _init_scheduler),
        *((Scheduler, name, wrap) for name, wrap in WRAPPERS),
    )
    Scheduler.spec_rl_lengths = None  # for schedulers whose engines do not draft from history
    wrap_functions(wrappers, SOURCES)
    setattr(WorkerBase, ADD_HISTORIES, _add_histories)
    patch_bad_words()


def _init_speculator(original: Any, vllm_config: Any, device: Any, *args: Any) -> Any:
    if not drafts_from_history(vllm_config):
        return original(vllm_config, device, *args)
    if vllm_config.model_config.is_hybrid:
        patch_states()
    module, name = SPECULATOR.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(vllm_config, device)


def _add_requests(original: Any, self: Any, scheduler_output: Any) -> None:
    original(self, scheduler_output)
    speculator = speculator_of(self)
    if speculator is not None:
        for request in scheduler_output.scheduled_new_reqs:
            row = self.req_states.req_id_to_index[request.req_id]
            speculator.add_request(row, request, self.req_states)


def _remove_request(original: Any, self: Any, req_id: str) -> bool:
    speculator = speculator_of(self)
    row = self.req_states.req_id_to_index.get(req_id)
    if speculator is not None and row is not None:
        speculator.remove_request(row)
    return bool(original(self, req_id))


def _finish_requests(original: Any, self: Any, scheduler_output: Any) -> None:
    """Remove requests that end in one step in the same order on every rank.

    Before 0.29, vLLM iterates over a set of strings, whose order differs from process to process.
    The order decides which places later requests get, and how responses are ordered in the index:
    ranks would make different drafts, and compute one step with different tokens, without an error.
    """
    if speculator_of(self) is not None:
        preempted = scheduler_output.preempted_req_ids or set()
        for req_id in sorted(preempted.union(scheduler_output.finished_req_ids)):
            self._remove_request(req_id)
    original(self, scheduler_output)  # skips those that are gone


def _add_histories(worker: Any, histories: Any) -> dict[str, int]:
    """Hand histories to the speculator of a worker (``sent_histories.send_histories``)."""
    speculator = speculator_of(worker.model_runner)
    if speculator is None:
        raise ConfigError(
            "histories: this engine does not draft from history in vLLM's V2 model runner; build "
            "it with nemo_specrl.engine_options"
        )
    held: dict[str, int] = speculator.add_histories(histories)
    return held


def _unsupported_features(original: Any, self: Any) -> list[str]:
    """Permit drafts: before 0.32, vLLM's V2 runner has no n-gram drafts, but here it has others."""
    features: list[str] = original(self)
    if drafts_from_history(self):
        features = [feature for feature in features if "ngram" not in feature]
    return features


def _post_init(original: Any, self: Any) -> None:
    if not drafts_from_history(self):
        original(self)
        return
    _set_lengths(self)
    if self.model_config.is_hybrid:
        set_prefix_cache(self)
    original(self)
    _check_runner(self)


def _set_lengths(vllm_config: Any) -> None:
    """Tell vLLM the lengths of drafts, so that it captures graphs for each of them.

    The table that it gets here is never used: the scheduler's is made in ``_init_scheduler``. It
    contains each length; those that the costs do not choose are at the largest numbers of rows. It
    has at most one length for each number of rows, so engines with few rows choose among fewer.
    """
    drafter = vllm_config.speculative_config
    rows = int(vllm_config.scheduler_config.max_num_seqs)
    options = vllm_config.additional_config[EXTRA_ARG]
    lengths = options["lengths"]
    if vllm_config.model_config.is_hybrid and (len(lengths) > 1 or options.get("by_chance")):
        lengths = _keep_lengths(vllm_config, sorted({min(n, MAX_WITH_STATES) for n in lengths}))
        drafter.num_speculative_tokens = lengths[-1]
    most = max_drafted(vllm_config)
    drafter.num_speculative_tokens_per_batch_size = None
    if options.get("by_chance"):
        # vLLM itself bounds how many tokens are verified in a step.
        drafter.enable_adaptive_verification = True
        set_graph_sizes(vllm_config, lengths, rows, rows * lengths[-1])
        return
    grouped = vllm_config.parallel_config.data_parallel_size > 1
    if not grouped and rows < len(lengths):  # a table cannot have them all
        # With few rows the longest drafts pay most, or none if nothing is accepted.
        by_worth = sorted(lengths, key=lambda n: (n != lengths[-1], n != 0, -n))
        lengths = _keep_lengths(vllm_config, sorted(by_worth[:rows]))
    if len(lengths) == 1 or grouped:
        # One length for all steps. All data-parallel ranks must draft the same number, on which
        # vLLM has no way to agree.
        longest = lengths[0] if len(lengths) == 1 else min(lengths[-1], LENGTHS[2])
        drafter.num_speculative_tokens = max(1, min(longest, most // rows))
        if drafter.num_speculative_tokens < longest:
            logger.warning(
                "rows draft %d tokens and not %d: with max_num_seqs = %d, the logits of more would "
                "not fit into %d GiB; a smaller max_num_seqs allows longer drafts",
                drafter.num_speculative_tokens,
                longest,
                rows,
                SAMPLER_BYTES >> 30,
            )
        set_graph_sizes(vllm_config, [drafter.num_speculative_tokens], rows, most)
        return
    set_graph_sizes(vllm_config, lengths, rows, most)
    table = first_table(vllm_config, rows)
    unused = [length for length in lengths if length not in table[1 : rows + 1 - len(lengths)]]
    table[rows + 1 - len(unused) :] = unused
    ranges = itertools.groupby(range(1, rows + 1), key=lambda n: table[n])
    by_range = [(length, list(same)) for length, same in ranges]
    drafter.num_speculative_tokens_per_batch_size = [
        (same[0], same[-1], length) for length, same in by_range
    ]


def _keep_lengths(vllm_config: Any, lengths: list[int]) -> list[int]:
    """Make an engine choose among these lengths only.

    The options are replaced rather than changed: another engine may be built with the same ones.
    """
    additional = vllm_config.additional_config
    options = {**additional[EXTRA_ARG], "lengths": lengths}
    vllm_config.additional_config = {**additional, EXTRA_ARG: options}
    return lengths


def _init_candidates(original: Any, self: Any) -> None:
    """Give each step the graph of its own length.

    vLLM considers only graphs of one size, the next that was captured for any length, which is
    often not the step's own: 17 rows with drafts of two tokens need 51, for which there are graphs
    of 57, but the next size is 52, for drafts of three.
    """
    original(self)
    if drafts_from_history(self.vllm_config):
        self._candidates = graphs_by_tokens(self._capture_descs)


def _check_runner(vllm_config: Any) -> None:
    """Refuse an engine whose drafts would not come from history."""
    name = "spec_rl.tree.method = v2"
    if not vllm_config.use_v2_model_runner:
        raise IncompatibleVersion(
            f"{name}: vLLM would not run this model in its V2 model runner, for the reason that it "
            "has logged (before 0.29: mixtures of experts, layers other than attention); set "
            "VLLM_USE_V2_MODEL_RUNNER=1 to have V2 all the same, or preset: faithful, or "
            "tree.method: proposer for the V1 runner"
        )
    model = vllm_config.model_config
    why = why_not_v2(Engines.installed(cpu=False), {"architectures": model.architectures})
    if why is not None and model.is_hybrid:
        raise IncompatibleVersion(f"{name}: {why}; set preset: faithful")
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if stages > 1:
        raise IncompatibleVersion(
            f"{name}: does not work with pipeline parallelism (pipeline_parallel_size = {stages}); "
            "set it to 1, or preset: faithful without trees"
        )


def _init_scheduler(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if drafts_from_history(self.vllm_config):
        choose_by_rows(self)
        warn_of_fewer_rows(self)

"""What is wrapped in vLLM so that its V2 model runner drafts from history.

Engines that do not draft from history behave as before: each wrapper asks
:func:`~nemo_specrl.engine.v2_config.drafts_from_history`, or whether the runner has our speculator.
What a model with layers other than attention needs in addition is in ``v2_hybrids``, and is applied
in the process of its worker.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any

from nemo_specrl.engine import v2_config
from nemo_specrl.engine.patches import Patch, install
from nemo_specrl.engine.step_costs import TIMED, max_drafted, step_costs, time_layers
from nemo_specrl.engine.v2_hybrids import HYBRID_PATCHES

__all__ = ["PATCHES"]

logger = logging.getLogger(__name__)

SPECULATOR = "nemo_specrl.engine.speculator"
"""Imported where a runner needs it: it needs Triton, which other processes of vLLM may not have."""
INPUT_IDS = 8
"""Position of the step's input tokens among the arguments of ``apply_bad_words``."""


def speculator_of(runner: Any) -> Any | None:
    """What drafts from history in a model runner, alone or beside a drafter, or None."""
    speculator = getattr(runner, "speculator", None)
    speculator = getattr(speculator, "history", speculator)
    return speculator if type(speculator).__name__.startswith("History") else None


def _init_speculator(original: Any, vllm_config: Any, device: Any, *args: Any) -> Any:
    if not v2_config.drafts_from_history(vllm_config):
        return original(vllm_config, device, *args)
    if vllm_config.model_config.is_hybrid:
        install(HYBRID_PATCHES)
    ours = importlib.import_module(SPECULATOR)
    if v2_config.has_drafter(vllm_config):
        drafter = original(vllm_config, device, *args)
        ours.HistoryBeside(drafter, vllm_config, device)
        return drafter
    return ours.HistorySpeculator(vllm_config, device)


def _add_requests(original: Any, self: Any, scheduler_output: Any) -> None:
    speculator, requests = speculator_of(self), scheduler_output.scheduled_new_reqs
    if speculator is not None:
        speculator.foreign.see(requests)  # the runner draws seeds for those that have none
    original(self, scheduler_output)
    if speculator is not None:
        speculator.length = scheduler_output.num_spec_tokens_to_schedule
        for request in requests:
            row = self.req_states.req_id_to_index[request.req_id]
            speculator.add_request(row, request, self.req_states)


def _remove_request(original: Any, self: Any, req_id: str) -> bool:
    speculator = speculator_of(self)
    row = self.req_states.req_id_to_index.get(req_id)
    if speculator is not None and row is not None:
        speculator.remove_request(row)
    return bool(original(self, req_id))


def _finish_requests(original: Any, self: Any, scheduler_output: Any) -> None:
    if speculator_of(self) is not None:
        preempted = scheduler_output.preempted_req_ids or set()
        for req_id in sorted(preempted.union(scheduler_output.finished_req_ids)):
            self._remove_request(req_id)
    original(self, scheduler_output)  # skips those that are gone


def _warmup_kernels(original: Any, runner: Any, *args: Any) -> None:
    if speculator_of(runner) is None:
        original(runner, *args)
        return
    config, most = runner.scheduler_config, max_drafted(runner.vllm_config)
    rows = config.max_num_seqs
    config.max_num_seqs = max(1, min(rows, most // runner.num_speculative_steps))
    try:
        original(runner, *args)
    finally:
        config.max_num_seqs = rows


def _unsupported_features(original: Any, self: Any) -> list[str]:
    features: list[str] = original(self)
    if v2_config.drafts_alone(self):
        features = [feature for feature in features if "ngram" not in feature]
    return features


def _post_init(original: Any, self: Any) -> None:
    ours = v2_config.drafts_from_history(self)
    if ours:
        v2_config.complete(self)
    original(self)
    if ours and self.speculative_config is not None:
        v2_config.check(self)


def _initialize_kv_caches(original: Any, self: Any, vllm_config: Any) -> Any:
    """Afterwards workers are ready, and the scheduler is made next."""
    made = original(self, vllm_config)
    if not (on_gpu() and v2_config.chooses_lengths(vllm_config)):
        return made
    if step_costs(vllm_config).expert_bytes:  # see time_layers
        return made
    try:
        timed, *_ = self.model_executor.collective_rpc(time_layers)
    except Exception:
        logger.warning("steps cannot be timed; their costs are computed", exc_info=True)
        return made
    vllm_config.additional_config[TIMED] = timed
    told = ", ".join(f"{tokens}: {1000 * seconds:.2f}" for tokens, seconds in timed)
    logger.info("layers of a step take, by tokens, in milliseconds: %s", told)
    return made


def on_gpu() -> bool:
    """Whether steps are worth timing."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike())


def _init_candidates(original: Any, self: Any) -> None:
    original(self)
    if v2_config.drafts_alone(self.vllm_config):
        self._candidates = graphs_by_tokens(self._capture_descs)


def graphs_by_tokens(captured: dict[Any, list[Any]]) -> dict[tuple[int, int], list[Any]]:
    """For each number of tokens and adapters of a step: the smallest graph of each kind that
    suffices.

    Args:
        captured: by mode, vLLM's ``BatchExecutionDescriptor`` of its graphs. Those of the mode with
            the largest value, full graphs, come first.
    """
    found: dict[tuple[int, int], list[Any]] = {}
    for mode in sorted(captured, key=lambda mode: -int(mode.value)):
        kinds: dict[Any, list[Any]] = {}
        for graph in sorted(captured[mode], key=lambda graph: graph.num_tokens):
            kind = dataclasses.replace(graph, num_tokens=0, num_reqs=None)
            kinds.setdefault(kind, []).append(graph)
        for graphs in kinds.values():
            begin = 0
            for graph in graphs:
                for tokens in range(begin, graph.num_tokens + 1):
                    found.setdefault((tokens, graph.num_active_loras), []).append(graph)
                begin = graph.num_tokens + 1
    return found


def _apply_bad_words(original: Any, *args: Any) -> None:
    # What it reads one place too early is then the right one. It never reads the last one.
    shifted = args[INPUT_IDS].roll(-1)
    original(*args[:INPUT_IDS], shifted, *args[INPUT_IDS + 1 :])


_RUNNER = "vllm.v1.worker.gpu.model_runner"

PATCHES = (
    Patch(
        "vllm.config:VllmConfig",
        "__post_init__",
        _post_init,
        "Lengths of drafts and sizes of graphs are set once the sizes of the model are known and "
        "before vLLM derives others from them; engines that could not draft are refused.",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore",
        "_initialize_kv_caches",
        _initialize_kv_caches,
        "Times steps once graphs have been captured, before the scheduler that needs it is made.",
    ),
    Patch(
        _RUNNER,
        "init_speculator",
        _init_speculator,
        "Makes our speculator, or has the user's own draft from history, too; vLLM has no registry "
        "of speculators.",
        {
            "f4cfdd06537c0f84": "0.25.1",
            "1f9a18dc380bf36e": "0.29.0",
            "b5854375c89a8dd1": "0.32.0",
            "6ef897bd22492f9a": "0.33.0",
        },
    ),
    Patch(
        f"{_RUNNER}:GPUModelRunner",
        "add_requests",
        _add_requests,
        "The speculator learns of requests, which vLLM's own speculators need not know.",
        {
            "37ced69082168d1a": "0.25.1",
            "f13266b750450235": "0.29.0",
            "5c0348221ed2e87f": "0.32.0, 0.33.0",
        },
    ),
    Patch(
        f"{_RUNNER}:GPUModelRunner",
        "_remove_request",
        _remove_request,
        "And when their rows are given to others.",
        {"a87e6efafc82f59b": "0.25.1", "86f1b21e7787064e": "0.29.0 to 0.33.0"},
    ),
    Patch(
        f"{_RUNNER}:GPUModelRunner",
        "finish_requests",
        _finish_requests,
        "Removes requests that end in one step in the same order on every rank. Before 0.29 the "
        "order is that of a set of strings, which differs from process to process and decides "
        "which places later requests get: ranks would make different drafts without an error.",
        before=(0, 29),
    ),
    Patch(
        "vllm.v1.worker.gpu_worker",
        "warmup_kernels",
        _warmup_kernels,
        "At start it verifies the longest drafts of all rows at once: 22 GiB of logits with 1,024 "
        "rows and the vocabulary of Qwen3. Here it has as many rows as there is memory for.",
    ),
    Patch(
        "vllm.config:VllmConfig",
        "_get_v2_model_runner_unsupported_features",
        _unsupported_features,
        "Before 0.32 the V2 runner has no n-gram drafts, but here it has others.",
        {"4110550e86c8419c": "0.25.1", "7c4a49959dacb9e0": "0.29.0"},
        before=(0, 32),
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        "_init_candidates",
        _init_candidates,
        "Gives each step the graph of its own length. vLLM considers only graphs of one size, the "
        "next that was captured for any length: 17 rows with drafts of two tokens need 51, for "
        "which there are graphs of 57, but the next size is 52, for drafts of three.",
        {
            "2e3009d8d6249f99": "0.25.1",
            "6848b02831344044": "0.29.0",
            "f23597574e533720": "0.32.0, 0.33.0",
        },
    ),
    Patch(
        "vllm.v1.worker.gpu.sample.bad_words",
        "apply_bad_words",
        _apply_bad_words,
        "To decide whether a token would complete a bad word, 0.25.1 reads drafts one place too "
        "early: a bad word whose beginning was drafted was missed.",
        before=(0, 29),
    ),
)
"""All of them are applied, or none."""

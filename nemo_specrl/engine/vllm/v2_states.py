"""The state of layers other than attention behind refused drafts, in vLLM's V2 model runner.

Layers of Mamba-2 and gated delta nets write the state behind each token of a step into a slot of
its own. The next step has to begin at the slot of the last accepted token, and does so for rows
that vLLM takes for decoding ones. Patched, each in the versions that need it, are:

- The order of rows (0.25 to 0.32). vLLM takes all rows for prompts that stand behind the first one,
  and sorts rows by their tokens, so that a short part of a prompt comes before longer drafts, or a
  part of a certain length before rows without drafts.
- Rows without drafts (before 0.32). Gated delta nets do not take them for decoding ones.
- Full CUDA graphs of steps with a prompt (before 0.29). vLLM replays one where all rows have the
  same number of tokens, also if some of these are the last ones of a prompt. The layers then leave
  the graph's buffers as the step before had them, and all rows begin at slots of that step.
- Capturing CUDA graphs (0.25 to 0.32). Layers of Mamba-2 let themselves be captured for the longest
  drafts alone, so that engines with several lengths would end while they start.
- Prefix caching (before 0.29). When a row passes the end of a block, the kernel that saves its
  state reads a number of accepted tokens that the same kernel writes (``mamba_utils.py``,
  ``run_fused_postprocess_align``), and the other kind, "all", is not told in V2 of the slots of
  the step before. Such engines have no prefix cache.

None of this has run on a GPU. On a CPU it was compared with plain decoding (``test_hybrids``).
"""

from __future__ import annotations

import builtins
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from nemo_specrl.engine.vllm.environment import FIRST_WITH_STATE_OF_DRAFTS, Engines
from nemo_specrl.engine.vllm.patches import wrap_functions

__all__ = ["patch_states", "rows_with_room", "set_prefix_cache", "warn_of_fewer_rows"]

logger = logging.getLogger(__name__)

SORT, UNIFORM = "sort_batch_req_ids", "get_uniform_token_count"
FIRST_WITH_DRAFTS_IN_SORT = FIRST_WITH_CACHED_STATES = FIRST_WITH_PROMPTS_APART = (0, 29)
"""The oldest vLLM that was found to tell ``SORT`` which rows have drafts, the oldest that was found
to keep their state right in its prefix cache, and the oldest that replays no full graph for a step
with a prompt; 0.26 does none of it."""

SOURCES: dict[str, dict[str, str]] = {
    "build_for_cudagraph_capture": {
        "6a028f9ce603a6ec": "0.25.1 to 0.29.0",
        "9ea7a2a7104dc8da": "0.32.0",
    },
    "prepare_inputs": {
        "aa36ea83ec390466": "0.25.1",
        "470558b4fc55cbe7": "0.26.0",
    },
    SORT: {"d030cf9e72ec662e": "0.29.0, 0.32.0"},
    "update_requests": {
        "fbc900b82034ebce": "0.25.1",
        "d0e4e41e2f4c28a6": "0.26.0",
    },
    "build": {
        "b3595e0ffccd87a4": "0.25.1",
        "24cb8d6f464d11ce": "0.26.0",
        "7dd5c3d2af01b390": "0.29.0",
    },
}
"""XXH3 of the source of each function that is wrapped, and the versions that have it."""


def set_prefix_cache(vllm_config: Any) -> None:
    """Have the prefix cache keep what drafts leave right, or have none.

    Args:
        vllm_config: of a model with other layers than attention, before vLLM fills in its defaults.
    """
    cache, here = vllm_config.cache_config, Engines.installed(cpu=False)
    if not cache.enable_prefix_caching or not here.before(FIRST_WITH_STATE_OF_DRAFTS):
        return
    if here.before(FIRST_WITH_CACHED_STATES):
        logger.info(
            "enable_prefix_caching is switched off: vLLM %s does not keep the state of other "
            "layers than attention right in it behind refused drafts (0.29 does)",
            here.version,
        )
        cache.enable_prefix_caching = False
    else:
        cache.mamba_cache_mode = "align"


def rows_with_room(kv_cache_config: Any, tokens: int, drafted: int) -> int:
    """Return how many rows have room in the KV cache at once.

    Args:
        kv_cache_config: of an engine whose model has other layers than attention.
        tokens: of each row, prompt included.
        drafted: draft tokens of a row at most. Each takes a slot for the state behind it, whether
            a step drafts or not.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    blocks = sum(
        1 + drafted if isinstance(spec, MambaSpec) else -(-tokens // spec.block_size)
        for spec in specs
    )
    return int(kv_cache_config.num_blocks // blocks)


def warn_of_fewer_rows(scheduler: Any) -> None:
    """Log a warning where the states behind drafted tokens leave room for fewer rows.

    Args:
        scheduler: of vLLM's, of an engine that drafts.
    """
    config = scheduler.vllm_config
    if not config.model_config.is_hybrid:
        return
    longest = int(config.speculative_config.num_speculative_tokens)
    tokens, wanted = config.model_config.max_model_len // 2, config.scheduler_config.max_num_seqs
    plain, drafting = (
        min(wanted, rows_with_room(scheduler.kv_cache_config, tokens, drafted))
        for drafted in (0, longest)
    )
    if drafting < plain:
        logger.warning(
            "the KV cache has room for %d rows of %d tokens, and for %d without drafts, since each "
            "row keeps %d states; where that many rows run, this may cost more than drafts gain: "
            "set a smaller tree.max_draft_tokens, or enabled: false",
            drafting,
            tokens,
            plain,
            1 + longest,
        )


def patch_states() -> None:
    """Have the state be right behind refused drafts, in the process of a worker that drafts.

    May be called again.

    Raises:
        IncompatibleVersion: a function that is wrapped is missing, or not one that is known.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.worker.gpu import model_runner

    here = Engines.installed(cpu=False)
    wrappers: list[tuple[Any, str, Any]] = [
        (BaseMambaAttentionMetadataBuilder, "build_for_cudagraph_capture", _build_for_capture)
    ]
    if here.before(FIRST_WITH_PROMPTS_APART):
        wrappers.append((model_runner.GPUModelRunner, "update_requests", _update_requests))
    if here.before(FIRST_WITH_DRAFTS_IN_SORT):
        wrappers.append((model_runner.GPUModelRunner, "prepare_inputs", _prepare_inputs))
    else:
        wrappers.append((model_runner, SORT, _sort_batch_req_ids))
    if here.before(FIRST_WITH_STATE_OF_DRAFTS):
        wrappers.append((GDNAttentionMetadataBuilder, "build", _build_gated_delta_net))
    wrap_functions(wrappers, SOURCES)


def _in_order(
    sort: Callable[..., list[str]],
    drafts: Mapping[str, Any],
    tokens: Mapping[str, int],
    *args: Any,
    **kwargs: Any,
) -> list[str]:
    """Rows that verify drafts, in vLLM's order, and behind them the others, by their tokens.

    Of those with one token, vLLM takes prompts for decoding rows where they have a state, and
    where they have none they are new, and stand behind the others already.

    Args:
        sort: vLLM's function.
        drafts: of rows in the step.
        tokens: of each row in the step.
        *args: what vLLM hands to its function besides.
        **kwargs: the same, by name.
    """
    drafted = {row: number for row, number in tokens.items() if drafts.get(row)}
    others = [row for row in tokens if row not in drafted]
    return [*sort(drafted, *args, **kwargs), *builtins.sorted(others, key=tokens.__getitem__)]


def _sort_batch_req_ids(original: Any) -> Any:
    def sort_batch_req_ids(tokens: Any, drafts: Any, *args: Any) -> list[str]:
        return _in_order(original, drafts, tokens, drafts, *args)

    return sort_batch_req_ids


def _prepare_inputs(original: Any) -> Any:
    """Where vLLM's function does not know of drafts; in 0.25 it is Python's own ``sorted``."""
    from vllm.v1.worker.gpu import model_runner

    names = vars(model_runner)
    name = SORT if SORT in names else "sorted"
    sort = names.get(name, builtins.sorted)

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        names[name] = functools.partial(_in_order, sort, drafts)
        try:
            return original(self, scheduler_output, *args)
        finally:
            names[name] = sort

    return prepare_inputs


def _update_requests(original: Any) -> Any:
    """Have no full graph replayed for a step with a prompt: its tokens are not uniform.

    The runner updates its requests and then asks, in the same step, whether they are.
    """
    from vllm.v1.worker.gpu import model_runner

    names = vars(model_runner)
    uniform = names[UNIFORM]

    def not_uniform(*args: Any) -> None:
        names[UNIFORM] = uniform

    def update_requests(self: Any, scheduler_output: Any) -> None:
        original(self, scheduler_output)
        states, step = self.req_states, scheduler_output.num_scheduled_tokens
        rows = [states.req_id_to_index[request] for request in step]
        prompts = states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]
        names[UNIFORM] = not_uniform if prompts.any() else uniform

    return update_requests


def _build_gated_delta_net(original: Any) -> Any:
    """Rows that decode are known by having a number of drafts, of which nothing else is read."""

    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        fast_build: bool = False,
    ) -> Any:
        prefills = common_attn_metadata.is_prefilling
        if num_decode_draft_tokens_cpu is not None and prefills is not None:
            decodes = (common_attn_metadata.query_start_loc_cpu.diff() > 0) & ~prefills
            some = num_decode_draft_tokens_cpu.clamp(min=1)
            num_decode_draft_tokens_cpu = some.where(decodes, num_decode_draft_tokens_cpu)
        return original(
            self,
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            fast_build,
        )

    return build


def _build_for_capture(original: Any) -> Any:
    """What vLLM builds for the longest drafts, for shorter ones."""

    def build_for_cudagraph_capture(self: Any, common_attn_metadata: Any) -> Any:
        longest = 1 + self.num_spec_tokens
        rows, tokens = common_attn_metadata.num_reqs, common_attn_metadata.max_query_len
        if tokens >= longest or rows > self.decode_cudagraph_max_bs:
            return original(self, common_attn_metadata)
        accepted = common_attn_metadata.query_start_loc.diff()
        return self.build(0, common_attn_metadata, num_accepted_tokens=accepted)

    return build_for_cudagraph_capture

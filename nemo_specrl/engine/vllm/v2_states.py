"""The state of layers other than attention after refused drafts, in vLLM's V2 model runner.

Mamba-2 layers and gated delta nets write the state after each token of a step into a slot of its
own. The next step must begin at the slot of the last accepted token, and does so for rows that vLLM
regards as decoding. The following is patched, each in the versions that need it:

- The order of rows (0.25 to 0.32). vLLM regards all rows after the first prompt as prompts, and
  sorts rows by their number of tokens, so that a short part of a prompt comes before longer drafts,
  or a part of a certain length before rows without drafts.
- Rows without drafts (before 0.32). Gated delta nets do not regard them as decoding.
- Full CUDA graphs of steps with a prompt (before 0.29). vLLM replays one if all rows have the same
  number of tokens, even if some of these are the last ones of a prompt. The layers then leave the
  graph's buffers as they were in the previous step, and all rows begin at slots of that step.
- Capturing CUDA graphs (0.25 to 0.32). Mamba-2 layers can be captured only for the longest drafts,
  so engines with several lengths would fail at startup.
- Prefix caching (before 0.29). When a row passes the end of a block, the kernel that saves its
  state reads a number of accepted tokens that the same kernel writes (``mamba_utils.py``,
  ``run_fused_postprocess_align``), and the other kind, "all", is not told in V2 of the slots of the
  previous step. Such engines have no prefix cache.

None of this has been run on a GPU. On a CPU it was compared with plain decoding (``test_hybrids``).
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
to keep their state correct in its prefix cache, and the oldest that replays no full graph for a
step with a prompt; 0.26 does none of it."""

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
    """Set up the prefix cache so that drafts leave it correct, or disable it.

    Args:
        vllm_config: configuration of a model with layers other than attention, before vLLM fills in
            its defaults.
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
        kv_cache_config: configuration of an engine whose model has layers other than attention.
        tokens: tokens of each row, prompt included.
        drafted: the most draft tokens of a row. Each takes a slot for the state after it, whether a
            step drafts or not.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    blocks = sum(
        1 + drafted if isinstance(spec, MambaSpec) else -(-tokens // spec.block_size)
        for spec in specs
    )
    return int(kv_cache_config.num_blocks // blocks)


def warn_of_fewer_rows(scheduler: Any) -> None:
    """Log a warning if the states after drafted tokens leave room for fewer rows.

    Args:
        scheduler: vLLM's scheduler, of an engine that drafts.
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
    """Make the state correct after refused drafts, in the process of a worker that drafts.

    May be called repeatedly.

    Raises:
        IncompatibleVersion: a function to be wrapped is missing, or is not a known one.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.worker.gpu import model_runner

    here = Engines.installed(cpu=False)
    wrappers: list[tuple[Any, str, Any]] = [
        (BaseMambaAttentionMetadataBuilder, "build_for_cudagraph_capture", _build_for_capture)
    ]
    if here.before(FIRST_WITH_PROMPTS_APART):
        update = functools.partial(_update_requests, vars(model_runner)[UNIFORM])
        wrappers.append((model_runner.GPUModelRunner, "update_requests", update))
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
    """Rows that verify drafts, in vLLM's order, followed by the others, by their tokens.

    Among the others with one token, vLLM regards prompts as decoding rows if they have a state; if
    they have none, they are new and already come after the others.

    Args:
        sort: vLLM's function.
        drafts: drafts of rows in the step.
        tokens: tokens of each row in the step.
        *args: further arguments that vLLM passes to its function.
        **kwargs: the same, by name.
    """
    drafted = {row: number for row, number in tokens.items() if drafts.get(row)}
    others = [row for row in tokens if row not in drafted]
    return [*sort(drafted, *args, **kwargs), *builtins.sorted(others, key=tokens.__getitem__)]


def _sort_batch_req_ids(original: Any, tokens: Any, drafts: Any, *args: Any) -> list[str]:
    return _in_order(original, drafts, tokens, drafts, *args)


def _prepare_inputs(original: Any, self: Any, scheduler_output: Any, *args: Any) -> Any:
    """Sort rows where vLLM's function knows no drafts; in 0.25 it is Python's own ``sorted``."""
    from vllm.v1.worker.gpu import model_runner

    names = vars(model_runner)
    name = SORT if SORT in names else "sorted"
    sort = names.get(name, builtins.sorted)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    names[name] = functools.partial(_in_order, sort, drafts)
    try:
        return original(self, scheduler_output, *args)
    finally:
        names[name] = sort


def _update_requests(uniform: Any, original: Any, self: Any, scheduler_output: Any) -> None:
    """Prevent replaying a full graph for a step with a prompt: its tokens are not uniform.

    The runner updates its requests and then asks ``uniform``, in the same step, whether they are.
    """
    from vllm.v1.worker.gpu import model_runner

    names = vars(model_runner)

    def not_uniform(*args: Any) -> None:
        names[UNIFORM] = uniform

    original(self, scheduler_output)
    states, step = self.req_states, scheduler_output.num_scheduled_tokens
    rows = [states.req_id_to_index[request] for request in step]
    prompts = states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]
    names[UNIFORM] = not_uniform if prompts.any() else uniform


def _build_gated_delta_net(
    original: Any,
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    num_accepted_tokens: Any = None,
    num_decode_draft_tokens_cpu: Any = None,
    fast_build: bool = False,
) -> Any:
    """Mark decoding rows by giving them a number of drafts, which is read for nothing else."""
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


def _build_for_capture(original: Any, self: Any, common_attn_metadata: Any) -> Any:
    """Build for shorter drafts what vLLM builds for the longest ones."""
    longest = 1 + self.num_spec_tokens
    rows, tokens = common_attn_metadata.num_reqs, common_attn_metadata.max_query_len
    if tokens >= longest or rows > self.decode_cudagraph_max_bs:
        return original(self, common_attn_metadata)
    accepted = common_attn_metadata.query_start_loc.diff()
    return self.build(0, common_attn_metadata, num_accepted_tokens=accepted)

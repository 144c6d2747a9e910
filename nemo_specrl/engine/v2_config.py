"""How an engine is configured that drafts from history in vLLM's V2 model runner.

To vLLM the method of drafting is ``ngram_gpu``, which its asynchronous scheduling and, from 0.32
on, its V2 runner support; ``v2_patches`` puts ``speculator.HistorySpeculator`` in its place. The
plug-in calls :func:`speculative_config` before vLLM makes its configuration; :func:`complete` is
called while vLLM completes it, when the sizes of the model are known, and :func:`check` after that.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

from nemo_specrl.config import DraftConfig
from nemo_specrl.drafting.uniform_length import LENGTHS
from nemo_specrl.engine.patches import vllm_version
from nemo_specrl.engine.row import block_of, config_of
from nemo_specrl.engine.step_costs import SAMPLER_BYTES, max_drafted
from nemo_specrl.engine.v2_lengths import first_table
from nemo_specrl.errors import ConfigError, IncompatibleVersion

__all__ = [
    "FIRST_WITH_STATES",
    "check",
    "check_drafter",
    "chooses_lengths",
    "complete",
    "drafts_alone",
    "drafts_from_history",
    "has_drafter",
    "speculative_config",
    "would_run_v2",
]

logger = logging.getLogger(__name__)

METHOD = "ngram_gpu"
MAX_WITH_STATES = 3
"""Length of the longest drafts if lengths are chosen and layers other than attention keep a state
for each drafted token of each row: in Nemotron 3 Nano about 48 MB, as much as 8,000 tokens of its
KV cache."""
FIRST_WITH_HYBRIDS, FIRST_WITH_STATES = (0, 29), (0, 32)
"""The oldest vLLM in which models with layers other than attention may draft: before, it lost their
state behind refused drafts in several ways. And the oldest that keeps it right by itself in all but
the two ways that ``v2_hybrids`` mends."""
FIRST_WITH_ADAPTIVE_VERIFICATION = (0, 32)
"""The oldest vLLM whose adaptive verification accepts drafts that no model made."""
NO_DRAFTERS = ("custom_class", "extract_hidden_states", "ngram", "ngram_gpu", "suffix")
"""Methods of vLLM beside which history is refused: they look tokens up, as it does, or draft
nothing."""
NEVER_TOLD = ("BailingMoeV2_5", "Jamba")
"""Architectures whose other layers (linear attention, Mamba-1) vLLM does not tell at which token
the next step begins (v1/worker/gpu/model_states/mamba_hybrid.py, ``get_extra_attn_kwargs``)."""
TOLD_BEFORE_0_32 = ("NemotronH", "Qwen3Next", "Qwen3_5")
"""Those whose layers 0.29 does tell, with ``v2_hybrids``."""
MOST_VERIFIED = 11
"""Length of drafts with adaptive verification, for which all rows draft the longest."""
CAPTURED, MOST_CAPTURED = 512, 1536
"""Tokens up to which vLLM captures graphs if nothing is configured; and tokens up to which it does
so because of drafts, beyond which a GPU computes for longer than a host launches."""


def states_are_kept() -> bool:
    """Whether this vLLM needs only part of ``v2_hybrids``."""
    return vllm_version() >= FIRST_WITH_STATES


def would_run_v2(cpu: bool) -> bool:
    """Whether vLLM would run a model that its V2 model runner supports in that runner.

    Args:
        cpu: whether it runs on a CPU, where V2 is not the default.
    """
    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower()
    return wanted in ("1", "true") if wanted else not cpu


def speculative_config(draft: DraftConfig) -> dict[str, Any]:
    """The argument ``speculative_config`` of an engine that drafts from history in V2."""
    return {
        "method": METHOD,
        "num_speculative_tokens": _lengths(draft)[-1],
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
    }


def drafts_from_history(vllm_config: Any) -> bool:
    """Whether an engine drafts from history, alone or beside a drafter of the user's own."""
    block = block_of(vllm_config.additional_config) or {}
    return bool(block.get("enabled")) and vllm_config.speculative_config is not None


def has_drafter(vllm_config: Any) -> bool:
    """Whether an engine that drafts from history has a drafter of the user's own, too."""
    return bool(vllm_config.speculative_config.method != METHOD)


def drafts_alone(vllm_config: Any) -> bool:
    """Whether an engine drafts from history and has no drafter of the user's own."""
    return drafts_from_history(vllm_config) and not has_drafter(vllm_config)


def chooses_lengths(vllm_config: Any) -> bool:
    """Whether an engine drafts from history alone, with a length chosen for each step."""
    if not drafts_alone(vllm_config):
        return False
    return vllm_config.speculative_config.num_speculative_tokens_per_batch_size is not None


def _lengths(draft: DraftConfig) -> list[int]:
    """The lengths to choose from, the longest last."""
    if draft.adaptive_verification:
        return [min(draft.max_tokens, MOST_VERIFIED)]
    if not draft.adaptive:
        return [draft.max_tokens]
    longest = min(draft.max_tokens, LENGTHS[-1])
    return [length for length in LENGTHS if length < longest] + [longest]


def complete(vllm_config: Any) -> None:
    """Tell vLLM the lengths of drafts and the sizes of graphs, before it fills in its defaults.

    It captures graphs for each length in the table that it gets. The table is never used:
    ``v2_lengths`` makes the scheduler's. It contains each length; those that the costs do not
    choose are at the largest numbers of rows. It has at most one length for each number of rows, so
    engines with few rows choose among fewer.
    """
    draft, drafter = config_of(vllm_config).draft, vllm_config.speculative_config
    if has_drafter(vllm_config):  # whose number of tokens stands
        check_drafter(draft, vars(drafter), "speculative_config")
        return
    if vllm_config.parallel_config.data_parallel_size > 1:
        # Its ranks must draft the same number of tokens in each step, on which vLLM has no way to
        # agree. A fixed number would be slower than none wherever little is accepted.
        logger.warning(
            "data_parallel_size = %d: the engines of a group draft nothing; run them as engines of "
            "their own, each with data_parallel_size = 1",
            vllm_config.parallel_config.data_parallel_size,
        )
        vllm_config.speculative_config = None
        return
    if vllm_version() < FIRST_WITH_STATES:  # of V1's kernel; it would switch the compile cache off
        drafter.use_ngram_gpu = _no
    rows = int(vllm_config.scheduler_config.max_num_seqs)
    lengths, hybrid = _lengths(draft), vllm_config.model_config.is_hybrid
    if hybrid and (len(lengths) > 1 or draft.adaptive_verification):
        lengths = sorted({min(length, MAX_WITH_STATES) for length in lengths})
    if hybrid and vllm_config.cache_config.enable_prefix_caching and not states_are_kept():
        vllm_config.cache_config.mamba_cache_mode = "align"  # the other kind loses them there
    most = max_drafted(vllm_config)
    drafter.num_speculative_tokens_per_batch_size = None
    drafter.num_speculative_tokens = lengths[-1]
    if draft.adaptive_verification:
        if vllm_version() < FIRST_WITH_ADAPTIVE_VERIFICATION:
            raise IncompatibleVersion(
                "spec_rl.draft.adaptive_verification: needs vLLM 0.32 or later; leave it out"
            )
        # vLLM itself bounds how many tokens are verified in a step.
        drafter.enable_adaptive_verification = True
        _set_graph_sizes(vllm_config, lengths, rows, rows * lengths[-1])
        return
    if len(lengths) > 1 and rows < len(lengths):  # a table cannot have them all
        # With few rows the longest drafts pay most, or none if nothing is accepted.
        by_worth = sorted(lengths, key=lambda n: (n != lengths[-1], n != 0, -n))
        lengths = sorted(by_worth[:rows])
    if len(lengths) == 1:
        longest = lengths[-1]
        drafter.num_speculative_tokens = length = max(1, min(longest, most // rows))
        if length < longest:
            logger.warning(
                "rows draft %d tokens and not %d: with max_num_seqs = %d, the logits of more would "
                "not fit into %d GiB; a smaller max_num_seqs allows longer drafts",
                length,
                longest,
                rows,
                SAMPLER_BYTES >> 30,
            )
        _set_graph_sizes(vllm_config, [length], rows, most)
        return
    _set_graph_sizes(vllm_config, lengths, rows, most)
    table = first_table(vllm_config, lengths, rows)
    unused = [length for length in lengths if length not in table[1 : rows + 1 - len(lengths)]]
    table[rows + 1 - len(unused) :] = unused
    ranges = itertools.groupby(range(1, rows + 1), key=lambda n: table[n])
    by_range = [(length, list(same)) for length, same in ranges]
    drafter.num_speculative_tokens_per_batch_size = [
        (same[0], same[-1], length) for length, same in by_range
    ]


def check_drafter(draft: DraftConfig, drafter: Mapping[str, Any], where: str) -> None:
    """Refuse what would not be exact, or be judged wrongly, beside a drafter.

    Args:
        draft: the block ``draft``.
        drafter: keys of vLLM's ``SpeculativeConfig``, those that are given.
        where: name of the drafter, for the message.

    Raises:
        ConfigError: what would not, and what to set.
    """
    given = drafter.get
    if given("method") in NO_DRAFTERS:
        raise ConfigError(
            f"{where}.method = {given('method')!r}: history has nothing to gain beside it; leave "
            "one out"
        )
    if given("draft_sample_method") == "probabilistic":
        raise ConfigError(
            f"{where}.draft_sample_method = 'probabilistic': drafts from history beside it would "
            "be verified with the probabilities of others; set greedy"
        )
    if given("num_speculative_tokens_per_batch_size"):
        raise ConfigError(
            f"{where}.num_speculative_tokens_per_batch_size: drafts of several lengths would be "
            "judged by the places of the longest; leave it out"
        )
    if draft.adaptive_verification or given("enable_adaptive_verification"):
        raise ConfigError(
            f"adaptive verification beside {where}: its chances are those of one drafter, and "
            "history is another; leave one of them out"
        )


def _no() -> bool:
    return False


def _set_graph_sizes(vllm_config: Any, lengths: list[int], rows: int, most: int) -> None:
    """Have graphs captured for the largest steps that drafts make; a user's own sizes are kept.

    Args:
        vllm_config: in which vLLM has not filled in its defaults yet.
        lengths: lengths of drafts.
        rows: the most rows of a step.
        most: the most draft tokens of a step.
    """
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_capture_sizes is not None:
        return
    if compilation.max_cudagraph_capture_size is not None:
        return
    tokens = [min(rows, most // length) * (1 + length) for length in lengths if length]
    batched = int(vllm_config.scheduler_config.max_num_batched_tokens)
    largest = min(max(tokens), batched, MOST_CAPTURED)
    if largest > CAPTURED:
        # An eighth apart at most: each size is captured for each length.
        sizes = (*range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32))
        sizes += (*range(512, largest, 64), largest)
        compilation.cudagraph_capture_sizes = [1, 2, 4, *sizes]


def check(vllm_config: Any) -> None:
    """Refuse an engine whose drafts would not come from history, or would not be exact.

    Args:
        vllm_config: as vLLM has completed it.

    Raises:
        IncompatibleVersion: what the model, or how it is run, would need.
    """
    off = "set spec_rl.enabled: false, or leave spec_rl out"
    if not vllm_config.use_v2_model_runner:
        raise IncompatibleVersion(
            "spec_rl: vLLM would not run this model in its V2 model runner, for the reason that it "
            "has logged (before 0.29: mixtures of experts, layers other than attention); set "
            f"VLLM_USE_V2_MODEL_RUNNER=1, or {off}"
        )
    model, here = vllm_config.model_config, vllm_version()
    if model.is_hybrid:
        names = [str(name) for name in model.architectures]
        told = not any(name.startswith(NEVER_TOLD) for name in names)
        if not states_are_kept():
            told = all(name.startswith(TOLD_BEFORE_0_32) for name in names)
        if here < FIRST_WITH_HYBRIDS or not told:
            needed = "0.29 or 0.32" if here < FIRST_WITH_HYBRIDS else "0.32, or another model"
            raise IncompatibleVersion(
                f"spec_rl: this vLLM does not bring back the state of all layers other than "
                f"attention ({', '.join(names)}) behind refused drafts; use vLLM {needed}, or {off}"
            )
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if stages > 1:
        raise IncompatibleVersion(
            "spec_rl: drafts in V2 do not work with pipeline parallelism "
            f"(pipeline_parallel_size = {stages}); set it to 1, or {off}"
        )

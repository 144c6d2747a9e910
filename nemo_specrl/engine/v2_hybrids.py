"""The state of layers other than attention after refused drafts, in vLLM's V2 model runner.

Mamba-2 layers and gated delta nets write the state after each token of a step into a slot of its
own. The next step must begin at the slot of the last accepted token, and does so for rows that vLLM
regards as decoding. Where it does not, it is mended here. Models with such layers draft from 0.29
on. None of this has been run on a GPU; on a CPU it was compared with plain decoding
(``test_hybrids``).
"""

from __future__ import annotations

from typing import Any

from nemo_specrl.engine.patches import Patch
from nemo_specrl.engine.v2_config import FIRST_WITH_STATES

__all__ = ["HYBRID_PATCHES"]


def _sort_batch_req_ids(
    original: Any, tokens: dict[str, int], drafts: dict[str, Any], *args: Any
) -> list[str]:
    """Rows that verify drafts, in vLLM's order, followed by the others, by their tokens.

    Among the others with one token, vLLM regards prompts as decoding rows if they have a state; if
    they have none, they are new and already come after the others.
    """
    drafted = {row: number for row, number in tokens.items() if drafts.get(row)}
    others = [row for row in tokens if row not in drafted]
    return [*original(drafted, drafts, *args), *sorted(others, key=tokens.__getitem__)]


def _build_for_capture(original: Any, self: Any, common_attn_metadata: Any) -> Any:
    """Build for shorter drafts what vLLM builds for the longest ones."""
    longest = 1 + self.num_spec_tokens
    rows, tokens = common_attn_metadata.num_reqs, common_attn_metadata.max_query_len
    if tokens >= longest or rows > self.decode_cudagraph_max_bs:
        return original(self, common_attn_metadata)
    accepted = common_attn_metadata.query_start_loc.diff()
    return self.build(0, common_attn_metadata, num_accepted_tokens=accepted)


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


HYBRID_PATCHES = (
    Patch(
        "vllm.v1.worker.gpu.model_runner",
        "sort_batch_req_ids",
        _sort_batch_req_ids,
        "vLLM regards all rows after the first prompt as prompts, and sorts rows by their number "
        "of tokens, so that a short part of a prompt comes before longer drafts.",
        {"d030cf9e72ec662e": "0.29.0 to 0.33.0"},
        since=(0, 29),
    ),
    Patch(
        "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder",
        "build_for_cudagraph_capture",
        _build_for_capture,
        "Mamba-2 layers can be captured only for the longest drafts: engines with several lengths "
        "would fail at start.",
        {"6a028f9ce603a6ec": "0.29.0", "9ea7a2a7104dc8da": "0.32.0, 0.33.0"},
        since=(0, 29),
    ),
    Patch(
        "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder",
        "build",
        _build_gated_delta_net,
        "Gated delta nets do not regard rows without drafts as decoding.",
        {"7dd5c3d2af01b390": "0.29.0"},
        since=(0, 29),
        before=FIRST_WITH_STATES,
    ),
)

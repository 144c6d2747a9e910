"""CUDA graphs for the steps of vLLM's V2 model runner that verify drafts.

``v2_patches`` makes vLLM capture the sizes and look up the graphs that are chosen here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["graphs_by_tokens", "set_graph_sizes"]

CAPTURED, MOST_CAPTURED, CAPTURED_APART = 512, 1536, 32
"""Tokens up to which vLLM captures graphs if nothing is configured; tokens up to which it does so
because of drafts, beyond which a GPU computes for longer than a host launches; and the distance
between sizes in that range."""


def set_graph_sizes(vllm_config: Any, lengths: list[int], rows: int, most: int) -> None:
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
        compilation.cudagraph_capture_sizes = [
            *(1, 2, 4),
            *range(8, 256, 8),
            *range(256, CAPTURED + 1, 16),
            *range(CAPTURED + CAPTURED_APART, largest, CAPTURED_APART),
            largest,
        ]


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

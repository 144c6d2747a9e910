"""Which nodes keep a prompt: rendezvous hashing.

A prompt's owners are the nodes with the highest scores for it (rendezvous hashing, Thaler and
Ravishankar, doi:10.1109/90.663936): when a node leaves, only its own prompts get another owner;
when one joins, only those for which it scores highest. Every process computes the same owners from
the nodes' addresses, so that a node which returns with its disk owns what it has there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import xxhash

__all__ = ["ranking"]


@functools.lru_cache(maxsize=4096)
def _seed(node: str) -> int:
    return xxhash.xxh3_64_intdigest(node.encode())


def ranking(key: bytes, nodes: Iterable[str]) -> list[str]:
    """Return the nodes by their score for a prompt, highest first: the first ones are its owners.

    Args:
        key: the prompt's key.
        nodes: addresses of nodes.
    """
    scores = {node: xxhash.xxh3_64_intdigest(key, seed=_seed(node)) for node in nodes}
    return sorted(scores, key=scores.__getitem__, reverse=True)

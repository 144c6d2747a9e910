"""Conversations, known by the tokens of their first prompt: their root.

The prompt of a later turn holds the model's own earlier turns and is a new one in every rollout.
Its root is not: all requests that begin with a known root draft from one index and add to it.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

__all__ = ["ROOTS", "Roots"]

ROOTS = 4096
"""Prompts whose later turns draft from the history of their root; those that were used last."""

TOKEN_BYTES = 4


class _Root(NamedTuple):
    """A root's prompt: its length in bytes, and its key."""

    length: int
    key: bytes


class Roots:
    """The roots that were used last, and the keys of their prompts.

    A root is known by the XXH3 of its tokens, in 128 bits, and the tokens are not kept. That a
    request is taken for another root's has a chance of 1e-31, and its drafts are verified as any.

    Args:
        most: roots that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._roots: OrderedDict[bytes, _Root] = OrderedDict()  # by hash of their tokens, int32
        self._counts: dict[int, int] = {}  # bytes of tokens: how many roots have so many
        self._lengths: list[int] = []  # these, sorted

    def __len__(self) -> int:
        return len(self._roots)

    def key_of(self, tokens: Sequence[int], key: bytes | None) -> bytes | None:
        """The key that a request drafts under.

        It is that of the known root that is its prompt, or else of the shortest one that its prompt
        begins with. Where there is none, the prompt becomes a root itself, if it has a key.

        Args:
            tokens: of the prompt.
            key: of the prompt; None: the request brought none.
        """
        return self.find(tokens, key)[0]

    def find(self, tokens: Sequence[int], key: bytes | None) -> tuple[bytes | None, int]:
        """The key that a request drafts under (:meth:`key_of`), and where its root ends.

        Args:
            tokens: of the prompt.
            key: of the prompt; None: the request brought none.

        Returns:
            The key, and the length of the root in tokens; that of the prompt where it has none.
        """
        data = memoryview(np.asarray(tokens, np.int32).tobytes())
        # Most prompts are roots themselves, and there may be roots of thousands of lengths.
        if len(data) in self._counts and (root := self._use(xxhash.xxh3_128_digest(data))):
            return root.key, len(tokens)
        hasher, begin = xxhash.xxh3_128(), 0
        for length in self._lengths:
            if length >= len(data):
                break
            hasher.update(data[begin:length])
            begin = length
            if root := self._use(hasher.digest()):
                return root.key, length // TOKEN_BYTES
        if key is not None:
            hasher.update(data[begin:])
            self._add(hasher.digest(), _Root(len(data), key))
        return key, len(tokens)

    def _use(self, digest: bytes) -> _Root | None:
        """A root by the hash of its tokens, which is the last one to be forgotten from now on."""
        root = self._roots.get(digest)
        if root is not None:
            self._roots.move_to_end(digest)
        return root

    def _add(self, digest: bytes, root: _Root) -> None:
        self._roots[digest] = root
        if root.length not in self._counts:
            bisect.insort(self._lengths, root.length)
        self._counts[root.length] = self._counts.get(root.length, 0) + 1
        if len(self._roots) > self._most:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, oldest = self._roots.popitem(last=False)
        self._counts[oldest.length] -= 1
        if not self._counts[oldest.length]:
            del self._counts[oldest.length]
            self._lengths.remove(oldest.length)

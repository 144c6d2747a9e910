"""Conversations, known by the tokens of their first prompt: their root.

The prompt of a later turn holds the model's own earlier turns and differs in every rollout. Its
root does not: all requests that begin with a known root draft from one index and add to it.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["ROOTS", "Roots"]

ROOTS = 4096
"""Prompts whose later turns draft from the history of their root; the most recently used are
kept."""

TOKEN_BYTES = 4


class _Root(NamedTuple):
    """A root's prompt: its length in bytes, and its key."""

    length: int
    key: bytes


class Roots:
    """The most recently used roots, and the keys of their prompts.

    A root is identified by the 128-bit XXH3 of its tokens; the tokens are not kept. The chance that
    a request is taken for another root's is 1e-31, and its drafts are verified like any others.

    Args:
        most: number of roots that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._roots: OrderedDict[bytes, _Root] = OrderedDict()  # by hash of their tokens, int32
        self._counts: dict[int, int] = {}  # bytes of tokens: number of roots of that length
        self._lengths: list[int] = []  # these, sorted

    def __len__(self) -> int:
        return len(self._roots)

    def key_of(self, tokens: Sequence[int], key: bytes | None) -> bytes | None:
        """The key that a request drafts under.

        It is the key of the known root that equals its prompt, or else of the shortest one that its
        prompt begins with. If there is none, the prompt becomes a root itself, provided it has a
        key.

        Args:
            tokens: tokens of the prompt.
            key: key of the prompt; None if the request brought none.
        """
        return self.find(tokens, key)[0]

    def find(
        self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]], key: bytes | None
    ) -> tuple[bytes | None, int]:
        """The key that a request drafts under (:meth:`key_of`), and where its root ends.

        Args:
            tokens: tokens of the prompt.
            key: key of the prompt; None if the request brought none.

        Returns:
            The key, and the length of the root in tokens; the length of the prompt if it has no
            root.
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
        """Return a root by the hash of its tokens, and make it the last one to be forgotten."""
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

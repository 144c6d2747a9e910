"""Conversations, known by the tokens of their first prompt: their root.

The prompt of a later turn holds the model's own earlier turns and is a new one in every rollout.
Its root is not: all requests that begin with a known root draft from one index and add to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

__all__ = ["ROOTS", "Roots"]

ROOTS = 4096
"""Prompts whose later turns draft from the history of their root; those that were used last."""

TOKEN_BYTES = 4


class Roots:
    """The roots that were used last, and the keys of their prompts.

    Args:
        most: roots that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()  # by tokens, int32
        self._lengths: dict[int, int] = {}  # bytes of tokens: how many roots have so many

    def __len__(self) -> int:
        return len(self._keys)

    def key_of(self, tokens: Sequence[int], key: bytes | None) -> bytes | None:
        """The key that a request drafts under.

        It is that of the shortest known root that its prompt begins with. Where there is none, the
        prompt becomes a root itself, if it has a key.

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
        data = np.asarray(tokens, np.int32).tobytes()
        # Most prompts are roots themselves, and there may be roots of hundreds of lengths.
        lengths = [len(data)] if data in self._keys else sorted(self._lengths)
        for length in lengths:
            found = self._keys.get(data[:length]) if length <= len(data) else None
            if found is not None:
                self._keys.move_to_end(data[:length])
                return found, length // TOKEN_BYTES
        if key is not None:
            self._keys[data] = key
            self._lengths[len(data)] = self._lengths.get(len(data), 0) + 1
            if len(self._keys) > self._most:
                self._forget_oldest()
        return key, len(tokens)

    def _forget_oldest(self) -> None:
        oldest, _ = self._keys.popitem(last=False)
        self._lengths[len(oldest)] -= 1
        if not self._lengths[len(oldest)]:
            del self._lengths[len(oldest)]

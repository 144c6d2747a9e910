"""Draft trees: for each prompt, its earlier responses indexed so that they predict the next tokens.

A tree holds the responses of earlier epochs, from the rollout cache, and those of the rows that are
being decoded now, which are appended token by token: the first sample of a group drafts for the
others. Drafts are offered to an engine that verifies them losslessly, so that a wrong one costs
speed alone (SRT, arXiv 2601.09083; SuffixDecoding, arXiv 2411.04975).

The index itself is native code (``_suffix.c``). This module bounds its memory and knows which
responses a tree has. It knows nothing of engines or of the cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from nemo_specrl.speculation import _suffix

__all__ = ["DraftTrees", "TreeRow"]

MIN_PROBABILITY = 0.2
"""A draft ends where its estimated chance of being accepted up to there falls below this."""
PRIOR = 0.5
"""Votes against every token, so that a context seen once is not taken for certain."""
RESPONSES_KEPT = 8
"""A tree is made anew from the cache when it has this many times as many responses as that has."""


class PromptTree:
    """The indexed responses to one prompt."""

    def __init__(self) -> None:
        self.index = _suffix.SuffixIndex()
        self.responses: set[int] = set()

    def add(self, history: Iterable[tuple[int, bytes]]) -> None:
        """Index responses that it does not have yet; see :meth:`DraftTrees.open`."""
        for identity, tokens in history:
            if identity not in self.responses:
                self.responses.add(identity)
                self.index.extend(self.index.start(), tokens)


class TreeRow:
    """A response that is being decoded: it drafts from the tree of its prompt and extends it."""

    def __init__(self, tree: PromptTree, identity: int) -> None:
        tree.responses.add(identity)
        self._index = tree.index
        self._response = tree.index.start()
        self.length = 0
        """Tokens so far."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy has produced."""
        self._index.extend(self._response, array("i", tokens))
        self.length += len(tokens)

    def draft(self, max_tokens: int) -> list[int]:
        """Likely next tokens, at most ``max_tokens``; empty where nothing is likely enough."""
        return self.proposal(max_tokens)[0]

    def proposal(self, max_tokens: int) -> tuple[list[int], list[float]]:
        """A draft, and for each of its tokens the estimated chance of being accepted up to it."""
        if max_tokens <= 0:
            return [], []
        tokens, chances, _ = self._index.draft(self._response, max_tokens, MIN_PROBABILITY, PRIOR)
        draft, estimated = array("i"), array("f")
        draft.frombytes(tokens)
        estimated.frombytes(chances)
        return draft.tolist(), estimated.tolist()


class DraftTrees:
    """The trees of the prompts that were used last, within a bound of memory.

    Args:
        max_bytes: of all trees together; the prompts unused for longest go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._trees: OrderedDict[bytes, PromptTree] = OrderedDict()

    def __len__(self) -> int:
        return len(self._trees)

    @property
    def nbytes(self) -> int:
        """Memory of all trees, bytes."""
        return sum(tree.index.nbytes for tree in self._trees.values())

    def open(self, key: bytes, identity: int, history: Sequence[tuple[int, bytes]]) -> TreeRow:
        """A row of a prompt that is about to be decoded.

        Args:
            key: of the prompt.
            identity: of the row's response (:func:`~nemo_specrl.speculation.drafts.response_id`).
            history: earlier responses as identity and int32 tokens, oldest first; those that the
                tree has are passed over.
        """
        tree = self._trees.pop(key, None)
        if tree is None or (history and len(tree.responses) > RESPONSES_KEPT * len(history)):
            tree = PromptTree()
            self._make_room()
        tree.add(history)
        self._trees[key] = tree
        return TreeRow(tree, identity)

    def _make_room(self) -> None:
        """Drop trees until those that are left take less than the bound."""
        used = self.nbytes
        while self._trees and used > self.max_bytes:
            _, dropped = self._trees.popitem(last=False)
            used -= dropped.index.nbytes

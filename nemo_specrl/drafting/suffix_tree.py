"""Draft trees: for each prompt, its earlier responses indexed so that they predict the next tokens.

A tree holds the responses of earlier epochs, from the rollout cache, and those that are being
decoded now. The latter are appended token by token, so that the first sample of a group drafts for
the others. Drafts are offered to an engine that verifies them losslessly, so a wrong one only costs
speed (SRT, arXiv 2601.09083; SuffixDecoding, arXiv 2411.04975).

The index itself is native code (``_suffix.c``). This module bounds its memory and keeps track of
the responses in each tree. It knows nothing about engines or the cache. For example::

    trees = DraftTrees(max_bytes=2**30)
    row = trees.open(key, 2, [(1, np.array([5, 6, 7, 8], np.int32).tobytes())])
    row.extend([5, 6])
    row.draft(max_tokens=8)  # [7, 8]
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from nemo_specrl.drafting.chances import CHANCES, MATCHES, MIN_PROBABILITY, SHARES, VOTES
from nemo_specrl.errors import IncompatibleVersion

try:
    from nemo_specrl.drafting import _suffix
except ImportError as error:
    raise IncompatibleVersion(
        f"the compiled part of nemo_specrl, which drafts on a CPU need, is missing ({error}); "
        "install a wheel (pip wheel --no-deps .)"
    ) from None

__all__ = ["RESPONSES_KEPT", "DraftTrees", "TreeRow"]

RESPONSES_KEPT = 2
"""If memory is short, a tree with more than this many times the responses that the cache has for
its prompt is rebuilt from those."""


assert (
    len(SHARES) + 1,
    len(MATCHES) + 1,
    len(VOTES) + 1,
) == (_suffix.SHARES, _suffix.MATCHES, _suffix.VOTES)


class PromptTree:
    """The indexed responses to one prompt.

    Attributes:
        index: the native index; None once the tree was dropped for lack of memory.
        responses: identities of the responses in the tree.
        rows: the rows that draft from it now.
        counted: the bytes with which it counts in the sum over all trees.
    """

    def __init__(self) -> None:
        self.index: _suffix.SuffixIndex | None = _suffix.SuffixIndex()
        self.responses: set[int] = set()
        self.rows: WeakSet[TreeRow] = WeakSet()
        self.counted = 0


class TreeRow:
    """A response that is being decoded: it drafts from the tree of its prompt and extends it.

    A tree is kept while it has rows. One of them is dropped only if the trees with rows are too
    large by themselves; its rows then no longer draft.
    """

    def __init__(self, trees: DraftTrees, tree: PromptTree, identity: int) -> None:
        self._trees = trees
        self._tree = tree
        tree.rows.add(self)
        self._response = trees.start(tree, identity)
        self.length = 0
        """Number of tokens so far."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy has produced."""
        self.length += len(tokens)
        self._trees.extend(self._tree, self._response, array("i", tokens))

    def draft(self, max_tokens: int) -> list[int]:
        """Likely next tokens, at most ``max_tokens``; none if no token is likely enough."""
        return array("i", self.proposal(max_tokens)[0]).tolist()

    def proposal(
        self,
        max_tokens: int,
        min_probability: float = MIN_PROBABILITY,
        table: npt.NDArray[np.float32] = CHANCES,
    ) -> tuple[bytes, bytes, bytes]:
        """Return a draft, with the chances of its tokens.

        Args:
            max_tokens: largest number of tokens.
            min_probability: the draft ends where the chance of being accepted up to there falls
                below this.
            table: chances by cell, float32 ``[len(CHANCES)]``.

        Returns:
            its tokens, int32; their cells, uint8; and for each the chance that all up to it are
            accepted, float32.
        """
        index = self._tree.index
        if max_tokens <= 0 or index is None:
            return b"", b"", b""
        return index.draft(self._response, max_tokens, min_probability, table)


class DraftTrees:
    """The trees of recently used prompts, within a memory limit.

    Args:
        max_bytes: limit of all trees together, even while they grow. The least recently used are
            dropped first, and those that rows draft from last.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        """Memory of all trees, bytes."""
        self._trees: OrderedDict[bytes, PromptTree] = OrderedDict()

    def __len__(self) -> int:
        return len(self._trees)

    def open(self, key: bytes, identity: int, history: Sequence[tuple[int, bytes]]) -> TreeRow:
        """Begin a row that drafts from its prompt's tree.

        Args:
            key: key of the prompt.
            identity: identity of the row's response.
            history: earlier responses as identity and int32 tokens, oldest first; those already in
                the tree are skipped.
        """
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = PromptTree()
        elif self._is_too_large(tree, len(history)):
            self._drop(key)
            tree = self._trees[key] = PromptTree()
        self._trees.move_to_end(key)
        for known, tokens in history:
            if known not in tree.responses:
                self.extend(tree, self.start(tree, known), tokens)
        return TreeRow(self, tree, identity)

    def _is_too_large(self, tree: PromptTree, cached: int) -> bool:
        """Whether a tree should be rebuilt from the responses in the cache before it is used again.

        Older responses improve drafts, and a tree keeps them while there is room. Without room,
        keeping them would mean that every tree is dropped before its prompt recurs.
        """
        short = self.nbytes > self.max_bytes // 2
        return short and 0 < RESPONSES_KEPT * cached < len(tree.responses) and not tree.rows

    def start(self, tree: PromptTree, identity: int) -> int:
        """Begin a response in a tree; returns its number in the index."""
        tree.responses.add(identity)
        if tree.index is None:
            return 0
        response = tree.index.start()
        self._count(tree)
        return response

    def extend(self, tree: PromptTree, response: int, tokens: bytes | array[int]) -> None:
        """Append int32 tokens to a response in a tree; drops trees if memory runs out."""
        if tree.index is not None:
            tree.index.extend(response, tokens)
            self._count(tree)

    def _count(self, tree: PromptTree) -> None:
        """Update ``nbytes`` after a tree has grown, and drop trees if it exceeds the limit."""
        assert tree.index is not None
        nbytes = tree.index.nbytes
        if nbytes == tree.counted:
            return
        self.nbytes += nbytes - tree.counted
        tree.counted = nbytes
        if self.nbytes > self.max_bytes:
            self._make_room(tree)

    def _make_room(self, grown: PromptTree) -> None:
        """Drop trees without rows until the rest fits; if that is not enough, the one that grew."""
        idle = [key for key, tree in self._trees.items() if not tree.rows and tree is not grown]
        for key in idle:
            self._drop(key)
            if self.nbytes <= self.max_bytes:
                return
        for key, tree in self._trees.items():
            if tree is grown:
                self._drop(key)
                return

    def _drop(self, key: bytes) -> None:
        tree = self._trees.pop(key)
        tree.index = None
        self.nbytes -= tree.counted

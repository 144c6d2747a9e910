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
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nemo_specrl.errors import IncompatibleVersion

try:
    from nemo_specrl.speculation import _suffix
except ImportError as error:
    raise IncompatibleVersion(
        f"the compiled part of nemo_specrl, which trees need, is missing ({error}); install a "
        "wheel (pip wheel --no-deps .), or set spec_rl.tree.enabled: false"
    ) from None

__all__ = ["CHANCES", "MIN_PROBABILITY", "RESPONSES_KEPT", "DraftTrees", "TreeRow"]

MIN_PROBABILITY = 0.2
"""A draft ends where its estimated chance of being accepted up to there falls below this."""
RESPONSES_KEPT = 2
"""Where memory is short, a tree with this many times the responses of the cache is made anew."""


def _chances() -> npt.NDArray[np.float32]:
    """By cell: a token's share of the weights, shrunk where little speaks for it."""
    share = np.array([0.2, 0.4, 0.6, 0.78, 0.9, 0.97, 1.0])[:, None, None]
    match = np.array([1.0, 2.5, 5.5, 12.0, 24.0, 48.0])[:, None]
    votes = np.array([1.0, 2.5, 5.5, 12.0])
    evidence = votes + match / 4
    chances = share * evidence / (evidence + 0.5)
    assert chances.shape == (_suffix.SHARES, _suffix.MATCHES, _suffix.VOTES)
    return np.ravel(chances).astype(np.float32)


CHANCES = _chances()
"""Estimated chances of acceptance, by what speaks for a token (``cell_of`` in ``_suffix.c``)."""


class PromptTree:
    """The indexed responses to one prompt.

    Attributes:
        index: None once the tree was dropped for want of memory.
        responses: identities of those that are in it.
        rows: how many draft from it now.
        counted: its bytes in the sum of all trees.
    """

    def __init__(self) -> None:
        self.index: _suffix.SuffixIndex | None = _suffix.SuffixIndex()
        self.responses: set[int] = set()
        self.rows = 0
        self.counted = 0


class TreeRow:
    """A response that is being decoded: it drafts from the tree of its prompt and extends it.

    A tree is kept while it has rows. Only where the trees of the rows alone are too large is one
    dropped all the same, and then its rows draft nothing any more.
    """

    def __init__(self, trees: DraftTrees, tree: PromptTree, identity: int) -> None:
        self._trees = trees
        self._tree = tree
        tree.rows += 1
        self._response = trees.start(tree, identity)
        self.length = 0
        """Tokens so far."""

    def __del__(self) -> None:
        self._tree.rows -= 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy has produced."""
        self.length += len(tokens)
        self._trees.extend(self._tree, self._response, array("i", tokens))

    def draft(self, max_tokens: int) -> list[int]:
        """Likely next tokens, at most ``max_tokens``; empty where nothing is likely enough."""
        return array("i", self.proposal(max_tokens)[0]).tolist()

    def proposal(
        self,
        max_tokens: int,
        min_probability: float = MIN_PROBABILITY,
        table: npt.NDArray[np.float32] = CHANCES,
    ) -> tuple[bytes, bytes, bytes]:
        """A draft, and what it is expected to bring.

        Args:
            max_tokens: at most.
            min_probability: the draft ends where the chance of being accepted up to there falls
                below this.
            table: chances by cell, float32 ``[len(CHANCES)]``.

        Returns:
            Tokens, int32; their cells, uint8; the chance that all up to each are accepted, float32.
        """
        index = self._tree.index
        if max_tokens <= 0 or index is None:
            return b"", b"", b""
        return index.draft(self._response, max_tokens, min_probability, table)


class DraftTrees:
    """The trees of the prompts that were used last, within a bound of memory.

    Args:
        max_bytes: of all trees together, also while they grow; the ones unused for longest go
            first, and those that rows draft from last.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        """Memory of all trees, bytes."""
        self._trees: OrderedDict[bytes, PromptTree] = OrderedDict()

    def __len__(self) -> int:
        return len(self._trees)

    def open(self, key: bytes, identity: int, history: Sequence[tuple[int, bytes]]) -> TreeRow:
        """A row of a prompt that is about to be decoded.

        Args:
            key: of the prompt.
            identity: of the row's response
                (:func:`~nemo_specrl.speculation.draft_selection.response_id`).
            history: earlier responses as identity and int32 tokens, oldest first; those that the
                tree has are passed over.
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
        """Whether a tree that is to be used again had better be made anew from the cache.

        Older responses make drafts better, and so a tree keeps them while there is room. Where
        there is not, all trees would be dropped in turn before their prompts come up again.
        """
        short = self.nbytes > self.max_bytes // 2
        return short and 0 < RESPONSES_KEPT * cached < len(tree.responses) and not tree.rows

    def start(self, tree: PromptTree, identity: int) -> int:
        """Begin a response in a tree; its number."""
        tree.responses.add(identity)
        if tree.index is None:
            return 0
        response = tree.index.start()
        self._count(tree)
        return response

    def extend(self, tree: PromptTree, response: int, tokens: bytes | array[int]) -> None:
        """Append int32 tokens to a response in a tree, and keep the bound."""
        if tree.index is not None:
            tree.index.extend(response, tokens)
            self._count(tree)

    def _count(self, tree: PromptTree) -> None:
        """Bring the sum up to date after a tree has grown, and keep the bound."""
        assert tree.index is not None
        nbytes = tree.index.nbytes
        if nbytes == tree.counted:
            return
        self.nbytes += nbytes - tree.counted
        tree.counted = nbytes
        if self.nbytes > self.max_bytes:
            self._make_room(tree)

    def _make_room(self, grown: PromptTree) -> None:
        """Drop trees without rows until the rest is within the bound, else the one that grew."""
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

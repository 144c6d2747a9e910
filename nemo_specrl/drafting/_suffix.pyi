"""Types of the compiled module; what it does is said at the top of ``_suffix.c``."""

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

SHARES: int
MATCHES: int
VOTES: int

class SuffixIndex:
    """Earlier responses to one prompt, found by the tokens that precede a position."""

    @property
    def tokens(self) -> int:
        """Tokens indexed."""
    @property
    def nbytes(self) -> int:
        """Memory taken, bytes."""
    def start(self) -> int:
        """Begin a response; returns its number."""
    def extend(self, response: int, tokens: Buffer, /) -> None:
        """Append tokens, int32 ``[n]``, to a response."""
    def draft(
        self, response: int, max_tokens: int, least: float, chances: npt.NDArray[np.float32], /
    ) -> tuple[bytes, bytes, bytes]:
        """Likely next tokens of a response, up to a chance of acceptance of ``least``.

        Args:
            response: its number.
            max_tokens: at most.
            least: the draft ends where the chance that all of it is accepted falls below this.
            chances: that a token is accepted when those before it are, by cell, float32
                ``[SHARES * MATCHES * VOTES]``; a cell stands for the token's share of the weights,
                the length of the match before it, and the number of responses that vote for it.

        Returns:
            Tokens, int32 ``[d]``; their cells, uint8 ``[d]``; and the chance that all tokens up to
            each one are accepted, float32 ``[d]``.
        """

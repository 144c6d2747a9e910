"""Types of the compiled module; what it does is said at the top of ``_suffix.c``."""

from typing_extensions import Buffer

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
        self, response: int, max_tokens: int, min_probability: float, prior: float, /
    ) -> tuple[bytes, bytes, int]:
        """Likely next tokens of a response.

        Returns:
            Tokens, int32 ``[d]``; the estimated probability that all tokens up to each one are
            accepted, float32 ``[d]``; and the length of the longest context that was found.
        """

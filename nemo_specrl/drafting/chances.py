"""The chance that a draft token is accepted if those before it are, by the evidence for it.

The evidence is the token's share of the voters' weights, the longest match among the voters for
it, and their number. Each of the three falls into one of a few ranges, and the table has one chance
for each combination, its *cell*. ``_suffix.c`` (V1), ``reference`` and ``kernels`` (V2) compute the
cell alike. What is learned from outcomes is added by ``adaptive_length``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["CHANCES", "MATCHES", "MIN_PROBABILITY", "SHARES", "VOTES"]

SHARES = (300, 500, 700, 850, 950, 995)
"""Thousandths of the weights at which the next range begins."""
MATCHES = (2, 4, 8, 16, 32)
"""Tokens of the longest match at which the next range begins."""
VOTES = (2, 4, 8)
"""Voters at which the next range begins."""
MIN_PROBABILITY = 0.2
"""Drafts that are not limited by the costs of steps end where their chance of being accepted up to
there falls below this."""


def _chances() -> npt.NDArray[np.float32]:
    """A token's share of the weights, reduced if there is little evidence."""
    share = np.array([0.2, 0.4, 0.6, 0.78, 0.9, 0.97, 1.0])[:, None, None]
    match = np.array([1.0, 2.5, 5.5, 12.0, 24.0, 48.0])[:, None]
    votes = np.array([1.0, 2.5, 5.5, 12.0])
    evidence = votes + match / 4
    chances = share * evidence / (evidence + 0.5)
    assert chances.shape == (len(SHARES) + 1, len(MATCHES) + 1, len(VOTES) + 1)
    return np.ravel(chances).astype(np.float32)


CHANCES = _chances()
"""Chances by cell, float32 ``[7 * 6 * 4]``."""

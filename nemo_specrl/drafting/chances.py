"""The chance that a draft token is accepted if those before it are, by the evidence for it.

The evidence is the token's share of the voters' weights, the longest match among the voters for
it, and their number. Each of the three falls into one of a few ranges, and the table has one chance
for each combination, its *cell*. ``_suffix.c`` (V1), ``reference`` and ``kernels`` (V2) compute the
cell alike. What is learned from outcomes is added by ``adaptive_length`` (V1) and :func:`learned`
(V2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHANCES",
    "MATCHES",
    "MIN_PROBABILITY",
    "MOST_TRIES",
    "PRIOR_TRIES",
    "SHARES",
    "VOTES",
    "learned",
]

SHARES = (300, 500, 700, 850, 950, 995)
"""Thousandths of the weights at which the next range begins."""
MATCHES = (2, 4, 8, 16, 32)
"""Tokens of the longest match at which the next range begins."""
VOTES = (2, 4, 8)
"""Voters at which the next range begins."""
PRIOR_TRIES, MOST_TRIES = 16, 1024
"""Number of tokens for which a cell's chance in the table counts where chances are learned; and
tokens beyond which a cell's earlier ones count half, so that a new policy is noticed."""
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


def learned(
    prior: npt.NDArray[np.float32], counts: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Chances by cell from what followed drafts, float32 ``[cells]``; the counts are kept small.

    Args:
        prior: chances before anything is known, float32 ``[cells]``.
        counts: tokens that were drafted behind right ones, and those of them that were right, int32
            ``[cells, 2]``; changed in place.
    """
    counts[counts[:, 0] > MOST_TRIES] //= 2
    tried, right = counts.T.astype(np.float32)
    chances: npt.NDArray[np.float32] = (prior * np.float32(PRIOR_TRIES) + right) / (
        tried + np.float32(PRIOR_TRIES)
    )
    return chances

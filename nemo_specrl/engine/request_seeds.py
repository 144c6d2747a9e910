"""Random numbers that no draft has seen.

A draft is a token that earlier random numbers made. If the same numbers come up again at the same
place, they accept it too often: with a seed that is used in every epoch, a token of probability
0.45 came up with 0.54 in the third. So a seed is not used again for a prompt whose responses it may
have made, and an engine that gets a history from another process begins its random numbers anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from nemo_specrl.engine.row import row_of

__all__ = ["Foreign", "derived_seed"]


def derived_seed(seed: int, key: bytes, ordinal: int, identities: Sequence[int]) -> int:
    """A seed that has made none of a prompt's earlier responses, ``0 .. 2**63 - 1``.

    Args:
        seed: the caller's, or the engine's.
        key: key of the prompt.
        ordinal: a number that differs between requests.
        identities: those of the earlier responses.
    """
    hasher = xxhash.xxh3_64(key)
    hasher.update(np.asarray([seed & (2**63 - 1), ordinal, *identities], np.int64).tobytes())
    return int(hasher.intdigest() >> 1)


class Foreign:
    """Begins the random numbers of a worker anew when it gets the first history of another process.

    An engine that is started again with the same seed has the same numbers, and its history was
    made with them. All ranks get the same requests in the same step, so their numbers stay equal.

    The request's own identity makes the new ones differ from those of a process that got the same
    history first, which may be another data-parallel engine.

    Args:
        seed: the engine's.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._done = seed, False

    def see(self, requests: Iterable[Any]) -> None:
        """Look at new requests, as a model runner gets them, before it draws numbers for them."""
        if self._done:
            return
        for request in requests:
            row = row_of(request)
            if row is not None and row.history:
                import torch

                identities = [identity for identity, _ in row.history]
                seed = derived_seed(self._seed, row.key, row.identity, identities)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
                self._done = True
                return

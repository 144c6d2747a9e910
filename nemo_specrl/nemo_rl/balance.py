"""Distribution of rows over engines, so that all engines finish at about the same time.

The rows of a prompt stay together: they share the prefill of their prompt, and draft from each
other. A row is expected to be as long as the last responses to its prompt were.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from nemo_specrl.files import replacing
from nemo_specrl.rollout import KEY_BYTES

__all__ = ["PromptPlaces", "ResponseLengths", "balanced_order"]

FILE = "lengths.npy"
RECORD = np.dtype([("key", np.uint8, KEY_BYTES), ("mean", np.float32)])
MOST_PROMPTS = 2**20
"""Number of latest prompts whose lengths are remembered, some 100 bytes each."""
OPEN_PROMPTS = 2**16
"""Number of latest prompts that wait for more of their rows."""
WORTHWHILE = 0.95
"""Rows are moved only if that cuts the cost of the most expensive share to this fraction."""

_entering = threading.Lock()
"""Held while a row chooses its engine or leaves it: NeMo-RL's asynchronous collector has a thread
for each batch."""


class ResponseLengths:
    """The mean length of the latest responses to each prompt, tokens.

    A copy in another process begins empty, and learns from the rows that it gets.
    """

    def __init__(self) -> None:
        self._means: OrderedDict[bytes, float] = OrderedDict()

    def __reduce__(self) -> tuple[type[ResponseLengths], tuple[()]]:
        return ResponseLengths, ()

    def note(self, keys: Sequence[bytes], lengths: Sequence[int]) -> None:
        """Note the responses of a batch: the prompt key and the length of each."""
        latest: dict[bytes, list[int]] = {}
        for key, length in zip(keys, lengths, strict=True):
            latest.setdefault(key, []).append(length)
        for key, values in latest.items():
            self._means[key] = sum(values) / len(values)
            self._means.move_to_end(key)
        while len(self._means) > MOST_PROMPTS:
            self._means.popitem(last=False)

    def expected(self, keys: Sequence[bytes]) -> list[float]:
        """Return the expected length of each row; for unknown prompts, the mean of the others."""
        known = [self._means[key] for key in keys if key in self._means]
        neutral = sum(known) / len(known) if known else 1.0
        return [self._means.get(key, neutral) for key in keys]

    def save(self, folder: Path) -> None:
        """Write the lengths into a folder."""
        saved = np.zeros(len(self._means), RECORD)
        saved["key"] = np.frombuffer(b"".join(self._means), np.uint8).reshape(-1, KEY_BYTES)
        saved["mean"] = list(self._means.values())
        with replacing(folder / FILE, folder / f"{FILE}.tmp") as file:
            np.save(file, saved)

    def restore(self, folder: Path) -> None:
        """Read what :meth:`save` wrote. What cannot be read is not known, and rows stay put."""
        with suppress(OSError, ValueError, KeyError, EOFError):
            saved = np.load(folder / FILE, allow_pickle=False)
            keys = [key.tobytes() for key in saved["key"].astype(np.uint8)]
            self._means.update(zip(keys, saved["mean"].tolist(), strict=True))


def balanced_order(keys: Sequence[bytes], costs: Sequence[float], shards: int) -> list[int]:
    """Order rows so that the contiguous shares of the engines cost about the same.

    Shares have ``ceil(n / shards)`` rows, and the last ones fewer, because that is how NeMo-RL
    splits a batch. The most expensive prompts are assigned first, each to the cheapest share that
    has room for all of its rows (longest processing time first; Graham, doi:10.1137/0117039).
    Where none has, its rows fill the cheapest shares one after the other. If moving rows gains
    little, all rows keep their order.

    Args:
        keys: prompt key of each row; the rows of a prompt are neighbours.
        costs: expected cost of each row, in any unit.
        shards: number of engines.

    Returns:
        Indices of rows: the first share, then the second, and so on.
    """
    n = len(costs)
    size = -(-n // shards) if shards else n
    if shards < 2 or n <= size:
        return list(range(n))
    starts = range(0, n, size)
    groups = [list(rows) for _, rows in itertools.groupby(range(n), lambda row: keys[row])]
    pieces = [rows[i : i + size] for rows in groups for i in range(0, len(rows), size)]
    room = [min(size, n - start) for start in starts]
    shares: list[list[int]] = [[] for _ in room]
    loads = [(0.0, share) for share in range(len(room))]
    for piece in sorted(pieces, key=lambda rows: -sum(costs[row] for row in rows)):
        fitting = [load for load in loads if room[load[1]] >= len(piece)]
        for load in [min(fitting)] if fitting else sorted(loads):
            share = load[1]
            taken, piece = piece[: room[share]], piece[room[share] :]
            room[share] -= len(taken)
            shares[share] += taken
            loads[share] = (load[0] + sum(costs[row] for row in taken), share)
    before = max(sum(costs[start : start + size]) for start in starts)
    if max(load for load, _ in loads) > WORTHWHILE * before:
        return list(range(n))
    return [row for share in shares for row in sorted(share)]


class PromptPlaces:
    """Chooses the engine of rows that arrive one by one.

    The rows of a prompt go to one engine, and prompts to the engine that runs the fewest rows.

    Args:
        engines: number of engines.
        together: the most rows of a prompt that stay together.
    """

    def __init__(self, engines: int, together: int) -> None:
        self._rows = [0] * engines
        self._together = together
        self._open: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def enter(self, key: bytes) -> int:
        """Return the engine of the next row of a prompt, which runs until :meth:`leave`."""
        with _entering:
            fewest = min(range(len(self._rows)), key=self._rows.__getitem__)
            engine, more = self._open.pop(key, (fewest, self._together))
            if more > 1:
                self._open[key] = engine, more - 1
            if len(self._open) > OPEN_PROMPTS:
                self._open.popitem(last=False)
            self._rows[engine] += 1
            return engine

    def leave(self, engine: int) -> None:
        """Note that a row of an engine has ended."""
        with _entering:
            self._rows[engine] -= 1

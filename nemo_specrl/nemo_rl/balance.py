"""Distribution of rows over engines, so that all engines finish at about the same time.

The rows of a prompt share its prefill and its blocks of KV cache, and draft from each other. They
stay together unless dealing them out costs less than the imbalance without it. A row is expected to
be as long as the last responses to its prompt were.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
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
"""Rows go to other engines only if the most expensive share then costs this fraction or less."""
PREFILL, READ, HELD = 0.35, 7e-4, 3e-4
"""What a prompt's token costs: once, to compute it; for each token that a row decodes, to read it;
and for each token of its longest row, as room that other rows do not have. In decoded tokens of a
row among 128 of an 8B model on an H100 (docs/evidence/measured.md: a step of 8.8 ms, prefill of
40,000 tokens/s, 147 kB of KV cache a token at 3.35 TB/s, room for 305,000 tokens)."""
SIBLINGS = 0.1
"""By how much faster a row decodes that drafts from all of its siblings than one from none, where
there is a history: SmolLM2-135M decoded 1.5 tokens a step from siblings alone, 2.6 with both."""

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


def balanced_order(
    keys: Sequence[Hashable], lengths: Sequence[float], prompts: Sequence[int], shards: int
) -> list[int]:
    """Order rows so that the contiguous shares of the engines cost about the same.

    Shares have ``ceil(n / shards)`` rows, and the last ones fewer, because that is how NeMo-RL
    splits a batch. The most expensive prompts are assigned first, each to the cheapest share that
    has room for all of its rows (longest processing time first; Graham, doi:10.1137/0117039).
    Where none has, its rows fill the cheapest shares one after the other. That is tried with whole
    prompts, and with halves, quarters, ... of their rows; the best of these is taken, or the order
    as it was if that gains little. Within its share the longest rows come first: an engine begins
    them in this order, and would otherwise end with a few of them.

    Args:
        keys: prompt key of each row; the rows of a prompt are neighbours.
        lengths: expected length of each response, tokens.
        prompts: length of each row's prompt, tokens.
        shards: number of engines.

    Returns:
        Indices of rows: the first share, then the second, and so on.
    """
    n = len(keys)
    size = -(-n // max(1, shards)) or 1
    groups = [list(rows) for _, rows in itertools.groupby(range(n), lambda row: keys[row])]
    most = {keys[rows[0]]: len(rows) for rows in groups}

    def cost(rows: Sequence[int]) -> float:
        """Cost of rows in one engine; those of a prompt are neighbours."""
        total = 0.0
        for key, of_prompt in itertools.groupby(rows, lambda row: keys[row]):
            same = list(of_prompt)
            prompt = prompts[same[0]]
            longest = max(lengths[row] for row in same)
            alone = 1 - (len(same) - 1) / max(1, most[key] - 1)
            decoded = sum(lengths[r] * (1 + READ * (prompt + lengths[r] / 2)) for r in same)
            total += decoded * (1 + SIBLINGS * alone) + prompt * (PREFILL + HELD * longest)
        return total

    best = [list(range(start, min(start + size, n))) for start in range(0, n, size)]
    least = WORTHWHILE * max(map(cost, best), default=0.0)
    together = min(size, max(most.values(), default=0)) if len(best) > 1 else 0
    while together:
        pieces = [rows[i : i + together] for rows in groups for i in range(0, len(rows), together)]
        shares = _dealt([(cost(rows), rows) for rows in pieces], [len(share) for share in best])
        if (dearest := max(map(cost, shares))) < least:
            best, least = shares, dearest
        together //= 2
    return [row for share in best for row in sorted(share, key=lambda row: -lengths[row])]


def _dealt(pieces: list[tuple[float, list[int]]], room: list[int]) -> list[list[int]]:
    """Deal pieces with their costs, the dearest first, into shares with room for so many rows."""
    shares: list[list[int]] = [[] for _ in room]
    loads = [0.0] * len(room)
    for cost, rows in sorted(pieces, key=lambda piece: -piece[0]):
        places = [i for i in range(len(room)) if room[i] >= len(rows)]
        by_load = loads.__getitem__
        each = cost / len(rows)
        for share in (
            [min(places, key=by_load)] if places else sorted(range(len(room)), key=by_load)
        ):
            taken, rows = rows[: room[share]], rows[room[share] :]
            room[share] -= len(taken)
            shares[share] += taken
            loads[share] += each * len(taken)
    return [sorted(share) for share in shares]


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

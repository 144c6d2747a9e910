"""Rows that drafts are made for without an engine: the search and the vote alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.model import Size, on_gpu
from nemo_specrl.drafting.chances import CHANCES
from nemo_specrl.drafting.device_index import DeviceIndex

CALLS = 50
"""Calls that are timed together on a GPU, which works on while the host sends the next ones."""


class DraftedRows:
    """Rows of groups, each of which has as many earlier responses as rows.

    Args:
        rows: of the batch.
        group: rows of a prompt.
        size: of the responses.

    Attributes:
        searched: tokens that each row searches.
    """

    def __init__(self, rows: int, group: int, size: Size) -> None:
        rng, longest = np.random.default_rng(0), size.response
        device = "cuda" if on_gpu() else "cpu"
        vocabulary, prompt = size.shape.vocabulary, size.prompt
        most = prompt + longest + 16
        self._index = DeviceIndex(device, rows, most, vocabulary, 2**29, 11, CHANCES)
        prompts = -(-rows // group)
        earlier = rng.integers(0, vocabulary, (prompts, group, longest)).astype(np.int32)
        histories = [[(i, tokens.tobytes()) for i, tokens in enumerate(of)] for of in earlier]
        tokens = np.zeros((rows, most), np.int32)
        half = longest // 2
        for row in range(rows):
            own = earlier[row // group, row % group, :half]  # it repeats what it said before
            tokens[row, prompt : prompt + half] = own
            history = histories[row // group] if row % group == 0 else []
            key = (row // group).to_bytes(2, "little")
            self._index.open_row(row, key, 100 + row, history, prompt, brought=half - 1)
        self._tokens = torch.from_numpy(tokens).to(device)
        self._totals = torch.full((rows,), prompt + half, dtype=torch.int32, device=device)
        self._host = np.arange(rows)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._lengths = np.full(rows, prompt + half + 1)
        self._last = torch.zeros(rows, dtype=torch.int64, device=device)
        self.searched = group * (longest + half)
        self._call()

    def _call(self) -> torch.Tensor:
        return self._index.draft(
            self._rows, self._host, self._lengths, self._tokens, self._totals, self._last
        )

    def timed(self) -> dict[str, Any]:
        """Seconds of one call: of the host alone, and until the device has done it."""
        calls = CALLS if on_gpu() else 1
        started = time.perf_counter()
        for _ in range(calls):
            self._call()
        sent = time.perf_counter()
        if on_gpu():
            torch.cuda.synchronize()
        done = time.perf_counter()
        return {"host_s": (sent - started) / calls, "seconds": (done - started) / calls}

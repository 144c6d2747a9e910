"""The arrays on the device, and the launches that work on them.

``device_index`` decides what is written where. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nemo_specrl.drafting import kernels
from nemo_specrl.drafting.reference import DEPTH, OFFERED, PAGE
from nemo_specrl.drafting.uniform_length import PRIOR_CHANCE

__all__ = ["CORPUS", "LINKS", "ROW", "STOPS", "DeviceArrays"]

logger = logging.getLogger(__name__)

PAGES_OF_PROMPT = 8192
"""The most pages of a prompt: 2,097,152 tokens; a row that searches them all reads 8 MiB."""
PAGES_SEARCHED = 2**19
"""The most pages that up to 256 rows search in a step: 512 MiB, which an H100 reads in 160 us."""
PROMPTS = 4096
"""The most prompts."""
CORPUS = 256
"""Pages of the corpus: 65,536 tokens, a quarter of a mebibyte, which all rows search."""
SHARE_OF_LISTS = 8
"""The lists of prompts take at most one part in this many of the memory."""
LINKS, ROW, STOPS = 3, 9, 4
"""Columns of ``links`` and of a row's state: slot of its prompt (-1: none), number of its response,
where the response begins, how many of its tokens are in the pages, how many it may have, and
``STOPS`` tokens that end it (-1: none)."""


class DeviceArrays:
    """Pool of pages, lists of pages, state of rows, and drafts.

    Args:
        device: device of the arrays.
        max_rows: the most rows that vLLM runs at once.
        max_model_len: the most tokens of a row.
        max_bytes: size in bytes of all arrays together.
        length: tokens of a draft.
        chances: table of chances (:data:`~nemo_specrl.drafting.chances.CHANCES`).
        learning: sources of drafts whose chances are learned from what follows: 0, 1 (the index),
            or 2 (and a drafter beside it, whose cells are the places of its drafts).
        agree: given the bytes for which this rank has memory, returns those for which all ranks
            have; None: there are no other ranks. Ranks whose pools differ would make different
            drafts.

    Attributes:
        pages_of_prompt: the most pages of a prompt; the fewer rows there are at once, the more.
        pool: tokens of pages, int32 ``[pages, PAGE]``.
        links: see ``reference``, int32 ``[pages, 3]``.
        table: pages of prompts, int32 ``[slots, pages of a prompt]``.
        corpus: pages of the corpus, int32 ``[CORPUS]``.
        rows: state of rows, int32 ``[max_rows, ROW]``.
        row_pages: pages of the rows' responses, int32 ``[max_rows, pages_of_row]``.
        state: these five, in one; ``*_at`` is where each begins.
        drafts: int64 ``[max_rows, length]``, in the order of the batch.
        confidences: float32, likewise; the chance of each token to be accepted if those before it
            are.
        chances: chances by cell, behind which are those of a drafter by place, float32 ``[cells +
            length]``.
        drafted: the last draft of each row, by source and row, int32 ``[2, max_rows, length]``;
            used if learning, like the next two.
        cells: the cells of these tokens, likewise; -1 where nothing was drafted.
        outcomes: tokens by cell that were drafted behind right ones, and those of them that were
            right, int32 ``[cells + length, 2]``.
        launches: number of kernel launches since the start.
    """

    def __init__(
        self,
        device: torch.device | str,
        max_rows: int,
        max_model_len: int,
        max_bytes: int,
        length: int,
        chances: npt.NDArray[np.float32],
        learning: int = 0,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self.device, self.max_rows = torch.device(device), max_rows
        self.length, self.max_model_len, self.learning = length, max_model_len, learning
        self.pages_of_row = -(-(max_model_len + 1) // PAGE)
        self.pages_of_prompt = min(PAGES_OF_PROMPT, PAGES_SEARCHED // min(max_rows, 256))
        self.launches = 0
        # On a CPU, Triton's interpreter takes a fixed time for each operation, whatever its size.
        self.tile = 4 if self.device.type != "cpu" else 32
        prior = np.append(chances, np.full(length, PRIOR_CHANCE, np.float32))
        self._prior = torch.from_numpy(prior).to(self.device)
        self.chances = self._prior.clone()
        self.outcomes = torch.zeros(len(prior), 2, dtype=torch.int32, device=self.device)
        had = self._make_arrays(max_bytes)
        if agree is not None and (least := agree(had)) < had:
            logger.warning("another rank has less memory for drafts: taking %d bytes", least)
            self._make_arrays(least)
        self.drafts = torch.zeros(max_rows, length, dtype=torch.int64, device=self.device)
        self.confidences = torch.zeros(max_rows, length, device=self.device)
        self.drafted = torch.zeros(2, max_rows, length, dtype=torch.int32, device=self.device)
        self.cells = torch.full_like(self.drafted, -1)
        self.cells[1] = len(chances) + torch.arange(length, device=self.device)
        self._contexts = torch.zeros(max_rows, DEPTH, dtype=torch.int32, device=self.device)

    def _make_arrays(self, max_bytes: int) -> int:
        """Make the pool and the state as large as memory allows; return the allowed bytes."""
        while True:
            self.pool = self.state = torch.empty(0)  # gives back what was made before
            pages, slots, listed = self._sizes(max_bytes)
            sizes = [
                pages * LINKS,
                slots * listed,
                self.max_rows * ROW,
                self.max_rows * self.pages_of_row,
                CORPUS,
            ]
            try:
                self.pool = torch.empty(pages, PAGE, dtype=torch.int32, device=self.device)
                self.state = torch.full((sum(sizes),), -1, dtype=torch.int32, device=self.device)
                break
            except torch.OutOfMemoryError:
                if not max_bytes:
                    raise
                max_bytes //= 2
                logger.warning("not enough memory for drafts: trying %d bytes", max_bytes)
        # Where in the state links, lists, rows, the pages of rows and the corpus begin.
        self.links_at, self.table_at, self.rows_at, self.row_pages_at, self.corpus_at = (
            int(end) - size for end, size in zip(np.cumsum(sizes), sizes, strict=True)
        )
        views = torch.split(self.state, sizes)
        self.links, self.rows = views[0].view(-1, LINKS), views[2].view(-1, ROW)
        self.table = views[1].view(-1, listed)
        self.row_pages, self.corpus = views[3].view(self.max_rows, -1), views[4]
        return max_bytes

    def _sizes(self, max_bytes: int) -> tuple[int, int, int]:
        """Pages, prompts and pages of a prompt for which there is memory beside that of rows."""
        of_rows = 4 * self.max_rows * (ROW + self.pages_of_row + DEPTH + 7 * self.length)
        left, of_page = max(0, max_bytes - of_rows - 4 * CORPUS), 4 * (PAGE + LINKS)
        listed = max(1, min(self.pages_of_prompt, 2 * left // of_page))
        slots = min(PROMPTS, left // (4 * listed * SHARE_OF_LISTS))
        return (left - 4 * slots * listed) // of_page, slots, listed

    @property
    def nbytes(self) -> int:
        """Memory of the arrays on the device, excluding the offers of the last step."""
        arrays = [self.pool, self.state, self.drafts, self.confidences, self._contexts]
        arrays += [self.drafted, self.cells]
        return sum(array.numel() * array.element_size() for array in arrays)

    def write(
        self,
        contents: Mapping[int, npt.NDArray[np.int32]],
        values: Mapping[int, int],
        anyway: bool = False,
    ) -> None:
        """Write pages, and values into the state.

        Args:
            contents: contents by page, int32 ``[PAGE]``.
            values: values by place in the state.
            anyway: launch the kernel even if there is nothing to write.
        """
        if not (contents or values or anyway):
            return
        arrays = (
            np.fromiter(contents, np.int32),
            np.concatenate([*contents.values(), np.zeros(1, np.int32)]),
            np.fromiter(values, np.int64),
            np.fromiter(values.values(), np.int32),
        )
        programs = len(contents) + -(-len(values) // kernels.SCATTERED.value)
        kernels.update[(programs or 1,)](
            self.pool, self.state, *map(self._to_device, arrays), len(contents), len(values)
        )
        self.launches += 1

    def launch(
        self,
        batch_rows: torch.Tensor,
        pages: int,
        all_tokens: torch.Tensor,
        total_lengths: torch.Tensor,
        last_sampled: torch.Tensor,
        corpus: int = 0,
        searching: bool = True,
        length: int | None = None,
    ) -> torch.Tensor:
        """Append what a step yielded, and draft for each of its rows.

        Args:
            batch_rows: rows of the batch, int ``[n]``; on the device, like all tensors here.
            pages: number of pages of the longest list among the prompts of these rows.
            all_tokens: tokens of rows, int32 ``[rows, max_model_len]``.
            total_lengths: tokens of rows, int32 ``[rows]``.
            last_sampled: last sampled token of rows, int64 ``[rows]``; fills drafts.
            corpus: number of pages of the corpus.
            searching: whether any of the rows has a prompt.
            length: tokens to draft, at most; None: ``self.length``.

        Returns:
            int64 ``[n, self.length]``, in the order of the batch.
        """
        n = len(batch_rows)
        listed = pages + corpus
        if length is None or self.learning:  # what was not drafted now would count again
            length = self.length
        length = min(length, self.length)
        if searching:
            kernels.append[(n,)](
                self.pool,
                self.rows,
                self.row_pages,
                self._contexts,
                batch_rows,
                all_tokens,
                total_lengths,
                self.drafted,
                self.cells,
                self.outcomes,
                all_tokens.stride(0),
                self.pages_of_row,
                self.length,
                self.max_rows * self.length,
                self.learning,
            )
            self.launches += 1
        if searching and self.learning:
            kernels.learn[(1,)](self.outcomes, self._prior, self.chances, len(self._prior))
            self.launches += 1
        if not length:
            return self.drafts[:n]
        offers = torch.empty(n * listed * OFFERED, dtype=torch.int32, device=self.device)
        if searching:
            kernels.search[(n, -(-listed // self.tile))](
                self.pool,
                self.links,
                self.table,
                self.corpus,
                self.rows,
                self._contexts,
                offers,
                batch_rows,
                self.table.stride(0),
                pages,
                corpus,
                self.tile,
            )
            self.launches += 1
        kernels.vote[(n,)](
            self.pool,
            self.links,
            self.table,
            self.corpus,
            self.rows,
            offers,
            self.drafts,
            self.confidences,
            batch_rows,
            last_sampled,
            self.chances,
            self.drafted,
            self.cells,
            self.table.stride(0),
            pages,
            corpus,
            length,
            self.length,
            self.learning > 0,
        )
        self.launches += 1
        return self.drafts[:n]

    def warm_up(self) -> None:
        """Compile all kernels, for which steps would otherwise wait. Call it before there are any
        rows.

        Triton compiles a kernel again for other types, depending on whether addresses and numbers
        are multiples of 16, and for a number that is 1. The arguments here are therefore like those
        of steps.
        """
        tokens = torch.zeros(1, self.max_model_len, dtype=torch.int32, device=self.device)
        total = torch.zeros(1, dtype=torch.int32, device=self.device)
        last = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.write({}, {}, anyway=True)
        for dtype in (torch.int32, torch.int64):  # of rows, in vLLM before 0.29 and from then on
            row = torch.zeros(1, dtype=dtype, device=self.device)
            self.launch(row, 1, tokens, total, last)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type != "cpu":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

"""The responses that drafts are made from: which are on the device, and where.

Per prompt, the earlier responses, written once, and those of the rows that run now, to which every
step appends on the device, so that the rows of a prompt draft for each other. All lie in pages of
one pool; ``reference`` describes them. The host decides which page belongs to what. It knows how
long responses can have become, not their tokens, and waits for nothing.

Memory is bounded. Prompts without rows make room first, those unused for longest before others.
Where that does not suffice, responses are left out and counted, and their rows draft less or
nothing.

Whatever happens here follows from the steps that vLLM schedules, in their order, so that every rank
of an engine has the same pages in the same order and makes the same drafts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nemo_specrl.engine.drafters.v2 import kernels
from nemo_specrl.engine.drafters.v2.reference import DEPTH, EMPTY, OFFERED, PAGE, START

__all__ = ["DeviceIndex", "IndexCounts"]

logger = logging.getLogger(__name__)

PAGES_OF_PROMPT = 1024
"""Pages of a prompt at most: 262,144 tokens. A row that searches them reads a mebibyte."""
PAGES_OF_HISTORY = 768
"""Of these, for earlier responses; the newest are taken."""
PROMPTS = 4096
"""Prompts at most."""
LINKS, ROW = 3, 6
"""Columns of ``links`` and of a row's state: slot of its prompt (-1: none), number of its response,
where that begins, how many of its tokens are in the pages, steps that yielded tokens, tokens."""
BEHIND = 1
_NO_MORE = 2**40
"""In place of a number of pages: the row gets no further ones."""


@dataclasses.dataclass
class IndexCounts:
    """What did not fit, since the start.

    Args:
        prompts: rows without drafts, since there was no place for their prompt.
        responses: earlier responses that were left out for want of memory.
        rows: rows whose own tokens were not indexed to their end.
        refused: earlier responses with tokens outside of the vocabulary.
        cut: earlier responses that were longer than ``max_model_len``.
        evicted: prompts that made room.
    """

    prompts: int = 0
    responses: int = 0
    rows: int = 0
    refused: int = 0
    cut: int = 0
    evicted: int = 0


class _Prompt:
    """A prompt with pages."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.listed: list[int] = []  # pages, -1 for those that were taken away
        self.responses: dict[int, list[int]] = {}  # identity: positions in the list
        self.rows = 0


class _Row:
    """A row that runs: its pages are the last ones of a response."""

    def __init__(self, prompt: _Prompt, identity: int, number: int, start: int) -> None:
        self.prompt, self.identity, self.number, self.start = prompt, identity, number, start
        self.positions: list[int] = []  # in the prompt's list


class DeviceIndex:
    """Pages, lists and rows on a device, and the three launches that draft from them.

    Args:
        device: of the arrays.
        max_rows: rows that vLLM has at once.
        max_model_len: tokens of a row at most.
        vocabulary: tokens from 0 to this are valid.
        max_bytes: of all arrays together.
        length: tokens of a draft.
        chances: table of chances (:data:`~nemo_specrl.speculation.suffix_tree.CHANCES`).

    Attributes:
        counts: see :class:`IndexCounts`.
        drafts: int64 ``[max_rows, length]``, in the order of the batch.
        confidences: float32, likewise; the chance of each token if those before it are accepted.
        launches: of kernels, since the start.
    """

    def __init__(
        self,
        device: torch.device | str,
        max_rows: int,
        max_model_len: int,
        vocabulary: int,
        max_bytes: int,
        length: int,
        chances: npt.NDArray[np.float32],
    ) -> None:
        self.device, self.max_rows, self.vocabulary = torch.device(device), max_rows, vocabulary
        self.length, self.max_model_len = length, max_model_len
        self.pages_of_row = -(-(max_model_len + 1) // PAGE)
        self.counts, self.launches = IndexCounts(), 0
        # The interpreter, on a CPU, takes a time for each operation, of whatever size.
        self.tile = 4 if self.device.type != "cpu" else 32
        self._chances = torch.from_numpy(np.array(chances)).to(self.device)
        self._make_arrays(max_bytes)
        self.drafts = torch.zeros(max_rows, length, dtype=torch.int64, device=self.device)
        self.confidences = torch.zeros(max_rows, length, device=self.device)
        self._contexts = torch.zeros(max_rows, DEPTH, dtype=torch.int32, device=self.device)
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._rows: dict[int, _Row] = {}
        self._pages_of = np.full(max_rows, _NO_MORE)  # of rows
        self._starts = np.zeros(max_rows, np.int64)
        self._responses = 0
        self._contents: dict[int, npt.NDArray[np.int32]] = {}  # to be written with the next step
        self._values: dict[int, int] = {}

    def _make_arrays(self, max_bytes: int) -> None:
        """Make the pool and the state as large as memory allows."""
        while True:
            pages = self._pages_within(max_bytes)
            self.slots = max(0, min(PROMPTS, pages))
            sizes = [
                pages * LINKS,
                self.slots * self._listed_at_most(pages),
                self.max_rows * ROW,
                self.max_rows * self.pages_of_row,
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
        # Where in the state links, lists, rows, and the pages of rows begin.
        self._links, self._table, self._row, self._row_pages = (
            int(end) - size for end, size in zip(np.cumsum(sizes), sizes, strict=True)
        )
        views = torch.split(self.state, sizes)
        self.links, self.rows = views[0].view(-1, LINKS), views[2].view(-1, ROW)
        self.table = views[1].view(-1, max(1, self._listed_at_most(pages)))
        self.row_pages = views[3].view(self.max_rows, -1)
        self.rows[:, 4:] = 0
        self._free, self._free_slots = list(range(pages))[::-1], list(range(self.slots))[::-1]

    def _listed_at_most(self, pages: int) -> int:
        return min(PAGES_OF_PROMPT, 2 * pages)

    def _pages_within(self, max_bytes: int) -> int:
        """Pages for which there is memory beside the arrays of rows and lists."""
        of_rows = 4 * self.max_rows * (ROW + self.pages_of_row + DEPTH + 3 * self.length)
        of_page = 4 * (PAGE + LINKS)
        most = max(0, max_bytes - of_rows) // of_page
        least, most = 0, int(most)
        while least < most:  # the lists grow with the pages
            pages = (least + most + 1) // 2
            lists = 4 * min(PROMPTS, pages) * self._listed_at_most(pages)
            if of_rows + pages * of_page + lists <= max_bytes:
                least = pages
            else:
                most = pages - 1
        return least

    @property
    def nbytes(self) -> int:
        """Memory of the arrays on the device, offers of the last step left out."""
        arrays = (self.pool, self.state, self.drafts, self.confidences, self._contexts)
        return sum(array.numel() * array.element_size() for array in arrays)

    def __len__(self) -> int:
        """Prompts that have pages."""
        return len(self._prompts)

    # What the host decides.

    def open_row(
        self,
        row: int,
        key: bytes,
        identity: int | None,
        history: Sequence[tuple[int, bytes]],
        start: int,
        brought: int = 0,
    ) -> None:
        """Have a row draft from its prompt's responses.

        Args:
            row: its place in vLLM's arrays.
            key: of the prompt.
            identity: of the row's response
                (:func:`~nemo_specrl.speculation.draft_selection.response_id`); None: it has none.
            history: earlier responses as identity and int32 tokens, oldest first; those that are
                here are passed over.
            start: tokens of the prompt, behind which the response begins.
            brought: tokens of the response that the row has already.
        """
        self.close_row(row)
        prompt = self._opened(key, history)
        if prompt is None:
            self.counts.prompts += 1
            return
        prompt.rows += 1
        if (
            brought
            and identity is not None
            and not any(
                other.prompt is prompt and other.identity == identity
                for other in self._rows.values()
            )
        ):
            self._take_away(prompt, identity)  # begun before vLLM preempted it
        self._responses += 1
        if identity is None:
            identity = -self._responses  # others' are not negative
        opened = self._rows[row] = _Row(prompt, identity, self._responses, start)
        self._set_row(row, prompt.slot, opened.number, start, 0)
        self._starts[row], self._pages_of[row] = start, 0

    def close_row(self, row: int) -> None:
        """Let go of a row; its response stays with the prompt."""
        closed = self._rows.pop(row, None)
        if closed is None:
            return
        closed.prompt.rows -= 1
        known = closed.prompt.responses.setdefault(closed.identity, [])
        known += closed.positions
        self._pages_of[row] = _NO_MORE
        self._values[self._row + row * ROW] = -1

    def forget(self) -> None:
        """Let go of all prompts that have no rows."""
        for key in [key for key, prompt in self._prompts.items() if not prompt.rows]:
            self._evict(key)

    def _opened(self, key: bytes, history: Sequence[tuple[int, bytes]]) -> _Prompt | None:
        """A prompt with its history; None: there is no place for it."""
        prompt = self._prompts.get(key)
        if prompt is not None and not prompt.rows and history:
            # Its pages are used up by rows that ended: begin anew from what the cache has.
            more = sum(-(-(len(tokens) // 4 + 1) // PAGE) for _, tokens in history)
            if len(prompt.listed) + more > PAGES_OF_HISTORY:
                self._evict(key)
                prompt = None
        if prompt is None:
            if not self._free_slots:
                self._evict_idle()
            if not self._free_slots or not (self._free or self._evict_idle()):
                return None
            prompt = self._prompts[key] = _Prompt(self._free_slots.pop())
        self._prompts.move_to_end(key)
        prompt.rows += 1  # not to be evicted for its own history
        self._write_history(prompt, history)
        prompt.rows -= 1
        return prompt

    def _write_history(self, prompt: _Prompt, history: Sequence[tuple[int, bytes]]) -> None:
        """Write the newest responses that fit, and keep their order."""
        room = min(PAGES_OF_HISTORY, self.table.shape[1]) - len(prompt.listed)
        taken: list[tuple[int, npt.NDArray[np.int32]]] = []
        for identity, data in reversed(history):
            tokens = np.frombuffer(data, np.int32)
            if identity in prompt.responses or not len(tokens):
                continue
            if tokens.min() < 0 or tokens.max() >= self.vocabulary:
                self.counts.refused += 1
                continue
            if len(tokens) > self.max_model_len:
                self.counts.cut += 1
                tokens = tokens[: self.max_model_len]
            pages = -(-(len(tokens) + 1) // PAGE)
            needed = pages + sum(len(cells) for _, cells in taken)
            if pages > room or not self._make_room(needed):
                self.counts.responses += 1
                continue
            room -= pages
            whole = np.full(pages * PAGE, EMPTY, np.int32)
            whole[0], whole[1 : len(tokens) + 1] = START, tokens
            taken.append((identity, whole.reshape(pages, PAGE)))
        for identity, contents in reversed(taken):
            self._responses += 1
            positions = prompt.responses[identity] = []
            for cells in contents:
                self._add_page(prompt, positions, self._responses, cells)

    def _make_room(self, pages: int) -> bool:
        """Have so many pages free, if need be at the expense of prompts without rows."""
        while len(self._free) < pages:
            if not self._evict_idle():
                return False
        return True

    def _evict_idle(self) -> bool:
        """Drop the prompt without rows that was unused for longest; False: there is none."""
        for key, prompt in self._prompts.items():
            if not prompt.rows:
                self._evict(key)
                self.counts.evicted += 1
                return True
        return False

    def _evict(self, key: bytes) -> None:
        prompt = self._prompts.pop(key)
        for position in range(len(prompt.listed)):
            self._remove_page(prompt, position)
        self._free_slots.append(prompt.slot)

    def _take_away(self, prompt: _Prompt, identity: int) -> None:
        """Remove a response."""
        for position in prompt.responses.pop(identity, ()):
            self._remove_page(prompt, position)

    def _remove_page(self, prompt: _Prompt, position: int) -> None:
        page, prompt.listed[position] = prompt.listed[position], -1
        if page >= 0:
            self._values[self._table + prompt.slot * self.table.shape[1] + position] = -1
            self._contents.pop(page, None)
            self._free.append(page)

    def _add_page(
        self, prompt: _Prompt, positions: list[int], number: int, cells: npt.NDArray[np.int32]
    ) -> int:
        """Append a page to a response; the page. There has to be a free one."""
        page = self._free.pop()
        before = prompt.listed[positions[-1]] if positions else -1
        link = self._links + page * LINKS
        self._values |= {link: before, link + 1: -1, link + 2: number}
        if before >= 0:
            self._values[self._links + before * LINKS + BEHIND] = page
        self._values[self._table + prompt.slot * self.table.shape[1] + len(prompt.listed)] = page
        self._contents[page] = cells
        positions.append(len(prompt.listed))
        prompt.listed.append(page)
        return page

    def _set_row(self, row: int, *values: int) -> None:
        place = self._row + row * ROW
        self._values |= {place + i: value for i, value in enumerate(values)}

    def _extend(self, row: int, tokens: int) -> None:
        """Have pages for so many tokens of a row's response."""
        extended = self._rows[row]
        prompt, positions = extended.prompt, extended.positions
        while len(positions) * PAGE <= tokens and len(positions) < self.pages_of_row:
            if len(prompt.listed) == self.table.shape[1] or not self._make_room(1):
                self.counts.rows += 1
                self._pages_of[row] = _NO_MORE
                return
            cells = np.full(PAGE, EMPTY, np.int32)
            if not positions:
                cells[0] = START
            page = self._add_page(prompt, positions, extended.number, cells)
            place = self._row_pages + row * self.pages_of_row + len(positions) - 1
            self._values[place] = page
        self._pages_of[row] = len(positions)

    # What the device does.

    def draft(
        self,
        batch_rows: torch.Tensor,
        batch_rows_host: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.integer[Any]],
        all_tokens: torch.Tensor,
        total_lengths: torch.Tensor,
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
        anyway: bool = False,
    ) -> torch.Tensor:
        """Append what a step has yielded, and draft for each of its rows.

        Args:
            batch_rows: rows of the batch, on the device, int ``[n]``.
            batch_rows_host: the same on the host.
            lengths: tokens that these rows may have at most by now, prompt included, ``[n]``.
            all_tokens: of rows, int32 ``[rows, max_model_len]``, on the device.
            total_lengths: tokens of rows, int32 ``[rows]``, on the device.
            num_sampled: by row of the batch, tokens that the step yielded, int32 ``[n]``.
            last_sampled: of rows, int64 ``[rows]``, on the device; fills drafts.
            anyway: launch all kernels, also where no row has a prompt.

        Returns:
            int64 ``[n, length]`` on the device, in the order of the batch.
        """
        n = len(batch_rows)
        most = np.minimum(lengths, self.max_model_len) - self._starts[batch_rows_host]
        for i in np.flatnonzero(self._pages_of[batch_rows_host] * PAGE <= most):
            self._extend(int(batch_rows_host[i]), int(most[i]))
        self._write_changes()
        of_batch = [row for row in map(self._rows.get, batch_rows_host.tolist()) if row is not None]
        pages = max([1, *(len(row.prompt.listed) for row in of_batch)])
        offers = torch.empty(n * pages * OFFERED, dtype=torch.int32, device=self.device)
        if of_batch or anyway:
            kernels.append[(n,)](
                self.pool, self.rows, self.row_pages, self._contexts, batch_rows, all_tokens,
                total_lengths, num_sampled, all_tokens.stride(0), self.pages_of_row,
            )  # fmt: skip
            kernels.search[(n, -(-pages // self.tile))](
                self.pool, self.links, self.table, self.rows, self._contexts, offers, batch_rows,
                self.table.stride(0), pages, self.tile,
            )  # fmt: skip
            self.launches += 2
        kernels.vote[(n,)](
            self.pool, self.links, self.table, self.rows, offers, self.drafts, self.confidences,
            batch_rows, last_sampled, self._chances, self.table.stride(0), pages, self.length,
        )  # fmt: skip
        self.launches += 1
        return self.drafts[:n]

    def warm_up(self) -> None:
        """Have all kernels compiled, for which steps would wait. There are no rows yet."""
        assert not self._rows
        row, tokens = torch.zeros(2, 1, dtype=torch.int32, device=self.device)
        last = torch.zeros(1, dtype=torch.int64, device=self.device)
        host = np.zeros(1, np.int32)
        self._write_changes(anyway=True)
        self.draft(row, host, host, tokens[:, None], tokens, row, last, anyway=True)

    def _write_changes(self, anyway: bool = False) -> None:
        """Write pages and values that the host has decided on since the last step."""
        if not (self._contents or self._values or anyway):
            return
        pages, contents, places, values = (
            self._to_device(array)
            for array in (
                np.fromiter(self._contents, np.int32),
                np.concatenate([*self._contents.values(), np.zeros(1, np.int32)]),
                np.fromiter(self._values, np.int64),
                np.fromiter(self._values.values(), np.int32),
            )
        )
        count = len(values)
        kernels.update[(len(pages) + -(-count // kernels.SCATTERED.value) or 1,)](
            self.pool, self.state, pages, contents, places, values, len(pages), count
        )
        self.launches += 1
        self._contents, self._values = {}, {}

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type != "cpu":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def take_totals(self) -> tuple[int, int]:
        """Steps that yielded tokens of rows with drafts, and these tokens, since they were taken.

        Reads from the device: for the end of a batch.
        """
        totals = self.rows[:, 4:].sum(0).tolist()
        self.rows[:, 4:] = 0
        return int(totals[0]), int(totals[1])

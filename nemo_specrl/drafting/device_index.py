"""The responses that drafts are made from: which are on the device, and where.

For each prompt there are the earlier responses, written once, and those of the rows that run now,
to which every step appends on the device, so that the rows of a prompt draft for each other. All
are in pages of one pool; ``reference`` describes them. The host decides which page belongs to what.
It knows how long responses may have become, but not their tokens, and waits for nothing.

Memory is bounded. Prompts without rows make room first, the least recently used before others; then
a prompt's oldest responses make room for its rows, as they do where its list of pages is full. If
that does not suffice, responses are left out and counted, and their rows draft less or nothing.

The pages of the responses that ended last, to whatever prompt, are the corpus, from which rows
draft if their own prompt has nothing. It lists pages that belong to their prompts, so it takes no
further memory, and it forgets those that are freed to make room.

Whatever happens here follows from the steps that vLLM schedules, in their order, so that every rank
of an engine has the same pages in the same order and makes the same drafts.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nemo_specrl.drafting.device_arrays import CORPUS, LINKS, ROW, STOPS, DeviceArrays
from nemo_specrl.drafting.reference import EMPTY, PAGE, START

__all__ = ["DeviceIndex"]

BEHIND = 1
_NO_MORE = 2**40
"""Used in place of a number of pages: the row gets no further ones."""


@dataclasses.dataclass
class IndexCounts:
    """Counts of what did not fit, since the start.

    Args:
        prompts: rows for whose prompt there was no room.
        responses: earlier responses that were left out for lack of memory.
        rows: rows whose own tokens were not indexed to their end.
        refused: earlier responses with tokens outside of the vocabulary.
        cut: earlier responses that were longer than ``max_model_len``.
        evicted: prompts that were evicted to make room.
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
        self.holes: list[int] = []  # positions of the latter, which are used again
        self.responses: dict[int, list[int]] = {}  # identity: positions in the list
        self.rows = 0


class _Row:
    """A row that runs: its pages are the last ones of a response."""

    def __init__(self, prompt: _Prompt, identity: int, number: int, start: int) -> None:
        self.prompt, self.identity, self.number, self.start = prompt, identity, number, start
        self.positions: list[int] = []  # in the prompt's list


class DeviceIndex(DeviceArrays):
    """Which pages belong to which responses, prompts and rows.

    Args:
        device: device of the arrays.
        max_rows: the most rows that vLLM runs at once.
        max_model_len: the most tokens of a row.
        vocabulary: valid tokens are at least 0 and below this.
        max_bytes: size in bytes of all arrays together.
        length: tokens of a draft.
        chances: table of chances (:data:`~nemo_specrl.drafting.chances.CHANCES`).
        learning: see :class:`DeviceArrays`.
        agree: likewise.

    Attributes:
        counts: see :class:`IndexCounts`.
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
        learning: int = 0,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(
            device, max_rows, max_model_len, max_bytes, length, chances, learning, agree
        )
        self.vocabulary, self.counts = vocabulary, IndexCounts()
        slots = len(self.table) if len(self.pool) else 0
        self._free, self._free_slots = list(range(len(self.pool)))[::-1], list(range(slots))[::-1]
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._rows: dict[int, _Row] = {}
        self._pages_of = np.full(max_rows, _NO_MORE)  # of rows
        self._starts = np.zeros(max_rows, np.int64)
        # The most pages of a prompt for earlier responses, of which the newest are taken.
        self._history = min(self.pages_of_prompt * 3 // 4, self.table.shape[1])
        self._responses = 0
        self._shared = 0  # pages added to the corpus so far
        self._corpus = [-1] * CORPUS  # pages by place, -1 for those that were removed
        self._places: dict[int, int] = {}  # and the place of each of these pages
        self._contents: dict[int, npt.NDArray[np.int32]] = {}  # to write with the next step
        self._values: dict[int, int] = {}

    def __len__(self) -> int:
        """Prompts that have pages."""
        return len(self._prompts)

    def open_row(
        self,
        row: int,
        key: bytes,
        identity: int,
        history: Sequence[tuple[int, bytes]],
        start: int,
        brought: int = 0,
        *,
        most: int | None = None,
        stops: Collection[int] = (),
    ) -> None:
        """Make a row draft from its prompt's responses.

        Args:
            row: its place in vLLM's arrays.
            key: the prompt's key.
            identity: identity of the row's response.
            history: earlier responses as identity and int32 tokens, oldest first; those that are
                already here are skipped.
            start: number of tokens of the prompt, after which the response begins.
            brought: number of tokens of the response that the row has already.
            most: the most tokens that the response may have; None: any number.
            stops: tokens that end it. Only the smallest ``STOPS`` of them are used; responses that
                end with one of the others also get what a step yields after their end.
        """
        self.close_row(row)
        prompt = self._opened(key, history)
        if prompt is None:
            self.counts.prompts += 1
            return
        prompt.rows += 1
        if brought and not any(
            other.prompt is prompt and other.identity == identity for other in self._rows.values()
        ):
            self._take_away(prompt, identity)  # begun before vLLM preempted it
        self._responses += 1
        opened = self._rows[row] = _Row(prompt, identity, self._responses, start)
        most = self.max_model_len if most is None else most
        ends = (sorted(stops) + [-1] * STOPS)[:STOPS]
        self._set_row(row, prompt.slot, opened.number, start, 0, most, *ends)
        self._starts[row], self._pages_of[row] = start, 0

    def close_row(self, row: int) -> None:
        """Release a row; its response stays with the prompt."""
        closed = self._rows.pop(row, None)
        if closed is None:
            return
        closed.prompt.rows -= 1
        known = closed.prompt.responses.setdefault(closed.identity, [])
        known += closed.positions
        for position in closed.positions:
            self._share(closed.prompt.listed[position])
        self._pages_of[row] = _NO_MORE
        self._values[self.rows_at + row * ROW] = -1
        # The next request in this place may get fewer pages, and must not write into these.
        place = self.row_pages_at + row * self.pages_of_row
        self._values |= {place + i: -1 for i in range(len(closed.positions))}

    def forget(self) -> None:
        """Release all prompts that have no rows."""
        for key in [key for key, prompt in self._prompts.items() if not prompt.rows]:
            self._evict(key)

    def _opened(self, key: bytes, history: Sequence[tuple[int, bytes]]) -> _Prompt | None:
        """Return a prompt with its history; None if there is no room for it."""
        prompt = self._prompts.get(key)
        if prompt is not None and not prompt.rows and history:
            # Its pages are used up by rows that ended: start again from what the cache has.
            more = sum(-(-(len(tokens) // 4 + 1) // PAGE) for _, tokens in history)
            if len(prompt.listed) + more > self._history:
                self._evict(key)
                prompt = None
        if prompt is None:
            if not self._free_slots:
                self._evict_idle()
            if not self._free_slots or not (self._free or self._evict_idle()):
                return None
            prompt = self._prompts[key] = _Prompt(self._free_slots.pop())
        self._prompts.move_to_end(key)
        prompt.rows += 1  # so that it is not evicted for its own history
        self._write_history(prompt, history)
        prompt.rows -= 1
        return prompt

    def _write_history(self, prompt: _Prompt, history: Sequence[tuple[int, bytes]]) -> None:
        """Write the newest responses that fit, and keep their order."""
        room = self._history - len(prompt.listed) + len(prompt.holes)
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
        """Make that many pages free, if need be at the expense of prompts without rows."""
        while len(self._free) < pages:
            if not self._evict_idle():
                return False
        return True

    def _evict_idle(self) -> bool:
        """Drop the least recently used prompt without rows; False if there is none."""
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

    def _drop_oldest(self, prompt: _Prompt) -> bool:
        """Remove a prompt's oldest response that has pages; False if there is none."""
        while prompt.responses:
            oldest, positions = next(iter(prompt.responses.items()))
            self._take_away(prompt, oldest)
            if positions:
                return True
        return False

    def _share(self, page: int) -> None:
        """Take a page into the corpus, in place of the one that has been there longest."""
        place = self._shared % CORPUS
        self._places.pop(self._corpus[place], None)
        self._shared += 1
        self._places[page], self._corpus[place] = place, page
        self._values[self.corpus_at + place] = page

    def _remove_page(self, prompt: _Prompt, position: int) -> None:
        page, prompt.listed[position] = prompt.listed[position], -1
        if page >= 0:
            prompt.holes.append(position)
            self._values[self.table_at + prompt.slot * self.table.shape[1] + position] = -1
            self._contents.pop(page, None)
            self._free.append(page)
            place = self._places.pop(page, None)
            if place is not None:
                self._corpus[place] = self._values[self.corpus_at + place] = -1

    def _add_page(
        self, prompt: _Prompt, positions: list[int], number: int, cells: npt.NDArray[np.int32]
    ) -> int:
        """Append a page to a response and return the page. There must be a free one."""
        page = self._free.pop()
        before = prompt.listed[positions[-1]] if positions else -1
        link = self.links_at + page * LINKS
        self._values |= {link: before, link + 1: -1, link + 2: number}
        if before >= 0:
            self._values[self.links_at + before * LINKS + BEHIND] = page
        if not prompt.holes:
            prompt.holes.append(len(prompt.listed))
            prompt.listed.append(-1)
        position = prompt.holes.pop()
        self._values[self.table_at + prompt.slot * self.table.shape[1] + position] = page
        self._contents[page] = cells
        positions.append(position)
        prompt.listed[position] = page
        return page

    def _set_row(self, row: int, *values: int) -> None:
        place = self.rows_at + row * ROW
        self._values |= {place + i: value for i, value in enumerate(values)}

    def _extend(self, row: int, tokens: int) -> None:
        """Ensure that there are pages for that many tokens of a row's response."""
        extended = self._rows[row]
        prompt, positions = extended.prompt, extended.positions
        while len(positions) * PAGE <= tokens and len(positions) < self.pages_of_row:
            listable = prompt.holes or len(prompt.listed) < self.table.shape[1]
            if not (listable and self._make_room(1)) and not self._drop_oldest(prompt):
                self.counts.rows += 1
                self._pages_of[row] = _NO_MORE
                return
            cells = np.full(PAGE, EMPTY, np.int32)
            if not positions:
                cells[0] = START
            page = self._add_page(prompt, positions, extended.number, cells)
            place = self.row_pages_at + row * self.pages_of_row + len(positions) - 1
            self._values[place] = page
        self._pages_of[row] = len(positions)

    def draft(
        self,
        batch_rows: torch.Tensor,
        batch_rows_host: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.integer[Any]],
        all_tokens: torch.Tensor,
        total_lengths: torch.Tensor,
        last_sampled: torch.Tensor,
        length: int | None = None,
    ) -> torch.Tensor:
        """Append what a step yielded, and draft for each of its rows.

        Args:
            batch_rows: rows of the batch, on the device, int ``[n]``.
            batch_rows_host: the same on the host.
            lengths: the most tokens that these rows may have by now, prompt included, ``[n]``.
            all_tokens: tokens of rows, int32 ``[rows, max_model_len]``, on the device.
            total_lengths: tokens of rows, int32 ``[rows]``, on the device.
            last_sampled: last sampled token of rows, int64 ``[rows]``, on the device; fills drafts.
            length: draft only that many tokens, 0: append alone; None: as many as fit.

        Returns:
            int64 ``[n, length]`` on the device, in the order of the batch.
        """
        most = np.minimum(lengths, self.max_model_len) - self._starts[batch_rows_host]
        for i in np.flatnonzero(self._pages_of[batch_rows_host] * PAGE <= most):
            self._extend(int(batch_rows_host[i]), int(most[i]))
        self.write(self._contents, self._values)
        self._contents, self._values = {}, {}
        of_batch = [row for row in map(self._rows.get, batch_rows_host.tolist()) if row is not None]
        pages = max([1, *(len(row.prompt.listed) for row in of_batch)])
        arrays = (all_tokens, total_lengths, last_sampled)
        corpus = min(self._shared, CORPUS)
        return self.launch(batch_rows, pages, *arrays, corpus, bool(of_batch), length)

"""Pages of an LMDB file, read and checked without LMDB.

LMDB trusts its pages: a flipped bit in the size of a value, in the free list or in a meta page
makes it read outside its memory map, and the process dies by SIGBUS or SIGABRT. This module reads
the same file with ``pread`` and believes nothing in it, so that a store can look at its file before
LMDB does, and so that ``nemo-specrl cache inspect`` needs no LMDB at all.

The format is that of LMDB 0.9 (data version 1) on 64-bit little-endian machines. A page has a
header of 16 bytes (u64 page number, u16 padding, u16 flags, u16 lower, u16 upper; or u32 number of
pages instead of the last two), pointers u16 to its nodes, and the nodes packed at its end. A node
is u16 low and u16 high half of the size, u16 flags, u16 key size, the key and the value; a value
that is too large for that lies on overflow pages, whose number stands in its place.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

__all__ = ["PageFile"]

Pages = npt.NDArray[np.int64]
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_BIG, _SUB_TREE = 1, 2
_MAGIC, _VERSION, _INTEGER_KEYS, _NO_SUBDIR = 0xBEEFC0DE, 1, 8, 0x4000
_HEADER = struct.Struct("<QHHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_META_PAGE = struct.Struct("<IIQQ48s48sQQ")
_NO_PAGE = 2**64 - 1
_MAX_KEY = 511
_MAX_DEPTH = 32
_AT_ONCE = 256  # pages


class Tree(NamedTuple):
    """A B+ tree as its parent, or the meta page, describes it."""

    page_size: int  # of the free list's tree; 0 in others
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Nodes(NamedTuple):
    """The nodes of some pages of one kind: one row a node, ``[nodes]`` int64 each."""

    page: Pages  # row of ``data``
    at: Pages  # offset in the page
    key_size: Pages
    size: Pages  # of the value; of a branch's node: the child's page number
    flags: Pages
    overflow: Pages  # first overflow page of the value; -1: it is in the node
    data: npt.NDArray[np.uint8]  # the pages, ``[pages, page size]``


class PageFile:
    """An LMDB file that is read page by page.

    Args:
        file: with the pages. Nobody should write to it meanwhile; whoever does makes it look
            damaged, and nothing worse.

    Attributes:
        known: whether it has this module's format; if not, nothing else can be asked of it.
        complete: whether :meth:`check` has come to its end.

    Raises:
        lmdb.CorruptedError: its meta pages make no sense, or it is cut off.
        OSError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._size = os.fstat(self._file).st_size
            self.known = self.complete = False
            if self._size and sys.byteorder == "little" and struct.calcsize("P") == 8:
                self._read_meta()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_meta(self) -> None:
        metas = []
        page_size = 0
        for number in range(2):
            page = os.pread(self._file, 16 + _META_PAGE.size, number * page_size)
            if len(page) < 16 + _META_PAGE.size:
                raise lmdb.CorruptedError(f"cut off at {self._size} bytes")
            meta = _META_PAGE.unpack_from(page, 16)
            free = Tree._make(_TREE.unpack(meta[4]))
            if number == 0:
                page_size = free.page_size
                if page_size not in {2**n for n in range(9, 17)}:
                    raise lmdb.CorruptedError(f"pages of {page_size} bytes")
            elif free.page_size != page_size:
                raise lmdb.CorruptedError("its meta pages name two page sizes")
            metas.append((page, meta, free))
        versions = {meta[1] for _, meta, _ in metas}
        if len(versions) == 1 and _VERSION not in versions:
            return  # of another LMDB, which will say so
        txns = [meta[7] for _, meta, _ in metas]
        for number, (page, meta, free) in enumerate(metas):
            flags = _HEADER.unpack_from(page)[2]
            if meta[0] != _MAGIC or meta[1] != _VERSION or flags != _META:
                raise lmdb.CorruptedError(f"page {number} is no meta page")
            # The transaction that a meta page is of alternates between both.
            if max(txns) and (txns[number] - number) % 2:
                raise lmdb.CorruptedError(f"transaction {txns[number]} in meta page {number}")
            if free.flags & ~_NO_SUBDIR != _INTEGER_KEYS:
                raise lmdb.CorruptedError(f"flags {free.flags:#x} in meta page {number}")
        if abs(txns[0] - txns[1]) > 1:
            raise lmdb.CorruptedError(f"meta pages of the transactions {txns[0]} and {txns[1]}")
        newer = txns[1] > txns[0]
        _, meta, self._free = metas[newer]
        self._main = Tree._make(_TREE.unpack(meta[5]))
        self._main_before = Tree._make(_TREE.unpack(metas[not newer][1][5]))
        self._last, self._transaction = meta[6], meta[7]
        self._page_size = page_size
        if self._main.flags:
            raise lmdb.CorruptedError(f"flags {self._main.flags:#x} of its main table")
        if self._size < (self._last + 1) * page_size:
            raise lmdb.CorruptedError(
                f"cut off at {self._size} of {(self._last + 1) * page_size} bytes"
            )
        self.known = True

    def tables(self) -> dict[bytes, Tree]:
        """The tables by name; of a value that describes none, a tree of depth -1.

        Raises:
            lmdb.CorruptedError: the main table is damaged.
        """
        return self._tables(self._main)

    def had_tables(self, names: Collection[bytes]) -> bool:
        """Whether these were the tables before the last transaction, whose pages are still there.

        A flipped bit in the newer meta page can make the file look like one of something else.
        """
        try:
            return self._tables(self._main_before).keys() == set(names)
        except lmdb.CorruptedError:
            return False

    def _tables(self, main: Tree) -> dict[bytes, Tree]:
        found = {}
        for name, value, flags in self._items(main):
            found[name] = Tree(0, 0, -1, 0, 0, 0, 0, 0)
            if flags == _SUB_TREE and len(value) == _TREE.size:
                found[name] = Tree._make(_TREE.unpack(value))
        return found

    def items(self, tree: Tree) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a table, in order.

        Raises:
            lmdb.CorruptedError: it came upon a damaged page.
        """
        for key, value, _ in self._items(tree):
            yield key, value

    def check(self, first: str, mark: bytes = b"", *, seconds: float) -> None:
        """Check what LMDB believes: no page is used twice, and nothing points outside its page.

        Args:
            first: name of the table in which ``mark`` is.
            mark: prefix of the keys to begin with.
            seconds: after which the check ends, wherever it is.

        Raises:
            lmdb.CorruptedError: something is wrong.
        """
        until = time.monotonic() + seconds
        tables = self.tables()
        used = np.zeros(self._last + 1, np.bool_)
        used[:2] = True
        overflows: list[Pages] = []
        if not self._walk(self._free, used, until, overflows):
            return
        self._check_free_list(used)
        trees = sorted(tables.items(), key=lambda item: item[0] == first.encode())
        if any(tree.flags or tree.depth < 0 for _, tree in trees):
            raise lmdb.CorruptedError("a table's description makes no sense")
        if mark and first.encode() in tables:
            self._check_records(tables[first.encode()], mark)
        for tree in (self._main, *(tree for _, tree in trees)):
            if not self._walk(tree, used, until, overflows):
                return
        for pages in overflows:
            for start in range(0, len(pages), _AT_ONCE):
                if time.monotonic() > until:
                    return
                for page in pages[start : start + _AT_ONCE].tolist():
                    self._check_overflow(page, 1)
        self.complete = True

    def _walk(self, tree: Tree, used: Any, until: float, overflows: list[Pages]) -> bool:
        """Check all pages of a tree and mark them as used; false if there was no time for it."""
        branches = leaves = large = entries = 0
        for depth, pages in self._levels(tree):
            last = depth == tree.depth
            _use(used, pages)
            branches += 0 if last else len(pages)
            leaves += len(pages) if last else 0
            if not last:
                continue
            for start in range(0, len(pages), _AT_ONCE):
                if time.monotonic() > until:
                    return False
                nodes = self._nodes(pages[start : start + _AT_ONCE], _LEAF)
                big = nodes.overflow >= 0
                first, count = nodes.overflow[big], self._pages_of(nodes.size[big])
                one = count == 1
                _use(used, first[one])
                overflows.append(first[one])
                for page, number in zip(first[~one].tolist(), count[~one].tolist(), strict=True):
                    self._check_overflow(page, number)
                    _use(used, np.arange(page, page + number))
                large += int(count.sum())
                entries += len(nodes.at)
        if (branches, leaves, large, entries) != tree[3:7]:
            raise lmdb.CorruptedError(
                f"a table has {branches}, {leaves} and {large} pages and {entries} entries, "
                f"described as {tree[3:7]}"
            )
        return True

    def _levels(self, tree: Tree) -> Iterator[tuple[int, Pages]]:
        """Depth and pages of each level of a tree, from the root, in the order of their keys."""
        if tree.root == _NO_PAGE:
            if tree.depth:
                raise lmdb.CorruptedError("a table without a root")
            return
        if not 0 < tree.depth <= _MAX_DEPTH or not 2 <= tree.root <= self._last:
            raise lmdb.CorruptedError(f"a table of depth {tree.depth} at page {tree.root}")
        pages = np.array([tree.root], np.int64)
        for depth in range(1, tree.depth):
            yield depth, pages
            below = []
            for start in range(0, len(pages), _AT_ONCE):
                nodes = self._nodes(pages[start : start + _AT_ONCE], _BRANCH)
                if tree.flags == 0 and (np.bincount(nodes.page) < 2).any():
                    raise lmdb.CorruptedError("a branch page with one child")
                below.append(nodes.size)
            pages = np.concatenate(below)
            if len(pages) > self._last:  # a page that is its own descendant
                raise lmdb.CorruptedError("a table with more pages than the file")
        yield tree.depth, pages

    def _nodes(self, pages: Pages, kind: int) -> _Nodes:
        """Read pages, check them, and find their nodes."""
        size = self._page_size
        data = np.frombuffer(b"".join(self._page(page) for page in pages.tolist()), np.uint8)
        data = data.reshape(-1, size)
        words = data.view("<u2")
        numbers = data.view("<u8")[:, 0].astype(np.int64)
        lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
        wrong = (numbers != pages) | (words[:, 5] != kind) | (lower < 18) | (lower % 2 > 0)
        wrong |= (upper < lower) | (upper > size - 8) | (upper % 2 > 0)
        _none(wrong, pages, "has a header that makes no sense")
        counts = (lower - 16) // 2
        page = np.repeat(np.arange(len(pages)), counts)
        index = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = words[page, 8 + index].astype(np.int64)
        _none((at < upper[page]) | (at % 2 > 0) | (at > size - 8), pages[page], "points nowhere")
        low, high, flags, key_size = (
            words[page, at // 2 + word].astype(np.int64) for word in range(4)
        )
        value = low | high << 16
        overflow = np.full(len(page), -1, np.int64)
        if kind == _BRANCH:
            value |= flags << 32
            _none((value < 2) | (value > self._last), pages[page], "has a child outside the file")
            end = at + 8 + key_size
        else:
            big = flags == _BIG
            end = at + 8 + key_size + np.where(big, 8, value)
            wrong = (flags & ~(_BIG | _SUB_TREE)) > 0
            _none(wrong | (key_size < 1) | (key_size > _MAX_KEY), pages[page], "has a bad node")
        # Nodes lie side by side from ``upper`` to the page's end, in any order.
        order = np.lexsort((at, page))
        behind = np.append(at[order][1:], 0)
        behind[np.cumsum(counts) - 1] = size
        _none((end + end % 2)[order] != behind, pages[page[order]], "has nodes that overlap")
        _none(np.minimum.reduceat(at, np.cumsum(counts) - counts) != upper, pages, "has a gap")
        if kind == _LEAF and big.any():
            rows, starts = page[big], (at + 8 + key_size)[big]
            bytes_ = data[rows[:, None], starts[:, None] + np.arange(8)]
            first = np.ascontiguousarray(bytes_).view("<u8")[:, 0]
            last = first + self._pages_of(value[big]).astype(np.uint64)
            _none((first < 2) | (first > self._last) | (last > self._last + 1),
                  pages[rows], "has a value outside the file")  # fmt: skip
            overflow[big] = first.astype(np.int64)
        return _Nodes(page, at, key_size, value, flags, overflow, data)

    def _items(self, tree: Tree) -> Iterator[tuple[bytes, bytes, int]]:
        for depth, pages in self._levels(tree):
            if depth < tree.depth:
                continue
            for start in range(0, len(pages), _AT_ONCE):
                yield from self._items_of(self._nodes(pages[start : start + _AT_ONCE], _LEAF))

    def _items_of(self, nodes: _Nodes) -> Iterator[tuple[bytes, bytes, int]]:
        data = nodes.data.tobytes()
        for page, at, key_size, size, flags, overflow in zip(
            *(column.tolist() for column in nodes[:6]), strict=True
        ):
            key_at = page * self._page_size + at + 8
            value_at = key_at + key_size
            value = (
                data[value_at : value_at + size]
                if overflow < 0
                else self._read(size, overflow * self._page_size + 16)
            )
            yield data[key_at:value_at], value, flags

    def _check_free_list(self, used: Any) -> None:
        """Check the lists of free pages, and mark those as used: no tree may have them."""
        before = 0
        for key, value, _ in self._items(self._free):
            if len(key) != 8 or len(value) < 8 or len(value) % 8:
                raise lmdb.CorruptedError("an entry of the free list has a wrong size")
            transaction = int.from_bytes(key, "little")
            pages = np.frombuffer(value, "<u8")
            count = int(pages[0])
            pages = pages[1:]
            if not before < transaction <= self._transaction or count > len(pages):
                raise lmdb.CorruptedError(f"entry {transaction} of the free list makes no sense")
            before = transaction
            pages = pages[:count]
            if ((pages < 2) | (pages > self._last)).any() or (pages[1:] >= pages[:-1]).any():
                raise lmdb.CorruptedError("a page of the free list is outside the file")
            _use(used, pages.astype(np.int64))

    def _check_records(self, tree: Tree, mark: bytes) -> None:
        """Check the path to the keys that begin with ``mark``, and the pages of their values."""
        pages = [tree.root]
        for depth in range(1, tree.depth + 1):
            last = depth == tree.depth
            nodes = self._nodes(np.array(pages, np.int64), _LEAF if last else _BRANCH)
            data = nodes.data.tobytes()
            keys = [
                data[at : at + size]
                for at, size in zip(
                    (nodes.page * self._page_size + nodes.at + 8).tolist(),
                    nodes.key_size.tolist(),
                    strict=True,
                )
            ]
            if not last:
                # A child has the keys from its own on, up to that of the next one.
                behind = [*keys[1:], b"\xff" * _MAX_KEY]
                near = [k[: len(mark)] <= mark <= b for k, b in zip(keys, behind, strict=True)]
                pages = [int(nodes.size[i]) for i in np.flatnonzero(near)][:_AT_ONCE]
                continue
            for key, page, size in zip(
                keys, nodes.overflow.tolist(), nodes.size.tolist(), strict=True
            ):
                if page >= 0 and key.startswith(mark):
                    self._check_overflow(page, int(self._pages_of(np.array(size))))

    def _check_overflow(self, page: int, count: int) -> None:
        header = os.pread(self._file, 16, page * self._page_size)
        number, _, flags, low, high = _HEADER.unpack(header)
        if (number, flags, low | high << 16) != (page, _OVERFLOW, count):
            raise lmdb.CorruptedError(f"page {page} is not the value that it should be")

    def _pages_of(self, size: Pages) -> Pages:
        """Overflow pages of values of so many bytes."""
        pages: Pages = (size + 15) // self._page_size + 1
        return pages

    def _page(self, page: int) -> bytes:
        return self._read(self._page_size, page * self._page_size)

    def _read(self, size: int, at: int) -> bytes:
        data = os.pread(self._file, size, at)
        if len(data) < size:
            raise lmdb.CorruptedError(f"cut off at {at + len(data)} bytes")
        return data


def _use(used: Any, pages: Pages) -> None:
    if len(pages):
        if used[pages].any() or (len(pages) > 1 and (np.diff(np.sort(pages)) == 0).any()):
            raise lmdb.CorruptedError("a page is used twice")
        used[pages] = True


def _none(wrong: Any, pages: Pages, what: str) -> None:
    if wrong.any():
        raise lmdb.CorruptedError(f"page {int(pages[int(np.argmax(wrong))])} {what}")

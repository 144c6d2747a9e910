"""Stands for the kernels of V2 drafting where Triton's interpreter would take too long.

The same launches on the same arrays, by the numpy reference; ``tests/drafting`` compares
the two bit for bit.
"""

import numpy as np

from nemo_specrl.drafting import reference
from nemo_specrl.drafting.chances import learned
from nemo_specrl.drafting.kernels import SCATTERED

__all__ = ["SCATTERED", "append", "learn", "search", "update", "vote"]


class Launch:
    """A function that is called like a kernel: ``function[grid](arguments)``."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*args):
            self.function(*(x.numpy() if hasattr(x, "numpy") else x for x in args))

        return launch


@Launch
def update(pool, state, pages, contents, places, values, num_pages, num_values):
    pool[pages] = contents[: num_pages * pool.shape[1]].reshape(-1, pool.shape[1])
    state[places] = values


@Launch
def append(
    pool,
    rows,
    row_pages,
    contexts,
    batch_rows,
    tokens,
    totals,
    drafted,
    of_drafted,
    outcomes,
    stride,
    pages_of_row,
    draft_stride,
    source_stride,
    learning,
):
    for b, row in enumerate(batch_rows):
        slot, _, start, known, most = rows[row, :5]
        if slot < 0:
            continue
        response = tokens[row, start : totals[row]]
        contexts[b] = reference.context_of(response.tolist())
        end = min(len(response), most)
        stops = set(rows[row, 5:9].tolist())
        for i in range(known, end):
            if response[i] in stops:
                end = most = i + 1
                break
        cells = np.arange(known, end) + 1
        page = row_pages[row, np.minimum(cells // pool.shape[1], pages_of_row - 1)]
        there = (page >= 0) & (cells // pool.shape[1] < pages_of_row)
        pool[page[there], cells[there] % pool.shape[1]] = response[known:end][there]
        rows[row, 3:5] = end, most
        for source in range(learning if known else 0):
            tried, right = reference.graded(
                drafted[source, row], of_drafted[source, row], response[known:end]
            )
            np.add.at(outcomes, (tried, 0), 1)
            np.add.at(outcomes, (right, 1), 1)


@Launch
def learn(outcomes, prior, chances, num_cells):
    chances[:] = learned(prior, outcomes)


@Launch
def search(
    pool,
    links,
    table,
    corpus,
    rows,
    contexts,
    offers,
    batch_rows,
    stride,
    num_pages,
    num_corpus,
    tile,
):
    offers[:] = 0
    width = (num_pages + num_corpus) * reference.OFFERED
    for b, row in enumerate(batch_rows):
        slot = rows[row, 0]
        if slot >= 0:
            listed = table[slot, :num_pages]
            scores = reference.best_positions(pool, links, listed, contexts[b], corpus[:num_corpus])
            offers[b * width : b * width + len(scores)] = scores


@Launch
def vote(
    pool,
    links,
    table,
    corpus,
    rows,
    offers,
    drafts,
    confidences,
    batch_rows,
    last,
    chances,
    drafted,
    cells,
    stride,
    num_pages,
    num_corpus,
    length,
    draft_stride,
    learning,
):
    width = (num_pages + num_corpus) * reference.OFFERED
    for b, row in enumerate(batch_rows):
        slot, response = rows[row, :2]
        drafts[b, :length], confidences[b, :length] = last[row], 0
        found = np.full(length, -1)
        if slot >= 0:
            scores = offers[b * width : (b + 1) * width]
            listed = np.concatenate((table[slot, :num_pages], corpus[:num_corpus]))
            drafts[b, :length], confidences[b, :length], found = reference.vote(
                pool, links, listed, scores[scores > 0], response, length, last[row], chances
            )
        if learning:
            drafted[0, row, :length], cells[0, row, :length] = drafts[b, :length], found

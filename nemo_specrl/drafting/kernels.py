"""The Triton kernels that draft: update, append, search and vote, one launch of each per step, and
learn, where chances are learned.

They follow the rules of ``reference`` and give the same tokens bit for bit. No value goes to the
host. Each program of a launch writes only to its own places, or adds integers, so that every rank
of an engine computes the same. Array arguments are named as in ``device_arrays``, which owns them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from nemo_specrl.drafting import chances as table_of_chances
from nemo_specrl.drafting import reference

__all__ = ["SCATTERED", "append", "learn", "search", "update", "vote"]

PAGE = tl.constexpr(reference.PAGE)
DEPTH = tl.constexpr(reference.DEPTH)
OFFERED = tl.constexpr(reference.OFFERED)
VOTERS = tl.constexpr(reference.VOTERS)
OWN_WEIGHT = tl.constexpr(reference.OWN_WEIGHT)
POSITION_BITS = tl.constexpr(reference.POSITION_BITS)
POSITION_MASK = tl.constexpr((1 << reference.POSITION_BITS) - 1)
MATCH_MASK, OWN_BIT = tl.constexpr(reference.MATCH_MASK), tl.constexpr(reference.OWN_BIT)
OWN = tl.constexpr(1 << reference.OWN_BIT)
CORPUS_LEAST = tl.constexpr(reference.CORPUS_LEAST)
START, EMPTY = tl.constexpr(reference.START), tl.constexpr(reference.EMPTY)
NOTHING = tl.constexpr(reference.NOTHING)
NO_TOKEN = tl.constexpr(-4)  # equal to nothing that a context may contain
LINKS, BEHIND, RESPONSE = tl.constexpr(3), tl.constexpr(1), tl.constexpr(2)
assert DEPTH.value % 8 == 0 and DEPTH.value <= 48
# As in cell_of, whose code they are part of.
assert table_of_chances.SHARES == (300, 500, 700, 850, 950, 995)
assert (table_of_chances.MATCHES, table_of_chances.VOTES) == ((2, 4, 8, 16, 32), (2, 4, 8))
CELLS_PADDED = tl.constexpr(512)  # all cells and places, rounded up to a power of two
PRIOR_TRIES = tl.constexpr(float(table_of_chances.PRIOR_TRIES))
MOST_TRIES = tl.constexpr(table_of_chances.MOST_TRIES)
# Columns of a row's state; see device_arrays.
ROW, ROW_SLOT, ROW_RESPONSE = tl.constexpr(9), tl.constexpr(0), tl.constexpr(1)
ROW_START, ROW_KNOWN, ROW_MOST = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
ROW_STOPS, STOPS = tl.constexpr(5), tl.constexpr(4)
SCATTERED = tl.constexpr(256)  # values that a program of update writes
APPENDED = tl.constexpr(32)  # tokens that append writes at once
CONTEXT = tl.constexpr(32)  # DEPTH, rounded up to a power of two
COMPARED = tl.constexpr(8)  # tokens that search compares before checking whether any is left
CHUNK = tl.constexpr(256)  # scores that vote examines together
CHANGING = ("num_pages", "num_values", "num_corpus", "length")
"""Arguments that change from step to step: nothing is recompiled for some of their values."""


@triton.jit(do_not_specialize=CHANGING)
def update(pool, state, pages, contents, places, values, num_pages, num_values):
    """Write pages, and values into the state. Grid: one for each page, then for 256 values."""
    program = tl.program_id(0)
    if program < num_pages:
        offsets = tl.arange(0, PAGE)
        page = tl.load(pages + program).to(tl.int64)
        tl.store(pool + page * PAGE + offsets, tl.load(contents + program * PAGE + offsets))
    else:
        i = (program - num_pages) * SCATTERED + tl.arange(0, SCATTERED)
        place = tl.load(places + i, mask=i < num_values, other=0)
        value = tl.load(values + i, mask=i < num_values, other=0)
        tl.store(state + place, value, mask=i < num_values)


@triton.jit
def append(
    pool,
    rows,
    row_pages,
    contexts,
    batch_rows,
    all_tokens,
    total_lengths,
    drafted,
    cells,
    outcomes,
    token_stride,
    pages_of_row,
    draft_stride,
    source_stride,
    LEARNING: tl.constexpr,
):
    """Append the tokens that a step yielded to their responses, and note each row's last ones.

    A response ends with its first stop token, or at its maximum length. What a step yields after
    that is not appended: a draft may reach beyond the end, and with asynchronous
    scheduling a row keeps running until the host has seen the end. The row's last
    drafts of so many sources (``LEARNING``) are compared with the tokens that followed. Grid: one
    program per row of the batch.
    """
    batch_row = tl.program_id(0)
    row = tl.load(batch_rows + batch_row).to(tl.int64)
    mine = rows + row * ROW
    slot = tl.load(mine + ROW_SLOT)
    if slot >= 0:
        tokens = all_tokens + row * token_stride
        start = tl.load(mine + ROW_START)
        known = tl.load(mine + ROW_KNOWN)
        total = tl.load(total_lengths + row)
        back = tl.arange(0, CONTEXT)
        place = total - 1 - back
        context = tl.load(tokens + place, mask=place >= start, other=NOTHING)
        context = tl.where(place == start - 1, START, context)
        tl.store(contexts + batch_row * DEPTH + back, context, mask=back < DEPTH)
        most = tl.load(mine + ROW_MOST)
        end = tl.minimum(total - start, most)
        for i in range(known, total - start, APPENDED):
            number = i + tl.arange(0, APPENDED)
            token = tl.load(tokens + start + number, mask=number < end, other=EMPTY)
            stops = token == tl.load(mine + ROW_STOPS)
            for j in tl.static_range(1, STOPS):
                stops = stops | (token == tl.load(mine + ROW_STOPS + j))
            stopped = tl.min(tl.where(stops & (token >= 0), number + 1, most), axis=0)
            end, most = tl.minimum(end, stopped), tl.minimum(most, stopped)
            new = number < end
            cell = number + 1  # after START
            new = new & (cell // PAGE < pages_of_row)
            page = tl.load(row_pages + row * pages_of_row + cell // PAGE, mask=new, other=-1)
            tl.store(pool + page.to(tl.int64) * PAGE + cell % PAGE, token, mask=new & (page >= 0))
            for source in tl.static_range(LEARNING):
                # Nothing was drafted for the first token of a response.
                k = number - known
                there = new & (k < draft_stride) & (known > 0)
                of_draft = source * source_stride + row * draft_stride + k
                of_cell = tl.load(cells + of_draft, mask=there, other=-1)
                right = there & (of_cell >= 0)
                right = right & (token == tl.load(drafted + of_draft, mask=there, other=EMPTY))
                wrong = tl.min(tl.where(right, APPENDED, k), axis=0)
                tried = there & (of_cell >= 0) & (k <= wrong) & (i == known)
                tl.atomic_add(outcomes + of_cell * 2, 1, mask=tried)
                tl.atomic_add(outcomes + of_cell * 2 + 1, 1, mask=tried & (k < wrong))
        tl.store(mine + ROW_KNOWN, end)
        tl.store(mine + ROW_MOST, most)


@triton.jit(do_not_specialize=CHANGING)
def search(
    pool,
    links,
    table,
    corpus,
    rows,
    contexts,
    offers,
    batch_rows,
    table_stride,
    num_pages,
    num_corpus,
    TILE: tl.constexpr,
):
    """Find the best positions of each page of a row's prompt, and of the corpus.

    Grid: rows of the batch, and ``num_pages`` (of the longest list) + ``num_corpus``, divided by
    ``TILE`` and rounded up. ``TILE`` pages are searched at once; the result does not depend on it.
    """
    batch_row = tl.program_id(0)
    row = tl.load(batch_rows + batch_row).to(tl.int64)
    slot = tl.load(rows + row * ROW + ROW_SLOT)
    if slot >= 0:
        i = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
        own = i < num_pages
        page = tl.load(table + slot.to(tl.int64) * table_stride + i, mask=own, other=-1)
        shared = (i >= num_pages) & (i < num_pages + num_corpus)
        page = tl.where(own, page, tl.load(corpus + i - num_pages, mask=shared, other=-1))
        there = page >= 0
        before = tl.load(links + page * LINKS, mask=there, other=-1)
        behind = tl.load(links + page * LINKS + BEHIND, mask=there, other=-1)
        offset = tl.arange(0, PAGE)[None, :]
        here = page.to(tl.int64) * PAGE + offset
        # The page before or after begins this many tokens later than if it were adjacent to this
        # one.
        to_before = (before.to(tl.int64) - page + 1) * PAGE
        to_behind = (behind.to(tl.int64) - page - 1) * PAGE
        match = tl.zeros([TILE, PAGE], dtype=tl.int32)
        alive = there & (offset >= 0)
        compared = 0
        left = 1
        while (compared < DEPTH) & (left > 0):
            for j in range(compared, compared + COMPARED):
                wanted = tl.load(contexts + batch_row * DEPTH + j)
                place = here - j + tl.where(offset < j, to_before, 0)
                known = alive & ((before >= 0) | (offset >= j))
                token = tl.load(pool + place, mask=known, other=NO_TOKEN)
                alive = alive & (token == wanted)
                match += alive.to(tl.int32)
            compared += COMPARED
            left = tl.max(tl.max(alive.to(tl.int32), axis=1), axis=0)
        place = here + 1 + tl.where(offset == PAGE - 1, to_behind, 0)
        known = (match > 0) & ((behind >= 0) | (offset < PAGE - 1))
        follower = tl.load(pool + place, mask=known, other=EMPTY)
        scores = (match << POSITION_BITS) | (i * PAGE + offset)
        scores = tl.where(own & (match >= 2), scores | OWN, scores)
        scores = tl.where((match >= tl.where(own, 1, CORPUS_LEAST)) & (follower >= 0), scores, 0)
        listed = num_pages + num_corpus
        offered = offers + (batch_row.to(tl.int64) * listed + i) * OFFERED
        for m in range(OFFERED):
            best = tl.max(scores, axis=1)[:, None]
            tl.store(offered + m, best, mask=i < listed)
            scores = tl.where(scores == best, 0, scores)


@triton.jit
def learn(outcomes, prior, chances, num_cells):
    """Renew the chances from the outcomes: see ``chances.learned``. Grid: one program."""
    cell = tl.arange(0, CELLS_PADDED)
    there = cell < num_cells
    tried = tl.load(outcomes + cell * 2, mask=there, other=0)
    right = tl.load(outcomes + cell * 2 + 1, mask=there, other=0)
    halved = (tried > MOST_TRIES).to(tl.int32)
    tried, right = tried >> halved, right >> halved
    tl.store(outcomes + cell * 2, tried, mask=there)
    tl.store(outcomes + cell * 2 + 1, right, mask=there)
    before = tl.load(prior + cell, mask=there, other=0.0) * PRIOR_TRIES
    chance = tl.div_rn(before + right.to(tl.float32), tried.to(tl.float32) + PRIOR_TRIES)
    tl.store(chances + cell, chance, mask=there)


@triton.jit
def best_scores(offers, count):
    """Return the best ``VOTERS`` scores of ``count``, in any order; 0 if there are fewer."""
    lane = tl.arange(0, VOTERS)
    kept = tl.zeros([VOTERS], dtype=tl.int32)
    chunks = tl.cdiv(count, CHUNK)
    for c in range(chunks):
        # Start with the newest, which are the best among equal matches.
        i = (chunks - 1 - c) * CHUNK + tl.arange(0, CHUNK)
        scores = tl.load(offers + i, mask=i < count, other=0)
        best, least = tl.max(scores, axis=0), tl.min(kept, axis=0)
        while best > least:
            worst = tl.min(tl.where(kept == least, lane, VOTERS), axis=0)
            kept = tl.where(lane == worst, best, kept)
            scores = tl.where(scores == best, 0, scores)
            best, least = tl.max(scores, axis=0), tl.min(kept, axis=0)
    return kept


@triton.jit
def cell_of(most, total, match, votes):
    """Return the cell of the table of chances: see ``chances``."""
    most, total = most.to(tl.int64) * 1000, total.to(tl.int64)
    share = (most >= total * 300).to(tl.int32) + (most >= total * 500).to(tl.int32)
    share += (most >= total * 700).to(tl.int32) + (most >= total * 850).to(tl.int32)
    share += (most >= total * 950).to(tl.int32) + (most >= total * 995).to(tl.int32)
    far = (match >= 2).to(tl.int32) + (match >= 4).to(tl.int32) + (match >= 8).to(tl.int32)
    far += (match >= 16).to(tl.int32) + (match >= 32).to(tl.int32)
    many = (votes >= 2).to(tl.int32) + (votes >= 4).to(tl.int32) + (votes >= 8).to(tl.int32)
    return (share * 6 + far) * 4 + many


@triton.jit(do_not_specialize=CHANGING)
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
    last_sampled,
    chances,
    drafted,
    cells,
    table_stride,
    num_pages,
    num_corpus,
    length,
    draft_stride,
    LEARNING: tl.constexpr,
):
    """Draft ``length`` tokens for each row. Grid: one program per row of the batch.

    If ``LEARNING``, tokens and cells are also kept by row.
    """
    batch_row = tl.program_id(0)
    row = tl.load(batch_rows + batch_row).to(tl.int64)
    slot = tl.load(rows + row * ROW + ROW_SLOT)
    response = tl.load(rows + row * ROW + ROW_RESPONSE)
    fill = tl.load(last_sampled + row)
    offered = (num_pages + num_corpus) * OFFERED
    count = tl.where(slot >= 0, offered, 0)
    score = best_scores(offers + batch_row.to(tl.int64) * offered, count)
    match = (score >> POSITION_BITS) & MATCH_MASK
    own = score >> OWN_BIT
    voting = (match >= 2) | ((match == 1) & (tl.max(match, axis=0) < 2))
    voting = voting & (own == tl.max(own, axis=0))
    place = score & POSITION_MASK
    listed = table + tl.maximum(slot, 0).to(tl.int64) * table_stride
    i = place // PAGE
    page = tl.load(listed + i, mask=voting & (i < num_pages), other=-1)
    shared = tl.load(corpus + i - num_pages, mask=voting & (i >= num_pages), other=-1)
    page = tl.where(i < num_pages, page, shared)
    offset = place % PAGE
    owner = tl.load(links + page * LINKS + RESPONSE, mask=voting, other=-1)
    weight = match * match * match * tl.where(owner == response, OWN_WEIGHT, 1)
    weight = tl.where(voting, weight, 0)
    for k in range(length):
        offset += 1
        over = offset == PAGE
        page = tl.load(links + page * LINKS + BEHIND, mask=over & (weight > 0), other=page)
        offset = tl.where(over, 0, offset)
        cell = page.to(tl.int64) * PAGE + offset
        following = tl.load(pool + cell, mask=(weight > 0) & (page >= 0), other=EMPTY)
        weight = tl.where(following >= 0, weight, 0)
        votes = tl.sum(tl.where(following[:, None] == following[None, :], weight[None, :], 0), 1)
        votes = tl.where(weight > 0, votes, 0)
        most = tl.max(votes, axis=0)
        best = tl.max(tl.where((votes == most) & (weight > 0), score, 0), axis=0)
        token = tl.max(tl.where((score == best) & (weight > 0), following, EMPTY), axis=0)
        total = tl.sum(weight, axis=0)
        weight = tl.where(following == token, weight, 0)
        longest = tl.max(tl.where(weight > 0, match, 0), axis=0) + k
        of_chance = cell_of(most, total, longest, tl.sum((weight > 0).to(tl.int32), axis=0))
        chance = tl.load(chances + of_chance)
        written = batch_row * draft_stride + k
        tl.store(drafts + written, tl.where(most > 0, token.to(tl.int64), fill))
        tl.store(confidences + written, tl.where(most > 0, chance, 0.0))
        if LEARNING:
            tl.store(drafted + row * draft_stride + k, token)
            tl.store(cells + row * draft_stride + k, tl.where(most > 0, of_chance, -1))

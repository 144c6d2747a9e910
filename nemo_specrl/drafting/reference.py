"""The rules by which drafts are made on the device, in numpy, and the layout of the arrays.

The kernels give the same tokens and the same confidences bit for bit: scores and weights are
integers, so that no order of summation matters, and no two positions have the same score.

**Layout.** Responses are stored in pages of ``PAGE`` int32 tokens. A response begins with ``START``
at the beginning of a page and continues in further pages; what is not written yet is ``EMPTY``. For
each page, ``links`` has the pages before and after it in its response (-1: none) and the number of
the response. A prompt has a list of pages, in the order in which they were added, except that a
place whose page has been removed (-1) is used again.

**Search.** The context of a row is its last ``DEPTH`` tokens. The match of a position in the pages
of its prompt is the number of tokens, up to and including it, that equal the last ones of the row.
Positions without a token after them do not count. The score of a position is its match and, among
equal matches, the place in the list: the newer the better. Each page offers its best ``OFFERED``
positions, and the best ``VOTERS`` of all pages vote. A match of a single token counts only if none
is longer.

If no position of the prompt has a match of two tokens, those of the corpus vote: the pages of the
most recently ended responses to any prompt. The corpus follows the prompt's list.

**Vote.** A position votes for the token after it with the third power of its match as weight, times
``OWN_WEIGHT`` if it is in the row's own response. The token with the most weight is drafted, among
equal ones that of the best position. The positions that voted for it vote on the next token, and so
on. If no voter is left, the rest of the draft is ``fill``.

**Confidence.** The chance that a token is accepted if those before it are. It is read from a table,
by the token's share of the weights, the longest match of the positions that voted for it, and their
number.

**Learning.** Where chances are learned, each draft is compared with the tokens that followed, which
are known whether it was verified or not: up to its first wrong token, each counts in its cell. So
what is not verified is learned of, too. Of drafts longer than 32 tokens, the first 32 count.

``_suffix.c`` follows the same rules on a CPU, with the same weights, number of voters and chances.
Three limits differ: it compares up to 48 tokens; it takes the newest positions among those with 2,
4, 8 or 16 tokens in common, where here the exact match decides; and it has no pages, so that more
of its voters may be close together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nemo_specrl.drafting.chances import MATCHES, SHARES, VOTES

__all__ = [
    "DEPTH",
    "EMPTY",
    "OFFERED",
    "PAGE",
    "START",
    "best_positions",
    "context_of",
    "draft",
    "graded",
    "pages_of",
    "vote",
]

Int32 = npt.NDArray[np.int32]

PAGE = 256
"""Number of tokens of a page; a power of two."""
DEPTH = 32
"""Number of a row's tokens that are compared; with 48 at most, sums of weights fit into int32.
Fewer are faster to search, but with 12 a policy that repeats itself got a twentieth fewer tokens
per step."""
OFFERED = 4
"""Number of positions of a page that may vote."""
VOTERS = 32
"""Number of positions that vote."""
OWN_WEIGHT = 16
"""Weight of a position in the row's own response."""
POSITION_BITS = 24
"""Bits of a score that hold the position; the match is above them."""
MATCH_MASK, OWN_BIT = 63, 30
"""Mask of the match; and the bit set in the scores of the prompt's own positions with a match of
two tokens or more."""
START, EMPTY, NOTHING = -2, -1, -3
"""Stored before the first token of a response; not written yet; before the start in a row's
context."""
CORPUS_LEAST = 3
"""Number of tokens that a position of the corpus must have in common with a row."""
NO_PAGES: Int32 = np.zeros(0, np.int32)
BEFORE, BEHIND, RESPONSE = 0, 1, 2
"""Columns of ``links``."""


def pages_of(responses: list[list[int]], page: int = PAGE) -> tuple[Int32, Int32]:
    """Pages and links of whole responses, in this order; each response is numbered by its place
    here.

    Returns:
        Tokens, int32 ``[pages, page]``, and links, int32 ``[pages, 3]``.
    """
    tokens: list[list[int]] = []
    links: list[tuple[int, int, int]] = []
    for number, response in enumerate(responses):
        cells = [START, *response]
        first, count = len(tokens), -(-len(cells) // page)
        cells += [EMPTY] * (count * page - len(cells))
        for i in range(count):
            tokens.append(cells[i * page : (i + 1) * page])
            before = first + i - 1 if i else -1
            behind = first + i + 1 if i + 1 < count else -1
            links.append((before, behind, number))
    return np.array(tokens, np.int32).reshape(-1, page), np.array(links, np.int32).reshape(-1, 3)


def context_of(response: list[int], depth: int = DEPTH) -> Int32:
    """The last tokens of a response, the newest first, int32 ``[depth]``."""
    cells = [START, *response][::-1][:depth]
    return np.array(cells + [NOTHING] * (depth - len(cells)), np.int32)


def best_positions(
    pool: Int32, links: Int32, listed: Int32, context: Int32, corpus: Int32 = NO_PAGES
) -> Int32:
    """Scores of the positions that vote for a row, best first; as many as there are.

    Args:
        pool: tokens of all pages, ``[pages, page]``.
        links: ``[pages, 3]``.
        listed: pages of the row's prompt, ``[listed]``.
        context: context of the row, the newest token first, ``[depth]``.
        corpus: pages of the corpus, ``[pages]``.
    """
    size = pool.shape[1]
    found = []
    for i, page in enumerate(np.concatenate((listed, corpus))):
        if page < 0:
            continue
        before, behind, _ = links[page]
        nothing = np.full(size, EMPTY, np.int32)
        cells = np.concatenate((pool[before] if before >= 0 else nothing, pool[page]))
        match = np.zeros(size, np.int64)
        alive = np.ones(size, bool)
        for j, wanted in enumerate(context):
            alive &= cells[size - j : 2 * size - j] == wanted
            if not alive.any():
                break
            match += alive
        follower = np.append(pool[page, 1:], pool[behind, 0] if behind >= 0 else EMPTY)
        places = i * size + np.arange(size)
        scores = np.where(follower >= 0, match << POSITION_BITS | places, 0)
        if i < len(listed):
            scores[match == 0] = 0
            scores[(match >= 2) & (scores > 0)] |= 1 << OWN_BIT
        else:
            scores[match < CORPUS_LEAST] = 0
        found.append(np.sort(scores)[::-1][:OFFERED])
    scores = np.sort(np.concatenate([*found, np.zeros(0, np.int64)]))[::-1][:VOTERS]
    scores = scores[scores > 0]
    if len(scores) and scores[0] >> OWN_BIT:
        scores = scores[scores >> OWN_BIT > 0]
    elif len(scores) and scores[0] >> POSITION_BITS >= 2:
        scores = scores[scores >> POSITION_BITS >= 2]
    return scores.astype(np.int32)


def vote(
    pool: Int32,
    links: Int32,
    listed: Int32,
    scores: Int32,
    response: int,
    length: int,
    fill: int,
    chances: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], Int32]:
    """Draft what the positions that were found vote for.

    Args:
        pool: tokens of all pages, ``[pages, page]``.
        links: ``[pages, 3]``.
        listed: pages of the row's prompt, followed by those of the corpus, ``[listed]``.
        scores: scores of the positions, best first.
        response: number of the row's own response; -1 if it has none here.
        length: number of tokens to draft.
        fill: token used if nothing is drafted; its confidence is 0.
        chances: chances by cell, float32 ``[7 * 6 * 4]``.

    Returns:
        Tokens, int64 ``[length]``, confidences, float32 ``[length]``, and cells, int32
        ``[length]``, -1 where nothing is drafted.
    """
    size = pool.shape[1]
    tokens, confidences = np.full(length, fill, np.int64), np.zeros(length, np.float32)
    cells = np.full(length, -1, np.int32)
    match, places = scores >> POSITION_BITS & MATCH_MASK, scores & (1 << POSITION_BITS) - 1
    page, offset = listed[places // size], places % size
    weight = match**3 * np.where(links[page, RESPONSE] == response, OWN_WEIGHT, 1)
    for k in range(length):
        offset = offset + 1
        over = offset == size
        page = np.where(over, links[page, BEHIND], page)
        offset = np.where(over, 0, offset)
        following = np.where(page >= 0, pool[page, offset], EMPTY)
        going = following >= 0
        page, offset, match = page[going], offset[going], match[going]
        weight, following = weight[going], following[going]
        if not len(following):
            break
        votes = (weight * (following[:, None] == following)).sum(1)
        tokens[k] = token = following[votes.argmax()]  # the first of equals: the best position
        agree = following == token
        cell = sum(int(votes.max()) * 1000 >= int(weight.sum()) * share for share in SHARES)
        cell = cell * (len(MATCHES) + 1) + sum(match[agree].max() + k >= m for m in MATCHES)
        cell = cell * (len(VOTES) + 1) + sum(agree.sum() >= v for v in VOTES)
        confidences[k], cells[k] = chances[cell], cell
        page, offset = page[agree], offset[agree]
        match, weight = match[agree], weight[agree]
    return tokens, confidences, cells


def draft(
    pool: Int32,
    links: Int32,
    listed: Int32,
    context: Int32,
    response: int,
    length: int,
    fill: int,
    chances: npt.NDArray[np.float32],
    corpus: Int32 = NO_PAGES,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], Int32]:
    """Make a row's draft: find :func:`best_positions`, then :func:`vote`."""
    scores = best_positions(pool, links, listed, context, corpus)
    everything = np.concatenate((listed, corpus))
    return vote(pool, links, everything, scores, response, length, fill, chances)


def graded(drafted: Int32, cells: Int32, followed: Int32) -> tuple[Int32, Int32]:
    """The cells of a draft's tokens that were drafted behind right ones, and of those right.

    Args:
        drafted: the draft's tokens, ``[n]``.
        cells: their cells, ``[n]``, -1 where nothing was drafted.
        followed: the tokens that followed.
    """
    n = min(len(drafted), len(followed))
    wrong = np.append(np.flatnonzero((drafted[:n] != followed[:n]) | (cells[:n] < 0)), n)[0]
    tried = cells[: min(wrong + 1, n)]
    return tried[tried >= 0], cells[:wrong]

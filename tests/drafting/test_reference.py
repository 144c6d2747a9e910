"""The rules of search and vote against their definition, and against the trees."""

import numpy as np
import pytest

from nemo_specrl.drafting import reference
from nemo_specrl.drafting.chances import CHANCES
from nemo_specrl.drafting.suffix_tree import DraftTrees

PAGE = 32  # not less than DEPTH


def drafted(responses, own, length, fill=99):
    """The draft of row ``own`` of these responses."""
    pool, links = reference.pages_of(responses, PAGE)
    listed = np.arange(len(pool))
    context = reference.context_of(responses[own])
    return reference.draft(pool, links, listed, context, own, length, fill, CHANCES)[:2]


def by_definition(responses, own, length, fill=99):
    """The same tokens in plain Python, position by position."""
    cells = [[reference.START, *response] for response in responses]
    found, listed = [], 0
    for r, response in enumerate(cells):
        for first in range(0, len(response), PAGE):
            page = []
            for i in range(first, min(first + PAGE, len(response) - 1)):
                match = 0
                while (
                    match < min(reference.DEPTH, i + 1, len(cells[own]))
                    and response[i - match] == cells[own][-1 - match]
                ):
                    match += 1
                if match:
                    page.append((match, listed * PAGE + i - first, r, i + 1))
            found += sorted(page)[::-1][: reference.OFFERED]
            listed += 1
    found = sorted(found)[::-1][: reference.VOTERS]
    if found and found[0][0] >= 2:
        found = [voter for voter in found if voter[0] >= 2]
    draft = []
    for k in range(length):
        found = [voter for voter in found if voter[3] + k < len(cells[voter[2]])]
        weights = {}
        for match, _, r, i in found:
            token = cells[r][i + k]
            weight = match**3 * (reference.OWN_WEIGHT if r == own else 1)
            weights[token] = weights.get(token, 0) + weight
        if not weights:
            return draft + [fill] * (length - k)
        draft.append(max(weights, key=weights.get))  # the first of equals
        found = [voter for voter in found if cells[voter[2]][voter[3] + k] == draft[k]]
    return draft


@pytest.mark.parametrize("seed", range(40))
def test_definition(seed):
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.choice([2, 4, 10, 50]))
    responses = [
        rng.integers(0, vocabulary, rng.integers(1, 90)).tolist() for _ in range(rng.integers(1, 6))
    ]
    own = int(rng.integers(len(responses)))
    if rng.random() < 0.5:  # follow another one for a while
        responses[own] += responses[0][: int(rng.integers(1, 50))]
    tokens, confidences = drafted(responses, own, 6)
    assert tokens.tolist() == by_definition(responses, own, 6)
    assert ((confidences > 0) == (tokens != 99)).all()
    assert (confidences <= 1).all()


def test_filler_where_nothing_matches():
    tokens, confidences = drafted([[1, 2, 3], [4]], 1, 3, fill=7)
    assert tokens.tolist() == [7, 7, 7]
    assert confidences.tolist() == [0, 0, 0]


def test_start_is_context():
    """The first token of a response is followed by what followed it at the start of others."""
    tokens, _ = drafted([[5, 6, 7], [8, 5, 9, 9, 9], [5]], 2, 2)
    assert tokens.tolist() == [6, 7]


def test_longer_match_and_own_row():
    others = [[1, 2, 3, 4], [9, 2, 3, 5], [8, 2, 3, 5]]
    assert drafted([*others, [1, 2, 3]], 3, 1)[0] == 4  # a match of 4, with the start
    assert drafted([*others, [7, 2, 3, 6, 2, 3]], 3, 1)[0] == 6  # its own


@pytest.mark.parametrize("seed", range(10))
def test_trees_draft_the_same_after_one_response(seed):
    """With one earlier response of distinct tokens there is nothing that limits could change."""
    rng = np.random.default_rng(seed)
    response = rng.permutation(200)[:40].tolist()
    n = int(rng.integers(1, 39))
    trees = DraftTrees(1 << 20)
    row = trees.open(b"a", 1, [(0, np.array(response, np.int32).tobytes())])
    row.extend(response[:n])
    tokens, _, _ = row.proposal(8, 0.0)
    of_tree = np.frombuffer(tokens, np.int32).tolist()
    draft, confidences = drafted([response, response[:n]], 1, 8)
    assert draft[confidences > 0].tolist() == of_tree == response[n : n + 8]

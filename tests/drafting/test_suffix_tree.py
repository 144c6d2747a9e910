"""The draft trees: the native index against a plain reference, and what bounds them."""

import bisect
from array import array
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_specrl.drafting import _suffix
from nemo_specrl.drafting._suffix import SuffixIndex
from nemo_specrl.drafting.chances import CHANCES, SHARES
from nemo_specrl.drafting.suffix_tree import RESPONSES_KEPT, DraftTrees

ORDERS = (16, 8, 4, 2, 1)
MAX_MATCH, MAX_POSITIONS, MAX_CHAIN = 48, 32, 96
SURE = np.ones(len(CHANCES), np.float32)
MIN_CONTEXT, OWN_WEIGHT = 2, 16
START = -1


class Reference:
    """Computes the same as ``_suffix.c``, by search through the responses as they are."""

    def __init__(self):
        self.responses = []
        self.order = []  # response and offset of each token, in the order of arrival

    def start(self):
        self.responses.append([START])
        self.order.append((len(self.responses) - 1, 0))
        return len(self.responses) - 1

    def extend(self, response, tokens):
        for token in tokens:
            self.responses[response].append(token)
            self.order.append((response, len(self.responses[response]) - 1))

    def match(self, a, b):
        n = 0
        while n < min(MAX_MATCH, len(a), len(b)) and a[-1 - n] == b[-1 - n]:
            n += 1
        return n

    def voters(self, context):
        found, known = [], MAX_MATCH + 1
        for order in ORDERS:
            if found and order < MIN_CONTEXT:
                break
            if len(context) < order:
                continue
            looked = 0
            for response, offset in reversed(self.order):
                tokens = self.responses[response]
                before = tokens[: offset + 1]
                if before[-order:] != context[-order:] or len(before) < order:
                    continue
                looked += 1
                if looked > MAX_CHAIN or len(found) == MAX_POSITIONS:
                    break
                n = self.match(before, context)
                if offset + 1 < len(tokens) and n < known:
                    found.append((response, offset, n))
            known = order
        return found

    def draft(self, response, most, least, chances):
        voters = self.voters(self.responses[response])
        tokens, cells, probabilities, path = [], [], [], 1.0
        while len(tokens) < most and voters:
            votes = defaultdict(list)
            for r, o, n in voters:
                votes[self.responses[r][o + 1]].append((n, r == response))
            weights = {
                token: sum(n**3 * (OWN_WEIGHT if own else 1) for n, own in ns)
                for token, ns in votes.items()
            }
            best = max(weights, key=weights.get)  # of equals the first
            share = bisect.bisect_right(SHARES, 1000 * weights[best] / sum(weights.values()))
            match = (
                min((max(n for n, _ in votes[best]) + len(tokens)).bit_length(), _suffix.MATCHES)
                - 1
            )
            count = min(len(votes[best]).bit_length(), _suffix.VOTES) - 1
            cell = (share * _suffix.MATCHES + match) * _suffix.VOTES + count
            path *= chances[cell]
            if path < least:
                break
            tokens.append(best)
            cells.append(cell)
            probabilities.append(path)
            voters = [
                (r, o + 1, n)
                for r, o, n in voters
                if self.responses[r][o + 1] == best and o + 2 < len(self.responses[r])
            ]
        return tokens, cells, probabilities


def drafted(index, *args):
    tokens, cells, probabilities = index.draft(*args)
    return (
        np.frombuffer(tokens, np.int32).tolist(),
        list(cells),
        np.frombuffer(probabilities, "f4"),
    )


pieces = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=20)), max_size=30
)


@settings(max_examples=300, deadline=None)
@given(pieces, st.sampled_from([0.0, 0.2]), st.integers(0, 9))
def test_drafts_are_those_of_the_reference(pieces, least, seed):
    chances = np.random.default_rng(seed).uniform(0.5, 1, len(CHANCES)).astype(np.float32)
    index, reference = SuffixIndex(), Reference()
    for _ in range(5):
        assert index.start() == reference.start()
    for response, tokens in pieces:
        index.extend(response, array("i", tokens))
        reference.extend(response, tokens)
    assert index.tokens == sum(len(tokens) for _, tokens in pieces)
    for response in range(5):
        tokens, cells, probabilities = drafted(index, response, 24, least, chances)
        expected, expected_cells, path = reference.draft(response, 24, least, chances)
        assert (tokens, cells) == (expected, expected_cells)
        assert np.allclose(probabilities, path, rtol=1e-5)


def test_a_response_that_came_before_is_drafted_to_its_end():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, 500).astype(np.int32)
    index = SuffixIndex()
    index.extend(index.start(), tokens)
    row = index.start()
    assert drafted(index, row, 24, 0.0, SURE)[0] == tokens[:24].tolist()
    index.extend(row, tokens[:490])
    assert drafted(index, row, 24, 0.0, SURE)[0] == tokens[490:].tolist()
    index.extend(row, tokens[490:])
    assert drafted(index, row, 24, 0.0, SURE)[0] == []


def test_memory_is_counted_and_stays_below_160_bytes_a_token():
    rng = np.random.default_rng(0)
    index = SuffixIndex()
    empty = index.nbytes
    for _ in range(8):
        index.extend(index.start(), rng.integers(0, 150_000, 4096).astype(np.int32))
    assert empty < 8192
    assert 12 * index.tokens < index.nbytes < 160 * index.tokens


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda index: index.extend(1, array("i", [1])), IndexError),
        (lambda index: index.draft(1, 4, 0.0, SURE), IndexError),
        (lambda index: index.draft(0, -1, 0.0, SURE), ValueError),
        (lambda index: index.draft(0, 2**20, 0.0, SURE), ValueError),
        (lambda index: index.draft(0, 4, 0.0, SURE[1:]), ValueError),
        (lambda index: index.draft(0, 4, 0.0, 0.5), TypeError),
        (lambda index: index.extend(0, b"123"), ValueError),
        (lambda index: index.extend(0, [1, 2]), TypeError),
        (lambda index: index.extend(-1, array("i", [1])), (IndexError, OverflowError)),
        (lambda index: SuffixIndex(3), TypeError),
    ],
)
def test_what_an_index_cannot_do_is_an_error_and_changes_nothing(call, error):
    index = SuffixIndex()
    index.start()
    with pytest.raises(error):
        call(index)
    assert index.tokens == 0


KEY, OTHER = b"k" * 16, b"o" * 16


def history(*responses, first=1):
    return [(first + i, array("i", tokens).tobytes()) for i, tokens in enumerate(responses)]


def test_a_row_drafts_from_the_history_of_its_prompt_alone():
    trees = DraftTrees(2**20)
    row = trees.open(KEY, 100, history([5, 6, 7, 8], [5, 6, 7, 9]))
    other = trees.open(OTHER, 100, [])
    assert row.draft(3) == [5, 6, 7]
    assert other.draft(3) == []
    assert row.draft(0) == []


def test_a_row_drafts_from_its_siblings_while_they_run():
    trees = DraftTrees(2**20)
    first, second = (trees.open(KEY, 100 + i, []) for i in range(2))
    first.extend([3, 4, 5, 6])
    assert second.draft(2) == [3, 4]
    second.extend([3, 4])
    first.extend([7])
    assert second.draft(4) == [5, 6, 7]


def test_a_response_is_indexed_once_whether_it_was_watched_or_comes_from_the_cache():
    trees = DraftTrees(2**20)
    row = trees.open(KEY, 1, [])
    row.extend([1, 2, 3])
    before = trees.nbytes
    index = trees._trees[KEY].index
    trees.open(KEY, 100, history([1, 2, 3]))
    trees.open(KEY, 101, history([1, 2, 3]))
    assert index.tokens == 3
    assert trees.nbytes == before


def measured(trees):
    return sum(tree.index.nbytes for tree in trees._trees.values())


def test_the_trees_unused_for_longest_are_dropped():
    trees = DraftTrees(200_000)
    rng = np.random.default_rng(1)
    keys = [bytes([i]) * 16 for i in range(40)]
    for key in keys:
        tokens = rng.integers(0, 1000, 500).astype(np.int32)
        row = trees.open(key, 100, [(0, tokens.tobytes())])
        row.extend(tokens[:4].tolist())
        assert row.draft(8) == tokens[4:12].tolist()
        assert trees.nbytes == measured(trees) <= 200_000
    kept = list(trees._trees)
    assert 1 < len(kept) < 20
    assert kept == keys[-len(kept) :]


def test_trees_without_rows_go_before_those_that_rows_draft_from():
    trees = DraftTrees(200_000)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 1000, 500).astype(np.int32)
    row = trees.open(KEY, 100, [(0, tokens.tobytes())])
    for i in range(40):
        other = rng.integers(0, 1000, 500).astype(np.int32)
        trees.open(bytes([i]) * 16, 100, [(0, other.tobytes())])
    row.extend(tokens[:4].tolist())
    assert row.draft(8) == tokens[4:12].tolist()
    del row
    for i in range(40):
        other = rng.integers(0, 1000, 500).astype(np.int32)
        trees.open(bytes([i, 1]) * 8, 100, [(0, other.tobytes())])
    assert KEY not in trees._trees
    assert trees.nbytes == measured(trees) <= 200_000


@pytest.mark.parametrize("short", [False, True])
def test_older_responses_are_kept_while_there_is_room(short):
    """A tree is made anew from what the cache has only where memory is short."""
    trees = DraftTrees(2**20)
    if short:
        rng = np.random.default_rng(4)
        trees.open(OTHER, 0, history(rng.integers(0, 1000, 8000).astype(np.int32)))
        assert 2**19 < trees.nbytes < 2**20
    row = None
    for version in range(20):
        del row  # as when its response has ended
        row = trees.open(KEY, version + 1, history([1, 2], first=version))
        row.extend([1, 2])
    responses = len(trees._trees[KEY].responses)
    assert responses <= RESPONSES_KEPT + 2 if short else responses == 21
    assert row.length == 2
    assert trees.nbytes == measured(trees)

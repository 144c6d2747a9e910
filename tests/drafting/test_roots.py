"""Which index a request drafts from, by the tokens of its prompt."""

import numpy as np
import pytest

from nemo_specrl.drafting.roots import Roots


def test_later_turns_have_the_key_of_their_root():
    roots = Roots(8)
    assert roots.key_of([1, 2, 3], b"a") == b"a"
    assert roots.key_of([1, 2, 3, 9, 9, 4], b"of this turn") == b"a"
    assert roots.key_of([1, 2, 3, 9, 9, 4, 8, 8], None) == b"a"  # brought no key
    assert roots.key_of([1, 2, 4], b"b") == b"b"
    assert roots.key_of([1, 2], None) is None
    assert len(roots) == 2
    assert roots.find([1, 2, 3, 9], b"of this turn") == (b"a", 3)
    assert roots.find([1, 2, 4], b"b") == (b"b", 3)
    assert roots.find([5], b"c") == (b"c", 1) and roots.find([6, 6], None) == (None, 2)


def test_prompts_that_share_a_beginning_are_roots_of_their_own():
    roots = Roots(8)
    assert roots.key_of([7, 7, 7, 1], b"a") == b"a"
    assert roots.key_of([7, 7, 7, 2], b"b") == b"b"
    assert roots.key_of([7, 7, 7, 1, 5], None) == b"a"


def test_bound():
    roots = Roots(2)
    for i in range(4):
        roots.key_of([i] * (i + 1), b"%d" % i)
        roots.key_of([0, 5], b"x")  # used all the time
    assert len(roots) == 2
    assert roots.key_of([3] * 4 + [1], None) == b"3"
    assert roots.key_of([2] * 3 + [1], None) is None
    assert roots.key_of([0, 5, 5], None) in (b"0", b"x")


def found(known, tokens):
    """The root that is a prompt, or else the shortest one that it begins with, by comparison."""
    beginnings = [root for root in known if tokens[: len(root)] == root]
    return tokens if tokens in beginnings else min(beginnings, key=len, default=None)


@pytest.mark.parametrize(("seed", "most"), [(0, 4), (1, 16), (2, 1000)])
def test_same_as_comparing_all_roots(seed, most):
    """Prompts of two tokens, of which many begin with others; requests with a key and without."""
    rng = np.random.default_rng(seed)
    roots, known = Roots(most), {}  # those that were used last come last
    for i in range(3000):
        tokens = tuple(rng.integers(0, 2, rng.integers(0, 12)).tolist())
        if len(tokens) < rng.integers(0, 4):  # or nearly all would begin with these
            continue
        key = b"%d" % i if rng.random() < 0.5 else None
        root = found(known, tokens)
        expected = (key, len(tokens)) if root is None else (known[root], len(root))
        if root is not None:
            known[root] = known.pop(root)
        elif key is not None:
            known[tokens] = key
            if len(known) > most:
                del known[next(iter(known))]
        assert roots.find(tokens, key) == expected, tokens
        assert len(roots) == len(known)

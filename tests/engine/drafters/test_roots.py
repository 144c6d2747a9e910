"""Which index a request drafts from, by the tokens of its prompt."""

from nemo_specrl.engine.drafters.roots import Roots


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

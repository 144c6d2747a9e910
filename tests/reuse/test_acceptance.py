"""The acceptance test against the paper's Algorithm 1, and the statistics of its random numbers."""

import math

import numpy as np
import pytest

from nemo_specrl import accepted_length
from nemo_specrl.errors import ConfigError
from nemo_specrl.reuse.acceptance import behaviour_logprobs, random_stream

LENIENCES = [1.0, math.exp(0.2), math.exp(0.5), math.inf]


def algorithm_1(p_new, p_old, uniforms, lenience):
    """SPEC-RL, arXiv 2509.23232, Algorithm 1: position of the first rejection, or the length."""
    for i in range(len(uniforms)):
        acceptance = min(1.0, lenience * p_new[i] / p_old[i])
        if uniforms[i] > acceptance:
            return i
    return len(uniforms)


@pytest.mark.parametrize("lenience", LENIENCES)
def test_ten_thousand_drafts_as_the_paper_states_it(lenience):
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(10_000):
        n = int(rng.integers(0, 24))
        old = -rng.exponential(1.5, n)
        new = np.minimum(0, old + rng.normal(0, 0.3, n))
        uniforms = 1 - rng.random(n)
        # Where a uniform is within rounding of its bound, either answer is right.
        edge = np.abs(np.log(uniforms) - np.minimum(0, math.log(lenience) + new - old)) < 1e-12
        uniforms[edge] *= 0.999
        expected = algorithm_1(np.exp(new), np.exp(old), uniforms, lenience)
        assert accepted_length(new, old, uniforms, lenience) == expected
        lengths.add(n - expected)
    assert len(lengths) > 15 or lenience == math.inf


def test_what_cannot_be_is_not_accepted():
    new = np.array([0, np.nan, 0], dtype=np.float32)
    assert accepted_length(new, np.zeros(3), np.full(3, 1e-9), 100.0) == 1
    gone, tiny = np.full(1, -np.inf), np.full(1, 1e-300)
    for old in (gone, np.zeros(1)):
        for lenience in LENIENCES:
            assert accepted_length(gone, old, tiny, lenience) == 0
    assert accepted_length(gone[:0], gone[:0], tiny[:0], 1.0) == 0


@pytest.mark.parametrize("lenience", [0.0, -1.0, math.nan])
def test_bad_lenience_is_named(lenience):
    with pytest.raises(ConfigError, match=r"lenience = .*must be a number greater than 0"):
        accepted_length(np.zeros(1), np.zeros(1), np.ones(1), lenience)


def test_lengths_that_differ_are_named():
    with pytest.raises(ConfigError, match="as many entries, got 2, 1 and 2"):
        accepted_length(np.zeros(2), np.zeros(1), np.ones(2), 1.0)


def test_streams_are_named_by_all_their_parts():
    names = ("accept", 3, 11, 0, bytes(range(16)))
    first = random_stream(*names).random(64)
    assert np.array_equal(random_stream(*names).random(64), first)
    others = [("fresh", *names[1:]), (*names, b""), ("accept", 31, 1, 0, names[4])]
    others += [(*names[:i], 7, *names[i + 1 :]) for i in range(1, 5)]
    for other in others:
        assert not np.isin(random_stream(*other).random(64), first).any()


def test_behaviour_logprobs_are_the_smaller_of_both():
    new, old = np.array([-1.0, -3.0]), np.array([-2.0, -1.0])
    assert behaviour_logprobs(new, old, math.exp(0.5)) == pytest.approx([-2.0, -2.5])

"""The acceptance test against its definition, and the statistics of its uniforms."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nemo_specrl import accepted_length
from nemo_specrl.errors import ConfigError
from nemo_specrl.speculation.acceptance import (
    accepted_lengths,
    behaviour_logprobs,
    derived_seed,
    draft_uniforms,
    offsets_of,
    row_uniform,
)

E_HALF = math.exp(0.5)
KEY = bytes(range(16))


def by_definition(new, old, uniforms, lenience):
    """Token by token, as the paper states it."""
    for i, u in enumerate(uniforms):
        if not u <= min(1.0, lenience * math.exp(new[i]) / math.exp(old[i])):
            return i
    return len(uniforms)


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8))
    n = sum(lengths)
    logprob = st.floats(-12, 0, width=32)
    uniform = st.floats(1e-9, 1, exclude_min=False)
    return (
        lengths,
        np.array(draw(st.lists(logprob, min_size=n, max_size=n)), dtype=np.float32),
        np.array(draw(st.lists(logprob, min_size=n, max_size=n)), dtype=np.float32),
        np.array(draw(st.lists(uniform, min_size=n, max_size=n))),
        draw(st.sampled_from([0.5, 1.0, E_HALF, 4.0])),
    )


@settings(derandomize=True, max_examples=300, deadline=None)
@given(batches())
def test_ragged_batch_equals_the_definition(batch):
    lengths, new, old, uniforms, lenience = batch
    offsets = offsets_of(lengths)
    # Where a uniform sits within rounding of its bound, either answer is right.
    bound = np.minimum(0.0, math.log(lenience) + new.astype(float) - old)
    on_the_edge = np.abs(np.log(uniforms) - bound) < 1e-6
    uniforms = np.where(on_the_edge, np.minimum(1.0, uniforms * 0.999), uniforms)
    got = accepted_lengths(new, old, uniforms, offsets, lenience)
    for i, (start, end) in enumerate(itertools.pairwise(offsets)):
        piece = slice(int(start), int(end))
        assert got[i] == by_definition(new[piece], old[piece], uniforms[piece], lenience)
        assert got[i] == accepted_length(new[piece], old[piece], uniforms[piece], lenience)


def test_nothing_empty_or_whole_is_special():
    new = np.zeros(5, dtype=np.float32)
    never, always = np.full(5, -np.inf, dtype=np.float32), np.zeros(5, dtype=np.float32)
    ones = np.ones(5)
    assert accepted_length(new, always, ones, 1.0) == 5
    assert accepted_length(never, always, ones * 1e-300, 1.0) == 0
    assert accepted_length(new[:0], always[:0], ones[:0], 1.0) == 0
    offsets = offsets_of([0, 2, 0, 3, 0])
    both = np.concatenate([new[:2], never[:3]])
    assert accepted_lengths(both, always, ones, offsets, 1.0).tolist() == [0, 2, 0, 0, 0]


def test_a_logprob_that_is_no_number_accepts_nothing():
    new = np.array([0, np.nan, 0], dtype=np.float32)
    assert accepted_length(new, np.zeros(3), np.full(3, 1e-9), 100.0) == 1
    minus_inf = np.full(1, -np.inf)
    assert accepted_length(minus_inf, minus_inf, np.full(1, 1e-9), 100.0) == 0


@pytest.mark.parametrize("lenience", [0.0, -1.0, math.inf, math.nan])
def test_bad_lenience_is_named(lenience):
    with pytest.raises(ConfigError, match=r"lenience = .*must be a finite number greater than 0"):
        accepted_length(np.zeros(1), np.zeros(1), np.ones(1), lenience)


def test_lengths_that_differ_are_named():
    with pytest.raises(ConfigError, match="must have 2 entries, got 2, 1 and 2"):
        accepted_lengths(np.zeros(2), np.zeros(1), np.ones(2), offsets_of([2]), 1.0)


def test_uniforms_depend_on_the_row_alone():
    keys, sample_indices, lengths = [KEY, KEY, b"x" * 16], [0, 1, 0], [7, 3, 5]
    offsets = offsets_of(lengths)
    together = draft_uniforms(3, 11, keys, sample_indices, offsets)
    for i, (key, sample_index, length) in enumerate(
        zip(keys, sample_indices, lengths, strict=True)
    ):
        alone = draft_uniforms(3, 11, [key], [sample_index], offsets_of([length]))
        assert np.array_equal(alone, together[offsets[i] : offsets[i + 1]])
    longer = draft_uniforms(3, 11, [KEY], [0], offsets_of([20]))
    assert np.array_equal(longer[:7], together[:7])


@pytest.mark.parametrize(
    ("seed", "version", "key", "sample_index"),
    [(4, 11, KEY, 0), (3, 12, KEY, 0), (3, 11, b"y" * 16, 0), (3, 11, KEY, 1)],
)
def test_uniforms_are_fresh_for_every_seed_version_prompt_and_sample_index(
    seed, version, key, sample_index
):
    offsets = offsets_of([64])
    base = draft_uniforms(3, 11, [KEY], [0], offsets)
    other = draft_uniforms(seed, version, [key], [sample_index], offsets)
    assert not np.isin(base, other).any()


def test_uniforms_are_uniform_and_independent_over_versions():
    """Two Kolmogorov-Smirnov tests and a correlation; a false alarm once in 10,000 runs."""
    offsets = offsets_of([1])
    draws = np.array([draft_uniforms(0, v, [KEY], [0], offsets)[0] for v in range(20_000)])
    assert draws.min() > 0
    assert draws.max() <= 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-4 / 3
    rows = np.array([row_uniform("fresh", 0, v, KEY, 3) for v in range(20_000)])
    assert rows.min() >= 0
    assert rows.max() < 1
    assert stats.kstest(rows, "uniform").pvalue > 1e-4 / 3
    assert stats.pearsonr(draws[:-1], draws[1:]).pvalue > 1e-4 / 3


def test_acceptance_rate_is_the_ratio():
    """Accepted share against min(1, l * p_new / p_old), a false alarm once in 10,000 runs."""
    n, new, old = 40_000, math.log(0.2), math.log(0.5)
    offsets = offsets_of([1] * n)
    keys = [i.to_bytes(16, "big") for i in range(n)]
    uniforms = draft_uniforms(0, 0, keys, [0] * n, offsets)
    accepted = accepted_lengths(np.full(n, new), np.full(n, old), uniforms, offsets, E_HALF).sum()
    expected = E_HALF * 0.2 / 0.5
    assert stats.binomtest(int(accepted), n, expected).pvalue > 1e-4


def test_behaviour_logprobs_are_the_smaller_of_both():
    new, old = np.array([-1.0, -3.0]), np.array([-2.0, -1.0])
    assert behaviour_logprobs(new, old, E_HALF) == pytest.approx([-2.0, -2.5])


def test_derived_seeds_differ_by_purpose():
    seeds = {derived_seed(p, 1, 2, KEY, 3) for p in ("continue", "rollout 0", "rollout 1")}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)

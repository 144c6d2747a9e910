"""The Triton kernels against the numpy reference, and what they take on GPUs."""

import numpy as np
import pytest

from nemo_specrl.drafting import reference
from nemo_specrl.drafting.chances import CHANCES, MOST_TRIES, learned


@pytest.mark.parametrize(("vocabulary", "length"), [(3, 7), (8, 1), (40, 4)])
def test_same_as_reference(vocabulary, length):
    """Bit for bit, in an index that grows: pages of several responses, rows in any order."""
    from tests.support.v2_drafting import Rows

    rng = np.random.default_rng(vocabulary)
    base = rng.integers(0, vocabulary, 600)

    def variant():
        tokens = base.copy()
        changed = rng.random(len(tokens)) < 0.03
        tokens[changed] = rng.integers(0, vocabulary, changed.sum())
        return tokens[: rng.integers(300, 600)].tolist()

    rows = Rows(vocabulary=vocabulary, length=length, learning=True)
    counts, chances, last = np.zeros((len(CHANCES), 2), np.int32), CHANCES, {}
    rows.open(3, b"c")  # the corpus
    rows.step({3: variant()[:300]})
    rows.index.close_row(3)
    yields = [variant() for _ in range(3)]
    for row in range(3):
        rows.open(row, b"ab"[row % 2 :][:1], [(i, variant()) for i in range(2)])
    for step in range(2):
        new = {}
        for row in rng.permutation(3).tolist():
            new[row], yields[row] = yields[row][:255], yields[row][255:]
        new = {row: tokens for row, tokens in new.items() if tokens}
        for row, tokens in new.items():
            if row in last:
                tried, right = reference.graded(*last[row], np.array(tokens))
                np.add.at(counts, (tried, 0), 1)
                np.add.at(counts, (right, 1), 1)
        chances = learned(CHANCES, counts)
        drafts = rows.step(new)
        assert (rows.index.outcomes.cpu().numpy()[: len(CHANCES)] == counts).all()
        assert (rows.index.chances.cpu().numpy()[: len(CHANCES)] == chances).all()
        pool, links = rows.index.pool.cpu().numpy(), rows.index.links.cpu().numpy()
        for b, row in enumerate(new):
            of_row = rows.index._rows[row]
            listed = np.array(of_row.prompt.listed)
            held = np.concatenate([pool[listed[position]] for position in of_row.positions])
            response = rows.responses[row]
            assert held[: len(response) + 1].tolist() == [reference.START, *response]
            tokens, confidences, cells = reference.draft(
                pool,
                links,
                listed,
                reference.context_of(response),
                of_row.number,
                length,
                response[-1],
                chances,
                rows.index.corpus.cpu().numpy()[:2],
            )
            assert drafts[b].tolist() == tokens.tolist(), (step, row)
            assert (rows.index.confidences[b].cpu().numpy() == confidences).all()
            assert (confidences > 0).any()
            last[row] = tokens.astype(np.int32), cells
            assert rows.index.cells[0, row].tolist() == cells.tolist()
    assert counts[:, 0].any()


def test_counts_are_halved_as_by_the_reference():
    import torch

    from nemo_specrl.drafting import kernels
    from tests.support.v2_drafting import DEVICE

    rng = np.random.default_rng(0)
    tried = rng.integers(0, 2 * MOST_TRIES, len(CHANCES))
    counts = np.stack([tried, rng.integers(0, tried + 1)], 1).astype(np.int32)
    of_kernel = torch.from_numpy(counts.copy()).to(DEVICE)
    prior = torch.from_numpy(CHANCES).to(DEVICE)
    chances = torch.empty_like(prior)
    kernels.learn[(1,)](of_kernel, prior, chances, len(CHANCES))
    assert (chances.cpu().numpy() == learned(CHANCES, counts)).all()
    assert (of_kernel.cpu().numpy() == counts).all() and counts.max() <= MOST_TRIES


def test_chances_follow_what_follows_drafts():
    """One prompt's rows repeat its history, whose chances rise; the other's never do."""
    from tests.support.v2_drafting import Rows

    rows = Rows(length=2, rows=2, learning=True)
    history = [*range(1, 20)]
    rows.open(0, b"a", [(0, history), (1, history)])
    rows.open(1, b"b", [(0, history)])
    for step in range(6):  # 1 of 2, 2 of 4, ...: the match of the second stays one token
        rows.step({0: history[2 * step : 2 * step + 2], 1: [30, history[step]]})
    tried, right = rows.index.outcomes.cpu().numpy()[: len(CHANCES)].T
    chances = rows.index.chances.cpu().numpy()[: len(CHANCES)]
    assert (chances[(tried > 0) & (right == tried)] > CHANCES[(tried > 0) & (right == tried)]).all()
    assert (chances[(tried > 0) & (right == 0)] < CHANCES[(tried > 0) & (right == 0)]).all()
    assert (chances[tried == 0] == CHANCES[tried == 0]).all()
    assert right.sum() == 2 * 5 and (tried - right).sum() == 5


def test_the_corpus_drafts_where_the_prompt_is_silent():
    from tests.support.v2_drafting import Rows

    rows = Rows(length=3, rows=2)
    rows.open(0, b"other")
    rows.step({0: [1, 2, 3, 4, 5, 6]})
    rows.index.close_row(0)
    rows.open(1, b"own", [(0, [9, 3, 7, 7, 7])])
    assert rows.step({1: [1, 2, 3]})[0].tolist() == [4, 5, 6]  # not 7: a match of one token
    rows.open(1, b"own", [(1, [2, 3, 8, 8, 8])])
    assert rows.step({1: [1, 2, 3]})[0].tolist() == [8, 8, 8]


def test_launches():
    """Four a step at most."""
    from tests.support.v2_drafting import Rows

    rows = Rows(length=1, rows=1)
    rows.open(0, history=[(0, [1, 2, 3])])
    assert rows.step({0: [1]}).tolist() == [[2]]
    assert rows.index.launches == 4
    assert rows.step({0: [2]}).tolist() == [[3]]
    assert rows.index.launches == 7  # nothing was to be written


def test_no_more_is_drafted_than_will_be_verified():
    """Two tokens of three; with none, the step is appended and nothing is searched."""
    from tests.support.v2_drafting import Rows

    rows = Rows(length=3, rows=1)
    rows.open(0, history=[(0, [1, 2, 3, 4, 5, 6])])
    assert rows.step({0: [1]}).tolist() == [[2, 3, 4]]
    launches = rows.index.launches
    assert rows.step({0: [2]}, 0).tolist() == [[2, 3, 4]]
    assert rows.index.launches == launches + 1
    assert rows.step({0: [3]}, 2).tolist() == [[4, 5, 4]]
    assert rows.index.rows[0, 3] == 3


def test_warm_up_changes_nothing():
    from tests.support.v2_drafting import Rows

    rows = Rows(length=1, rows=1)
    before = rows.index.state.clone()
    rows.index.warm_up()
    assert (rows.index.state == before).all()
    assert rows.index.launches == 7  # update, and the others for both types of rows


@pytest.mark.parametrize("capability", [90, 100])
def test_compiled(capability):
    """For Hopper and Blackwell: small, and without spilled registers."""
    import subprocess
    import sys

    # The interpreter is on in this process.
    program = (
        "import os; os.environ.pop('TRITON_INTERPRET', None)\n"
        "from benchmarks.gpu.compile_kernels import compile_kernels\n"
        f"for kernel in compile_kernels({capability}): print(*kernel)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["append", "learn", "search", "update", "vote"]
    for name, _, binary, registers, spilled, _ in lines:
        assert int(spilled) == 0, name
        assert int(registers) <= 96, name
        assert int(binary) < 64_000, name

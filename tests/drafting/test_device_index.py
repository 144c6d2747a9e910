"""What is on the device, within which bound, and that no step waits for it."""

import numpy as np
import pytest
import torch

from nemo_specrl.drafting.reference import EMPTY, START

LONG = list(range(39)) * 20


@pytest.fixture
def make_rows(by_reference):
    from tests.support.v2_drafting import Rows

    return Rows


def held(rows):
    """Responses in the pages of all prompts, as their lists have them."""
    pool, links = rows.index.pool.cpu().numpy(), rows.index.links.cpu().numpy()
    found = []
    for prompt in rows.index._prompts.values():
        for page in prompt.listed:
            if page >= 0 and links[page, 0] < 0:
                cells = []
                while page >= 0:
                    cells += pool[page].tolist()
                    page = links[page, 1]
                found.append([token for token in cells if token >= 0])
    return found


def test_siblings_draft_for_each_other(make_rows):
    """Within the step, without any history."""
    rows = make_rows(length=3)
    rows.open(0)
    rows.open(1)
    drafts = rows.step({0: [5, 6, 7, 8], 1: [5]})
    assert drafts[1].tolist() == [6, 7, 8]
    rows.open(2, b"another prompt")
    assert rows.step({2: [5]}).tolist() == [[5, 5, 5]]


def test_response_drafts_when_its_row_has_ended(make_rows):
    """For its prompt, and by the corpus for others that have nothing themselves."""
    rows = make_rows(length=2)
    rows.open(0)
    rows.step({0: [5, 6, 7]})
    rows.index.close_row(0)
    rows.open(0, b"b")
    rows.open(1)
    assert rows.step({1: [5], 0: [5, 6]}).tolist() == [[6, 7], [7, 6]]
    rows.open(0, b"c", [(0, [5, 8, 8])])
    assert rows.step({0: [5]}).tolist() == [[8, 8]]


def test_history_is_written_once(make_rows):
    rows = make_rows()
    rows.open(0, history=[(0, [1, 2, 3])])
    rows.open(1, history=[(0, [1, 2, 3]), (1, [1, 2, 4])])
    rows.step({0: [1], 1: [1]})
    assert sorted(held(rows)) == [[1], [1], [1, 2, 3], [1, 2, 4]]


def test_long_responses_cross_pages(make_rows):
    rows = make_rows(length=4, longest=900)
    rows.open(0, history=[(0, LONG)])
    for i in range(0, 700, 50):
        drafts = rows.step({0: LONG[i : i + 50]})
        assert drafts[0].tolist() == LONG[i + 50 : i + 54]
    assert sorted(map(len, held(rows))) == [700, len(LONG)]


def test_refused_and_cut(make_rows):
    rows = make_rows(vocabulary=10, longest=20)
    history = [(0, [1, 2, 99]), (1, []), (2, [1, -5]), (3, [1] * 30), (4, [3, 4])]
    rows.open(0, history=history)
    assert rows.step({0: [3]})[0, 0] == 4
    counts = rows.index.counts
    assert (counts.refused, counts.cut) == (2, 1)
    assert sorted(held(rows)) == [[1] * 20, [3], [3, 4]]


def test_preempted_row_begins_anew(make_rows):
    """Its response is there once, not twice."""
    rows = make_rows(length=1)
    rows.open(0, identity=7)
    rows.step({0: [1, 2, 3]})
    rows.index.close_row(0)
    rows.open(1, identity=7, brought=[1, 2, 3])
    rows.step({1: [4]})
    assert held(rows) == [[1, 2, 3, 4]]


@pytest.mark.parametrize(("rows", "left_out"), [(64, 0), (256, 2), (1024, 2)])
def test_a_prompt_may_have_more_the_fewer_rows_there_are(make_rows, rows, left_out):
    """130 earlier responses of 3,070 tokens; 256 rows may search 384 Ki tokens of them each."""
    from tests.support.v2_drafting import as_bytes

    sent = [(i, as_bytes([i % 40] * 3070)) for i in range(130)]
    index = make_rows(rows=rows, longest=3071, max_bytes=128 << 20).index
    index.open_row(0, b"a", 1000, sent, 3)
    assert index.counts.responses == left_out
    (prompt,) = index._prompts.values()
    assert sorted(prompt.responses) == list(range(left_out, 130))  # the newest


@pytest.mark.parametrize("max_bytes", [0, 1000, 30_000, 60_000, 150_000])
def test_memory_bound(make_rows, max_bytes):
    """Prompts without rows make room, then rows do without; nothing is an error."""
    rows = make_rows(rows=4, max_bytes=max_bytes, longest=600)
    empty = make_rows(rows=4, max_bytes=0, longest=600)
    assert rows.index.nbytes <= max(max_bytes, empty.index.nbytes) + 4096
    rng = np.random.default_rng(0)
    for batch in range(8):
        for row in range(4):
            history = [(i, rng.integers(0, 40, 300).tolist()) for i in range(3)]
            rows.open(row, b"%d" % (batch * 2 + row // 2), history)
        for _ in range(3):
            rows.step({row: rng.integers(0, 40, 100).tolist() for row in range(4)})
        in_use = [page for p in rows.index._prompts.values() for page in p.listed if page >= 0]
        assert len(set(in_use)) == len(in_use) == len(rows.index.pool) - len(rows.index._free)
        table = rows.index.table.cpu().numpy()
        for prompt in rows.index._prompts.values():
            listed = table[prompt.slot]
            assert listed[: len(prompt.listed)].tolist() == prompt.listed
            assert (listed[len(prompt.listed) :] == -1).all()
    counts = rows.index.counts
    assert counts.prompts + counts.responses + counts.rows + counts.evicted > 0


def test_a_row_without_room_leaves_the_responses_of_others_alone(make_rows, monkeypatch):
    """Its place was that of a row with more pages, which are still those of that row's prompt."""
    from nemo_specrl.drafting import device_arrays

    monkeypatch.setattr(device_arrays, "PAGES_SEARCHED", 16)  # eight pages of a prompt
    rows = make_rows(rows=2, longest=3000)
    rng = np.random.default_rng(0)
    ended = rng.integers(0, 20, 1800).tolist()
    rows.open(0, b"ended")
    for i in range(0, 1800, 200):
        rows.step({0: ended[i : i + 200]})
    rows.index.close_row(0)
    rows.open(0, b"without room", [(1, rng.integers(0, 20, 1500).tolist())])
    for _ in range(12):
        rows.step({0: [30] * 200})
    assert rows.index.counts.rows == 1
    assert ended in held(rows)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_full_list_drops_its_oldest_responses(make_rows, monkeypatch, preempted):
    """A prompt whose requests bring nothing, and one whose row is preempted again and again."""
    from nemo_specrl.drafting import device_arrays

    monkeypatch.setattr(device_arrays, "PAGES_SEARCHED", 16)  # eight pages of a prompt
    rows = make_rows(rows=2, longest=600, length=2)
    for i in range(30):
        brought = [1, 2] if preempted and i else []
        rows.open(0, identity=7 if preempted else i, brought=brought)
        rows.step({0: [i, *[30] * 297]})
        rows.step({0: [i]})
        rows.index.close_row(0)
    (prompt,) = rows.index._prompts.values()
    assert rows.index.counts.rows == 0 and len(prompt.listed) <= 8
    newest = [tokens[2 * preempted] for tokens in held(rows)]
    assert sorted(newest) == ([29] if preempted else [26, 27, 28, 29])
    assert rows.index.table[prompt.slot, : len(prompt.listed)].tolist() == prompt.listed
    rows.open(1, identity=99)
    assert rows.step({1: [29]})[0].tolist() == [30, 30]


def test_two_ranks_draft_the_same(make_rows):
    """Whichever pages hold what. Rows end in the same order on both (``test_exactness``)."""
    ranks = [make_rows(rows=6, longest=600, max_bytes=150_000) for _ in range(2)]
    ranks[1].index.forget()
    junk = ranks[1].index._free
    junk.reverse()  # other pages
    rng = np.random.default_rng(1)
    for _ in range(6):
        ended = rng.permutation(6)[:3].tolist()
        for rank in ranks:
            for row in ended:
                rank.index.close_row(row)
        state = rng.bit_generator.state
        drafts = []
        for rank in ranks:
            rng.bit_generator.state = state
            for row in sorted({*ended, *(r for r in range(6) if r not in rank.index._rows)}):
                history = [(i, rng.integers(0, 4, 250).tolist()) for i in range(2)]
                rank.open(row, b"%d" % (row % 3), history)
            drafts.append(rank.step({row: rng.integers(0, 4, 40).tolist() for row in range(6)}))
        assert torch.equal(*drafts)
        assert (ranks[0].index.confidences == ranks[1].index.confidences).all()
    assert ranks[0].index.counts == ranks[1].index.counts


def test_ranks_take_what_the_one_with_the_least_memory_has(tmp_path):
    """Two processes, of which one runs out of memory for its pool, and halves it until it fits."""
    from tests.support.v2_ranks import ALLOWED, MAX_BYTES, sizes_of_ranks

    first, second = sizes_of_ranks(tmp_path)
    assert first == second
    assert 0 < first[0] * 256 <= ALLOWED < MAX_BYTES // 4


@pytest.mark.parametrize("length", [8, 24])
@pytest.mark.parametrize("changed", [0.002, 0.02])
def test_as_many_tokens_a_step_as_trees(make_rows, length, changed):
    """Responses that follow two solutions and leave them now and then, as a policy does."""
    from tests.support.v2_drafting import steps_with_index, steps_with_trees

    rng = np.random.default_rng(3)
    solutions = [rng.integers(0, 30, 300) for _ in range(2)]

    def response():
        tokens = solutions[rng.integers(2)].copy()
        replaced = rng.random(len(tokens)) < changed
        tokens[replaced] = rng.integers(0, 30, replaced.sum())
        cut = int(rng.integers(200, 300))  # and repeats a part of itself
        return [*tokens[:cut].tolist(), *tokens[cut - 40 : cut].tolist()]

    history, responses = [response() for _ in range(4)], [response() for _ in range(4)]
    index = steps_with_index(responses, history, length, 30)
    trees = steps_with_trees(responses, history, length)
    assert index <= trees / 0.97, (index, trees, sum(map(len, responses)))


def test_what_lies_behind_the_end_is_not_drafted_from(make_rows):
    """A stop token, and the longest response."""
    rows = make_rows(length=2)
    rows.open(0, stops={7, 9})
    rows.open(1, most=4)
    rows.step({0: [1], 1: [1]})
    rows.step({0: [2, 7, 3], 1: [2, 3, 4]})
    rows.step({0: [4, 5], 1: [5]})  # a step too late, under asynchronous scheduling
    pool, held = rows.index.pool.cpu().numpy(), rows.index._rows
    for row, kept in ((0, [1, 2, 7]), (1, [1, 2, 3, 4])):
        page = held[row].prompt.listed[held[row].positions[0]]
        assert pool[page][: len(kept) + 2].tolist() == [START, *kept, EMPTY]

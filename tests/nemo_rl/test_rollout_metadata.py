"""Records of rollouts on their way from the workers to the trainer; needs no NeMo-RL."""

import weakref

import numpy as np
import pytest
import torch
from vllm import CompletionOutput, RequestOutput

from nemo_specrl import Finish, Rollout, prompt_key
from nemo_specrl.engine.outputs import RolloutInfo
from nemo_specrl.nemo_rl import rollout_metadata
from nemo_specrl.nemo_rl.birth_anchor import anchored_logprobs
from nemo_specrl.nemo_rl.rollout_metadata import (
    MAX_RECORDS,
    MetadataLog,
    MetadataTable,
    RolloutMetadata,
)
from tests.support.nemo_rl.steps import GROUP, Batch, Workers, outputs_of, step, table_of


def found(table, rows):
    return table.find(rows["token_ids"], rows["token_loss_mask"], rows["input_lengths"])


def test_each_row_finds_the_record_of_its_rollout_in_any_order():
    rows, rollouts = step([7, 8], np.random.default_rng(0))
    order = np.random.default_rng(1).permutation(len(rollouts))
    shuffled = {name: [column[i] for i in order] for name, column in rows.items()}
    for i, responses in zip(order, found(table_of(rows, rollouts), shuffled), strict=True):
        ((start, end, record),) = responses
        assert (start, end) == (3, rows["input_lengths"][i])
        assert (record.key, record.sample_index) == (rollouts[i].key, rollouts[i].sample_index)
        assert record.fresh == rollouts[i].fresh
        assert record.staleness == (None if rollouts[i].fresh else pytest.approx(-18))


def test_each_response_of_a_conversation_has_a_record_of_its_own():
    ids, mask = [1, 2, 3, 4, 5, 6, 7, 8, 0], [0, 0, 1, 1, 0, 0, 1, 1, 0]
    responses = [
        Rollout(prompt_key(ids[:start]), k, ids[start:end], np.zeros(2), Finish.STOP, 0)
        for k, (start, end) in enumerate([(2, 4), (6, 8)])
    ]
    workers = Workers()
    for rollout, end in zip(responses, (4, 8), strict=True):
        workers.make({"token_ids": [ids], "input_lengths": [end]}, [rollout])
    (row,) = MetadataTable(workers.take).find([ids], [mask], [8])
    assert [(start, end) for start, end, _ in row] == [(2, 4), (6, 8)]
    assert [record.key for *_, record in row] == [r.key for r in responses]


def test_equal_rows_of_which_one_is_fresh_get_a_record_each():
    rows, rollouts = step([7], np.random.default_rng(0))
    same = {name: [column[0]] * GROUP for name, column in rows.items()}
    tokens = rollouts[0].tokens
    equal = [
        Rollout(r.key, r.sample_index, tokens, np.zeros(len(tokens)), r.finish, 3, fresh=r.fresh)
        for r in rollouts
    ]
    table = table_of(same, equal)
    for _ in range(2):  # the anchor asks as well as the monitor
        indices = [row[0].record.sample_index for row in found(table, same)]
        assert sorted(indices) == list(range(GROUP))


def test_workers_are_asked_once_a_step_and_what_was_used_is_forgotten():
    workers = Workers()
    table = MetadataTable(workers.take)
    for version in (1, 2):
        rows, rollouts = step([7], np.random.default_rng(0), version=version)
        workers.make(rows, rollouts)
        for _ in range(2):
            assert all(row[0].record is not None for row in found(table, rows))
        table.end_step()
        assert workers.asked == version
    assert all(row[0].record is None for row in found(table, rows))


def test_rows_that_are_trained_on_later_keep_their_record():
    rows, rollouts = step([7, 8], np.random.default_rng(0))
    table = table_of(rows, rollouts, later=True)
    for part in (slice(GROUP, None), slice(GROUP)):
        some = {name: column[part] for name, column in rows.items()}
        assert all(row[0].record is not None for row in found(table, some))
        table.end_step()


@pytest.mark.parametrize("later", [False, True])
def test_a_step_that_asks_for_no_rows_has_records_too(later):
    rows, rollouts = step([7], np.random.default_rng(0))
    table = table_of(rows, rollouts, later=later)
    table.end_step()
    assert all((row[0].record is not None) == later for row in found(table, rows))


@pytest.mark.parametrize("later", [False, True])
def test_records_of_rows_that_are_dropped_in_each_step_do_not_add_up(later, monkeypatch):
    """As under dynamic sampling, which drops the groups whose rewards are equal."""
    workers, rng, noted = Workers(births=True), np.random.default_rng(0), []

    def take():
        taken = workers.take()
        noted.extend(weakref.ref(record) for _, record in taken)
        return taken

    table, kept, dropped = MetadataTable(take, later=later), [], []
    monkeypatch.setattr(rollout_metadata, "MAX_BYTES", 256)  # of 32 rows that reuse two tokens
    for _ in range(10):
        rows, rollouts = step(range(8), rng, fresh_fraction=0.0)
        workers.make(rows, rollouts)
        trained = {name: column[: 2 * GROUP] for name, column in rows.items()}
        assert all(row[0].record is not None for row in found(table, trained))
        table.end_step()
        kept.append(sum(reference() is not None for reference in noted))
        dropped.append({name: column[2 * GROUP :] for name, column in rows.items()})
    assert kept == [32 if later else 0] * 10 and len(noted) == 10 * 8 * GROUP
    *older, newest = ([row[0].record for row in found(table, rows)] for rows in dropped)
    assert all(record is None for records in older for record in records)
    assert [record is not None for record in newest] == [False] * 16 + [later] * 32


def test_records_that_nobody_takes_are_limited():
    rows, rollouts = step([7, 8, 9], np.random.default_rng(0))
    log = MetadataLog(births=False)
    log.note(outputs_of(rows, rollouts))
    taken = log.take()
    log.note(outputs_of(rows, rollouts) * (MAX_RECORDS // len(rollouts) + 1))
    assert len(log.take()) == MAX_RECORDS
    # The driver has taken those of the rows first, and then so many others that five are left.
    record = taken[0][1]
    others = [((i.to_bytes(16), 1), record) for i in range(MAX_RECORDS - 5)]
    collections = [taken + others, []]
    table = MetadataTable(lambda: collections.pop(0), later=True)
    table.collect()
    table.end_step()
    left = [row[0].record is not None for row in found(table, rows)]
    assert left == [False] * (len(rows["token_ids"]) - 5) + [True] * 5


def test_in_a_step_with_more_rows_than_are_kept_each_is_found():
    """The records are collected engine by engine, and no row is looked for before."""
    rows, rollouts = step([7, 8, 9], np.random.default_rng(0))
    log = MetadataLog(births=False)
    log.note(outputs_of(rows, rollouts))
    first = log.take()
    others = [((i.to_bytes(16), 1), first[0][1]) for i in range(MAX_RECORDS)]
    collections = [first, others]
    table = MetadataTable(lambda: collections.pop(0))
    table.collect()
    table.collect()  # as for the next part of a batch
    assert all(row[0].record is not None for row in found(table, rows))


def test_births_are_carried_only_where_they_are_needed():
    _, rollouts = step([7], np.random.default_rng(0))
    reused = next(rollout for rollout in rollouts if not rollout.fresh)
    without, with_births = (RolloutMetadata.of(reused, 2, births=b) for b in (False, True))
    assert without.births is None and with_births.births.tolist() == [-9, -9]


def test_the_anchor_replaces_reused_tokens_and_nothing_else():
    rows, rollouts = step([7], np.random.default_rng(0))
    assert not rollouts[-1].fresh
    batch = Batch(rows)
    before = batch["prev_logprobs"].clone()
    table = table_of(rows, [*rollouts[:-1], None], births=True)  # the last row's record is lost
    expected = before.clone()
    for row, rollout in enumerate(rollouts[:-1]):
        if not rollout.fresh:
            expected[row, 3:5] = -9.0
    assert torch.equal(anchored_logprobs(batch, table), expected)
    assert torch.equal(batch["prev_logprobs"], before) and not torch.equal(expected, before)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("versions", "accepted"),
    [
        ([7, 7, 7, 7, 8, 8], 0),  # decoded in part before a refit
        ([5, 5, 7, 7, 8, 8], 2),  # likewise, behind an accepted prefix
        ([8, 8, 8, 8, 8, 8], 3),  # its draft is of a lost step that had the same number
    ],
)
def test_the_accepted_prefix_alone_is_anchored_whatever_the_versions_are(fresh, versions, accepted):
    prompt, tokens = [1, 2, 3], [5, 6, 7, 8, 9, 10]
    now, born = np.full(6, -1.0), np.full(6, -1.0)
    born[:accepted] = -2.0
    rollout = Rollout(
        *(prompt_key(prompt), 0, tokens, now, Finish.STOP, 8, born, versions), fresh=fresh
    )
    completion = CompletionOutput(0, "", tokens, None, None)
    completion.spec_rl = RolloutInfo(rollout, accepted, accepted)
    log = MetadataLog(births=True)
    log.note([RequestOutput("", None, prompt, None, [completion], True)])
    table = MetadataTable(log.take)
    batch = {
        "input_ids": torch.tensor([prompt + tokens]),
        "token_mask": torch.tensor([[0] * 3 + [1] * 6]),
        "input_lengths": torch.tensor([9]),
        "prev_logprobs": torch.full((1, 9), -9.0),
    }
    replaced = 0 if fresh else accepted  # a fresh row's draft is of the same weights
    expected = [-9.0] * 3 + [-2.0] * replaced + [-9.0] * (6 - replaced)
    assert anchored_logprobs(batch, table).tolist() == [expected]
    ids, mask, lengths = (
        batch[name].numpy() for name in ("input_ids", "token_mask", "input_lengths")
    )
    (((_, _, record),),) = table.find(ids, mask, lengths)
    assert record.staleness == (-float(replaced) if replaced else None)

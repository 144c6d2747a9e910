"""The journal: what a process that died had made is taken by the step it was made for, once."""

import contextlib

import numpy as np
import pytest

from nemo_specrl.cache import RolloutStore
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.support.rollouts import rollout
from tests.support.stores import restore

KEYS = [prompt_key([p]) for p in range(3)]
ROWS = [(key, sample_index) for key in KEYS for sample_index in range(2)]
WEIGHTS = 77


def exact(key, sample_index, version, *, salt=0, fingerprint=WEIGHTS, finish=Finish.STOP):
    """A rollout with log-probs of all bits, which only exact records keep."""
    n = 5 + salt
    logprobs = -np.random.default_rng([key[0], sample_index, version, salt]).random(n)
    fields = {"logprobs": logprobs, "birth_logprobs": None, "finish": finish}
    return rollout(key, version, sample_index, n, salt=salt, occurrence=version,
                   fingerprint=fingerprint, **fields)  # fmt: skip


@contextlib.contextmanager
def opened(folder, run="a run", max_bytes=8 * 2**20):
    store = JournaledStore(
        folder / "store", folder / "journal", run=run, max_bytes=max_bytes, tokenizer_id="tok"
    )
    with contextlib.closing(store):
        yield store


def step(version, **options):
    return [exact(key, sample_index, version, **options) for key, sample_index in ROWS]


def decode(store, rollouts):
    """As an engine does, which asks for what there is, finds nothing, and decodes."""
    (version,) = {rollout.policy_version for rollout in rollouts}
    assert store.take(ROWS, version, WEIGHTS) == [None] * 6
    store.put(rollouts)


def test_what_was_made_is_taken_by_its_step_once_and_goes_into_the_store(tmp_path):
    made = {version: step(version) for version in (3, 4)}
    with opened(tmp_path) as store:
        for rollouts in made.values():
            decode(store, rollouts)
        assert store.take(ROWS, 4, WEIGHTS) == [None] * 6  # it was made by this very process
        store.snapshot(tmp_path / "snapshot")
    restore(tmp_path / "snapshot", tmp_path / "store")
    for _ in range(2):  # what is taken is not gone: the process may die again
        with opened(tmp_path) as store:
            assert store.take(ROWS, 2, WEIGHTS) == [None] * 6
            for version, rollouts in made.items():
                assert store.take(ROWS[::-1], version, WEIGHTS) == rollouts[::-1]
                assert store.take(ROWS, version, WEIGHTS) == [None] * 6
                newest = [r for group in store.get(KEYS).values() for r in group]
                assert [r.policy_version for r in newest] == [version] * 6


def test_rows_that_come_twice_in_a_step_take_what_each_occurrence_made(tmp_path):
    first, second = step(1), step(1, salt=1)
    with opened(tmp_path) as store:
        decode(store, [*first, exact(*ROWS[0], 1, salt=2, finish=Finish.PARTIAL)])
        decode(store, second)
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == first
        assert store.take(ROWS, 1, WEIGHTS) == second
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == first
        store.put(step(1, salt=3))  # made again for whatever reason
        assert store.take(ROWS, 1, WEIGHTS) == second


def test_half_a_batch_of_the_same_weights_is_not_taken(tmp_path):
    with opened(tmp_path) as store:
        decode(store, step(1)[:4])
    with opened(tmp_path) as store:
        decode(store, step(1))
        assert len(store.get(KEYS)) == 3
    with opened(tmp_path) as store:  # the second time it was whole
        assert store.take(ROWS, 1, WEIGHTS) == step(1)


def test_a_step_that_was_lost_twice_comes_from_the_process_that_had_all_of_it(tmp_path):
    """The first died in mid-step, the second later on, with what it had decoded in the log."""
    with opened(tmp_path) as store:
        decode(store, step(1)[:4])
    with opened(tmp_path) as store:
        decode(store, step(1, salt=1))
    for _ in range(2):
        with opened(tmp_path) as store:
            assert store.take(ROWS, 1, WEIGHTS) == step(1, salt=1)
            newest = [r.tokens.tolist() for group in store.get(KEYS).values() for r in group]
            assert newest == [r.tokens.tolist() for r in step(1, salt=1)]


def test_a_step_that_ended_early_is_taken_with_its_partial_rollouts(tmp_path):
    """Two of three prompts are enough; of the third one row had ended, and one was cut off."""

    def enough(ended):
        return sum(map(all, zip(ended[::2], ended[1::2], strict=True))) >= 2

    rollouts = [*step(1)[:5], exact(*ROWS[5], 1, finish=Finish.PARTIAL)]
    for ended, whole in ((3, False), (5, True)):  # the first process died before it was enough
        with opened(tmp_path) as store:
            assert store.take(ROWS, 1, WEIGHTS, enough) == [None] * 6
            store.put([*rollouts[:ended], *(rollouts[5:] if whole else [])])
    RolloutStore(tmp_path / "store", max_bytes=2**20, tokenizer_id="tok").clear()
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS, enough) == [*rollouts[:5], None]
        restored = [r for group in store.get(KEYS).values() for r in group]
        for found, made in zip(restored, rollouts, strict=True):
            assert (found.key, found.sample_index) == (made.key, made.sample_index)
            assert found.finish is made.finish and (found.tokens == made.tokens).all()
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6  # a step of all rows is not there


def test_what_several_processes_had_of_a_step_is_not_put_together(tmp_path):
    """Each has what it finished first, which is short; together they had all rows."""
    for salt, part in enumerate((slice(0, 4), slice(2, 6))):
        with opened(tmp_path) as store:
            decode(store, step(1, salt=salt)[part])
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6


def test_a_second_draw_that_was_lost_twice_is_the_second_one(tmp_path):
    """A prompt is drawn twice in a step. The first process dies in its second draw."""
    with opened(tmp_path) as store:
        for salt, part in ((0, slice(6)), (1, slice(4))):
            decode(store, step(1, salt=salt)[part])
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == step(1)
        decode(store, step(1, salt=2))
        decode(store, step(1, salt=3))
    with opened(tmp_path) as store:
        for salt in (0, 2, 3):
            assert store.take(ROWS, 1, WEIGHTS) == step(1, salt=salt)
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6


def test_of_what_other_weights_made_the_latest_is_offered(tmp_path):
    for salt, part in enumerate((slice(0, 4), slice(2, 4))):
        with opened(tmp_path) as store:
            store.take(ROWS, 1, WEIGHTS + salt)  # drafts, the second time
            store.put(step(1, salt=salt, fingerprint=WEIGHTS + salt)[part])
    with opened(tmp_path) as store:
        first, second = (step(1, salt=s, fingerprint=WEIGHTS + s) for s in (0, 1))
        assert store.take(ROWS, 1, WEIGHTS + 2) == [*first[:2], *second[2:4], None, None]


def test_what_other_weights_made_is_offered_but_not_stored(tmp_path):
    with opened(tmp_path) as store:
        decode(store, step(1)[:4])
        store.snapshot(tmp_path / "snapshot")
    with opened(tmp_path) as store:
        store._store.clear()
        assert store.take(ROWS, 1, WEIGHTS + 1) == [*step(1)[:4], None, None]
        assert store.get(KEYS) == {}


def test_a_checkpoint_makes_it_forget_and_another_run_has_its_own(tmp_path):
    with opened(tmp_path) as store:
        decode(store, step(1))
        store.snapshot(tmp_path / "snapshot")
        store.forget()
        decode(store, step(2))
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6
        assert store.take(ROWS, 2, WEIGHTS) == step(2)
    with opened(tmp_path, run="another") as store:
        assert store.take(ROWS, 2, WEIGHTS) == [None] * 6
        assert len(store.get(KEYS)) == 3  # the store is the folder's
    with opened(tmp_path) as store:
        assert store.take(ROWS, 2, WEIGHTS) == [None] * 6


def test_what_a_step_makes_while_a_checkpoint_is_written_stays(tmp_path):
    first, second = step(2), step(2, salt=1)
    with opened(tmp_path) as store:
        decode(store, step(1))
        store.snapshot(tmp_path / "snapshot")
        decode(store, first)
    with opened(tmp_path) as store:  # the process died before the checkpoint was complete
        assert store.take(ROWS, 1, WEIGHTS) == step(1)
        assert store.take(ROWS, 2, WEIGHTS) == first
        store.put(second)
        assert store.take(ROWS, 2, WEIGHTS) == [None] * 6
        decode(store, step(3))
        store.snapshot(tmp_path / "snapshot")
        decode(store, step(4))
        store.forget()
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6
        assert store.take(ROWS, 3, WEIGHTS) == [None] * 6
        assert store.take(ROWS, 4, WEIGHTS) == step(4)


def test_what_one_part_refuses_the_others_keep(tmp_path):
    """A disk may be full for one of them; a part that is closed fails in the same way."""
    with opened(tmp_path) as store:
        store._store.close()
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6
        with pytest.raises(StoreUnavailable):
            store.put(step(1))
        with pytest.raises(StoreUnavailable):
            store.sync()
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == step(1)
        decode(store, step(2))
        store._journal[0].close()
        with pytest.raises(StoreUnavailable):
            store.sync()
        assert not store._store._buffer.records


def test_both_together_stay_under_the_cap(tmp_path):
    cap = 4 * 2**20
    tokens, logprobs = np.zeros(2000, int), -np.ones(2000)
    with opened(tmp_path, max_bytes=cap) as store:
        for version in range(60):
            store.put(
                Rollout(prompt_key([p]), 0, tokens, logprobs, Finish.STOP, version)
                for p in range(10)
            )
        store.sync()
        files = [f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()]
        assert sum(files) <= cap
        assert len(store.get(prompt_key([p]) for p in range(10))) == 10


def test_where_the_cap_made_it_forget_it_hands_out_nothing_of_this_process(tmp_path):
    with opened(tmp_path, max_bytes=4 * 2**20) as store:
        decode(store, step(1))
        for prompt in range(100, 400):  # the journal has 1 MiB: the first ones are evicted
            store.put([rollout(prompt, 1, n=3000)])
        assert store._journal[-1].get(KEYS) == {}
        for _ in range(3):
            store.put(step(1, salt=1))
        assert len(store._journal[-1].get(KEYS)) == len(KEYS)
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6


def test_a_damaged_journal_is_moved_aside_and_the_run_resumes_without_it(tmp_path, caplog):
    with opened(tmp_path) as store:
        decode(store, step(1))
    for file in (tmp_path / "journal").glob("*/rollouts.sqlite"):
        data = bytearray(file.read_bytes())
        for page in range(0, len(data), 4096):
            data[page + 12] ^= 1
        file.write_bytes(data)
    with opened(tmp_path) as store:
        assert store.take(ROWS, 1, WEIGHTS) == [None] * 6
        assert len(store.get(KEYS)) == 3
    assert f"{tmp_path / 'journal' / '1'} is damaged" in caplog.text

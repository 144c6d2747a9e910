"""The hard cap of a store, and what goes when it is full."""

import itertools
import logging
import random
import subprocess
import threading

import pytest

from nemo_specrl.errors import StoreUnavailable
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    PREAMBLE,
    bytes_on_disk,
    changing,
    contents,
    moved_aside,
    open_store,
    run_python,
)


@pytest.mark.parametrize(
    ("cap", "lengths", "written"),
    [
        (MIB, [0, 10, 30], 3 * MIB // 8),
        (MIB, [10, 700, 5000], 3 * MIB),
        (20 * MIB, [60_000, 100_000], 60 * MIB),
        (20 * MIB, [1_000], 24 * MIB),
    ],
    ids=["tiny", "mixed", "huge", "page-sized"],
)
def test_the_files_never_exceed_the_cap(tmp_path, cap, lengths, written):
    rng = random.Random(0)
    total = prompts = 0
    largest = 0
    with open_store(tmp_path, cap) as store:
        while total < written:
            made = [rollout(prompts + i, n=rng.choice(lengths)) for i in range(4)]
            assert store.put(made) == 4
            prompts += 4
            contents(store, [rng.randrange(prompts)])
            total += sum(4 * len(r) + 32 for r in made)
            largest = max(largest, bytes_on_disk(tmp_path))
        assert contents(store, [prompts - 1]) == {prompts - 1: [made[-1]]}
        stats = store.stats()
        assert stats.dropped == 0 and stats.evicted > 0
        assert stats.prompts + stats.evicted == prompts
        assert cap // 2 < largest <= cap


def test_with_many_readers_and_writers_the_files_stay_below_the_cap(tmp_path):
    """A log that is being read cannot go into the file; then writers wait."""
    script = f"""{PREAMBLE}
import random
store = open_store(sys.argv[1], {2 * MIB})
rng = random.Random(int(sys.argv[2]))
for i in range(200):
    if sys.argv[2] < "2":
        store.put([rollout(rng.randrange(100), i, int(sys.argv[2]), n=2000)])
    else:
        contents(store, [rng.randrange(100) for _ in range(20)])
print(store.stats().evicted)
"""
    processes = [run_python(script, tmp_path, i, stdout=subprocess.PIPE) for i in range(4)]
    largest = 0
    while any(process.poll() is None for process in processes):
        largest = max(largest, bytes_on_disk(tmp_path))
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert int(said[0]) + int(said[1]) > 0
    assert MIB < largest <= 2 * MIB


def test_least_recently_used_prompts_go_first(tmp_path):
    order = []
    rng = random.Random(3)
    store = open_store(tmp_path, MIB)
    for step in range(300):
        prompt = rng.randrange(60)
        store.put([rollout(prompt, step, i, n=rng.choice([50, 900])) for i in range(3)])
        order = [p for p in order if p != prompt] + [prompt]
        if step % 7 == 0:  # written with the next put
            there = [p for p in rng.sample(range(60), 3) if contents(store, [p])]
            order = [p for p in order if p not in there] + there
        if step % 40 == 39:
            store.close()
            store = open_store(tmp_path, MIB)
    with changing(tmp_path) as database:
        left = database.execute("SELECT count(*) FROM prompts").fetchone()[0]
    assert 0 < left < 60
    assert set(contents(store, range(60))) == set(order[-left:])
    store.close()


def test_a_prompt_that_is_read_outlives_those_that_are_not(tmp_path):
    with open_store(tmp_path, MIB) as store:
        store.put([rollout(0, n=2000)])
        for prompt in range(1, 200):
            store.put([rollout(prompt, n=2000)])
            if prompt % 7 == 0:
                assert contents(store, [0])
        assert store.stats().evicted > 50
    with open_store(tmp_path, MIB) as store:  # the last reads counted, too
        for prompt in range(200, 220):
            store.put([rollout(prompt, n=2000)])
        assert contents(store, [0]) == {0: [rollout(0, n=2000)]}


def test_what_can_never_fit_is_dropped_and_counted(tmp_path):
    with open_store(tmp_path, MIB) as store:
        store.put([rollout(1)])
        assert store.put([rollout(1, 1, n=50_000), rollout(2, n=50_000), rollout(3)]) == 1
        assert contents(store, [1, 2, 3]) == {1: [rollout(1)], 3: [rollout(3)]}
        assert store.stats().dropped == 2


def test_a_prompt_larger_than_the_cap_keeps_its_last_responses(tmp_path):
    with open_store(tmp_path, MIB, responses_per_prompt=1000) as store:
        made = [rollout(1, 0, i, n=3000) for i in range(100)]
        store.put(made)
        left = contents(store, [1])[1]
        assert left == made[-len(left) :]
        assert bytes_on_disk(tmp_path) <= MIB


def test_a_lower_cap_begins_anew_where_nobody_else_uses_the_file(tmp_path, caplog):
    with open_store(tmp_path, 20 * MIB) as store:
        store.put([rollout(p, n=3000) for p in range(600)])
        with open_store(tmp_path, 2 * MIB) as other:  # beside another: it does not grow
            size = bytes_on_disk(tmp_path)
            other.put([rollout(p, n=3000) for p in range(600, 620)])
            assert other.stats().evicted > 0
            assert set(contents(other, range(610, 620))) == set(range(610, 620))
            assert bytes_on_disk(tmp_path) <= size + MIB
    with caplog.at_level(logging.WARNING), open_store(tmp_path, 2 * MIB) as store:
        assert contents(store, range(620)) == {}
        store.put([rollout(1)])
    assert bytes_on_disk(tmp_path) <= 2 * MIB
    (record,) = caplog.records
    assert "larger than max_bytes" in record.getMessage()
    assert not moved_aside(tmp_path)


def test_a_reader_that_never_ends_stops_puts_and_not_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_specrl.cache.store.BUSY_SECONDS", 0.2)
    monkeypatch.setattr("nemo_specrl.cache.database.BUSY_SECONDS", 0.2)
    with open_store(tmp_path, MIB) as store, changing(tmp_path) as database:
        store.put([rollout(1)])
        database.execute("BEGIN")
        database.execute("SELECT count(*) FROM prompts").fetchall()
        with pytest.raises(StoreUnavailable, match="has been reading it for long"):
            for prompt in itertools.count():
                store.put([rollout(prompt, n=1000)])
        assert bytes_on_disk(tmp_path) <= MIB
        assert contents(store, [1])
        database.execute("ROLLBACK")
        store.put([rollout(2, 1)])
        assert contents(store, [2])[2][-1] == rollout(2, 1)


def test_responses_of_many_megabytes_take_several_transactions(tmp_path):
    with open_store(tmp_path, 64 * MIB) as store:
        made = [rollout(p, 0, i, n=8000) for p in range(60) for i in range(16)]
        writer = threading.Thread(target=store.put, args=(made,))
        writer.start()
        while writer.is_alive():
            for group in contents(store, range(60)).values():
                assert all(r in made[:960] for r in group[:1])
            assert bytes_on_disk(tmp_path) <= 64 * MIB
        assert store.stats().responses == 960
        assert contents(store, [59])[59] == made[-16:]

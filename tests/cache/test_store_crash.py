"""A rollout store whose process is killed, or ends without closing it."""

import contextlib
import gc
import inspect
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import time

import pytest

from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.codec import decode
from nemo_specrl.cache.storage.database import connect
from nemo_specrl.cache.storage.schema import DATA_FILE, named
from nemo_specrl.errors import StoreInUse
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    PREAMBLE,
    bytes_on_disk,
    changing,
    contents,
    damaged_folders,
    open_store,
    run_python,
)

CRASHES = int(os.environ.get("NEMO_SPECRL_CRASHES", "20"))


def write_until_killed(path, start, max_bytes, prompts, every):
    """Puts, look-ups after every so many, and syncs.

    Says on standard output, after each sync, up to which number it put.
    """
    store = RolloutStore(path, max_bytes=max_bytes, tokenizer_id="tok")
    for i in itertools.count(start):
        store.put([rollout(i % prompts, version=i, n=[5, 300, 4000][i % 3])])
        if i % every == 0:
            store.get([prompt_key([i % 7])])
        if i % 3 == 0:
            store.sync()
            print(i, flush=True)


WRITER = f"""{PREAMBLE}
{inspect.getsource(write_until_killed)}
write_until_killed(sys.argv[1], *map(int, sys.argv[2:]))
"""
ROOMY = (2**24, 50, 5)
CRAMPED = (2**20, 300, 1)
"""Cap, prompts, and puts for each look-up: nothing is evicted, and most commits evict something."""


@pytest.mark.timeout(15 * CRASHES)
def test_what_was_acknowledged_survives_sigkill(tmp_path):
    """Every store opens, every record that was acknowledged is there, and no wrong one is served.

    NEMO_SPECRL_CRASHES says how often; each crash is at another moment.
    """
    path, rng = tmp_path / "a", random.Random(11)
    acknowledged = {}  # prompt -> version
    start = 0
    for _ in range(CRASHES):
        with run_python(WRITER, path, start, *ROOMY, stdout=subprocess.PIPE) as process:
            for _ in range(rng.randrange(1, 80)):
                line = process.stdout.readline()
            for _ in range(rng.randrange(40_000)):  # so that it may be anywhere between two syncs
                pass
            process.send_signal(signal.SIGKILL)
            last = int([line, *process.stdout.read().splitlines()][-1])
            assert process.wait() == -signal.SIGKILL
        acknowledged |= {i % 50: i for i in range(start, last + 1)}
        with open_store(path) as store:
            found = contents(store, range(50))
            version_of = {prompt: group[0].policy_version for prompt, group in found.items()}
            for prompt, version in version_of.items():
                assert version % 50 == prompt
                assert found[prompt] == [rollout(prompt, version, n=[5, 300, 4000][version % 3])]
            for prompt, version in acknowledged.items():
                assert version_of[prompt] >= version
            assert store.stats().corrupt_records == 0
        start = max(version_of.values()) + 1
    assert not damaged_folders(path)


@pytest.mark.timeout(30 * CRASHES)
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
def test_a_process_killed_at_any_call_of_a_commit_leaves_a_sound_store(tmp_path, strace, call):
    """Before, while and after the file is written, with evictions in most commits."""
    path, rng = tmp_path / "a", random.Random(5)
    start, last = 0, -1
    for _ in range(CRASHES // 2):
        when = rng.randrange(*((150, 2500) if call == "pwrite64" else (15, 400)))
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}"]
        with run_python(
            WRITER, path, start, *CRAMPED, stdout=subprocess.PIPE, before=[*strace, *inject]
        ) as process:
            synced = process.stdout.read().split()
        last = int(synced[-1]) if synced else last
        with open_store(path, MIB) as store:
            found = contents(store, range(300))
            for prompt, group in found.items():
                (r,) = group
                version = r.policy_version
                assert r == rollout(prompt, version, n=[5, 300, 4000][version % 3])
                assert version % 300 == prompt
            if last >= 0:  # what was put last is there
                assert found[last % 300][0].policy_version >= last
            stats = store.stats()
            assert (stats.corrupt_records, stats.prompts, stats.rollouts) == (0, *[len(found)] * 2)
            start = max((g[0].policy_version for g in found.values()), default=-1) + 1
    assert start > 300 and bytes_on_disk(path) <= MIB
    with changing(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not damaged_folders(path)


def test_what_nobody_syncs_is_committed_all_the_same(tmp_path):
    """By the timer, in a process that does nothing more with its store."""
    path = tmp_path / "a"
    script = f"""{PREAMBLE}
store = RolloutStore(sys.argv[1], max_bytes=2**24, tokenizer_id="tok")
for version in range(2):
    store.put([rollout(p, version) for p in range(20)])
    print("put", flush=True)
    sys.stdin.readline()
"""
    pipe = subprocess.PIPE
    with run_python(script, path, stdin=pipe, stdout=pipe) as process:
        for version in range(2):
            assert process.stdout.readline() == "put\n"
            seen = 0
            while seen < 2:  # until another process sees it; the commit may not have ended at once
                with (
                    contextlib.suppress(sqlite3.Error),
                    contextlib.closing(connect(path / DATA_FILE, "mode=ro&nolock=1")) as database,
                ):
                    rows = database.execute(
                        "SELECT prompt, sample_index, clock, record FROM rollouts"
                    )
                    records = [decode(*record) for record in named(rows)]
                    seen += {(r.policy_version, len(records)) for r in records} == {(version, 20)}
                time.sleep(0.01)
            if version == 0:
                process.stdin.write("\n")
                process.stdin.flush()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with open_store(path) as store:
        assert contents(store, range(20)) == {p: [rollout(p, 1)] for p in range(20)}


def test_a_process_that_ends_without_closing_loses_nothing(tmp_path):
    script = f"""{PREAMBLE}
store = RolloutStore(sys.argv[1], max_bytes=2**24, tokenizer_id="tok")
store.put([rollout(p) for p in range(20)])
"""
    with run_python(script, tmp_path / "a") as process:
        assert process.wait() == 0
    with open_store(tmp_path / "a") as store:
        assert contents(store, range(20)) == {p: [rollout(p)] for p in range(20)}


def test_a_store_that_is_dropped_without_closing_commits_what_was_put(tmp_path):
    open_store(tmp_path / "a").put([rollout(1)])
    while True:  # until its timer has committed, and let go of the folder
        with contextlib.suppress(StoreInUse):
            gc.collect()
            with open_store(tmp_path / "a") as store:
                assert contents(store, [1]) == {1: [rollout(1)]}
            break


def test_a_forked_child_that_outlives_a_killed_parent_does_not_keep_the_folder(tmp_path):
    script = f"""{PREAMBLE}
import os, signal
store = RolloutStore(sys.argv[1], max_bytes=2**24, tokenizer_id="tok")
store.put([rollout(1)])
store.sync()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.waitpid(child, 0)
"""
    pipe = subprocess.PIPE
    with run_python(script, tmp_path / "a", stdin=pipe, stdout=pipe) as process:
        child = int(process.stdout.readline())
        with pytest.raises(StoreInUse) as caught:
            open_store(tmp_path / "a")
        assert caught.value.pid == process.pid
        process.kill()
        process.wait()
        os.kill(child, 0)  # it lives
        with open_store(tmp_path / "a") as store:
            assert contents(store, [1]) == {1: [rollout(1)]}
        process.stdin.close()

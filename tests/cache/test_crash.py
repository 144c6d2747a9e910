"""A store whose processes are killed at any moment, all of them at once or one after the other.

NEMO_SPECRL_CRASHES says how many rounds there are.
"""

import contextlib
import functools
import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from nemo_specrl.errors import CacheError
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    PREAMBLE,
    bytes_on_disk,
    contents,
    data_file,
    moved_aside,
    open_store,
    run_python,
)

CRASHES = int(os.environ.get("NEMO_SPECRL_CRASHES", "3"))
WRITERS, READERS = 4, 2
PROMPTS = 40
LENGTHS = (5, 300, 4000)
ROOMY, CRAMPED = 512 * MIB, MIB
"""Nothing is evicted; most transactions evict something."""
DRIVER = """
import json, sys
from tests.cache.test_crash import one_round
for line in sys.stdin:
    print(json.dumps(one_round(**json.loads(line))), flush=True)
"""


@functools.cache
def made(writer, i):
    """The responses of a writer's put number i."""
    return [
        rollout((7 * i + k) % PROMPTS, version=i, index=writer, n=LENGTHS[(i + k) % 3])
        for k in range(1 + i % 3)
    ]


def write(folder, cap, writer, start, said):
    store = open_store(folder, cap, responses_per_prompt=4096)
    i = start
    while True:
        store.put(made(writer, i))
        os.write(said, f"{i} ".encode())
        if i % 10 == 0:
            store.sync()
        i += 1


def check(store):
    """Names of all that a store has: (prompt, version, writer); raises if anything is wrong."""
    names = set()
    for prompt, group in contents(store, range(PROMPTS)).items():
        for r in group:
            i = r.policy_version
            (writer,) = (w for w in range(WRITERS) if r in made(w, i))
            names.add((prompt, i, writer))
    return names


def read(folder, cap, _reader, _start, said):
    store = open_store(folder, cap, responses_per_prompt=4096)
    rng = random.Random(os.getpid())
    while True:
        prompt = rng.randrange(PROMPTS)
        for r in contents(store, [prompt]).get(prompt, [])[-20:]:
            if not any(r in made(writer, r.policy_version) for writer in range(WRITERS)):
                os.write(said, b"wrong ")
        os.write(said, b"read ")


def one_round(folder, cap, start, seed):
    """Let processes work and kill them; returns what each of them said."""
    rng = random.Random(seed)
    children = []
    for number in range(WRITERS + READERS):
        heard, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                (write if number < WRITERS else read)(folder, cap, number, start, said)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os.write(said, b"raised ")
            finally:
                os._exit(1)
        os.close(said)
        children.append((pid, heard))
    words = [b""] * len(children)

    def listen():
        for number, (_, heard) in enumerate(children):
            while select.select([heard], [], [], 0)[0]:
                some = os.read(heard, 2**16)
                words[number] += some
                if not some:
                    break

    while not all(len(word) > 20 for word in words[:WRITERS]):
        listen()
        time.sleep(0.005)
    until = time.monotonic() + 0.5 * rng.random()
    while time.monotonic() < until:
        listen()
        time.sleep(0.005)
    together = rng.random() < 0.5
    for pid, _ in rng.sample(children, len(children)):
        os.kill(pid, signal.SIGKILL)
        if not together:
            time.sleep(0.02 * rng.random())
    for pid, _ in children:
        os.waitpid(pid, 0)
    listen()
    for _, heard in children:
        os.close(heard)
    return [word.decode().split() for word in words]


@pytest.fixture
def rounds():
    pipe = subprocess.PIPE
    with run_python(DRIVER, stdin=pipe, stdout=pipe) as process:

        def run(**arguments):
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


@pytest.mark.timeout(60 + 20 * CRASHES)
def test_nothing_acknowledged_is_lost_and_nothing_else_is_served(tmp_path, rounds):
    acknowledged = set()
    start = 0
    for seed in range(CRASHES):
        words = rounds(folder=str(tmp_path), cap=ROOMY, start=start, seed=seed)
        for writer, numbers in enumerate(words[:WRITERS]):
            assert "raised" not in numbers
            for i in map(int, numbers):
                prompts = [(7 * i + k) % PROMPTS for k in range(1 + i % 3)]
                acknowledged |= {(prompt, i, writer) for prompt in prompts}
        for reader in words[WRITERS:]:
            assert set(reader) <= {"read"}
        with open_store(tmp_path, ROOMY, responses_per_prompt=4096) as store:
            there = check(store)
            stats = store.stats()
        assert acknowledged <= there
        # Of what was not acknowledged, each writer's last put may be there.
        assert len({(i, writer) for _, i, writer in there - acknowledged}) <= WRITERS * (seed + 1)
        assert (stats.damaged, stats.evicted, stats.restarts) == (0, 0, 0)
        assert stats.responses == len(there)
        start = max(i for _, i, _ in there) + 1
    assert not moved_aside(tmp_path)


@pytest.mark.timeout(60 + 20 * CRASHES)
def test_killed_while_it_evicts_the_store_is_sound_and_below_its_cap(tmp_path, rounds):
    start = 0
    for seed in range(100, 100 + CRASHES):
        words = rounds(folder=str(tmp_path), cap=CRAMPED, start=start, seed=seed)
        assert not {"wrong", "raised"} & {word for some in words for word in some}
        assert bytes_on_disk(tmp_path) <= CRAMPED
        with open_store(tmp_path, CRAMPED, responses_per_prompt=4096) as store:
            there = check(store)
            assert store.stats().responses == len(there) > 0
        start = max(i for _, i, _ in there) + 1
        with contextlib.closing(sqlite3.connect(data_file(tmp_path))) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not moved_aside(tmp_path)


@pytest.mark.timeout(60 + 30 * CRASHES)
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync", "ftruncate"])
def test_killed_at_any_call_of_a_transaction_the_store_is_sound(tmp_path, strace, call):
    """Before, while and after the file is written, and while the log goes into the file."""
    script = f"""{PREAMBLE}
from tests.cache.test_crash import CRAMPED, write
write(sys.argv[1], CRAMPED, 0, int(sys.argv[2]), 1)
"""
    rng = random.Random(5)
    start, last = 0, -1
    for _ in range(1 + CRASHES // 3):
        when = rng.randrange(*((100, 2500) if call == "pwrite64" else (3, 40)))
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}"]
        with run_python(
            script, tmp_path, start, stdout=subprocess.PIPE, before=[*strace, *inject]
        ) as process:
            said = process.stdout.read().split()
        last = int(said[-1]) if said else last
        with open_store(tmp_path, CRAMPED, responses_per_prompt=4096) as store:
            there = check(store)
            assert store.stats().responses == len(there)
        if last >= 0:
            assert (7 * last % PROMPTS, last, 0) in there
            start = max(i for _, i, _ in there) + 1
    assert start > 0 and bytes_on_disk(tmp_path) <= CRAMPED
    assert not moved_aside(tmp_path)


def test_a_process_that_ends_without_closing_loses_nothing(tmp_path):
    script = f"""{PREAMBLE}
open_store(sys.argv[1]).put([rollout(p) for p in range(20)])
"""
    with run_python(script, tmp_path) as process:
        assert process.wait() == 0
    with open_store(tmp_path) as store:
        assert contents(store, range(20)) == {p: [rollout(p)] for p in range(20)}


def test_a_process_that_is_stopped_in_a_transaction_costs_others_their_puts_alone(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("nemo_specrl.cache.database.BUSY_SECONDS", 0.2)
    script = f"""{PREAMBLE}
import os, signal
store = open_store(sys.argv[1])
store.put([rollout(1)])
with store._transaction():
    print("begun", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    with run_python(script, tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "begun\n"
        with open_store(tmp_path) as store:
            assert contents(store, [1]) == {1: [rollout(1)]}
            with pytest.raises(CacheError, match="locked"):
                store.put([rollout(2)])
            process.kill()
            process.wait()
            store.put([rollout(3)])
            assert list(store.get([prompt_key([p]) for p in range(4)])) == [
                prompt_key([1]),
                prompt_key([3]),
            ]

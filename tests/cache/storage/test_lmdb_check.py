"""Flipped bits in the files of stores and journals, in every kind of page.

Whatever flips: a process dies of it once at most, nothing wrong is served, and the next process
has a store that works, an empty one if need be.

NEMO_SPECRL_BIT_FLIPS says how many places are tried for each kind of page, in the store's file and
the journal's, at rest and while a process has them open; 4 of each make 80.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys

import lmdb
import numpy as np
import pytest

from nemo_specrl.cache.storage.lmdb_check import PageFile
from nemo_specrl.cache.storage.schema import reading_file
from nemo_specrl.errors import CacheError, StoreUnavailable
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.support.rollouts import rollout
from tests.support.stores import MIB, contents, open_store, run_python

FLIPS = int(os.environ.get("NEMO_SPECRL_BIT_FLIPS", "4"))
PROMPTS = 40
LENGTHS = (5, 300, 1500)
KINDS = ("meta", "branch", "leaf", "overflow", "free list")
DEATHS = {-signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE}

LIVES = """
import json, os, sys, traceback
from tests.cache.storage.test_lmdb_check import live
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            os._exit(live(**job))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def expected(prompt, version):
    return rollout(prompt, version, n=LENGTHS[(prompt + version) % 3])


def opened(folder, kind):
    if kind == "store":
        return open_store(f"{folder}/store", 4 * MIB)
    return JournaledStore(
        f"{folder}/store", f"{folder}/journal", run="a", max_bytes=16 * MIB, tokenizer_id="tok"
    )  # fmt: skip


def data_file(folder, kind):
    """The file that is written to."""
    return folder / ("store" if kind == "store" else "journal/1") / "data.mdb"


def flip_bit(file, offset, bit):
    with open(file, "r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


def live(folder, kind, life, flip=None):
    """Use a store in every way; 0: all is well, 1: something wrong was served."""
    try:
        store = opened(folder, kind)
        if flip is not None:
            flip_bit(*flip)
        i = failed = 0
        while i < 3:
            try:
                found = contents(store, range(PROMPTS))
                for prompt, group in found.items():
                    for r in group:
                        if r != expected(prompt, r.policy_version):
                            return 1
                if kind == "journal":
                    rows = [(r.key, 0) for r in (rollout(p, n=0) for p in range(PROMPTS))]
                    for p, r in enumerate(store.take(rows, 6, 0)):
                        if r is not None and r != expected(p, 6):
                            return 1
                version = 100 * (life + 1) + i
                store.put(expected(prompt, version) for prompt in range(i, PROMPTS, 2))
                store.sync()
                store.stats()
                i += 1
            except CacheError as error:
                failed += 1
                if failed > 1:  # it goes on empty after the first
                    print(error, file=sys.stderr)
                    return 3
        if not contents(store, [2]):
            return 4
        store.close()
        return 0
    except CacheError as error:
        print("refused", error, file=sys.stderr)
        return 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a store, and of one with a journal, whose files have all kinds of pages."""
    folders = {}
    for kind in ("store", "journal"):
        folder = tmp_path_factory.mktemp(kind)
        store = opened(folder, kind)
        for version in range(7):
            store.put(expected(prompt, version) for prompt in range(PROMPTS))
            store.sync()
            store.put(expected(prompt, version) for prompt in range(0, PROMPTS, 3))
            store.sync()
        store.close()
        folders[kind] = folder
    return folders


def pages_by_kind(file):
    """The numbers of the pages in use, by kind."""
    found = {kind: set() for kind in KINDS} | {"meta": {0, 1}}
    with PageFile(file) as pages:
        trees = {"": pages._main, "free": pages._free} | pages.tables()
        for name, tree in trees.items():
            for depth, numbers in pages._levels(tree):
                leaf = depth == tree.depth
                kind = "free list" if name == "free" else "leaf" if leaf else "branch"
                found[kind] |= set(numbers.tolist())
                if leaf:
                    values = pages._nodes(numbers, 2).overflow
                    found["overflow"] |= set(values[values >= 0].tolist())
    return found


def flips(file, kind, count):
    """Offset and bit of flips in pages of a kind, half of them near the pages' beginning."""
    rng = random.Random(f"{file.parent.name} {kind}")
    numbers = sorted(pages_by_kind(file)[kind])
    assert numbers, f"no {kind} page"
    near = 160 if kind == "meta" else 16 if kind == "overflow" else 64
    chosen = [
        (4096 * rng.choice(numbers) + rng.randrange(near if i % 2 else 4096), rng.randrange(8))
        for i in range(count - 1)
    ]
    # The flag of an overflow page, which a branch or leaf is not: LMDB takes it for a value of many
    # pages when it writes it, and says that input or output failed.
    return [*chosen, (4096 * numbers[-1] + 10, 2)]


def test_a_flipped_root_is_damage_and_not_a_file_of_something_else(whole, tmp_path):
    """The newer meta page names another page as the root of the table of tables."""
    intact = whole["store"] / "store" / "data.mdb"
    data = intact.read_bytes()
    transactions = [int.from_bytes(data[at : at + 8], "little") for at in (144, 4096 + 144)]
    root = 4096 * int(transactions[1] > transactions[0]) + 128
    damaged = tmp_path / "data.mdb"
    why = []
    for bit in range(64):
        shutil.copyfile(intact, damaged)
        flip_bit(damaged, root + bit // 8, bit % 8)
        with pytest.raises(lmdb.CorruptedError) as caught, reading_file(damaged):
            pass
        why.append(str(caught.value))
    assert any("its tables are" in line for line in why)


@pytest.mark.parametrize("running", [False, True], ids=["at rest", "while open"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["store", "journal"])
@pytest.mark.timeout(60 + 20 * FLIPS)
def test_no_flipped_bit_ends_two_processes(tmp_path, whole, file, kind, running):
    with run_python(LIVES, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        died = 0
        for offset, bit in flips(data_file(whole[file], file), kind, FLIPS):
            folder = tmp_path / "lives"
            shutil.copytree(whole[file], folder)
            flip = [str(data_file(folder, file)), offset, bit]
            if not running:
                flip_bit(*flip)
            ends = []
            for life in range(3):
                job = {"folder": str(folder), "kind": file, "life": life}
                if running and life == 0:
                    job["flip"] = flip
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
                ends.append(int(process.stdout.readline()))
            assert ends[1:] == [0, 0], (kind, offset, bit, ends)
            assert ends[0] == 0 or ends[0] in DEATHS, (kind, offset, bit, ends)
            died += ends[0] != 0
            shutil.rmtree(folder)
        process.stdin.close()
    print(f"{file}, {kind}: {died} of {FLIPS} flips ended a process")
    assert running or died <= max(1, FLIPS // 20), (
        "the check at opening misses what it is there for"
    )


def first_keys(file, table):
    """Offset and first byte of the first key of each leaf page of a table."""
    with PageFile(file) as pages:
        tree = pages.tables()[table]
        leaves = [n for depth, some in pages._levels(tree) if depth == tree.depth for n in some]
        for number in leaves:
            nodes = pages._nodes(np.array([number]), 2)
            at = int(nodes.at[0]) + 8
            yield 4096 * int(number) + at, int(nodes.data[0, at])


@pytest.mark.timeout(60)
def test_uses_out_of_order_do_not_keep_an_eviction_going(tmp_path):
    """The oldest use becomes the newest by its key, where no search finds it."""
    store = open_store(tmp_path / "store", 4 * MIB)
    store.put(expected(prompt, 0) for prompt in range(PROMPTS))
    store.sync()
    file = tmp_path / "store" / "data.mdb"
    offset, byte = next(first_keys(file, b"uses"))
    assert byte < 128
    flip_bit(file, offset, 7)
    with pytest.raises(StoreUnavailable, match=r"out of order.*goes on empty"):
        store.put(expected(prompt, 0) for prompt in range(3000))
        store.sync()
    goes_on(store)


@pytest.mark.timeout(60)
def test_prompts_out_of_order_do_not_keep_a_scan_going(tmp_path):
    """A search runs off the end of one page to the first key of the next, which is a small one."""
    store = open_store(tmp_path / "store", 4 * MIB)
    store.put(expected(prompt, 0) for prompt in range(400))
    store.sync()
    file = tmp_path / "store" / "data.mdb"
    offset, _ = next((at, byte) for at, byte in first_keys(file, b"rollouts") if byte >= 128)
    flip_bit(file, offset, 7)
    with pytest.raises(StoreUnavailable, match=r"out of order.*goes on empty"):
        list(store.scan(b""))
    goes_on(store)


def goes_on(store):
    store.put([expected(1, 99)])
    store.sync()
    assert [r.policy_version for r in contents(store, [1])[1]] == [99]
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_says_what_is_damaged_and_fails_in_no_other_way(tmp_path, whole, kind):
    """Ten times as many flips as lives are tried with, since no process has to be started."""
    source = whole["store"] / "store" / "data.mdb"
    data = source.read_bytes()
    found = 0
    (tmp_path / "store").mkdir()
    file = tmp_path / "store" / "data.mdb"
    for offset, bit in flips(source, kind, 10 * FLIPS):
        file.write_bytes(data)
        flip_bit(file, offset, bit)
        try:
            with PageFile(file) as pages:
                if pages.known:
                    pages.check("rollouts", expected(1, 0).key, seconds=60)
                    assert pages.complete
                    for tree in pages.tables().values():
                        for _ in pages.items(tree):
                            pass
        except lmdb.CorruptedError:
            found += 1
    assert found, f"of {10 * FLIPS} flips none was noticed"

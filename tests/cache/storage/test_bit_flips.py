"""Flipped bits in the files of stores and journals, in every kind of page.

Whatever flips: no process dies of it, nothing wrong is served, and the store goes on, empty if
need be.

NEMO_SPECRL_BIT_FLIPS says how many places are tried for each kind of page, in the store's file and
the journal's, at rest and while a process has them open; 4 of each make 80.
"""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest

from nemo_specrl.errors import CacheError, StoreUnavailable
from nemo_specrl.trainer.replay_journal import JournaledStore
from tests.support.rollouts import rollout
from tests.support.stores import MIB, changing, contents, open_store, run_python

FLIPS = int(os.environ.get("NEMO_SPECRL_BIT_FLIPS", "4"))
PAGE = 4096
PROMPTS = 40
LENGTHS = (5, 300, 1500)
KINDS = ("header", "interior", "leaf", "overflow", "free")

LIVES = """
import json, os, sys, traceback
from tests.cache.storage.test_bit_flips import live
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
    return folder / ("store" if kind == "store" else "journal/1") / "rollouts.sqlite"


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
                if failed > 1:  # it starts empty after the first
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
        with changing(data_file(folder, kind).parent) as database:
            database.execute("CREATE TABLE t AS SELECT randomblob(50000)")
            database.execute("DROP TABLE t")  # whose pages are free now
        folders[kind] = folder
    return folders


def pages_by_kind(file):
    """The numbers of the pages, from 0, by kind."""
    data = file.read_bytes()

    def integer(at):
        return int.from_bytes(data[at : at + 4], "big")

    found = {kind: set() for kind in KINDS} | {"header": {0}}
    trunk = integer(32)
    while trunk:  # the list of free pages
        at = (trunk - 1) * PAGE
        found["free"] |= {trunk - 1, *(integer(at + 8 + 4 * i) - 1 for i in range(integer(at + 4)))}
        trunk = integer(at)
    for page in set(range(1, len(data) // PAGE)) - found["free"]:
        kind = {2: "interior", 5: "interior", 10: "leaf", 13: "leaf"}.get(data[page * PAGE])
        found[kind or "overflow"].add(page)
    return found


def flips(file, kind, count):
    """Offset and bit of flips in pages of a kind, half of them near the pages' beginning."""
    rng = random.Random(f"{file.parent.name} {kind}")
    numbers = sorted(pages_by_kind(file)[kind])
    assert numbers, f"no {kind} page"
    near = {"header": 110, "overflow": 4}.get(kind, 64)
    return [
        (PAGE * rng.choice(numbers) + rng.randrange(near if i % 2 else PAGE), rng.randrange(8))
        for i in range(count)
    ]


@pytest.mark.parametrize("running", [False, True], ids=["at rest", "while open"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["store", "journal"])
@pytest.mark.timeout(60 + 20 * FLIPS)
def test_no_flipped_bit_ends_a_process(tmp_path, whole, file, kind, running):
    with run_python(LIVES, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
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
            assert ends == [0, 0, 0], (kind, offset, bit, ends)
            shutil.rmtree(folder)
        process.stdin.close()


@pytest.mark.parametrize("index", ["prompts_by_use", "rollouts_by_prompt"])
@pytest.mark.timeout(60)
def test_an_index_that_does_not_fit_its_table_does_not_keep_an_eviction_going(tmp_path, index):
    """The oldest use, or all the places of records, are found in the index and not in the table."""
    folder = tmp_path / "store"
    with open_store(folder, 4 * MIB) as store:
        store.put(expected(prompt, 0) for prompt in range(PROMPTS))
    with changing(folder) as database:
        sql = database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (index,)).fetchone()
        change = "sql = 'CREATE INDEX gone ON meta (value)', tbl_name = 'meta', name = 'gone'"
        database.execute("PRAGMA writable_schema = ON")
        database.execute(f"UPDATE sqlite_master SET {change} WHERE name = ?", (index,))
    with changing(folder) as database:  # which does not know of the index now
        database.execute("PRAGMA writable_schema = ON")
        if index == "prompts_by_use":
            database.execute("UPDATE prompts SET last_use = last_use + 1000000")
        else:
            database.execute("UPDATE rollouts SET sample_index = sample_index + 1")
        back = "sql = ?, tbl_name = ?, name = ?"
        values = (*sql, sql[0].split()[4], index)
        database.execute(f"UPDATE sqlite_master SET {back} WHERE name = 'gone'", values)
    store = open_store(folder, 4 * MIB)
    with pytest.raises(StoreUnavailable, match="starts empty"):
        store.put(expected(prompt, 0) for prompt in range(3000))
        store.sync()
    store.put([expected(1, 99)])
    store.sync()
    assert [r.policy_version for r in contents(store, [1])[1]] == [99]
    store.close()

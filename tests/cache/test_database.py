"""Stores whose files are damaged: no process dies, nothing wrong is served, the store goes on.

NEMO_SPECRL_BIT_FLIPS says how many pages are tried, at rest and while a process has the file open;
0 means every page.
"""

import json
import logging
import os
import random
import shutil
import subprocess

import pytest

from nemo_specrl.cache.database import DATA_FILE
from nemo_specrl.errors import CacheError
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    PREAMBLE,
    bytes_on_disk,
    changing,
    contents,
    data_file,
    moved_aside,
    open_store,
    run_python,
)

FLIPS = int(os.environ.get("NEMO_SPECRL_BIT_FLIPS", "40"))
PAGE = 1024
PROMPTS = 30
LENGTHS = (5, 300, 1500)

LIVES = """
import json, os, sys, traceback
from tests.cache.test_database import live
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


def flip(file, offset, bit):
    with open(file, "r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


def live(folder, offset, bit, while_open):
    """Use a store in every way; 0: all is well, 1: something wrong was served."""
    if not while_open:
        flip(data_file(folder), offset, bit)
    store = open_store(folder, 2 * MIB)
    if while_open:
        child = os.fork()  # which may not close a descriptor of this process's file
        if child == 0:
            flip(data_file(folder), offset, bit)
            os._exit(0)
        os.waitpid(child, 0)
    failed = i = 0
    while i < 3:
        try:
            for prompt, group in contents(store, range(PROMPTS)).items():
                if any(r != expected(prompt, r.policy_version) for r in group):
                    return 1
            for r in store.take_drafts(prompt_key([i]), 1000, 9):
                if r != expected(i, r.policy_version):
                    return 1
            store.put([expected(prompt, 100 + i) for prompt in range(i, PROMPTS, 2)])
            store.sync()
            store.stats()
            sum(len(records) for _, records in store.scan())
            i += 1
        except CacheError:
            failed += 1
            if failed > 3:  # then it goes on empty
                return 3
    found = contents(store, [2])
    store.close()
    return 0 if found else 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store's folder whose file has all kinds of pages, and that number of pages."""
    folder = tmp_path_factory.mktemp("whole")
    with open_store(folder, 2 * MIB, responses_per_prompt=5) as store:
        for version in range(8):
            store.put([expected(prompt, version) for prompt in range(PROMPTS)])
    return folder, data_file(folder).stat().st_size // PAGE


@pytest.mark.timeout(600 + 2 * 3600 * (FLIPS == 0))
@pytest.mark.parametrize("while_open", [False, True], ids=["at rest", "in use"])
def test_any_page_may_be_damaged(tmp_path, whole, while_open):
    folder, pages = whole
    rng = random.Random(7 + while_open)
    some = range(pages) if not FLIPS else [0, 0, 1, 2, 3, *rng.sample(range(pages), FLIPS)]
    pipe = subprocess.PIPE
    with run_python(LIVES, stdin=pipe, stdout=pipe) as process:
        for page in some:
            # Half of the flips hit the beginning of a page, where SQLite keeps what a page is.
            within = rng.randrange(PAGE) if rng.random() < 0.5 else rng.randrange(40)
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            job = {"folder": str(copy), "offset": page * PAGE + within, "bit": rng.randrange(8)}
            process.stdin.write(json.dumps(job | {"while_open": while_open}) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "0\n", job
            assert len(moved_aside(copy)) <= 1
            assert bytes_on_disk(copy) <= 4 * MIB  # with what was moved aside
            shutil.rmtree(copy)
        process.stdin.close()


def cut(size):
    return lambda data: data[: int(size * len(data)) if isinstance(size, float) else size]


DAMAGES = {
    "100 bytes": cut(100),
    "within the first page": cut(PAGE - 1),
    "one page": cut(PAGE),
    "two pages": cut(2 * PAGE),
    "a third": cut(0.33),
    "all but the last page": cut(-PAGE),
    "all but the last byte": cut(-1),
    "garbage": lambda data: random.Random(0).randbytes(len(data)),
    "garbage after the first page": lambda data: data[:PAGE] + b"\xa5" * (len(data) - PAGE),
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"this is no database\n" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_moved_beside_and_the_store_goes_on_empty(
    tmp_path, caplog, whole, damage
):
    shutil.copytree(whole[0], tmp_path / "a")
    data = damage(data_file(whole[0]).read_bytes())
    file = data_file(tmp_path / "a")
    file.write_bytes(data)
    older = file.with_name(f"{DATA_FILE}.damaged-3")
    older.write_bytes(b"of another time")
    failed = 0
    with caplog.at_level(logging.WARNING), open_store(tmp_path / "a", 2 * MIB) as store:
        while True:
            try:
                found = contents(store, range(PROMPTS))
                store.put([rollout(1, 777)])
                assert contents(store, [1])[1][-1] == rollout(1, 777)
                break
            except CacheError:
                failed += 1
                assert failed <= 3
        restarts = store.stats().restarts
    assert found == {} and restarts == failed // 3
    assert len([r for r in caplog.records if "moved to" in r.getMessage()]) == 1
    assert moved_aside(tmp_path / "a") == [f"{DATA_FILE}.damaged-4"]  # the last one alone is kept
    if not failed:
        assert file.with_name(f"{DATA_FILE}.damaged-4").read_bytes() == data


def test_an_empty_or_unfinished_file_is_a_new_store(tmp_path):
    for content in (b"", b"S", None):
        folder = tmp_path / str(content)
        data_file(folder).parent.mkdir(parents=True)
        if content is not None:
            data_file(folder).write_bytes(content)
        else:
            with changing(folder) as database:  # as left by a process that died while it began
                database.execute("PRAGMA journal_mode = WAL")
        with open_store(folder) as store:
            store.put([rollout(1)])
        assert not [name for name in moved_aside(folder) if "damaged" in name]
        with open_store(folder) as store:
            assert contents(store, [1]) == {1: [rollout(1)]}


def test_a_file_cut_off_anywhere_serves_nothing_wrong(tmp_path, whole):
    data = data_file(whole[0]).read_bytes()
    rng = random.Random(5)
    pages = len(data) // PAGE
    for i in range(40):
        at = PAGE * rng.randrange(1, pages) + rng.choice([-1, 0, 1]) if i % 2 else None
        folder = tmp_path / str(i)
        data_file(folder).parent.mkdir(parents=True)
        data_file(folder).write_bytes(data[: at or rng.randrange(1, len(data))])
        with open_store(folder, 2 * MIB) as store:
            for _ in range(4):
                try:
                    found = contents(store, range(PROMPTS))
                    break
                except CacheError:
                    continue
            for prompt, group in found.items():
                assert all(r == expected(prompt, r.policy_version) for r in group)
            store.put([rollout(1, 1000)])
            assert contents(store, [1])[1][-1] == rollout(1, 1000)


def test_a_damaged_record_is_left_out_counted_logged_once_and_deleted(tmp_path, caplog):
    with open_store(tmp_path) as store:
        store.put([rollout(1, index=i) for i in range(3)] + [rollout(2)])
    with changing(tmp_path) as database:
        for r in (rollout(1, index=1), rollout(2)):
            database.execute(
                "UPDATE rollouts SET record = substr(record, 1, 30) || x'ff' || substr(record, 32) "
                "WHERE identity = ?",
                (r.identity,),
            )
    with caplog.at_level(logging.WARNING), open_store(tmp_path) as store:
        for _ in range(2):
            assert contents(store, [1, 2]) == {1: [rollout(1, index=0), rollout(1, index=2)]}
        assert store.stats().damaged == 4
        assert [len(records) for _, records in store.scan()] == [2]
        assert len([r for r in caplog.records if "checksum" in r.getMessage()]) == 1
        store.put([rollout(2, 7)])  # which deletes them
        assert contents(store, [2]) == {2: [rollout(2, 7)]}
        assert store.stats().responses == 3 and store.stats().damaged == 4
    with changing(tmp_path) as database:
        assert database.execute("SELECT count(*) FROM rollouts").fetchone() == (3,)


@pytest.mark.parametrize("column", ["key", "number", "identity", "version", "record"])
def test_a_row_in_anothers_place_serves_nothing_wrong(tmp_path, column):
    with open_store(tmp_path) as store:
        store.put([rollout(p, p) for p in range(20)])
    new = {
        "key": "(SELECT key FROM prompts WHERE key <> rollouts.key ORDER BY key LIMIT 1)",
        "record": "(SELECT record FROM rollouts WHERE number = 1)",
    }.get(column, f"{column} + 1000")
    with changing(tmp_path) as database:
        database.execute(f"UPDATE rollouts SET {column} = {new}")
    with open_store(tmp_path) as store:
        for p, group in contents(store, range(20)).items():
            assert group == [rollout(p, p)]
        for p in range(20):
            assert store.take_drafts(prompt_key([p]), 3000, 1) in ([], [rollout(p, p)])
        store.put([rollout(1, 500)])
        assert contents(store, [1])[1][-1] == rollout(1, 500)


def test_all_processes_go_on_with_the_new_file_after_one_has_moved_it(tmp_path):
    """None of them deletes the log of the new file when it lets go of the old one."""
    script = f"""{PREAMBLE}
store = open_store(sys.argv[1])
store.put([rollout(1)])
print("open", flush=True)
sys.stdin.readline()
store.put([rollout(2)])
found = contents(store, range(4))
assert list(found) == [2, 3], list(found)
print(store.stats().restarts, flush=True)
sys.stdin.readline()
store.close()
"""
    pipe = subprocess.PIPE
    with run_python(script, tmp_path, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == "open\n"
        with open_store(tmp_path) as store:
            assert contents(store, [1])
            with changing(tmp_path) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # Both have the file open; a third finds its first page damaged.
            subprocess.run(
                ["dd", f"of={data_file(tmp_path)}", "conv=notrunc", "bs=1", "count=3000"],
                input=b"\xa5" * 3000,
                check=True,
                capture_output=True,
            )
            with run_python(
                f"{PREAMBLE}\nwith open_store(sys.argv[1]) as s: s.put([rollout(3)])", tmp_path
            ) as third:
                assert third.wait() == 0
            assert moved_aside(tmp_path) == [f"{DATA_FILE}.damaged-1"]
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "1\n"
            assert list(contents(store, range(4))) == [2, 3]
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait() == 0
            store.put([rollout(1, 9)])
            assert list(contents(store, range(4))) == [1, 2, 3]
            assert store.stats().restarts == 1
    with open_store(tmp_path) as store:
        assert list(contents(store, range(4))) == [1, 2, 3]


def test_a_store_whose_folder_is_removed_begins_anew(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1)])
        shutil.rmtree(tmp_path / "a")
        assert contents(store, [1]) == {}
        store.put([rollout(2)])
        assert contents(store, [2]) == {2: [rollout(2)]}
    with open_store(tmp_path / "a") as store:
        assert contents(store, [2]) == {2: [rollout(2)]}

"""Stores on disks that are full, fail, hang, cannot be written, have no locks: a clean error or a
cold part, never anything wrong, and the store goes on when the disk does.
"""

import contextlib
import inspect
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nemo_specrl.cache import database as database_module
from nemo_specrl.cache import open_cache
from nemo_specrl.cache.local import LocalCache
from nemo_specrl.config import CacheConfig
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.monitoring import names as metric
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    PREAMBLE,
    VOCABULARY,
    assert_one_line,
    contents,
    moved_aside,
    open_store,
    run_python,
)

VERSIONS = 40
LENGTHS = (5, 300, 4000)
AS_A_USER = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
)
"""The administrator may write everywhere, unless these capabilities are gone."""


def write_on_a_disk_that_fails(path):
    """Puts, syncs and reads; says what was acknowledged, what failed, and what was found wrong."""
    store = open_store(path, MIB)
    acknowledged, failed, wrong, there = [], {}, [], {}
    for i in range(VERSIONS):
        try:
            there.setdefault(i % 10, []).append(i)  # maybe
            store.put([rollout(i % 10, i, n=LENGTHS[i % 3])])
            store.sync()
            acknowledged.append(i)
        except StoreUnavailable as error:
            failed[i] = str(error)
        try:
            for p, group in contents(store, range(10)).items():
                if any(r != rollout(p, r.policy_version, n=len(r)) for r in group):
                    wrong.append(i)
        except StoreUnavailable as error:
            failed[i] = str(error)
    store.close()
    print(json.dumps([acknowledged, failed, wrong]))


WRITER = f"""{PREAMBLE}
import json
from nemo_specrl.errors import StoreUnavailable
VERSIONS, LENGTHS = {VERSIONS}, {LENGTHS}
{inspect.getsource(write_on_a_disk_that_fails)}
write_on_a_disk_that_fails(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("calls", "error", "when"),
    [
        ("fsync,fdatasync", "EIO", "20+"),  # for good
        ("fsync,fdatasync", "EIO", "20..24"),
        ("pwrite64", "EIO", "200+"),
        ("pwrite64", "EIO", "200..203"),
        ("pwrite64", "EROFS", "200..220"),
        ("pwrite64", "ENOSPC", "200+"),
        ("pwrite64", "ENOSPC", "200..220"),
        ("pread64", "EIO", "60..61"),
    ],
)
def test_a_disk_whose_calls_fail(tmp_path, strace, calls, error, when):
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error={error}:when={when}"]
    with run_python(WRITER, tmp_path, stdout=subprocess.PIPE, before=[*strace, *inject]) as process:
        acknowledged, failed, wrong = json.loads(process.stdout.read())
    assert wrong == []
    assert acknowledged and failed, "nothing failed, or all did"
    # SQLite takes some failures of a read for damage, which must come again before it is believed.
    why = "disk is full" if error == "ENOSPC" else "disk I/O error|Input/output error|malformed"
    for line in failed.values():
        assert_one_line(line, tmp_path)
    assert any(re.search(why, line) for line in failed.values()), failed
    if not when.endswith("+"):
        assert acknowledged[-1] == VERSIONS - 1, "it does not go on where the disk does"
    with open_store(tmp_path, MIB) as store:
        found = contents(store, range(10))
    for i in acknowledged:
        assert rollout(i % 10, i, n=LENGTHS[i % 3]) in found[i % 10]
    assert not moved_aside(tmp_path)


@contextlib.contextmanager
def no_file_may_grow():
    """As on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_where_no_file_may_grow_puts_fail_and_what_is_there_is_found(tmp_path):
    with open_store(tmp_path) as store:
        store.put([rollout(1)])
        with no_file_may_grow():
            with pytest.raises(StoreUnavailable) as caught:
                store.put([rollout(2, n=100_000)])
            found = contents(store, [1, 2])
        assert_one_line(caught.value, "cannot write the rollout store", tmp_path)
        assert found == {1: [rollout(1)]}
        store.put([rollout(2)])
        assert contents(store, [1, 2]) == {1: [rollout(1)], 2: [rollout(2)]}


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder])
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_smaller_than_the_cap(small_disk):
    """The store is as large as the disk allows; room that others give back is used."""
    (small_disk / "of others").write_bytes(bytes(MIB))
    failed = kept = 0
    with open_store(small_disk / "cache", 64 * MIB) as store:
        for i in range(300):
            try:
                store.put([rollout(i % 100, i, n=4000)])
                kept += 1
            except StoreUnavailable as error:
                failed += 1
                assert_one_line(error, "disk is full")
            for p, group in contents(store, [i % 100]).items():
                assert all(r == rollout(p, r.policy_version, n=4000) for r in group)
        assert failed and kept
        (small_disk / "of others").unlink()
        store.put([rollout(7, 1000)])
        assert contents(store, [7])[7][-1] == rollout(7, 1000)
    with open_store(small_disk / "cache", 64 * MIB) as store:
        assert store.stats().responses == kept + 1
    assert not moved_aside(small_disk / "cache")


def test_on_a_full_disk_there_is_no_cache_after_one_line(small_disk, caplog):
    with contextlib.suppress(OSError), open(small_disk / "of others", "wb") as file:
        file.write(bytes(4 * MIB))
    with pytest.raises(StoreUnavailable) as caught:
        open_store(small_disk / "cache")
    assert_one_line(caught.value, "cannot use the rollout store", small_disk)
    assert open_cache(CacheConfig(dir=small_disk / "cache"), VOCABULARY, cluster=False) is None
    assert len(caplog.records) == 1


OPENS = f"""{PREAMBLE}
import logging
from nemo_specrl.cache import open_cache
from nemo_specrl.config import CacheConfig
logging.basicConfig(format="%(message)s")
cache = open_cache(CacheConfig(dir=sys.argv[1]), VOCABULARY, cluster=False)
print(cache)
"""


def refused_in_one_line(folder, before):
    """Open a store in a process of its own, to which it is refused; return what is logged."""
    pipe = subprocess.PIPE
    with run_python(OPENS, folder, before=before, stdout=pipe, stderr=pipe) as process:
        said, logged = process.communicate()
    assert said == "None\n" and process.returncode == 0, logged
    assert logged.count("\n") == 1, logged
    return logged


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o500)
    logged = refused_in_one_line(folder / "a", AS_A_USER)
    assert "Permission denied" in logged and str(folder) in logged


def test_a_store_that_may_only_be_read_is_one_line(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1)])
    for path in (tmp_path / "a").rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert "denied" in refused_in_one_line(tmp_path / "a", AS_A_USER)


@pytest.mark.parametrize("call", ["flock", "fcntl"])
def test_a_file_system_without_locks_is_one_line(tmp_path, strace, call):
    ending = "lock" if call == "flock" else "sqlite"
    file = tmp_path / "a" / VOCABULARY / f"rollouts.{ending}"
    inject = ["-P", str(file), "-e", f"trace={call}", "-e", f"inject={call}:error=ENOLCK"]
    logged = refused_in_one_line(tmp_path / "a", [*strace, *inject])
    assert "cannot use the rollout store" in logged


def test_a_file_system_without_shared_memory_is_one_line(tmp_path, strace):
    """As some containers' are. Only the file beside the database is mapped as shared memory."""
    file = tmp_path / "a" / VOCABULARY / "rollouts.sqlite-shm"
    inject = ["-P", str(file), "-e", "trace=mmap", "-e", "inject=mmap:error=ENODEV"]
    logged = refused_in_one_line(tmp_path / "a", [*strace, *inject])
    assert "cannot use the rollout store" in logged


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "cifs", "beegfs"])
def test_a_disk_that_machines_share_is_one_line(tmp_path, monkeypatch, kind):
    """Only the type of the file system is made up: mounting one takes a server."""
    monkeypatch.setattr(database_module, "file_system", lambda path: ("/home", kind))
    with pytest.raises(StoreUnavailable) as caught:
        open_store(tmp_path / "a")
    assert_one_line(caught.value, "/home is shared by machines", kind, "the node's own disk")


def test_the_type_of_a_file_system_is_known(small_disk, tmp_path):
    assert database_module.file_system(small_disk) == (str(small_disk), "tmpfs")
    assert database_module.file_system(tmp_path)[1] not in ("", "tmpfs")


FORGETS = """
import os, sys
for name in sys.argv[1:]:
    file = os.open(name, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
"""


def forget(folder):
    """Take a store's files out of the page cache: a process that has one open may not do so, since
    its locks would go.
    """
    files = [*folder.rglob("rollouts.sqlite"), *folder.rglob("*-wal")]
    with run_python(FORGETS, *files) as process:
        assert process.wait() == 0


@pytest.mark.timeout(120)
def test_nobody_waits_for_a_disk_that_hangs(network_disk):
    """A look-up ends at its deadline, a hanging one costs the others nothing more, and the process
    ends.
    """
    folder, server = network_disk
    store = open_store(folder / "a")
    cache = LocalCache(store)
    kept = [rollout(p, n=50_000) for p in range(40)]
    assert cache.put(kept) == 40
    key = kept[3].key
    assert cache.get([key], 10) == {key: [kept[3]]}
    forget(folder)
    server.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        for r in kept:
            assert cache.get([r.key], 0.05) == {}
        assert cache.take_drafts({key: 1}, 5, 0.05) == {}
        stats = cache.stats()
        assert time.monotonic() - started < 10
        assert set(stats) == {metric.CACHE_ERRORS} and stats[metric.CACHE_ERRORS] >= 41
        writer = threading.Thread(target=cache.put, args=([rollout(99)],), daemon=True)
        writer.start()
    finally:
        server.send_signal(signal.SIGCONT)
    writer.join(60)
    assert not writer.is_alive()
    assert cache.get([key], 10) == {key: [kept[3]]}
    assert cache.get([prompt_key([99])], 10) == {prompt_key([99]): [rollout(99)]}
    cache.close()


@pytest.mark.timeout(120)
def test_a_process_ends_while_the_disk_hangs(network_disk):
    folder, server = network_disk
    script = f"""{PREAMBLE}
from nemo_specrl.cache import open_cache, local
from nemo_specrl.config import CacheConfig
local.CLOSE_SECONDS = 0.2
cache = open_cache(CacheConfig(dir=sys.argv[1]), VOCABULARY, cluster=False)
cache.put([rollout(p, n=50_000) for p in range(40)])
print("open", flush=True)
sys.stdin.readline()
assert len(cache.get([prompt_key([p]) for p in range(40)], 0.1)) == 0
cache.close()
print("closed", flush=True)
"""
    pipe = subprocess.PIPE
    with run_python(script, folder / "a", stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == "open\n"
        forget(folder)
        server.send_signal(signal.SIGSTOP)
        try:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "closed\n"
            # Python has ended when the kernel has taken its memory back. What the kernel then
            # waits for, as it closes the files, is not up to a process.
            while (Path("/proc") / str(process.pid) / "cmdline").read_bytes():
                time.sleep(0.01)
        finally:
            server.send_signal(signal.SIGCONT)
        assert process.wait() == 0


def test_a_store_on_a_disk_that_hangs_is_not_opened(network_disk, monkeypatch, caplog):
    monkeypatch.setattr("nemo_specrl.cache.local.OPEN_SECONDS", 0.2)
    folder, server = network_disk
    server.send_signal(signal.SIGSTOP)
    try:
        assert open_cache(CacheConfig(dir=folder / "a"), VOCABULARY, cluster=False) is None
    finally:
        server.send_signal(signal.SIGCONT)
    assert len(caplog.records) == 1

"""The rollout store on disks that fail and with files that lost their ends.

Whatever happens: nothing wrong is served, what was acknowledged is there where the disk still has
it, and the store goes on.
"""

import inspect
import json
import logging
import random
import re
import shutil
import subprocess

import pytest

import nemo_specrl.cache.store as store_module
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.snapshot import read_partition, write_partition
from nemo_specrl.cache.store import FLUSH_SECONDS
from nemo_specrl.errors import CacheError, StoreUnavailable
from nemo_specrl.rollout import prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    PREAMBLE,
    assert_one_line,
    contents,
    damaged_folders,
    open_store,
    run_python,
)

VERSIONS = 40
LENGTHS = (5, 300, 4000)
CUTS = 60


def write_on_a_disk_that_fails(path):
    """Puts, syncs and reads; says what was acknowledged, what failed, and what was found wrong."""
    # strace counts the calls of each thread apart, and each background flush has a thread of its
    # own, which would find a disk in order. So there are none.
    store_module.FLUSH_SECONDS = 3600
    store = RolloutStore(path, max_bytes=2**24, tokenizer_id="tok")
    acknowledged, failed, wrong, there = [], {}, [], {}
    for i in range(VERSIONS):
        try:
            store.put([rollout(i % 10, i, n=LENGTHS[i % 3])])
            there[i % 10] = i  # written or not; a put is refused when the buffer is full
            store.sync()
            acknowledged.append(i)
        except StoreUnavailable as error:
            failed[i] = str(error)
        try:
            found = store.get([prompt_key([p]) for p in range(10)])
        except StoreUnavailable as error:  # a commit broke off, and cannot be undone yet
            failed[i] = str(error)
            continue
        right = {prompt_key([p]): [rollout(p, v, n=LENGTHS[v % 3])] for p, v in there.items()}
        if found != right:
            wrong.append(i)
    try:
        store.close()
        closed = True
    except StoreUnavailable:
        closed = False
    print(json.dumps([acknowledged, failed, wrong, closed]))


WRITER = f"""{PREAMBLE}
import json
import nemo_specrl.cache.store as store_module
from nemo_specrl.errors import StoreUnavailable
VERSIONS, LENGTHS = {VERSIONS}, {LENGTHS}
{inspect.getsource(write_on_a_disk_that_fails)}
write_on_a_disk_that_fails(sys.argv[1])
"""

# No file may grow while the limit stands, as on a full disk. The store is not synced, nor closed.
FLUSHED_IN_THE_BACKGROUND = f"""{PREAMBLE}
import logging, resource, signal, time
logged = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("nemo_specrl").addHandler(handler)
store = RolloutStore(sys.argv[1], max_bytes=2**24, tokenizer_id="tok")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
store.put([rollout(1, 7)])
while not logged:
    time.sleep(0.05)
time.sleep(5 * {FLUSH_SECONDS})
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(*logged, sep="\\n")
"""

# A write fails, so that the file is to be opened anew, which fails, too, as long as no file can be
# opened. Then all is well again. The store is not synced after that, nor closed.
NOT_OPENED_BY_THE_TIMER = f"""{PREAMBLE}
import resource, signal
import nemo_specrl.cache.store as store_module
from nemo_specrl.errors import StoreUnavailable

def fails(call, *limits):
    before = {{limit: resource.getrlimit(limit) for limit in limits}}
    for limit, (_, hard) in before.items():
        resource.setrlimit(limit, (0, hard))
    try:
        call()
    except StoreUnavailable:
        pass
    finally:
        for limit, values in before.items():
            resource.setrlimit(limit, values)

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store_module.FLUSH_SECONDS = 3600
store = RolloutStore(sys.argv[1], max_bytes=2**24, tokenizer_id="tok")
store.put([rollout(1)])
store.sync()
store.get([prompt_key([1])])
fails(store.sync, resource.RLIMIT_FSIZE)
assert store._failed and not store._buffer.records
store._timer.cancel()
fails(store._timer.function, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
assert store._failed
store_module.FLUSH_SECONDS = {FLUSH_SECONDS}
store.put([rollout(2)])
"""


@pytest.mark.parametrize(
    ("calls", "error", "when"),
    [
        ("fdatasync", "EIO", "40+"),  # from the 40th on, for good; a commit takes four
        ("fdatasync", "EIO", "40..52"),
        ("pwrite64", "EIO", "300+"),
        ("pwrite64", "EIO", "300..303"),
        ("pwrite64", "EIO", "300..320"),
        ("pwrite64", "EROFS", "300..320"),
        ("pwrite64", "ENOSPC", "300+"),
        ("pwrite64", "ENOSPC", "300..320"),
    ],
)
def test_a_disk_whose_calls_fail(tmp_path, strace, calls, error, when):
    path = tmp_path / "a"
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error={error}:when={when}"]
    with run_python(WRITER, path, stdout=subprocess.PIPE, before=[*strace, *inject]) as process:
        acknowledged, failed, wrong, closed = json.loads(process.stdout.read())
    assert wrong == []
    assert acknowledged and failed, "nothing failed, or all did"
    why = "No space left" if error == "ENOSPC" else "Input/output error"
    assert all(str(path) in line and why in line for line in failed.values()), failed
    for_good = when.endswith("+")
    assert closed is not for_good
    if not for_good:
        assert acknowledged[-1] == VERSIONS - 1, "it does not go on where the disk does"
    with open_store(path) as store:
        found = contents(store, range(10))
    for p in range(10):
        last = max((v for v in acknowledged if v % 10 == p), default=None)
        group = found.get(p, [])
        versions = [r.policy_version for r in group]
        assert group == [rollout(p, v, n=LENGTHS[v % 3]) for v in versions]
        assert last is None or versions[0] >= last
    assert not damaged_folders(path)


def test_a_background_flush_is_tried_until_the_disk_takes_it(tmp_path):
    path = tmp_path / "a"
    with run_python(FLUSHED_IN_THE_BACKGROUND, path, stdout=subprocess.PIPE) as process:
        logged = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert len(logged) == 1, "of the failures in a row one is logged"
    assert_one_line(logged[0], path, "Input/output error", "tried again until it works")
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1, 7)]}


def test_a_timer_that_could_not_open_the_file_is_followed_by_another(tmp_path):
    """The disk fails while nothing is buffered; what is put when it works again is committed."""
    path = tmp_path / "a"
    with run_python(NOT_OPENED_BY_THE_TIMER, path) as process:
        assert process.wait() == 0
    with open_store(path) as store:
        assert contents(store, [1, 2]) == {1: [rollout(1)], 2: [rollout(2)]}


def test_a_file_cut_off_anywhere_serves_nothing_wrong(tmp_path, caplog):
    """At page ends, beside them, and at random."""
    path = tmp_path / "whole"
    put = {p: [rollout(p, n=500)] for p in range(50)}
    with open_store(path) as store:
        store.put(group[0] for group in put.values())
    data = (path / "rollouts.sqlite").read_bytes()
    rng = random.Random(5)
    pages = [4096 * rng.randrange(1, len(data) // 4096) + rng.choice([-1, 0, 1]) for _ in range(30)]
    offsets = [*pages, *(rng.randrange(1, len(data)) for _ in range(CUTS - len(pages)))]
    for i, offset in enumerate(offsets):
        cut = tmp_path / f"cut-{i}"
        shutil.copytree(path, cut)
        (cut / "rollouts.sqlite").write_bytes(data[:offset])
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_store(cut) as store:
            found = contents(store, range(50))
            assert all(group == put[p] for p, group in found.items())
            assert found == put or len(caplog.records) == 1
            store.put([rollout(1, 1)])
            store.sync()
            assert contents(store, [1]) == {1: [rollout(1, 1)]}


def test_a_partition_cut_off_anywhere_is_refused(tmp_path):
    put = sorted((rollout(p, n=200) for p in range(20)), key=lambda r: r.key)
    file = write_partition(tmp_path, 0, put)
    assert list(read_partition(tmp_path, file)) == put
    name = next(tmp_path.iterdir())
    data = name.read_bytes()
    rng = random.Random(6)
    for offset in [0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(CUTS))]:
        name.write_bytes(data[:offset])
        with pytest.raises(CacheError, match=re.escape(str(name))):
            list(read_partition(tmp_path, file))
    for offset in (rng.randrange(len(data)) for _ in range(CUTS)):
        changed = bytearray(data)
        changed[offset] ^= 1 << rng.randrange(8)
        name.write_bytes(changed)
        with pytest.raises(CacheError, match=re.escape(str(name))):
            list(read_partition(tmp_path, file))

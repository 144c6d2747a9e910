"""The rollout store: what it finds again, what it forgets, and what it survives."""

import contextlib
import inspect
import itertools
import json
import logging
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import nemo_specrl
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.codec import STEP, decode
from nemo_specrl.cache.lock import FolderLock
from nemo_specrl.cache.tables import reading_file
from nemo_specrl.errors import CacheError, ConfigError, ForeignStore, InvalidRollout
from nemo_specrl.errors import StoreUnavailable as Unavailable
from nemo_specrl.rollout import Finish, Rollout, prompt_key

MIB = 2**20
CRASHES = int(os.environ.get("NEMO_SPECRL_CRASHES", "20"))


def rollout(prompt, version=0, sample_index=0, n=20):
    """The rollout that these arguments determine; ``n`` tokens take about 6n bytes.

    Its log-probs are such as a record keeps exactly; those of birth are others.
    """
    rng = np.random.default_rng([prompt, version, sample_index, n])
    return Rollout(
        prompt_key([prompt]),
        sample_index,
        rng.integers(0, 60000, n),
        rng.integers(-5000, 1, n) * STEP,
        Finish.STOP,
        version,
        rng.integers(-5000, 1, n) * STEP,
    )


def open_store(path, max_bytes=16 * MIB, tokenizer_id="tok", **options):
    return RolloutStore(path, max_bytes=max_bytes, tokenizer_id=tokenizer_id, **options)


def contents(store, prompts):
    """What a store has of prompts, by number."""
    found = store.get([prompt_key([p]) for p in prompts])
    return {p: found[prompt_key([p])] for p in prompts if prompt_key([p]) in found}


def bytes_on_disk(folder):
    return sum(file.stat().st_size for file in Path(folder).rglob("*"))


def damaged_folders(path):
    return sorted(Path(path).parent.glob(f"{Path(path).name}.damaged-*"))


def run_python(script, *args, before=(), **options):
    """A Python process of its own that can import the package; ``before`` it, who starts it."""
    root = str(Path(nemo_specrl.__file__).parents[1])
    return subprocess.Popen(
        [*before, sys.executable, "-c", script, *map(str, args)],
        env={**os.environ, "PYTHONPATH": root},
        text=True,
        **options,
    )


# What is put is what is found


def test_what_is_put_is_found_at_once_and_after_reopening(tmp_path):
    n = 30
    rng = np.random.default_rng(0)
    whole = Rollout(
        prompt_key([9]),
        3,
        rng.integers(0, 2**31, n),
        -rng.integers(0, 9999, n) * STEP,
        Finish.LENGTH,
        2**63 - 1,
        -rng.integers(0, 9999, n) * STEP,
        rng.integers(0, 2**63, n),
    )
    empty = Rollout(prompt_key([8]), 0, [], [], Finish.STOP, 5)
    long = rollout(7, n=40_000)  # many pages
    with open_store(tmp_path / "a") as store:
        store.put([whole, empty, long])
        assert contents(store, [7, 8, 9]) == {7: [long], 8: [empty], 9: [whole]}
    with open_store(tmp_path / "a") as store:
        assert contents(store, [7, 8, 9]) == {7: [long], 8: [empty], 9: [whole]}
        assert len(store) == 3


def test_keys_that_are_not_there_are_absent(tmp_path):
    with open_store(tmp_path / "a") as store:
        assert store.get([]) == {}
        assert store.get([prompt_key([1])]) == {}
        store.put([rollout(1)])
        assert list(store.get([prompt_key([2]), prompt_key([1]), prompt_key([1])])) == [
            prompt_key([1])
        ]
        stats = store.stats()
        assert (stats.lookups, stats.hits) == (3, 1)
        with pytest.raises(InvalidRollout, match="16 bytes"):
            store.get([b"short"])


@pytest.mark.parametrize("synced", [False, True], ids=["buffered", "on disk"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_newest_groups_are_kept_newest_first(tmp_path, groups, synced):
    with open_store(tmp_path / "a", groups_per_prompt=groups) as store:
        for version in range(5):
            for sample_index in (2, 0, 300):
                store.put([rollout(1, version, sample_index)])
            if synced:
                store.sync()
            kept = [v for v in range(version, -1, -1)][:groups]
            want = [rollout(1, v, sample_index) for sample_index in (0, 2, 300) for v in kept]
            assert contents(store, [1]) == {1: want}
            assert len(store) == len(want)


def test_of_a_sample_index_put_twice_in_one_call_the_later_is_kept(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1, 5), rollout(1, 4), rollout(1, 3)])
        assert contents(store, [1]) == {1: [rollout(1, 3)]}


def test_reopening_with_fewer_groups_serves_fewer(tmp_path):
    with open_store(tmp_path / "a", groups_per_prompt=3) as store:
        store.put(rollout(1, version) for version in range(3))
    with open_store(tmp_path / "a", groups_per_prompt=1) as store:
        assert contents(store, [1]) == {1: [rollout(1, 2)]}
        store.put([rollout(1, 3)])
        store.sync()
        assert len(store) == 1


def test_prompts_never_mix(tmp_path):
    # Keys that sort next to each other, at both ends of their range.
    keys = [bytes(15) + b"\0", bytes(15) + b"\1", b"\xff" * 15 + b"\xfe", b"\xff" * 16]
    made = {
        key: [
            Rollout(key, sample_index, [i, sample_index], [-1, -2], Finish.STOP, 1)
            for sample_index in (0, 1, 65535)
        ]
        for i, key in enumerate(keys)
    }
    with open_store(tmp_path / "a") as store:
        store.put(r for rollouts in made.values() for r in reversed(rollouts))
        for _ in range(2):
            for key in keys:
                assert store.get([key]) == {key: made[key]}
            assert store.get(keys) == made
            store.sync()


def test_stats_count_what_is_there_buffered_or_not(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1, sample_index=s) for s in range(3)])
        store.sync()
        on_disk = store.stats()
        store.put([rollout(1, 1, sample_index=2), rollout(1, 1, sample_index=3), rollout(2)])
        buffered = store.stats()
        store.sync()
        stats = store.stats()
        assert (on_disk.prompts, on_disk.rollouts) == (1, 3)
        assert (buffered.prompts, buffered.rollouts) == (stats.prompts, stats.rollouts) == (2, 5)
        assert stats.max_bytes == 16 * MIB
        assert 0 < stats.bytes_used <= bytes_on_disk(tmp_path / "a")
        assert (stats.corrupt_records, stats.dropped_records, stats.evicted_prompts) == (0, 0, 0)


def test_a_scan_finds_every_rollout_of_a_range_once(tmp_path):
    with open_store(tmp_path / "s", groups_per_prompt=2) as store:
        put = [rollout(p, v, s) for p in range(150) for v in range(2) for s in range(3)]
        store.put(put)
        everything = list(store.scan(b""))

        def place(r):
            return r.key, r.sample_index, r.policy_version

        assert sorted(everything, key=place) == sorted(put, key=place)
        keys = sorted({r.key for r in put})
        middle = list(store.scan(keys[20], keys[120]))
        assert [r.key for r in middle] == [k for k in keys[20:120] for _ in range(6)]
        assert middle == [r for k in keys[20:120] for r in store.get([k])[k]]
        assert list(store.scan(keys[-1] + b"\0")) == []
        assert list(store.scan(keys[-1][:8])) == [r for r in everything if r.key == keys[-1]]


def test_changing_an_array_after_the_put_changes_nothing(tmp_path):
    with open_store(tmp_path / "a") as store:
        mine = rollout(1)
        store.put([mine])
        mine.tokens[:] = 0
        found = contents(store, [1])[1][0]
        with pytest.raises(ValueError, match="read-only"):
            found.tokens[:] = 1
        assert contents(store, [1]) == {1: [rollout(1)]}


def by_sample(group):
    sample_indices = defaultdict(list)
    for r in group:
        sample_indices[r.sample_index].append(r)
    return dict(sample_indices)


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls, crashes and evictions, against a dict.

    Of what has not been synced, a crash may lose the latest puts. A prompt may be missing where the
    store says that it has evicted as many.
    """

    prompt = st.integers(0, 5)
    large = st.integers(6, 8)
    prompts = range(9)

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.lives = 0
        self.open()
        self.model = {}  # prompt -> sample index -> newest first
        self.since_sync = [{}]
        self.saved = None
        self.version = 0

    def open(self):
        self.path = self.folder / f"store-{self.lives}"
        self.store = open_store(self.path, groups_per_prompt=2)
        self.missed = 0  # evictions that are accounted for

    @staticmethod
    def want(model, prompt):
        return [r for _, group in sorted(model.get(prompt, {}).items()) for r in group[:2]]

    def put_all(self, places):
        made = []
        for prompt, sample_index, n in places:
            self.version += 1
            made.append(rollout(prompt, self.version, sample_index, n))
            self.model = {
                p: {s: list(g) for s, g in sample_indices.items()}
                for p, sample_indices in self.model.items()
            }
            self.model.setdefault(prompt, {}).setdefault(sample_index, []).insert(0, made[-1])
        self.store.put(made)
        self.since_sync.append(self.model)

    @rule(puts=st.lists(st.tuples(prompt, st.integers(0, 2), st.sampled_from([0, 9, 900]))))
    def put(self, puts):
        self.put_all(puts)

    @rule(prompt=large)
    def put_much(self, prompt):
        """A fifth of the cap: others have to go."""
        self.put_all([(prompt, 0, 400_000)])
        assert contents(self.store, [prompt])[prompt][0] == self.model[prompt][0][0]
        self.sync()

    @rule(prompts=st.lists(prompt, unique=True))
    def get(self, prompts):
        found = contents(self.store, prompts)
        for prompt in prompts:
            want, group = self.want(self.model, prompt), found.get(prompt, [])
            if group != want:  # evicted, and maybe put again
                assert all(r in want for r in group)
                self.missed += 1
                self.model = {**self.model, prompt: by_sample(group)}
                self.since_sync = [{**m, prompt: by_sample(group)} for m in self.since_sync]
        assert self.missed <= self.store.stats().evicted_prompts

    @rule()
    def count(self):
        self.get(self.prompts)
        rollouts = [r for prompt in self.prompts for r in self.want(self.model, prompt)]
        assert len(self.store) == len(rollouts)

    @rule()
    def sync(self):
        self.store.sync()
        self.get(self.prompts)
        self.since_sync = [self.model]

    @rule()
    def reopen(self):
        self.sync()
        self.store.close()
        self.open()

    @rule()
    def crash(self):
        """What is on disk at this moment is what another process finds."""
        self.lives += 1
        with self.store._mutex:
            shutil.copytree(self.path, self.folder / f"store-{self.lives}")
            lost = self.store.stats().evicted_prompts - self.missed
        self.store.close()
        self.open()
        found = contents(self.store, self.prompts)

        def evicted(model):
            """Prompts of which something is missing; all, where something else is there."""
            wanted = {p: self.want(model, p) for p in self.prompts}
            if any(r not in wanted[p] for p, group in found.items() for r in group):
                return self.prompts
            return [p for p in self.prompts if found.get(p, []) != wanted[p]]

        assert min(len(evicted(model)) for model in self.since_sync) <= lost
        self.model = {p: by_sample(group) for p, group in found.items()}
        self.since_sync = [self.model]

    @rule()
    def snapshot(self):
        self.sync()
        self.store.snapshot(self.folder / "snapshot")
        self.saved = self.model

    @rule()
    def restore(self):
        if self.saved is not None:
            self.store.close()
            RolloutStore.restore(self.folder / "snapshot", self.path)
            self.open()
            self.model = self.saved
            self.since_sync = [self.model]

    def teardown(self):
        self.get(self.prompts)
        self.store.close()


def test_any_order_of_calls_agrees_with_a_dict(tmp_path):
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: StoreMachine(tmp_path / str(next(numbers))),
        settings=settings(
            derandomize=True, max_examples=60, stateful_step_count=40, deadline=None, database=None
        ),
    )


# The cap, and who goes first


def test_the_longest_unused_prompts_go_first_and_reopening_remembers(tmp_path):
    path, rng = tmp_path / "a", random.Random(3)
    order = []  # of use, the latest last
    store = open_store(path, MIB)
    for step in range(150):
        prompt = rng.randrange(60)
        if rng.random() < 0.5:
            used = list(contents(store, [prompt]))
        else:
            store.put(
                [
                    rollout(prompt, step, sample_index, n=rng.choice([50, 3000]))
                    for sample_index in range(3)
                ]
            )
            used = [prompt]
        order = [p for p in order if p not in used] + used
        if step % 40 == 39:
            store.close()
            store = open_store(path, MIB)
    store.sync()
    left = contents(store, range(60))
    assert store.stats().prompts == len(left) < len(order)
    assert set(left) == set(order[-len(left) :])
    assert all(len(group) == 3 for group in left.values())  # a prompt goes as a whole
    store.close()


def test_a_prompt_that_is_read_outlives_those_that_are_not(tmp_path):
    path = tmp_path / "a"
    with open_store(path, MIB) as store:
        store.put([rollout(0, n=2000)])
        for prompt in range(1, 200):
            store.put([rollout(prompt, n=2000)])
            if prompt % 7 == 0:
                assert contents(store, [0])
        assert store.stats().evicted_prompts > 100
    with open_store(path, MIB) as store:  # the last reads counted, too
        for prompt in range(200, 220):
            store.put([rollout(prompt, n=2000)])
        assert contents(store, [0]) == {0: [rollout(0, n=2000)]}


@pytest.mark.parametrize(
    ("cap", "lengths", "written"),
    [
        (MIB, [0, 10, 30], MIB // 3),
        (MIB, [10, 700, 5000], 5 * MIB),
        (2 * MIB, [60_000, 100_000], 10 * MIB),
        (2 * MIB, [680], 10 * MIB),
    ],
    ids=["tiny", "mixed", "huge", "page-sized"],
)
def test_the_files_never_exceed_the_cap(tmp_path, cap, lengths, written):
    path, rng = tmp_path / "a", random.Random(0)
    total = 0
    with open_store(path, cap) as store:
        for prompt in itertools.count():
            n = rng.choice(lengths)
            store.put([rollout(prompt, n=n)])
            contents(store, [rng.randrange(prompt + 1)])
            total += 6 * n + 30
            assert bytes_on_disk(path) <= cap
            if total > written:
                break
        assert contents(store, [prompt]) == {prompt: [rollout(prompt, n=n)]}
        store.sync()
        stats = store.stats()
        assert bytes_on_disk(path) <= cap
        assert stats.dropped_records == 0
        assert stats.evicted_prompts > 0
        assert stats.prompts + stats.evicted_prompts == prompt + 1
        assert cap // 4 < stats.bytes_used <= cap


def test_what_else_is_in_the_folder_counts(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "other").write_bytes(bytes(MIB))
    with pytest.raises(Unavailable, match="other files"):
        open_store(path, MIB)
    with open_store(path, 2 * MIB) as store:
        store.put(rollout(p, n=3000) for p in range(200))
        store.sync()
        assert store.stats().evicted_prompts > 0
    assert bytes_on_disk(path) <= 2 * MIB


def test_a_record_that_can_never_fit_is_dropped_and_counted(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        store.put([rollout(1)])
        store.put([rollout(1, 1, n=200_000), rollout(2, n=200_000), rollout(3)])
        store.sync()
        assert contents(store, [1, 2, 3]) == {1: [rollout(1)], 3: [rollout(3)]}
        assert store.stats().dropped_records == 2


def test_records_that_fit_only_alone_take_turns(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        for prompt in range(8):
            store.put([rollout(prompt, n=130_000)])
            store.sync()
            assert contents(store, range(8)) == {prompt: [rollout(prompt, n=130_000)]}
        assert store.stats().dropped_records == 0


def test_a_group_larger_than_the_cap_keeps_its_last_rollouts(tmp_path):
    with open_store(tmp_path / "a", MIB) as store:
        store.put(rollout(1, sample_index=sample_index, n=5000) for sample_index in range(100))
        store.sync()
        left = contents(store, [1])[1]
        assert left == [
            rollout(1, sample_index=sample_index, n=5000)
            for sample_index in range(100 - len(left), 100)
        ]
        assert bytes_on_disk(tmp_path / "a") <= MIB


def test_a_lower_cap_holds_from_the_next_opening(tmp_path):
    path = tmp_path / "a"
    with open_store(path, 8 * MIB) as store:
        store.put(rollout(p, n=3000) for p in range(300))
        contents(store, [0])
    assert bytes_on_disk(path) > 4 * MIB
    with open_store(path, 2 * MIB) as store:
        assert bytes_on_disk(path) <= 2 * MIB
        left = contents(store, range(300))
        assert len(left) > 50
        assert sorted(left) == [0, *range(301 - len(left), 300)]
        store.put(rollout(p, n=3000) for p in range(300, 400))
    assert bytes_on_disk(path) <= 2 * MIB


def test_arguments_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_bytes"):
        open_store(tmp_path / "a", MIB - 1)
    with pytest.raises(ConfigError, match="groups_per_prompt"):
        open_store(tmp_path / "a", groups_per_prompt=0)
    assert not (tmp_path / "a").exists()


# Whose store it is


def test_another_tokenizer_is_refused_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a"
    with open_store(path, tokenizer_id="qwen3") as store:
        store.put([rollout(1)])
    with pytest.raises(ForeignStore) as caught:
        open_store(path, tokenizer_id="llama")
    for part in ("'qwen3'", "'llama'", str(path), "delete"):
        assert part in str(caught.value)
    with open_store(path, tokenizer_id="qwen3") as store:
        assert contents(store, [1]) == {1: [rollout(1)]}


@pytest.mark.parametrize(("made", "whose"), [(2, "an older"), (4, "a newer")])
def test_the_format_of_another_release_is_refused(tmp_path, made, whose):
    path = tmp_path / "a"
    open_store(path).close()
    identity = json.dumps({"format": made, "anything": "else"}).encode()
    with lmdb.open(str(path), max_dbs=3, lock=False) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"identity", identity + xxhash.xxh3_64_digest(identity), db=meta)
    with pytest.raises(ForeignStore, match=rf"{whose} release \(format {made}"):
        open_store(path)


def test_an_lmdb_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "a"
    with lmdb.open(str(path), lock=False) as env, env.begin(write=True) as txn:
        txn.put(b"meta", b"of somebody else")
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(Unavailable, match="no rollout store"):
        open_store(path)
    assert (path / "data.mdb").read_bytes() == before


def test_a_store_is_open_once_in_a_process(tmp_path):
    with open_store(tmp_path / "a"):
        (tmp_path / "link").symlink_to(tmp_path / "a")
        for path in (tmp_path / "a", tmp_path / "link"):
            with pytest.raises(Unavailable, match=f"in this process, pid {os.getpid()}"):
                open_store(path)
    open_store(tmp_path / "a").close()


def test_a_store_is_open_in_one_process(tmp_path):
    script = """
import sys
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.codec import STEP
store = RolloutStore(sys.argv[1], max_bytes=2**20, tokenizer_id="tok")
print("open", flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with run_python(script, tmp_path / "a", stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(Unavailable, match=f"in another process, pid {process.pid};"):
            open_store(tmp_path / "a")
        with pytest.raises(Unavailable, match=f"pid {process.pid}"):
            RolloutStore.restore(snapshot_of(tmp_path, [rollout(1)]), tmp_path / "a")
        process.stdin.close()
    open_store(tmp_path / "a").close()


def test_a_forked_child_cannot_use_or_unlock_the_store_of_its_parent(tmp_path):
    with open_store(tmp_path / "a") as store:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Unavailable):
                store.put([rollout(1)])
                os._exit(1)
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(Unavailable, match="pid"):
            open_store(tmp_path / "a")
        store.put([rollout(2)])


def test_a_closed_store_says_so(tmp_path):
    store = open_store(tmp_path / "a")
    store.put([rollout(1)])
    store.close()
    store.close()
    for call in (
        lambda: store.put([]),
        lambda: store.get([]),
        store.sync,
        store.stats,
        lambda: len(store),
        lambda: store.snapshot(tmp_path / "b"),
    ):
        with pytest.raises(Unavailable, match="closed"):
            call()


# Folders and disks


def assert_one_line(error, *parts):
    assert "\n" not in str(error) and all(str(part) in str(error) for part in parts), str(error)


def test_folders_that_cannot_be_are_refused_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    for path, reason in (
        (file, "it is a file"),
        (file / "below", "Not a directory"),
        (Path("/proc/nemo_specrl"), "cannot open"),
    ):
        with pytest.raises(Unavailable) as caught:
            open_store(path)
        assert_one_line(caught.value, path, reason)
    assert file.read_text() == "not a folder"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system is not permitted here: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_at_creation(small_disk):
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(2 * MIB))
    with pytest.raises(Unavailable) as caught:
        open_store(small_disk / "a")
    assert_one_line(caught.value, small_disk / "a", "No space left")


def test_a_disk_that_fills_up_later_costs_no_reads_and_no_data(small_disk):
    filler = small_disk / "filler"
    with open_store(small_disk / "a") as store:
        store.put([rollout(1, n=9000)])
        store.sync()
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2 * MIB))
        store.put([rollout(2, n=9000)])
        with pytest.raises(Unavailable) as caught:
            store.sync()
        assert_one_line(caught.value, small_disk / "a", "No space left")
        with pytest.raises(Unavailable):
            store.put(rollout(p, n=9000) for p in range(10, 100))
        with pytest.raises(Unavailable):
            store.snapshot(small_disk / "snapshot")
        both = {1: [rollout(1, n=9000)], 2: [rollout(2, n=9000)]}
        assert contents(store, [1, 2]) == both
        filler.unlink()
        store.sync()
        assert contents(store, [1, 2]) == both
    with open_store(small_disk / "a") as store:
        assert contents(store, [1, 2]) == both


# Damage


def raw(path):
    """The store's file as LMDB sees it, and its table of rollouts."""
    env = lmdb.open(str(path), map_size=16 * MIB, max_dbs=3, lock=False)
    return env, env.open_db(b"rollouts")


def test_a_corrupt_record_is_skipped_counted_logged_once_and_deleted(tmp_path, caplog):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(1, sample_index=sample_index) for sample_index in range(3))
        store.put([rollout(2)])
    env, table = raw(path)
    with env, env.begin(write=True) as txn:
        for prompt, sample_index in ((1, b"\0\1"), (2, b"\0\0")):
            with txn.cursor(table) as cursor:
                cursor.set_range(prompt_key([prompt]) + sample_index)
                name, value = cursor.item()
            txn.put(name, value[:9] + bytes([value[9] ^ 1]) + value[10:], db=table)
    with caplog.at_level(logging.WARNING), open_store(path) as store:
        for _ in range(2):
            assert contents(store, [1, 2]) == {
                1: [rollout(1, sample_index=0), rollout(1, sample_index=2)]
            }
            assert store.stats().corrupt_records == 2
        assert len([r for r in caplog.records if "checksum" in r.getMessage()]) == 1
        store.sync()
        stats = store.stats()
        assert (stats.prompts, stats.rollouts) == (1, 2)
        store.put([rollout(2, 7), rollout(1, 7, sample_index=1)])
        store.sync()
        assert contents(store, [2]) == {2: [rollout(2, 7)]}
    with open_store(path) as store:
        assert len(store) == 4
        assert len(contents(store, [1])[1]) == 3
        assert store.stats().corrupt_records == 0


def test_the_older_rollout_serves_where_the_newest_is_corrupt(tmp_path):
    path = tmp_path / "a"
    with open_store(path, groups_per_prompt=2) as store:
        store.put([rollout(1, 0), rollout(1, 1)])
    env, table = raw(path)
    with env, env.begin(write=True) as txn:
        with txn.cursor(table) as cursor:
            cursor.set_range(prompt_key([1]) + b"\0")
            name = cursor.key()
        txn.put(name, b"", db=table)
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1, 0)]}
        store.sync()
        assert contents(store, [1]) == {1: [rollout(1, 0)]}


def cut(size):
    return lambda data: data[: int(size * len(data)) if isinstance(size, float) else size]


DAMAGES = {
    "1 byte": cut(1),
    "100 bytes": cut(100),
    "within the first page": cut(4095),
    "one page": cut(4096),
    "within the second page": cut(8191),
    "two pages": cut(8192),
    "three pages": cut(12288),
    "a third": cut(0.33),
    "all but the last page": cut(-4096),
    "all but the last byte": cut(-1),
    "garbage": lambda data: random.Random(0).randbytes(len(data)),
    "garbage after the first page": lambda data: data[:4096] + b"\xa5" * (len(data) - 4096),
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"this is no database\n" * 1000,
    "no identity": lambda data: data.replace(b'{"format"', b'{"farmot"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_moved_aside_and_the_store_is_cold(tmp_path, caplog, damage):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, n=500) for p in range(50))
    data = damage((path / "data.mdb").read_bytes())
    (path / "data.mdb").write_bytes(data)
    (tmp_path / "a.damaged-1").mkdir()
    with caplog.at_level(logging.WARNING), open_store(path) as store:
        assert contents(store, range(50)) == {}
        assert len(store) == 0
        store.put([rollout(1)])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(tmp_path / "a.damaged-2") in caplog.text
    assert (tmp_path / "a.damaged-2" / "data.mdb").read_bytes() == data
    with open_store(path) as store:
        assert contents(store, range(50)) == {1: [rollout(1)]}


def test_an_empty_file_is_a_new_store(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "data.mdb").touch()
    with open_store(path) as store:
        store.put([rollout(1)])
    assert not damaged_folders(path)


def test_damage_found_later_raises_once_and_the_store_goes_on_cold(tmp_path, caplog):
    path = tmp_path / "a"
    with open_store(path) as store:
        store.put(rollout(p, n=2000) for p in range(50))
        store.sync()
        # Page headers say what a page is; LMDB notices when it comes upon one that is not.
        data = bytearray((path / "data.mdb").read_bytes())
        for start in range(8192, len(data), 4096):
            data[start : start + 16] = b"\xa5" * 16
        with open(path / "data.mdb", "r+b") as file:
            file.write(data)
        with pytest.raises(CacheError, match="damaged"):
            contents(store, range(50))
        assert contents(store, range(50)) == {}
        store.put([rollout(1)])
        store.sync()
        assert contents(store, range(50)) == {1: [rollout(1)]}
    assert len(damaged_folders(path)) == 1
    with open_store(path) as store:
        assert contents(store, [1]) == {1: [rollout(1)]}


def test_damage_that_kills_a_process_kills_the_next_one_no_more(tmp_path):
    if struct.calcsize("P") != 8 or os.sysconf("SC_PAGE_SIZE") != 4096:
        pytest.skip(
            "the page to be damaged is looked for as 64-bit LMDB with 4 KiB pages writes it"
        )
    path = tmp_path / "a"
    RolloutStore.restore(
        snapshot_of(tmp_path, [rollout(p, n=2000) for p in range(200)]), path
    )  # which has no stale pages
    data = bytearray((path / "data.mdb").read_bytes())
    keys = sorted(prompt_key([p]) for p in range(200))
    leaf = next(
        page
        for page in range(2, len(data) // 4096)
        if data[page * 4096 + 10] == 2 and data.find(keys[100], page * 4096, page * 4096 + 4096) > 0
    )
    data[leaf * 4096 : leaf * 4096 + 4096] = bytes(4096)
    (path / "data.mdb").write_bytes(data)
    reader = "import sys, lmdb; e = lmdb.open(sys.argv[1], max_dbs=3, lock=False)\n" + (
        "with e.begin(e.open_db(b'rollouts')) as t: list(t.cursor())"
    )
    with run_python(reader, path, stderr=subprocess.DEVNULL) as process:
        if process.wait() >= 0:
            pytest.skip("this LMDB reads on where a page is blank")
    (path / "lock").write_text("1\n")  # as a process leaves it that died
    with open_store(path) as store:
        assert contents(store, range(200)) == {}
        store.put([rollout(1)])
    assert len(damaged_folders(path)) == 1


# Crashes


def write_until_killed(path, start):
    """Puts and syncs; says on standard output, after each sync, up to which number it did."""
    store = RolloutStore(path, max_bytes=2**24, tokenizer_id="tok")
    for i in itertools.count(start):
        store.put([rollout(i % 50, version=i, n=[5, 300, 4000][i % 3])])
        if i % 5 == 0:
            store.get([prompt_key([i % 7])])
        if i % 3 == 0:
            store.sync()
            print(i, flush=True)


PREAMBLE = f"""
import itertools, sys
import numpy as np
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cache.codec import STEP
from nemo_specrl.rollout import Finish, Rollout, prompt_key
{inspect.getsource(rollout)}
"""
WRITER = f"""{PREAMBLE}
{inspect.getsource(write_until_killed)}
write_until_killed(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.timeout(15 * CRASHES)
def test_what_was_acknowledged_survives_sigkill(tmp_path):
    """Every store opens, every record that was acknowledged is there, and no wrong one is served.

    NEMO_SPECRL_CRASHES says how often; each crash is at another moment.
    """
    path, rng = tmp_path / "a", random.Random(11)
    acknowledged = {}  # prompt -> version
    start = 0
    for _ in range(CRASHES):
        with run_python(WRITER, path, start, stdout=subprocess.PIPE) as process:
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
            while True:  # until another process sees it
                with contextlib.suppress(lmdb.Error), reading_file(path / "data.mdb") as found:
                    records = [decode(*record) for record in found.records]
                    if {(r.policy_version, len(records)) for r in records} == {(version, 20)}:
                        break
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


def test_the_prompt_that_a_process_died_at_is_known_to_the_next(tmp_path):
    script = """
import os, signal, sys
from nemo_specrl.cache import RolloutStore
store = RolloutStore(sys.argv[1], max_bytes=2**24, tokenizer_id="tok")
store.get([bytes.fromhex(key) for key in sys.argv[2:]])
os.kill(os.getpid(), signal.SIGKILL)
"""
    keys = [prompt_key([p]) for p in range(5)]
    with run_python(script, tmp_path / "a", *(key.hex() for key in keys)) as process:
        process.wait()
    lock = FolderLock(tmp_path / "a")
    assert not lock.clean and lock.last_mark == keys[-1]
    lock.release()
    open_store(tmp_path / "a").close()
    lock = FolderLock(tmp_path / "a")
    assert lock.clean and lock.last_mark == b""
    lock.release()


def test_a_cleared_store_is_empty_and_goes_on(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put([rollout(1)])
        store.sync()
        store.put([rollout(2)])
        store.clear()
        assert contents(store, [1, 2]) == {} and len(store) == 0
        store.put([rollout(3)])
    with open_store(tmp_path / "a") as store:
        assert contents(store, [1, 2, 3]) == {3: [rollout(3)]}
    assert not damaged_folders(tmp_path / "a")


# Snapshots


def snapshot_of(tmp_path, rollouts, max_bytes=16 * MIB):
    with open_store(tmp_path / "source", max_bytes) as store:
        store.put(rollouts)
        store.snapshot(tmp_path / "snapshot")
    return tmp_path / "snapshot"


def test_a_snapshot_is_the_store_as_it_was(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put(rollout(p, sample_index=s) for p in range(20) for s in range(2))
        then = contents(store, range(20))
        store.snapshot(tmp_path / "new" / "snapshot")
        store.put(rollout(p, 1) for p in range(10, 30))
        now = contents(store, range(30))
        RolloutStore.restore(tmp_path / "new" / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b") as copy:
            assert contents(copy, range(30)) == then
            assert len(copy) == 40
        store.snapshot(tmp_path / "new" / "snapshot")
        assert contents(store, range(30)) == now
        RolloutStore.restore(tmp_path / "new" / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b") as copy:
            assert contents(copy, range(30)) == now
    assert len(os.listdir(tmp_path / "new" / "snapshot")) == 1


def test_a_restored_store_evicts_as_the_original_does(tmp_path):
    def use(store):
        rng = random.Random(1)
        left = []
        for step in range(60):
            store.put([rollout(1000 + step, n=3000)])
            contents(store, [rng.randrange(100)])
            if step % 20 == 19:
                store.sync()
                left.append(store.stats())
        return left, contents(store, range(2000))

    with open_store(tmp_path / "a", MIB) as store:
        store.put(rollout(p, n=1500) for p in range(100))
        contents(store, [95, 70, 80])
        store.snapshot(tmp_path / "snapshot")
        RolloutStore.restore(tmp_path / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b", MIB) as copy:
            assert contents(copy, range(90, 100)) == contents(store, range(90, 100))
            (left, found), (copy_left, copy_found) = use(store), use(copy)
    assert copy_found == found
    for a, b in zip(left, copy_left, strict=True):
        assert (a.prompts, a.rollouts, a.bytes_used) == (b.prompts, b.rollouts, b.bytes_used)


def test_restoring_replaces_what_is_there_and_ignores_leftovers(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(1)])
    with open_store(tmp_path / "b") as store:
        store.put([rollout(2)])
    (tmp_path / "b" / "data.mdb.tmp").write_bytes(b"of a restore that died" * 100_000)
    with open_store(tmp_path / "b") as store:  # it died before the rename: the old store stands
        assert contents(store, [1, 2]) == {2: [rollout(2)]}
    assert not (tmp_path / "b" / "data.mdb.tmp").exists()
    (tmp_path / "b" / "data.mdb.tmp").write_bytes(b"of a restore that died" * 100_000)
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, [1, 2]) == {1: [rollout(1)]}
    assert sorted(os.listdir(tmp_path / "b")) == ["data.mdb", "lock"]


def test_restoring_over_a_damaged_store_heals_it(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(1)])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "data.mdb").write_bytes(b"\xa5" * 50_000)
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, [1]) == {1: [rollout(1)]}
    assert not damaged_folders(tmp_path / "b")


def test_restoring_under_a_lower_cap_keeps_the_latest_used(tmp_path):
    snapshot = snapshot_of(tmp_path, (rollout(p, n=3000) for p in range(200)))
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b", MIB) as store:
        left = sorted(contents(store, range(200)))
        assert len(left) > 20 and left == list(range(200 - len(left), 200))
    assert bytes_on_disk(tmp_path / "b") <= MIB


def test_a_missing_or_damaged_snapshot_is_refused_and_the_store_stays(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(p, n=300) for p in range(20)])
    with open_store(tmp_path / "b") as store:
        store.put([rollout(2)])
    with pytest.raises(Unavailable) as caught:
        RolloutStore.restore(tmp_path / "nowhere", tmp_path / "b")
    assert_one_line(caught.value, tmp_path / "nowhere", "No such file")
    (file,) = snapshot.iterdir()
    whole, rng = file.read_bytes(), random.Random(0)
    flips = [0, len(whole) - 1, len(whole) - 10, *rng.sample(range(len(whole)), 20)]
    damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in flips]
    damaged += [whole[:n] for n in (0, 1, 15, 16, 17, 4096, len(whole) - 1)] + [whole + b"\0"]
    for data in damaged:
        file.write_bytes(data)
        with pytest.raises(Unavailable, match="is damaged"):
            RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, range(20)) == {2: [rollout(2)]}
    file.write_bytes(whole)
    RolloutStore.restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert len(contents(store, range(20))) == 20

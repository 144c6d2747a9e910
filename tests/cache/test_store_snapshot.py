"""Snapshots of a rollout store, and stores restored from them."""

import os
import random

import pytest

from nemo_specrl.cache.cluster.shard import Shard
from nemo_specrl.cache.export import read_export, reset_provenance, write_export
from nemo_specrl.cache.run_folders import prepare, restore_checkpoint
from nemo_specrl.cache.snapshot import MANIFEST, Manifest, read_manifest, write_manifest
from nemo_specrl.errors import ForeignStore
from nemo_specrl.errors import StoreUnavailable as Unavailable
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    assert_one_line,
    bytes_on_disk,
    contents,
    damaged_folders,
    open_store,
    restore,
    snapshot_of,
)


def test_a_snapshot_is_the_store_as_it_was(tmp_path):
    with open_store(tmp_path / "a") as store:
        store.put(rollout(p, sample_index=s) for p in range(20) for s in range(2))
        then = contents(store, range(20))
        store.snapshot(tmp_path / "new" / "snapshot")
        store.put(rollout(p, 1) for p in range(10, 30))
        now = contents(store, range(30))
        assert restore(tmp_path / "new" / "snapshot", tmp_path / "b") == []
        with open_store(tmp_path / "b") as copy:
            assert contents(copy, range(30)) == then
            assert len(copy) == 40
        store.snapshot(tmp_path / "new" / "snapshot")
        assert contents(store, range(30)) == now
        assert restore(tmp_path / "new" / "snapshot", tmp_path / "b") == []
        with open_store(tmp_path / "b") as copy:
            assert contents(copy, range(30)) == now
    files = sorted(os.listdir(tmp_path / "new" / "snapshot"))
    assert files == ["manifest.json", "partition-00000.rollouts"]


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
        restore(tmp_path / "snapshot", tmp_path / "b")
        with open_store(tmp_path / "b", MIB) as copy:
            assert contents(copy, range(90, 100)) == contents(store, range(90, 100))
            (left, found), (copy_left, copy_found) = use(store), use(copy)
    # Pages are filled otherwise, so that a prompt may go sooner or later; the order is the same.
    assert len(copy_found.keys() ^ found.keys()) <= 1
    for a, b in zip(left, copy_left, strict=True):
        assert abs(a.prompts - b.prompts) <= 1 and a.evicted_prompts > 0


def test_restoring_replaces_what_is_there(tmp_path):
    snapshot = snapshot_of(tmp_path, [rollout(1)])
    with open_store(tmp_path / "b") as store:
        store.put([rollout(2)])
        store.sync()
        store.put([rollout(3)])
        store.restore(snapshot)
        assert contents(store, [1, 2, 3]) == {1: [rollout(1)]}
    with open_store(tmp_path / "b") as store:
        assert contents(store, [1, 2, 3]) == {1: [rollout(1)]}


def test_all_groups_of_a_sample_index_come_back_newest_first(tmp_path):
    put = [rollout(p, version, s) for version in range(3) for p in range(70) for s in range(2)]
    with open_store(tmp_path / "a", groups_per_prompt=2) as store:
        store.put(put)
        store.snapshot(tmp_path / "snapshot")
        want = contents(store, range(70))
    with open_store(tmp_path / "b", groups_per_prompt=2) as store:
        store.restore(tmp_path / "snapshot")
        assert contents(store, range(70)) == want
    assert [r.policy_version for r in want[5]] == [2, 1, 2, 1]


def test_a_run_resumes_with_what_its_checkpoint_has_whatever_is_in_its_folder(tmp_path, caplog):
    snapshot_of(tmp_path, [rollout(1)]).rename(tmp_path / "rollout_cache")
    with open_store(tmp_path / "foreign", tokenizer_id="another") as store:
        store.put([rollout(2)])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "rollouts.sqlite").write_bytes(b"\xa5" * 50_000)
    (tmp_path / "damaged" / "rollouts.sqlite.tmp").write_bytes(b"left" * 500_000)
    for folder in (tmp_path / "foreign", tmp_path / "damaged"):
        prepare(folder, "tok", MIB, fresh=False)
        with open_store(folder, MIB) as store:
            assert contents(store, [1, 2]) == {}
            assert restore_checkpoint(store.restore, tmp_path, "it starts cold") == 0
            assert contents(store, [1, 2]) == {1: [rollout(1)]}
        assert not damaged_folders(folder)
        assert not (folder / "rollouts.sqlite.tmp").exists()
    assert caplog.messages == []


def test_restoring_under_a_lower_cap_keeps_the_latest_used(tmp_path):
    snapshot = snapshot_of(tmp_path, (rollout(p, n=3000) for p in range(200)))
    restore(snapshot, tmp_path / "b")
    with open_store(tmp_path / "b", MIB) as store:
        left = sorted(contents(store, range(200)))
        assert len(left) > 20 and left == list(range(200 - len(left), 200))
    assert bytes_on_disk(tmp_path / "b") <= MIB


def test_a_snapshot_without_a_whole_manifest_is_refused_and_the_store_stays(tmp_path, caplog):
    snapshot = snapshot_of(tmp_path, [rollout(p, n=300) for p in range(20)])
    manifest = snapshot / MANIFEST
    whole = manifest.read_bytes()
    with open_store(tmp_path / "b") as store:
        store.put([rollout(2)])
        with pytest.raises(Unavailable) as caught:
            store.restore(tmp_path / "nowhere")
        assert_one_line(caught.value, tmp_path / "nowhere", "No such file")
        for data in (b"", *(whole[:n] for n in (1, 100, len(whole) - 1)), b"\xa5" * len(whole)):
            manifest.write_bytes(data)
            with pytest.raises(Unavailable, match="damaged") as caught:
                store.restore(snapshot)
            assert_one_line(caught.value, manifest)
        manifest.write_bytes(whole.replace(b'"tok"', b'"qwen3"'))
        with pytest.raises(ForeignStore, match="is of tokenizer 'qwen3', not of 'tok'"):
            store.restore(snapshot)
        assert contents(store, range(20)) == {2: [rollout(2)]}
    manifest.write_bytes(whole)
    assert restore(snapshot, tmp_path / "b") == []
    with open_store(tmp_path / "b") as store:
        assert len(contents(store, range(20))) == 20


def test_the_cache_in_a_checkpoint_of_an_older_release_is_named_and_the_run_goes_on(
    tmp_path, caplog
):
    with open_store(tmp_path / "step_3" / "rollout_cache") as store:
        store.put([rollout(1)])
    with open_store(tmp_path / "b") as store:
        assert restore_checkpoint(store.restore, tmp_path / "step_3", "it starts cold") == 0
    [line] = caplog.messages
    assert line == (
        f"rollout cache: {tmp_path / 'step_3' / 'rollout_cache'} has the cache as an older release "
        "wrote it (rollouts.sqlite), this one reads manifest.json; it starts cold"
    )


def test_a_damaged_file_of_a_snapshot_is_left_out_and_named(tmp_path):
    """Cut off anywhere, or a flipped bit anywhere: nothing wrong is ever served."""
    snapshot = snapshot_of(tmp_path, (rollout(p, n=300) for p in range(20)))
    (file,) = snapshot.glob("*.rollouts")
    whole, rng = file.read_bytes(), random.Random(0)
    flipped = [
        whole[:i] + bytes([whole[i] ^ 1 << rng.randrange(8)]) + whole[i + 1 :]
        for i in [0, 4, 20, *rng.sample(range(len(whole)), 60)]
    ]
    cut = [whole[:n] for n in (0, 1, 100, 4096, len(whole) - 1)]
    with open_store(tmp_path / "b") as store:
        for data in [*cut, *flipped]:
            file.write_bytes(data)
            _, [line] = store.restore(snapshot)
            assert line == f"{file}: damaged, its checksum is not that of the manifest"
            assert contents(store, range(20)) == {}
        file.unlink()
        _, [line] = store.restore(snapshot)
        assert "No such file" in line
        file.write_bytes(whole)
        assert store.restore(snapshot)[1] == []
        assert len(contents(store, range(20))) == 20


def test_what_one_process_writes_a_cluster_reads_and_the_other_way_round(tmp_path):
    put = [rollout(p, sample_index=s, incarnation=7) for p in range(40) for s in range(2)]
    want = {p: [r for r in put if r.key == rollout(p).key] for p in range(40)}
    options = {"max_bytes": 16 * MIB, "tokenizer_id": "tok"}
    single = snapshot_of(tmp_path, put)
    shard = Shard(str(tmp_path / "shard"), 1, True, options)
    files = list(read_manifest(single).files)
    assert shard.read_snapshot(str(single), files, set(range(4)), 4) == ([], 7)
    assert contents(shard.store, range(40)) == want
    parts = tmp_path / "partitions"
    written, _ = shard.write_snapshot(str(parts), list(range(4)), 4, epoch=0)
    shard.close()
    write_manifest(parts, Manifest("tok", 3, 4, tuple(written)))
    assert len(list(parts.glob("*.rollouts"))) == 4
    with open_store(tmp_path / "b") as store:
        manifest, damaged = store.restore(parts)
        assert (manifest.policy_version, damaged) == (3, [])
        assert contents(store, range(40)) == want
        next(parts.glob("*.rollouts")).write_bytes(b"damaged")
        _, damaged = store.restore(parts)
        assert len(damaged) == 1
        left = contents(store, range(40))
        assert 20 < len(left) < 40 and all(want[p] == group for p, group in left.items())


def test_an_empty_store_has_an_empty_snapshot(tmp_path):
    assert os.listdir(snapshot_of(tmp_path, [])) == [MANIFEST]
    with open_store(tmp_path / "b") as store:
        store.put([rollout(1)])
        assert store.restore(tmp_path / "snapshot")[1] == []
        assert len(store) == 0


def test_snapshots_and_exports_keep_freshness_incarnation_and_rawness(tmp_path):
    put = [
        rollout(p, fresh=p % 2 == 0, raw=p != 1, incarnation=incarnation)
        for p, incarnation in enumerate((0, 3, 2**64 - 1))
    ]
    restore(snapshot_of(tmp_path, put), tmp_path / "b")
    with open_store(tmp_path / "b") as store:
        assert contents(store, range(3)) == {p: [r] for p, r in enumerate(put)}
    ordered = sorted(put, key=lambda r: r.key)
    write_export(tmp_path / "export", ordered, "tok")
    exported = list(read_export(tmp_path / "export")[1])
    assert [(r.finish, r.raw) for r in exported] == [(r.finish, r.raw) for r in ordered]
    assert [reset_provenance(r).raw for r in exported] == [r.raw for r in ordered]

"""``nemo-specrl cache``: what it shows, finds damaged, moves and refuses."""

import contextlib
import functools
import os
import re
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nemo_specrl import Finish, RolloutStore, prompt_key
from nemo_specrl.cache.inspection import open_source
from nemo_specrl.cache.run_folders import WARM_START, begin_empty, run_folder
from nemo_specrl.cache.storage.schema import DATA_FILE
from nemo_specrl.errors import CacheError, StoreInUse
from tests.support import rollouts as factories

MIB = 2**20


def rollout(prompt, version, sample_index=0, n=20, **fields):
    births = {"birth_versions": np.full(n, version // 2), "occurrence": version, "fingerprint": 9}
    return factories.rollout(prompt, version, sample_index, n, **(births | fields))


def made(folder, tokenizer="tok", prompts=30, **options):
    """A store of two rollouts a prompt, one sample index of which has an older one too."""
    with RolloutStore(folder, max_bytes=8 * MIB, tokenizer_id=tokenizer, **options) as store:
        for version in (4, 6):
            store.put(rollout(p, version) for p in range(prompts))
        store.put(rollout(p, 6, sample_index=1, n=5, finish=Finish.LENGTH) for p in range(prompts))
        store.get([prompt_key([p]) for p in range(prompts + 10)])
    return folder


@pytest.fixture
def cache(command_line):
    return functools.partial(command_line, "cache")


def contents(folder, prompts, tokenizer="tok"):
    with RolloutStore(folder, max_bytes=8 * MIB, tokenizer_id=tokenizer) as store:
        return store.get([prompt_key([p]) for p in range(prompts)])


def test_inspect_counts_what_is_there(tmp_path, cache):
    path = made(tmp_path / "store")
    before = (path / "rollouts.sqlite").read_bytes()
    shown = cache("inspect", path)
    assert (path / "rollouts.sqlite").read_bytes() == before
    for part in (
        *("store", "tok"),
        *("30 │", "60, 30 LENGTH, 30 STOP", "750, 12.5 a rollout, at most 20"),
        f"{len(before):,}",
        *("6 to 6", "0.0 versions a rollout, 3.0 a token", "75.0% of 40 prompts"),
    ):
        assert part in shown, (part, shown)


def test_a_path_may_be_relative_and_have_any_characters(tmp_path, cache, monkeypatch):
    made(tmp_path / "a ?b#%20", prompts=3)
    monkeypatch.chdir(tmp_path)
    assert "6, 3 LENGTH, 3 STOP" in cache("inspect", "a ?b#%20")


def test_inspect_reads_snapshots_and_checkpoints(tmp_path, cache):
    path = made(tmp_path / "store", groups_per_prompt=2)
    options = {"max_bytes": 8 * MIB, "tokenizer_id": "tok"}
    with RolloutStore(path, groups_per_prompt=2, **options) as store:
        store.snapshot(tmp_path / "step_11" / "rollout_cache", 11)
    shown = cache("inspect", path)
    assert "store" in shown and "90, 30 LENGTH, 60 STOP" in shown
    assert "4 to 6" in shown and "0.7 versions a rollout" in shown
    with RolloutStore(path, **options) as store:
        store.snapshot(tmp_path / "newest", 11)
    shown = cache("inspect", tmp_path / "step_11")
    assert "snapshot" in shown and "90, 30 LENGTH, 60 STOP" in shown
    shown = cache("inspect", tmp_path / "newest")
    assert "snapshot" in shown and "60, 30 LENGTH, 30 STOP" in shown
    assert "1, 1 of them with rollouts" in shown
    assert "6 to 6, beside the weights of 11" in shown and "not known" in shown


def flipped(file, *needles):
    data = file.read_bytes()
    for needle in needles:  # wherever it is: pages that are free have old copies
        assert needle in data
        data = data.replace(needle, bytes([needle[0] ^ 1]) + needle[1:])
    file.write_bytes(data)


def test_verify_names_what_is_damaged(tmp_path, cache):
    path = made(tmp_path / "store")
    assert "60 rollouts are sound, 0 damaged" in cache("verify", path)
    tokens = [rollout(p, 6).tokens.astype("<u2").tobytes() for p in (3, 8)]
    flipped(path / "rollouts.sqlite", *tokens)
    shown = cache("verify", path, code=1)
    assert "58 rollouts are sound, 2 damaged" in shown
    for prompt in (3, 8):
        assert f"damaged: record {prompt_key([prompt]).hex()}" in shown
    assert "damaged │ 2; nemo-specrl cache verify names them" in cache("inspect", path)
    (path / "rollouts.sqlite").write_bytes((path / "rollouts.sqlite").read_bytes()[:-4096])
    assert "damaged: cannot read" in cache("verify", path, code=1)
    (path / "rollouts.sqlite").write_bytes(b"\xa5" * 50_000)
    shown = cache("verify", path, code=1)
    assert re.search(r"damaged: cannot read .*store", shown) and "0 rollouts are sound" in shown


def test_verify_checks_snapshots_and_exports(tmp_path, cache):
    path = made(tmp_path / "store")
    with RolloutStore(path, max_bytes=8 * MIB, tokenizer_id="tok") as store:
        store.snapshot(tmp_path / "copy")
    cache("export", path, tmp_path / "export")
    needle = rollout(3, 6).tokens
    for name, width in (("copy", "<u2"), ("export", "<i4")):
        assert "60 rollouts are sound, 0 damaged" in cache("verify", tmp_path / name)
        (damaged,) = (f for f in (tmp_path / name).iterdir() if f.suffix != ".json")
        flipped(damaged, needle.astype(width).tobytes())
        shown = cache("verify", tmp_path / name, code=1)
        assert f"damaged: {damaged}" in shown


def test_what_is_exported_warms_another_run(tmp_path, cache):
    path = made(tmp_path / "store", groups_per_prompt=2)
    assert "90 rollouts" in cache("export", path, tmp_path / "export")
    (file,) = (tmp_path / "export").iterdir()
    columns = load_file(file)
    assert columns["keys"].shape == (90, 16) and columns["tokens"].dtype == np.int32
    assert int(columns["lengths"].sum()) == len(columns["tokens"]) == 30 * 45
    warm = tmp_path / "other" / WARM_START
    with RolloutStore(warm, max_bytes=8 * MIB, tokenizer_id="tok") as store:
        own = rollout(5, 1, sample_index=1)
        store.put([own])
    for source, left_out in ((tmp_path / "export", 31), (path, 60 + 30)):
        shown = cache("import", source, tmp_path / "other", "--max-bytes", "8MiB")
        assert f"{90 - left_out} rollouts imported, {left_out} left out" in shown
        assert f"for runs with spec_rl.cache.dir={tmp_path / 'other'}" in shown
    run = run_folder(tmp_path / "other", tmp_path / "checkpoints")
    begin_empty(run, "tok", warm=True)
    found = contents(run, 30)
    for prompt in range(30):
        newest, second = found[prompt_key([prompt])]
        want = rollout(prompt, 6)
        assert newest.tokens.tolist() == want.tokens.tolist()
        assert newest.birth_logprobs.tolist() == want.birth_logprobs.tolist()
        assert (newest.policy_version, newest.occurrence, newest.fingerprint) == (0, 6, 0)
        assert set(newest.birth_versions.tolist()) == {0}
        assert second == own if prompt == 5 else second.finish is Finish.LENGTH
    cache("import", path, tmp_path / "new")
    assert len(contents(tmp_path / "new" / WARM_START, 30)) == 30


def killed_in_a_commit(folder):
    """Leave a store as a process that is killed while it commits does: with its journal."""
    database = sqlite3.connect(folder / DATA_FILE, isolation_level=None)
    with contextlib.closing(database):
        database.execute("PRAGMA cache_size = 1")
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE rollouts SET record = zeroblob(length(record))")
        left = {file.name: file.read_bytes() for file in folder.iterdir()}
        database.execute("ROLLBACK")
    for name, data in left.items():
        (folder / name).write_bytes(data)


def test_an_import_that_was_killed_is_repeated(tmp_path, cache):
    source, warm = made(tmp_path / "store"), tmp_path / "runs" / WARM_START
    cache("import", source, tmp_path / "runs", "--max-bytes", "8MiB")
    killed_in_a_commit(warm)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        sqlite3.connect(f"file:{warm / DATA_FILE}?mode=ro", uri=True).execute("SELECT * FROM meta")
    shown = cache("import", source, tmp_path / "runs", "--max-bytes", "8MiB")
    assert "0 rollouts imported, 60 left out" in shown
    assert len(contents(warm, 30)) == 30
    (warm / DATA_FILE).write_bytes(b"\xa5" * 50_000)
    shown = cache("import", source, tmp_path / "runs", code=2)
    assert f"cannot read {warm}: " in shown and str(source) not in shown


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path):
    path = made(tmp_path / "closed" / "store")
    path.parent.chmod(0)
    # The administrator may enter every folder, unless these capabilities are gone.
    as_a_user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [sys.executable, "-m", "nemo_specrl", "cache", "inspect", str(path)]
    done = subprocess.run(
        [*(as_a_user if os.geteuid() == 0 else ()), *command], capture_output=True, text=True
    )
    path.parent.chmod(0o700)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("nemo-specrl: ") and "Permission denied" in done.stderr


def test_bad_input_is_one_line_and_code_2(tmp_path, cache):
    store, foreign = made(tmp_path / "store"), made(tmp_path / "foreign" / WARM_START, "another")
    (tmp_path / "empty").mkdir()
    cache("export", store, tmp_path / "export")
    os.mkdir(tmp_path / "strange")
    save_file({"a": np.zeros(2)}, tmp_path / "strange" / "rollouts-00000.safetensors")
    before = (foreign / "rollouts.sqlite").read_bytes()
    for arguments, part in (
        (("inspect", tmp_path / "nowhere"), "no such folder"),
        (
            ("inspect", tmp_path / "empty"),
            "neither a rollout store (rollouts.sqlite), nor a snapshot",
        ),
        (("verify", tmp_path / "empty"), "neither a rollout store"),
        (("export", store, tmp_path / "export"), "has an export; name another folder"),
        (("export", tmp_path / "empty", tmp_path / "x"), "neither a rollout store"),
        (("import", tmp_path / "export", foreign.parent), "is of tokenizer 'tok', the store"),
        (("import", tmp_path / "strange", tmp_path / "y"), "no export that this release reads"),
        (("import", foreign, foreign.parent), "cannot be imported into itself"),
        (("import", store, tmp_path / "y", "--max-bytes", "lots"), "must be a number of bytes"),
        (("import", store, tmp_path / "y", "--max-bytes", "5"), "max_bytes = 5: must be greater"),
    ):
        shown = cache(*arguments, code=2)
        assert shown.startswith("nemo-specrl: ") and part in shown, shown
    assert (foreign / "rollouts.sqlite").read_bytes() == before
    with RolloutStore(store, max_bytes=8 * MIB, tokenizer_id="tok"):
        for command in (("inspect", store), ("verify", store), ("export", store, tmp_path / "z")):
            assert f"is open in process {os.getpid()}" in cache(*command, code=2)


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "import"])
def test_help_shows_an_example(command, cache):
    assert f"Example: nemo-specrl cache {command} " in cache(command, "--help")


def test_a_run_may_open_a_store_that_is_being_looked_at(tmp_path):
    path = made(tmp_path / "store")
    meanwhile = "was opened by a process while it was read"
    with pytest.raises(StoreInUse, match=meanwhile), open_source(path) as source:
        next(source.rollouts)
        with RolloutStore(path, max_bytes=8 * MIB, tokenizer_id="tok") as store:
            store.put([rollout(1, 9)])
        list(source.rollouts)
    with open_source(path) as source:  # which changes nothing itself
        assert sum(not isinstance(r, CacheError) for r in source.rollouts) == 60


def test_a_store_whose_pages_are_damaged_is_one_line(tmp_path, cache):
    path = made(tmp_path / "store")
    data = bytearray((path / "rollouts.sqlite").read_bytes())
    for page in range(4096, len(data), 4096):
        data[page + 3] ^= 0x40  # the number of its cells
    (path / "rollouts.sqlite").write_bytes(data)
    for command in (("inspect", path), ("export", path, tmp_path / "out")):
        assert "cannot read" in cache(*command, code=2)
    assert "damaged: cannot read" in cache("verify", path, code=1)
    assert "cannot read" in cache("import", path, tmp_path / "new", code=2)

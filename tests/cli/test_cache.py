"""``nemo-specrl cache``: what it shows, finds damaged, moves and refuses."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest

from nemo_specrl.cache.inspection import open_source
from nemo_specrl.errors import CacheError
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.rollouts import rollout
from tests.support.stores import (
    MIB,
    VOCABULARY,
    changing,
    contents,
    data_file,
    open_store,
    run_python,
)


def made(folder, prompts=30, **options):
    """A store of three responses a prompt."""
    with open_store(folder, 8 * MIB, **options) as store:
        for version in (4, 6):
            store.put([rollout(p, version) for p in range(prompts)])
        store.put(
            [rollout(p, 6, 1, n=5, finish=Finish.LENGTH, scored=False) for p in range(prompts)]
        )
    return folder


@pytest.fixture
def cache(command_line):
    return functools.partial(command_line, "cache")


def test_inspect_counts_what_is_there(tmp_path, cache):
    folder = made(tmp_path / "cache")
    shown = cache("inspect", folder)
    size = data_file(folder).stat().st_size
    for part in (
        *(str(folder / VOCABULARY), "kind store", f"vocabulary {VOCABULARY}", "prompts 30"),
        *("responses 90: 30 LENGTH, 60 STOP", "with log-probs 60"),
        "tokens 1,350, 15.0 a response, at most 20",
        *(f"bytes {size:,}, ", "policy versions 4 to 6"),
    ):
        assert part in shown, (part, shown)
    assert "damaged" not in shown
    assert cache("inspect", folder / VOCABULARY) == cache("inspect", data_file(folder)) == shown


def test_a_store_in_use_may_be_looked_at_and_goes_on(tmp_path, cache):
    with open_store(made(tmp_path / "cache"), 8 * MIB) as store:
        store.put([rollout(1, 9)])
        assert "responses 91: 30 LENGTH, 61 STOP" in cache("inspect", tmp_path / "cache")
        assert "91 responses are sound, 0 damaged" in cache("verify", tmp_path / "cache")
        assert "91 responses" in cache("export", tmp_path / "cache", tmp_path / "out")
        with open_source(tmp_path / "cache") as source:  # meanwhile it changes
            found = [next(source.rollouts)]
            store.put([rollout(p, 10) for p in range(40)])
            found += list(source.rollouts)
        assert not any(isinstance(r, CacheError) for r in found) and len(found) >= 91
        assert contents(store, [1])[1][-2:] == [rollout(1, 9), rollout(1, 10)]
        assert store.stats().responses == 131


def test_stores_of_several_vocabularies_are_shown_one_by_one(tmp_path, cache):
    made(tmp_path)
    made(tmp_path, prompts=2, vocabulary="f" * 32)
    shown = cache("inspect", tmp_path)
    assert "prompts 30" in shown and "prompts 2" in shown and "f" * 32 in shown
    shown = cache("verify", tmp_path)
    assert "90 responses are sound" in shown and "6 responses are sound" in shown
    shown = cache("export", tmp_path, tmp_path / "out", code=2)
    assert f"several vocabularies; name one of {VOCABULARY}, {'f' * 32}" in shown
    cache("export", tmp_path / VOCABULARY, tmp_path / "out")


def test_figures_are_not_cut_in_a_pipe_or_a_narrow_terminal(tmp_path):
    folder = made(tmp_path / ("long" * 30))
    for environment in ({}, {"COLUMNS": "40"}, {"PYTHONIOENCODING": "ascii"}):
        done = subprocess.run(
            [sys.executable, "-m", "nemo_specrl", "cache", "inspect", folder],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == str(folder / VOCABULARY) and len(lines) == 9
        assert f"  vocabulary      {VOCABULARY}" in lines


def test_a_path_may_be_relative_and_have_any_characters(tmp_path, cache, monkeypatch):
    made(tmp_path / "a ?b#%20", prompts=3)
    monkeypatch.chdir(tmp_path)
    assert "responses 9: 3 LENGTH, 6 STOP" in cache("inspect", "a ?b#%20")


def test_checkpoints_are_read_as_one(tmp_path, cache):
    step = tmp_path / "step_11" / "rollout_cache"
    for node, first in (("a", 0), ("b", 10)):
        with open_store(tmp_path / node) as store:
            store.put([rollout(p) for p in range(first, first + 10)])
            store.snapshot(step / node)
    (step / "notes.json").write_text("{}")
    for path in (tmp_path / "step_11", step):
        shown = cache("inspect", path)
        assert "kind snapshot" in shown and "prompts 20" in shown
    assert "20 responses added" in cache("import", tmp_path / "step_11", tmp_path / "new")
    with open_store(tmp_path / "new") as store:
        assert contents(store, range(20)) == {p: [rollout(p)] for p in range(20)}
    assert "prompts 10" in cache("inspect", step / "a")


def flipped(file, *needles):
    data = file.read_bytes()
    for needle in needles:  # wherever it is: pages that are free have old copies
        assert needle in data
        data = data.replace(needle, bytes([needle[0] ^ 1]) + needle[1:])
    file.write_bytes(data)


def test_verify_names_what_is_damaged(tmp_path, cache):
    folder = made(tmp_path / "cache")
    file = data_file(folder)
    assert "90 responses are sound, 0 damaged" in cache("verify", folder)
    flipped(file, *(rollout(p, 6).tokens.astype("<u2").tobytes() for p in (3, 8)))
    shown = cache("verify", folder, code=1)
    assert "88 responses are sound, 2 damaged" in shown
    for prompt in (3, 8):
        assert f"damaged: a response to prompt {prompt_key([prompt]).hex()}" in shown
    assert "damaged 2; nemo-specrl cache verify names them" in cache("inspect", folder)
    assert "88 responses; left out as damaged: 2" in cache("export", folder, tmp_path / "o")
    file.write_bytes(file.read_bytes()[:-4096])
    assert "damaged: cannot read" in cache("verify", folder, code=1)
    file.write_bytes(b"\xa5" * 50_000)
    shown = cache("verify", folder, code=1)
    assert re.search(r"damaged: cannot read .*cache", shown) and "0 responses are sound" in shown
    for command in (("inspect", folder), ("export", folder, tmp_path / "out")):
        assert "cannot read" in cache(*command, code=2)


def test_verify_checks_copies_and_exports(tmp_path, cache):
    with open_store(made(tmp_path / "cache"), 8 * MIB) as store:
        store.snapshot(tmp_path / "copy")
    cache("export", tmp_path / "cache", tmp_path / "export")
    for name in ("copy", "export"):
        assert "90 responses are sound, 0 damaged" in cache("verify", tmp_path / name)
    flipped(tmp_path / "copy", rollout(3, 6).tokens.astype("<u2").tobytes())
    shown = cache("verify", tmp_path / "copy", code=1)
    assert "89 responses are sound, 2 damaged" in shown and "copy is damaged" in shown
    lines = (tmp_path / "export").read_text().splitlines()
    lines[5] = lines[5].replace("STOP", "STOOP")
    lines[6] = lines[6][:-20]
    lines[7] = "[" * 100_000
    (tmp_path / "export").write_text("\n".join(lines))
    shown = cache("verify", tmp_path / "export", code=1)
    assert "87 responses are sound, 3 damaged" in shown
    assert "line 6 is no response" in shown and "line 7 is no response" in shown


def test_what_is_exported_can_be_read_and_warms_another_run(tmp_path, cache):
    folder = made(tmp_path / "cache")
    assert "90 responses" in cache("export", folder, tmp_path / "out.jsonl")
    head, *lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert head["vocabulary"] == VOCABULARY and len(lines) == 90
    first = lines[0]
    want = rollout(29, 6, 1, n=5, finish=Finish.LENGTH, scored=False)
    assert first == {
        "key": want.key.hex(),
        "identity": f"{want.identity:x}",
        "finish": "LENGTH",
        "policy_version": 6,
        "tokens": want.tokens.tolist(),
    }
    assert Rollout(
        bytes.fromhex(lines[1]["key"]),
        lines[1]["tokens"],
        Finish[lines[1]["finish"]],
        lines[1]["policy_version"],
        lines[1]["logprobs"],
        int(lines[1]["identity"], 16),
    ) == rollout(29, 6)
    own = rollout(5, 1, 7)
    with open_store(tmp_path / "other") as store:
        store.put([own])
        shown = cache("import", tmp_path / "out.jsonl", tmp_path / "other", "--max-bytes", "8MiB")
        assert "90 responses added" in shown
        assert f"for runs with cache.dir={tmp_path / 'other'}" in shown
        assert "0 responses added" in cache("import", folder, tmp_path / "other")
        with open_store(folder) as source:
            want = contents(source, range(30))
        want[5].append(own)  # what was there is newer
        assert contents(store, range(30)) == want


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path):
    path = made(tmp_path / "closed" / "cache")
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


def test_a_store_of_another_user_can_be_looked_at(tmp_path):
    folder = made(tmp_path / "cache")
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = "from nemo_specrl.cli.main import main; main()"
    with run_python(
        script,
        "cache",
        "verify",
        folder,
        before=["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else (),
        stdout=subprocess.PIPE,
    ) as process:
        said = process.communicate()[0]
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700)
    assert process.returncode == 0 and "90 responses are sound, 0 damaged" in said


def test_bad_input_is_one_line_and_code_2(tmp_path, cache):
    folder = made(tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    cache("export", folder, tmp_path / "export")
    (tmp_path / "strange").write_text('{"format": "other"}\n')
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "nested").write_text("[" * 100_000)
    with open_store(tmp_path / "older") as store:
        store.put([rollout(1)])
    with changing(tmp_path / "older") as database:
        database.execute("PRAGMA user_version = 4")
    nothing = "neither a rollout store, nor a checkpoint with one, nor an export"
    for arguments, part in (
        (("inspect", tmp_path / "nowhere"), nothing),
        (("inspect", tmp_path / "empty"), nothing),
        (("verify", tmp_path / "empty"), nothing),
        (("export", folder, tmp_path / "export"), "exists; name a new file"),
        (("export", tmp_path / "empty", tmp_path / "x"), nothing),
        (("inspect", tmp_path / "older"), "has format 4, this release reads 5"),
        (("verify", tmp_path / "older"), "has format 4, this release reads 5"),
        (("import", tmp_path / "strange", tmp_path / "y"), "no export or snapshot that this"),
        (("import", tmp_path / "nested", tmp_path / "y"), "no export or snapshot that this"),
        (("import", tmp_path / "bytes", tmp_path / "y"), "no export or snapshot that this"),
        (("import", folder, tmp_path / "y", "--max-bytes", "lots"), "must be a number of bytes"),
        (("import", folder, tmp_path / "y", "--max-bytes", "5"), "max_bytes = 5: must be greater"),
        (("import", folder, "null"), "must be a path"),
    ):
        shown = cache(*arguments, code=2)
        assert shown.startswith("nemo-specrl: ") and part in shown, shown
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "import"])
def test_help_shows_an_example(command, cache):
    assert f"Example: nemo-specrl cache {command} " in cache(command, "--help")

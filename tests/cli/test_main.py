"""The command line itself: its version, its first line, and bad input in one line."""

import errno
import os
import subprocess
import sys

import pytest

from nemo_specrl import __version__
from nemo_specrl.cache import RolloutStore
from nemo_specrl.cli import main as command_line_module
from nemo_specrl.errors import CheckpointError
from tests.conftest import REPOSITORY

DEMO = "examples/configs/grpo_sort_cpu.yaml"
SLOW = ("numpy", "omegaconf", "sqlite3", "matplotlib", "torch", "vllm", "ray")


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_the_version(command_line):
    assert command_line("--version") == f"nemo-specrl {__version__}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", DEMO], f"train: loading {DEMO}, torch and vLLM"),
        (["compare", DEMO], f"compare: {DEMO}, first plain, then speculative"),
        (["run", "tests/conftest.py"], "nemo-specrl run: loading NeMo-RL with the plug-in"),
        (["simulate", "tests"], "simulate: reading tests"),
    ],
)
def test_the_first_line_comes_before_anything_slow_is_imported(arguments, line):
    code = f"""
import sys
from nemo_specrl.cli.main import main
print([name for name in {SLOW} if name in sys.modules])
for name in ("numpy", "omegaconf", "torch"):
    sys.modules[name] = None  # its import fails from here on
sys.argv[1:] = {arguments}
main()
"""
    done = python(code)
    found, first, *_ = done.stdout.splitlines()
    assert found == "[]" and first.startswith(line)
    assert done.returncode == 1, done.stderr


def test_public_names_are_there_and_come_when_they_are_used():
    code = f"""
import sys
import nemo_specrl
assert not any(name in sys.modules for name in {SLOW})
for name in nemo_specrl.__all__:
    getattr(nemo_specrl, name)
assert "vllm" not in sys.modules and "ray" not in sys.modules
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


LONG = "x" * 300
BAD = [
    (["report", "{empty}"], "no metrics.jsonl here; give the folder of a run"),
    (["report", "{file}"], "no metrics.jsonl here; give the folder of a run"),
    (["report", "{folders}"], "cannot be read (Is a directory)"),
    (["report", "{file}", "--follow"], "no metrics.jsonl here; give the folder of a run"),
    (["simulate", "{file}"], "no such folder"),
    (["simulate", "{folders}"], "cannot be read (Is a directory)"),
    (["cache", "inspect", "{file}"], "file"),
    (["cache", "verify", "{empty}"], "empty"),
    (["cache", "export", "{empty}", "{file}"], "empty"),
    (["cache", "import", "{file}", "{empty}"], "file"),
    (["train", "{empty}"], "empty"),
    (["compare", "{file}"], "must"),
    (["run", "{empty}"], "no such file; give a script of NeMo-RL"),
    (["cache", "import", "{empty}", "None"], "None: must be a path"),
    (["cache", "export", "{empty}", "~nobody-has-this-name/x"], "no home folder for ~nobody"),
    (["train", LONG], "File name too long"),
    (["report", LONG], "File name too long"),
    (["simulate", LONG], "File name too long"),
    (["run", LONG], "File name too long"),
    (["cache", "verify", LONG], "File name too long"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=lambda x: "-".join(x)[:30])
def test_bad_input_is_one_line(tmp_path, capfd, monkeypatch, arguments, said):
    from nemo_specrl.cli.main import main

    monkeypatch.chdir(REPOSITORY)
    places = {name: tmp_path / name for name in ("empty", "file", "folders")}
    places["empty"].mkdir()
    places["file"].write_text("x")
    for name in ("metrics.jsonl", "train_data_step1.jsonl"):
        (places["folders"] / name).mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["nemo-specrl", *(a.format(**places) for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("nemo-specrl: ") and said in line


LINES = """
import sys
from nemo_specrl.cli import main
def run():
    for line in range(3):
        main._say(f"line {line}")
        print("and another", line)
main.app = run
main.main()
print("all said", file=sys.stderr)
"""


@pytest.mark.parametrize("output", ["full", "closed pipe", "closed"])
def test_standard_output_that_fails_ends_no_run(output):
    command = [sys.executable, "-c", LINES]
    if output == "full":
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    elif output == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
    else:
        shell = ["sh", "-c", 'exec "$0" "$@" >&-', *command]
        done = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    *warnings, last = done.stderr.splitlines()
    assert (done.returncode, last) == (0, "all said"), done.stderr
    assert len(warnings) == (output != "closed")
    assert all("standard output cannot be written to" in line for line in warnings)


@pytest.mark.parametrize(
    "command", [["--help"], ["--version"], ["doctor"], ["cache", "verify", "{cache}"]], ids=" ".join
)
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path, command):
    with RolloutStore(tmp_path, vocabulary="0" * 32, max_bytes=2**20, responses_per_prompt=1):
        pass
    command = [word.format(cache=tmp_path) for word in command]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nemo_specrl", *command],
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    [line] = done.stderr.splitlines()
    said = "nemo-specrl: standard output cannot be written to (No space left on device)"
    assert done.returncode == 0 and line.startswith(said)


@pytest.mark.parametrize("option", ["--engines", "--kv-tokens", "--max-num-seqs"])
def test_numbers_that_no_machine_has_are_refused(command_line, option):
    assert f"Invalid value for '{option}'" in command_line(
        "simulate", ".", option, "9" * 20, code=2
    )


def test_a_terminal_that_is_not_utf_8_shows_codes():
    code = (
        "from nemo_specrl.cli import main\n"
        "main.app = lambda: main._say('r\u00e9sum\u00e9 \u2026')\nmain.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "r\\xe9sum\\xe9 \\u2026\n"), done.stderr


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (OSError(errno.EIO, "Input/output error"), 1),
        (OSError(errno.ESTALE, "Stale file handle"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (ValueError("not JSON"), 2),
    ],
)
def test_a_checkpoint_that_failed_for_a_passing_fault_may_be_tried_again(monkeypatch, cause, code):
    def app():
        try:
            raise cause
        except (OSError, ValueError) as error:
            raise CheckpointError(f"step_4: {error}") from None

    monkeypatch.setattr(command_line_module, "app", app)
    with pytest.raises(SystemExit) as end:
        command_line_module.main()
    assert end.value.code == code

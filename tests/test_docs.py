"""The pages: their links lead somewhere, and what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer

from nemo_specrl.cli.main import app
from tests.conftest import REPOSITORY

CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
PAGES = sorted(
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(
    r"(?<![\w/.-])(?:examples|benchmarks|scripts|slurm|docker|tests|nemo_specrl|requirements)"
    r"/[\w./-]*\w\.(?:py|yaml|yml|json|sh|sub|lock|in|png)\b"
)

BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.M | re.S)
RUN = re.compile(r"python -m (benchmarks[.\w]+)")
"""A benchmark, as a command names it."""


def identifier(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue  # the web
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = set(NAMED.findall(text))
    named |= {f"{module.replace('.', '/')}.py" for module in RUN.findall(text)}
    assert not [
        name
        for name in named
        # NeMo-RL's own scripts and recipes are in its checkout.
        if not (REPOSITORY / name).exists()
        and not name.startswith(("examples/run_", "examples/nemo_gym/", "examples/configs/evals/"))
    ]


def commands(page: Path) -> list[tuple[set[str], list[str]]]:
    """What a page says to type: the variables that are set for each command, and its words."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # no command: a drawing
                continue
            settings = [w.partition("=")[0] for w in words if re.match(r"[A-Z_]+=", w)]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                found.append((set(settings), words))
    return found


def parse(words: list[str]) -> None:
    """Parse a command line of nemo-specrl; unknown commands and options are errors."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    command.make_context("nemo-specrl", words, resilient_parsing=True)


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_commands_of_a_page_exist_with_their_options_and_variables(page):
    for settings, words in commands(page):
        line = " ".join(words)
        if words[0] == "nemo-specrl" or " -m nemo_specrl " in line:
            name = "nemo-specrl" if words[0] == "nemo-specrl" else "nemo_specrl"
            try:
                parse(words[words.index(name) + 1 :])
            except (click.ClickException, KeyError) as error:
                pytest.fail(f"{line}: {error!r}")
        if words[0] == "make":
            makefile = (REPOSITORY / "Makefile").read_text()
            assert re.search(rf"^{words[1]}:", makefile, re.M), line
        if words[0] == "docker" and words[1] == "build":
            dockerfile = (REPOSITORY / words[words.index("-f") + 1]).read_text()
            given = [words[i + 1] for i, word in enumerate(words) if word == "--build-arg"]
            assert all(f"ARG {x.partition('=')[0]}" in dockerfile for x in given), line
        if words[0] == "sbatch":
            (script,) = (w for w in words if w.endswith((".sub", ".sbatch")))
            text = (REPOSITORY / "slurm" / Path(script).name).read_text()
            assert not [name for name in settings if name not in text], line


def test_every_page_is_in_the_index():
    index = REPOSITORY / "docs/README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in LINK.findall(index.read_text())
    }
    assert {page for page in PAGES if index.parent in page.parents} - {index} <= linked


def test_the_pages_written_from_the_code_are_up_to_date():
    command = [sys.executable, "scripts/reference.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_layers_are_drawn_as_the_linter_has_them():
    drawing = re.search(r"^## Layers$.*?^```\n(.*?)^```$", CONTRIBUTING, re.M | re.S)[1]
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (
        c["layers"] for c in contracts["contracts"] if c.get("containers") == ["nemo_specrl"]
    )
    assert [re.split(r" {2,}", line)[0] for line in drawing.splitlines()] == layers


def test_where_to_look_is_where_it_is():
    """Each file of the table has the names beside it."""
    table = re.search(r"^## Where to look$(.*?)^## ", CONTRIBUTING, re.M | re.S)[1]
    file, names = r"`([\w/]+\.(?:py|sh|sub|sbatch))`", r"((?:`[\w ]+`(?:, (?=`[\w ]+`(?!:)))?)+)"
    places = re.findall(f"{file}: {names}", table)
    assert len(places) > 15
    for path, names in places:
        root = REPOSITORY if path.startswith("slurm/") else REPOSITORY / "nemo_specrl"
        text = (root / path).read_text()
        for name in re.findall(r"`([\w ]+)`", names):
            defined = rf"(?:def|class) {name}\b" if path.endswith(".py") else name
            assert re.search(defined, text), f"{path} has no {name}"

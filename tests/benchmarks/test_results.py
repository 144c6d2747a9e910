"""Data in ``benchmarks/results``: its reports, and the pages that quote it."""

import json
import shutil

import pytest

from tests.benchmarks.test_scripts import run
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "benchmarks/results"
TABLES = [
    ("rollout.py", "rollout.json", "rollouts.md"),
    ("sweep.py", "sweep.json", "rollouts.md"),
    ("regimes.py", "regimes.json", "lossless.md"),
    ("run_ahead.py", "run_ahead.json", "lossless.md"),
    ("simulate.py", "simulator.json", "simulation.md"),
    ("simulate_8b.py", "simulator_8b.json", "performance.md"),
]
"""Script, its data, and the page that has its tables."""
REPORTED = ["cache", "cold_overhead", "demo_seeds", "refit", "resume"]
"""Scripts whose figures pages quote in their own words."""
# The others are what ``nemo-specrl compare`` writes.
MEASURED = sorted(p for p in RESULTS.glob("*.json") if not p.name.endswith("_compare.json"))


def report(script, data, picture):
    printed = run("--report", RESULTS / data, "--plot", picture, script=script)
    assert picture.read_bytes().startswith(b"\x89PNG")
    return [line for line in printed.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(("script", "data", "page"), TABLES)
def test_the_tables_of_the_pages_are_those_of_the_data(script, data, page, tmp_path):
    lines = report(script, data, tmp_path / "plot.png")
    text = (REPOSITORY / "docs" / page).read_text().splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line not in text] == []


def test_the_table_of_lenience_is_that_of_the_data(tmp_path):
    shutil.copy(RESULTS / "fidelity.json", tmp_path)
    arguments = ("--out", tmp_path / "none", "--report", tmp_path / "fidelity")
    printed = run(*arguments, script="fidelity.py").partition("\nLenience\n")[2]
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    text = (REPOSITORY / "docs/laboratory.md").read_text().splitlines()
    assert len(lines) == 1 + 2 * 7  # two tasks: plain, and six values
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize("name", REPORTED)
def test_other_data_is_reported_and_drawn(name, tmp_path):
    assert len(report(f"{name}.py", f"{name}.json", tmp_path / "plot.png")) > 1


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_data_says_when_and_on_what_machine_it_was_measured(path):
    data = json.loads(path.read_text())
    for machine in data.get("measured") or [data["machine"]]:
        assert {"device", "vllm"} <= set(machine)

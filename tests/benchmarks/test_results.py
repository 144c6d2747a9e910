"""Data in ``benchmarks/results``: its reports, and the pages that quote it."""

import json
import shutil

import pytest

from tests.conftest import REPOSITORY
from tests.support.benchmarks import run

RESULTS = REPOSITORY / "benchmarks/results"
TABLES = [
    ("rollout.rollout", "rollout.json", "rollouts.md"),
    ("rollout.rollout --by-epoch", "rollout_language.json", "language.md"),
    ("rollout.sweep", "sweep.json", "rollouts.md"),
    ("rollout.sweep", "sweep_language.json", "language.md"),
    ("rollout.regimes", "regimes.json", "lossless.md"),
    ("rollout.run_ahead", "run_ahead.json", "lossless.md"),
    ("rollout.balance", "balance.json", "lossless.md"),
    ("simulation.simulate", "simulator.json", "simulation.md"),
    ("simulation.simulate", "simulator_language.json", "language.md"),
    ("fidelity.demo_seeds", "language_seeds.json", "language.md"),
    ("simulation.simulate_8b", "simulator_8b.json", "simulation.md"),
    ("simulation.partial_rollouts", "partial_rollouts.json", "simulation.md"),
]
"""Script with options, its data, and the page that has its tables."""
REPORTED = [
    "cache.cache",
    "fidelity.demo_seeds",
    "rollout.cold_overhead",
    "trainer.refit",
    "trainer.resume",
]
"""Scripts whose figures pages quote in their own words."""
# The others are what ``nemo-specrl compare`` writes.
MEASURED = sorted(p for p in RESULTS.glob("*.json") if not p.name.endswith("_compare.json"))


def report(script, data, picture):
    script, *options = script.split()
    printed = run("--report", RESULTS / data, "--plot", picture, *options, script=script)
    assert picture.read_bytes().startswith(b"\x89PNG")
    return [line for line in printed.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(("script", "data", "page"), TABLES)
def test_the_tables_of_the_pages_are_those_of_the_data(script, data, page, tmp_path):
    lines = report(script, data, tmp_path / "plot.png")
    text = (REPOSITORY / "docs/evidence" / page).read_text().splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line not in text] == []


def test_the_table_of_lenience_is_that_of_the_data(tmp_path):
    shutil.copy(RESULTS / "fidelity.json", tmp_path)
    arguments = ("--out", tmp_path / "none", "--report", tmp_path / "fidelity")
    printed = run(*arguments, script="fidelity.fidelity").partition("\nLenience\n")[2]
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    text = (REPOSITORY / "docs/evidence/laboratory.md").read_text().splitlines()
    assert len(lines) == 1 + 2 * 7  # two tasks: plain, and six values
    assert [line for line in lines if line not in text] == []


@pytest.mark.parametrize("script", REPORTED)
def test_other_data_is_reported_and_drawn(script, tmp_path):
    data = script.partition(".")[2] + ".json"
    assert len(report(script, data, tmp_path / "plot.png")) > 1


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_data_says_when_and_on_what_machine_it_was_measured(path):
    data = json.loads(path.read_text())
    for machine in data.get("measured") or [data["machine"]]:
        assert {"device", "vllm"} <= set(machine)

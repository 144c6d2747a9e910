"""The names of the metrics, and the table of them in the documentation."""

import re

from nemo_specrl.config import QUANTITIES
from nemo_specrl.monitoring import names
from tests.conftest import REPOSITORY

START = "| `step`, `epoch`, `total_steps` |"
"""Begins the table's first row."""
AFFIXES = {names.PREFIX, names.AT_START, names.STALENESS}


def all_names():
    """Every metric's name, without the prefix of the engine's."""
    found = {value for name, value in vars(names).items() if name.isupper()
             and isinstance(value, str) and value not in AFFIXES}  # fmt: skip
    for quantity in names.DRIFT_QUANTITIES:
        found |= {f(quantity) for f in (names.drift, names.drift_z, names.drifts)}
    return {name.removeprefix(names.PREFIX) for name in found}


def pages():
    return [path.read_text() for path in sorted((REPOSITORY / "docs").rglob("*.md"))]


def test_the_drift_monitor_compares_what_has_names():
    assert names.GAPS == QUANTITIES


def test_every_metric_is_in_the_documentation():
    words = set(re.findall(r"`(?:train/)?(?:spec_rl/)?([a-z_]+)`", "\n".join(pages())))
    z_of_gaps = {f"{quantity}_gap_z" for quantity in QUANTITIES}  # "and each with `_z`"
    assert all_names() - words - z_of_gaps == set()


def test_the_table_has_no_metric_that_is_not_there():
    (page,) = [text for text in pages() if START in text]
    table = page[: page.index(START)].rsplit("\n\n", 1)[1]
    table += page[page.index(START) :].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = set(re.findall(r"`(?:spec_rl/)?([a-z_]+)`", "\n".join(cells))) - {"_z"}
    assert len(listed) > 50
    assert listed <= all_names()

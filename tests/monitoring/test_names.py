"""The names of the metrics: each is used, and no two are the same."""

import re

from nemo_specrl.monitoring import names
from tests.conftest import REPOSITORY

NAMES = {
    name: value
    for name, value in vars(names).items()
    if name.isupper() and isinstance(value, str) and name not in ("PREFIX", "AT_START")
}


def test_each_name_is_written_or_read_somewhere():
    texts = "\n".join(
        path.read_text()
        for path in (REPOSITORY / "nemo_specrl").rglob("*.py")
        if path.name != "names.py"
    )
    used = set(re.findall(r"\bmetric\.([A-Z_]+)", texts))
    used |= set(re.findall(r"\b([A-Z_]+)=", texts))  # Resident.add
    assert not set(NAMES) - used


def test_no_two_are_the_same_and_counts_are_among_them():
    assert len(set(NAMES.values())) == len(NAMES)
    assert set(NAMES.values()) > names.COUNTS

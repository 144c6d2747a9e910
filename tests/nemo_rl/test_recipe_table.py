"""The table of NeMo-RL's own recipes is what the checks say of a checkout (NEMO_RL_HOME)."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.nemo_rl.jobs import HOME, marks

pytestmark = marks


@pytest.fixture(scope="module")
def script():
    """scripts/nemo_rl_recipes.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "nemo_rl_recipes", REPOSITORY / "scripts" / "nemo_rl_recipes.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nemo_rl(script):
    return script.NemoRl(Path(HOME).resolve())


def test_the_table_is_that_of_the_checks(script, nemo_rl):
    written = script.committed(nemo_rl, script.TABLE.read_text())
    if written is None:
        pytest.skip(f"{script.TABLE.name} has no part for {script.heading(nemo_rl)[3:]}")
    assert written == script.section(nemo_rl), (
        f"{script.TABLE.relative_to(REPOSITORY)} is not what the checks say; write it anew by "
        f"`make nemo-table NEMO_RL_HOME={HOME}` and look at what has changed"
    )


def test_all_files_are_in_the_table(script, nemo_rl):
    written = script.committed(nemo_rl, script.TABLE.read_text())
    if written is None:
        pytest.skip(f"{script.TABLE.name} has no part for {script.heading(nemo_rl)[3:]}")
    folder = nemo_rl.home / "examples" / "configs"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}
    assert len(files) > 200
    assert all(written.count(f"`{file}`") == 1 for file in files)


def test_a_model_that_is_not_told_ends_the_script(script):
    with pytest.raises(SystemExit, match="acme/unknown: no such model in MODELS"):
        script.facts_of("acme/unknown")

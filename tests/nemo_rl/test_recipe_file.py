"""``nemo-specrl check``: a recipe's file, read by the loader of the checkout in NEMO_RL_HOME."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.recipe_file import check_file
from tests.conftest import REPOSITORY
from tests.support.nemo_rl.jobs import HOME, SITE, environment, marks

pytestmark = marks
RECIPE = "grpo_qwen3_8b_megatron_tp2.yaml"


@pytest.fixture(scope="module", autouse=True)
def importable():
    # By its path, since this Python may have a sitecustomize of its own.
    runpy.run_path(str(SITE / "sitecustomize.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(HOME).resolve()), *sys.path])
        yield


def test_a_recipe_that_runs_one_that_does_not_and_one_without_the_block(tmp_path):
    ours = REPOSITORY / "examples" / "configs" / "nemo_rl" / RECIPE
    assert check_file(ours).endswith(
        "runs with preset lossless, cache in /raid/specrl on each node"
    )
    with pytest.raises(ConfigError, match=r"enabled = 'nein': "):
        check_file(ours, ["policy.generation.spec_rl.enabled=nein"])
    with pytest.raises(
        ConfigError, match=r"does not work with policy\.generation\.temperature = 0\.5"
    ):
        check_file(
            ours,
            ["policy.generation.spec_rl.preset=reuse", "policy.generation.temperature=0.5"],
        )
    stock = Path(HOME) / "examples" / "configs" / "grpo_math_1B.yaml"
    assert "spec_rl is off" in check_file(stock)


def test_what_is_no_recipe_is_refused_in_one_line(tmp_path):
    for text in ("- a list", "defaults: absent.yaml", "a: [", "policy: ${missing}"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text)
        with pytest.raises(ConfigError) as raised:
            check_file(recipe)
        assert str(recipe) in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ConfigError):
        check_file(tmp_path / "none.yaml")


def test_the_research_project_in_upstream_is_read_from_its_place(tmp_path):
    project = tmp_path / "research" / "history_drafting"
    shutil.copytree(REPOSITORY / "upstream" / "nemo_rl_research" / "history_drafting", project)
    (tmp_path / "examples").symlink_to(Path(HOME).resolve() / "examples")
    script = (project / "tests" / "functional" / "history_drafting.sh").read_text()
    overrides = re.findall(r"^    ([\w.]+=[^ ]+) \\$", script, re.M)
    assert len(overrides) > 10
    overrides = [each.replace('"$EXP_DIR', str(tmp_path)).replace('"', "") for each in overrides]
    line = check_file(project / "configs" / "grpo_math_1B.yaml", overrides)
    assert line.endswith(f"runs with preset lossless, cache in {tmp_path}/cache on each node")


def test_an_evaluation_has_its_block_elsewhere(tmp_path):
    recipe = tmp_path / "eval.yaml"
    recipe.write_text("generation: {spec_rl: {enabled: true, cache: {dir: /raid/specrl}}}")
    assert "runs with preset lossless" in check_file(recipe)


def test_a_run_is_refused_before_its_script_begins(tmp_path):
    """Which would load models and data first, for minutes."""
    script, recipe = tmp_path / "script.py", tmp_path / "recipe.yaml"
    script.write_text("print('the script has begun')")
    recipe.write_text("policy: {generation: {spec_rl: {enabled: true, preset: loseless}}}")
    done = subprocess.run(
        [*(sys.executable, "-m", "nemo_specrl", "run", script), *("--config", recipe)],
        env=environment(NEMO_RL_PY_EXECUTABLES_SYSTEM="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "the script has begun" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("nemo-specrl: ")]
    assert "policy.generation.spec_rl.preset = 'loseless'" in line

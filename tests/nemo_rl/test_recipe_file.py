"""``nemo-specrl check``: a recipe's file, read by the loader of the checkout in NEMO_RL_HOME."""

import runpy
import sys
from pathlib import Path

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.recipe_file import check_file
from tests.conftest import REPOSITORY
from tests.support.nemo_rl.jobs import HOME, SITE, marks

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


def test_an_evaluation_has_its_block_elsewhere(tmp_path):
    recipe = tmp_path / "eval.yaml"
    recipe.write_text("generation: {spec_rl: {enabled: true, cache: {dir: /raid/specrl}}}")
    assert "runs with preset lossless" in check_file(recipe)

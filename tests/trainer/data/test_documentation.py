"""The trainer's page on one's own prompts and rewards: its files train as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.conftest import REPOSITORY
from tests.support.trainer.text_models import text_model


def test_the_files_of_the_page_train(tmp_path):
    page = (REPOSITORY / "docs/guide/trainer.md").read_text()
    section = page.partition("## Your own prompts and rewards")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"```(json|python|yaml)\n(.*?)```", section, re.DOTALL))
    recipe = blocks["yaml"]
    assert "Qwen/Qwen3-0.6B" in recipe
    model = text_model(tmp_path / "model", "qwen3")
    for theirs, small in (("Qwen/Qwen3-0.6B", str(model)), ("1024", "128"), ("256", "8")):
        recipe = recipe.replace(theirs, small)
    (tmp_path / "my_recipe.yaml").write_text(recipe)
    (tmp_path / "problems.jsonl").write_text(blocks["json"])
    (tmp_path / "my_rewards.py").write_text(blocks["python"])
    done = subprocess.run(
        [sys.executable, "-m", "nemo_specrl", "train", "my_recipe.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = read_metrics(tmp_path / "results" / "grpo" / "metrics.jsonl")
    assert len(steps) == 3
    assert all(step["reward_failures"] == 0 for step in steps)
    assert all(-0.2 < step["reward"] <= 1 for step in steps)
    assert len({json.dumps(step["reward"]) for step in steps}) > 1

"""The examples of monitoring ask for what a run exports, Prometheus takes them, and alerts fire."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from nemo_specrl.monitoring.metrics_file import read_metrics
from nemo_specrl.monitoring.prometheus import of_step, started
from tests.conftest import REPOSITORY
from tests.support.warm import Command

FOLDER = REPOSITORY / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
NEMO_RL = {"nemo_specrl_draft_length"}
"""Names that runs of NeMo-RL alone export."""


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def names(expression):
    return set(re.findall(r"nemo_specrl_\w+", expression))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Names that a run with prefix reuse and drafts behind it exports, by its own records."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        "policy.generation.spec_rl.preset=reuse",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=2",
        "grpo.max_num_steps=2",
        "grpo.max_val_samples=2",
        "data.num_prompts=2",
        "policy.train_global_batch_size=4",
        "policy.train_micro_batch_size=4",
        f"checkpointing.checkpoint_dir={folder}",
        f"logger.log_dir={folder}",
        "logger.tensorboard_enabled=false",
        f"logger.prometheus_textfile={folder / 'run.prom'}",
    ]
    recipe = "examples/configs/grpo_sort_cpu.yaml"
    run = Command("nemo_specrl", ["train", recipe, *overrides], REPOSITORY, os.environ)
    assert run.wait() == 0, run.stderr[-3000:]
    records = read_metrics(folder / "metrics.jsonl")
    there = set(re.findall(r"^(nemo_specrl_\w+)\{", (folder / "run.prom").read_text(), re.M))
    assert there == {name for r in records for half in (*started(), *of_step(r)) for name in half}
    return there


def test_alerts_and_dashboard_ask_for_what_a_run_exports(exported):
    asked = {name for text in EXPRESSIONS.values() for name in names(text)}
    asked |= {name for rule in RULES for name in names(rule["expr"])}
    asked |= {
        name for v in DASHBOARD["templating"]["list"] for name in names(json.dumps(v["query"]))
    }
    assert len(asked) > 30
    assert asked - exported == NEMO_RL


def test_alerts_say_what_they_are_about():
    page = (REPOSITORY / "docs/guide/monitoring.md").read_text()
    for rule in RULES:
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) == {"run"}
        assert f"`{rule['alert']}`" in page


def test_each_alert_fires_when_it_should_and_not_else():
    tests = Path(__file__).parent / "alerts_test.yaml"
    tested = {
        test["alertname"]
        for group in yaml.safe_load(tests.read_text())["tests"]
        for test in group["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert tested == {rule["alert"] for rule in RULES}
    promtool("test", "rules", tests)


def test_prometheus_takes_the_configuration_and_the_expressions_of_the_dashboard(tmp_path):
    rules = []
    for number, expression in enumerate(EXPRESSIONS.values()):
        concrete = expression.replace("$window", "30m").replace("$run", ".+")
        assert "$" not in concrete
        rules.append({"record": f"panel:{number}", "expr": concrete})
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)
    promtool("check", "config", FOLDER / "prometheus.yml")


def test_panels_have_their_own_place():
    taken, ids = set(), [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) > 20
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells


def test_the_dashboard_has_nothing_that_grafanas_schema_does_not_know():
    """A field that the schema lacks is dropped on the way through Grafana's own classes."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    returned = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))
    assert lost(DASHBOARD, returned) == []
    misspelt = {**DASHBOARD, "panels": [{**DASHBOARD["panels"][1], "titel": ""}]}
    returned = json.loads(json.dumps(Dashboard.from_json(misspelt), cls=JSONEncoder))
    assert lost(misspelt, returned) == ["/panels/0/titel"]


def lost(given, returned, path=""):
    """Places at which what was given did not come back."""
    if isinstance(given, dict) and isinstance(returned, dict):
        pairs = [(key, value, returned.get(key, lost)) for key, value in given.items()]
    elif isinstance(given, list) and isinstance(returned, list) and len(given) == len(returned):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(given, returned, strict=True))]
    else:
        return [] if given == returned else [path]
    return [place for key, a, b in pairs for place in lost(a, b, f"{path}/{key}")]

"""The metrics that a step leaves for Prometheus, and the alert that looks at it."""

import re

import yaml
from prometheus_client.parser import text_string_to_metric_families

from nemo_specrl.config import QUANTITIES, MonitorConfig
from nemo_specrl.speculation.drift import DriftMonitor
from nemo_specrl.trainer.log import MetricsLog, read_metrics, write_prometheus
from tests.conftest import REPOSITORY

RECORD = {"step": 3, "reward": 0.5, "fresh_reward": None, "spec_rl/reward_gap": -0.25}


def samples(path):
    families = text_string_to_metric_families(path.read_text())
    return {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }


def test_prometheus_sees_the_last_step(tmp_path):
    path = tmp_path / "metrics" / "run.prom"
    log = MetricsLog(tmp_path / "run", 0, tensorboard=False, prometheus=path)
    log.write(RECORD | {"reward": 0.1})
    log.write(RECORD | {"step": 4})
    log.close()
    run = ("run", "run")
    assert samples(path) == {
        ("nemo_specrl_step", run): 4,
        ("nemo_specrl_reward", run): 0.5,
        ("nemo_specrl_reward_gap", run): -0.25,
    }
    assert [p.name for p in path.parent.iterdir()] == ["run.prom"]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[1] == RECORD | {"step": 4}


def test_a_textfile_that_cannot_be_written_costs_no_step(tmp_path, caplog):
    path = tmp_path / "metrics" / "run.prom"
    path.parent.write_text("a file where the folder should be")
    log = MetricsLog(tmp_path / "run", 0, tensorboard=False, prometheus=path)
    for step in range(3):
        log.write(RECORD | {"step": step})
    assert caplog.text.count("run.prom: cannot be written") == 1
    path.parent.unlink()
    log.write(RECORD)
    log.close()
    assert samples(path)[("nemo_specrl_step", ("run", "run"))] == 3
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


def test_the_alert_looks_at_metrics_that_are_there(tmp_path):
    rules = yaml.safe_load((REPOSITORY / "examples/monitoring/alerts.yaml").read_text())
    monitor = DriftMonitor(MonitorConfig(), fresh_fraction=0.2, steps_per_epoch=1)
    write_prometheus(tmp_path / "run.prom", monitor.as_dict(), "run")
    there = {name for name, *_ in samples(tmp_path / "run.prom")}
    (rule,) = rules["groups"][0]["rules"]
    looked_at = set(re.findall(r"nemo_specrl_\w+", rule["expr"]))
    assert looked_at == {name for name in there if name.endswith("_drifts")}
    assert len(looked_at) == len(QUANTITIES) + 1
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= {"run"}

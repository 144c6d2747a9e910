"""The metrics that a step leaves for Prometheus."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_specrl.monitoring.metrics_file import MetricsLog, read_metrics

RECORD = {
    "step": 3,
    "reward": 0.5,
    "fresh_reward": None,
    "rollout_s": 0.25,  # by the trainer
    "spec_rl/rollout_s": 0.25,  # and by the engine
    "spec_rl/reward_gap": -0.25,
    "spec_rl/cache_errors": 2.0,
}


def samples(path):
    families = text_string_to_metric_families(path.read_text())
    return {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }


def test_prometheus_sees_the_newest_values_and_the_sums(tmp_path):
    path, before = tmp_path / "metrics" / "run.prom", time.time()
    log = MetricsLog(tmp_path / "run", 0, tensorboard=False, prometheus=path)
    run = ("run", "run")
    progress = ("nemo_specrl_last_progress_timestamp_seconds", run)
    started = samples(path)
    assert before <= started.pop(progress) <= time.time()
    assert started == {("nemo_specrl_running", run): 1}
    log.write(RECORD | {"reward": 0.1, "heldout_accuracy_at_start": 0.25, "loss": float("nan")})
    log.write(RECORD | {"step": 4})
    log.finish()
    log.close()
    ended = samples(path)
    assert ended.pop(progress) > before
    assert ended == {
        ("nemo_specrl_running", run): 0,
        ("nemo_specrl_step", run): 4,
        ("nemo_specrl_reward", run): 0.5,
        ("nemo_specrl_reward_gap", run): -0.25,
        ("nemo_specrl_heldout_accuracy", run): 0.25,
        ("nemo_specrl_steps_total", run): 2,
        ("nemo_specrl_rollout_seconds_total", run): 0.5,
        ("nemo_specrl_cache_errors_total", run): 4,
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


def test_earlier_runs_without_checkpoints_keep_their_steps(tmp_path, caplog):
    for run in (1, 2, 3):
        log = MetricsLog(tmp_path, 0, tensorboard=False)
        log.write(RECORD | {"step": 1, "reward": run})
        log.close()
    assert [r["reward"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [3]
    for run in (1, 2):
        name = f"metrics.earlier-{run}.jsonl"
        assert [r["reward"] for r in read_metrics(tmp_path / name)] == [run]
        assert f"the steps of an earlier run are now in {name}" in caplog.text


@pytest.mark.parametrize("line", ["null", "3", "[]", '{"reward": 1}', '{"step": "2"}', "[" * 10**5])
def test_a_line_that_is_no_record_ends_what_is_kept(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    MetricsLog(tmp_path, 5, tensorboard=False).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]

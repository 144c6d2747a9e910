"""Jobs of NeMo-RL whose driver hangs, under a real ``ft_launcher``, and one whose engine dies.

They need an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import importlib.util
import json
import os
import signal
import time

import numpy as np
import pytest

from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from tests.support.nemo_rl.jobs import ACCEPTED, FAITHFUL, Job, marks

pytestmark = [pytest.mark.timeout(1800), *marks]  # of the two time-outs, the first counts

LIMIT = 60
"""Seconds between two heartbeats; a step takes a few."""
LAUNCHER = (
    *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone", "--max-restarts=3"),
    *("--ft-workload-check-interval=0.5", "--ft-enable-nic-monitor=false", "--term-timeout=5"),
    *("--ft-initial-rank-heartbeat-timeout=1200", f"--ft-rank-heartbeat-timeout={LIMIT}"),
)


def driver_in_step(job, step):
    """Wait until the rollouts of a step are being made, and return the driver's process id."""
    while job.process.poll() is None:
        made = [line for line in job._lines("counts.jsonl") if line["kind"] == "generate"]
        trained = [line for line in made if not line["validating"]]
        if len(trained) >= step:
            return trained[-1]["pid"]
        time.sleep(0.05)
    raise AssertionError(job.log.read_text()[-6000:])


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext is not installed here",
)
def test_a_driver_that_hangs_is_killed_and_goes_on_from_its_checkpoint_with_its_cache(tmp_path):
    job = Job(tmp_path / "job", steps=6, spec_rl=FAITHFUL, launcher=LAUNCHER)
    try:
        os.kill(driver_in_step(job, 3), signal.SIGSTOP)
        before = read_metrics(job.out / "logs" / METRICS)
    except BaseException:
        job.kill()
        raise
    job.wait()
    output = job.log.read_text()
    assert output.count("Did not get subsequent heartbeat") == 1
    assert "starts cold" not in output
    assert [record["step"] for record in before] == [1, 2]
    rows = read_metrics(job.out / "logs" / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[:2] == before
    # Of the second process, which has read the cache back from the checkpoint of step 2.
    for row in rows[2:]:
        assert row["spec_rl/cache_errors"] == row["spec_rl/refused_drafts"] == 0
        assert row["spec_rl/draft_coverage"] > 0.5
        assert row["spec_rl/accepted_fraction"] > ACCEPTED
    manifest = job.out / "checkpoints" / "step_6" / "rollout_cache" / "manifest.json"
    assert json.loads(manifest.read_text())["policy_version"] > 6  # it goes on counting


def test_an_engine_that_dies_ends_the_run_and_those_of_the_next_one_draft_at_once(tmp_path):
    out = tmp_path / "job"
    job = Job(out, steps=6, spec_rl=FAITHFUL)
    try:
        driver = driver_in_step(job, 3)
        engines = {line["pid"] for line in job._lines("counts.jsonl") if line["kind"] == "get"}
        os.kill(max(engines - {driver}), signal.SIGKILL)
        assert job.exit_code() == 1  # at once, and by itself
    finally:
        job.kill()
    assert "ActorDiedError" in job.log.read_text()
    resumed = Job(out, steps=6, spec_rl=FAITHFUL).wait()
    assert "starts cold" not in resumed.log.read_text()
    steps = resumed.train()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    for step in range(3, 7):  # with two new engines; each has its share of the rows
        assert steps[step]["spec_rl/cache_errors"] == steps[step]["spec_rl/refused_drafts"] == 0
        assert steps[step]["spec_rl/accepted_fraction"] > ACCEPTED
    # A fifth of the eight rows of a step is to be fresh, of one step by chance a half.
    assert np.mean([steps[step]["spec_rl/draft_coverage"] for step in range(3, 7)]) > 0.5
    lines = resumed._lines("counts.jsonl")
    asked = {line["pid"] for line in lines if line["kind"] == "get"}
    assert len(asked - engines) == len(engines) == 2

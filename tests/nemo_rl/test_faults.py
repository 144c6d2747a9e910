"""A job of NeMo-RL whose driver hangs, under a real ``ft_launcher``.

It needs an unmodified checkout of NeMo-RL in NEMO_RL_HOME and its environment: `make test-nemo`.
"""

import importlib.util
import os
import signal
import time

import pytest

from nemo_specrl.monitoring.metrics_file import METRICS, read_metrics
from tests.support.nemo_rl.jobs import BATCH, Job, marks, tokens_per_step

pytestmark = [
    pytest.mark.timeout(1800),  # of the two time-outs, the first counts
    *marks,
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia_resiliency_ext") is None,
        reason="nvidia-resiliency-ext is not installed here",
    ),
]
LIMIT = 60
"""Seconds between two heartbeats; a step takes a few."""
LAUNCHER = (
    *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone", "--max-restarts=3"),
    *("--ft-workload-check-interval=0.5", "--ft-enable-nic-monitor=false", "--term-timeout=5"),
    *("--ft-initial-rank-heartbeat-timeout=1200", f"--ft-rank-heartbeat-timeout={LIMIT}"),
)


def driver_after_rollouts(job, step):
    """Wait until a step has its rollouts, and return the driver's process id."""
    while job.process.poll() is None:
        made = [row for row in job.rows() if len(row["prompts"]) == BATCH]
        if len(made) >= step:
            return made[-1]["pid"]
        time.sleep(0.05)
    raise AssertionError(job.log.read_text()[-6000:])


def test_a_driver_that_hangs_is_killed_and_goes_on_from_its_checkpoint_with_its_cache(tmp_path):
    job = Job(tmp_path / "job", 6, {}, launcher=LAUNCHER)
    try:
        os.kill(driver_after_rollouts(job, 3), signal.SIGSTOP)
    except BaseException:
        job.kill()
        raise
    job.wait()
    assert job.log.read_text().count("Did not get subsequent heartbeat") == 1
    assert "starts cold" not in job.log.read_text()
    rows = read_metrics(job.out / "logs" / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    tokens = tokens_per_step(job.train())
    print(f"tokens a step: {tokens}")
    assert max(tokens[step] for step in (3, 4)) > 1.3  # of the second process

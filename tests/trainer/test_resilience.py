"""Runs under ``ft_launcher`` of nvidia-resiliency-ext: what hangs is killed, and starts again.

Everything is real: launcher, monitor, engine, and a FUSE file system whose server is stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time

import pytest

from nemo_specrl.monitoring.metrics_file import read_metrics
from tests.conftest import REPOSITORY
from tests.trainer.test_loop import command

pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed here")

LAUNCHER = (
    *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone", "--max-restarts=3"),
    *("--ft-workload-check-interval=0.5", "--ft-enable-nic-monitor=false", "--term-timeout=5"),
    *("--ft-rank-out-of-section-timeout=300",),
)
TIMEOUTS = "setup:300,rollout:300,training:300,checkpoint:300"
TIMED_OUT = "FT timeout elapsed"


class Run:
    """A run of the demo's recipe, made small, under the launcher; its output goes into a file."""

    def __init__(self, folder, log, temporary, timeouts, *overrides, program):
        self.folder, self.log = folder, log
        python, *rest = command(folder, *overrides, program=program)
        limits = f"--ft-rank-section-timeouts={timeouts}"
        with log.open("wb") as output:
            self.launcher = subprocess.Popen(
                [python, *LAUNCHER, limits, *rest],
                cwd=REPOSITORY,
                env=os.environ | {"TMPDIR": temporary, "COLUMNS": "200"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def until(self, condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output[-3000:]
            assert self.launcher.poll() is None, self.output[-3000:]
            time.sleep(0.1)

    def end(self):
        """Wait for the launcher's end; its exit code."""
        return self.launcher.wait(300)


@pytest.fixture
def launch(tmp_path):
    """A function that starts a run; it has ended when the test has."""
    runs = []

    def start(folder, timeouts, *overrides, program=("nemo_specrl", "train")):
        log = tmp_path / "output"
        run = Run(folder, log, temporary, timeouts, *overrides, program=program)
        runs.append(run)
        return run

    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # paths of sockets must be short
        yield start
        for run in runs:
            run.launcher.terminate()
            run.launcher.wait(60)


@pytest.mark.timeout(400)
def test_an_engine_that_hangs_and_one_that_dies(launch, tmp_path):
    """The driver is killed, or dead, and goes on from its checkpoint, with all steps once."""
    folder = tmp_path / "run"
    run = launch(folder, TIMEOUTS, program=("tests.support.trainer.fault_job",))
    assert run.end() == 0, run.output[-3000:]
    (seconds, limit) = re.search(
        r"Section 'rollout' has been open for ([\d.]+) seconds. Timeout is ([\d.]+)", run.output
    ).groups()
    assert float(seconds) >= float(limit)  # both rounded; the watchdog compares what they were
    assert float(limit) < 300  # learned from the first two steps
    assert run.output.count("(exitcode: -9)") == 2
    assert run.output.count("resuming from step ") == 2
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    learned = json.loads((folder / "section_seconds.json").read_text())
    assert set(learned) == {"setup", "rollout", "training", "checkpoint", "outside"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_file_system_that_hangs(launch, tmp_path, network_disk):
    """The run's folder hangs in the middle of a step, and is there again for the restart."""
    disk, server = network_disk
    run = launch(
        disk / "run",
        TIMEOUTS,
        f"policy.generation.spec_rl.cache.dir={tmp_path / 'cache'}",
        "checkpointing.save_period=1",
    )
    try:
        run.until(lambda: len(read_metrics(disk / "run" / "metrics.jsonl")) >= 2)
        server.send_signal(signal.SIGSTOP)
        run.until(lambda: TIMED_OUT in run.output)
    finally:
        server.send_signal(signal.SIGCONT)
    assert run.end() == 0, run.output[-3000:]
    assert "resuming from step" in run.output

"""The connection to nvidia-resiliency-ext's monitor, under a real ``ft_launcher`` and without one.

Runs that hang are in ``trainer/test_resilience.py``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from nemo_specrl.monitoring import heartbeat
from tests.conftest import REPOSITORY

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext is not installed here",
)
LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"


def launch(*arguments, code=0):
    """Run a module under the launcher, which may start it again once; its output."""
    options = ("--standalone", "--max-restarts=1", "--ft-enable-nic-monitor=false")
    done = subprocess.run(
        [sys.executable, "-m", LAUNCHER, *options, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert code in (None, done.returncode), (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@needs_package
def test_timeouts_are_learned_and_the_next_process_has_them(tmp_path):
    """The first process is killed; the restart doubles what was learned."""
    output = launch(
        "--ft-rank-section-timeouts=rollout:300,training:null,checkpoint:40",
        "--ft-rank-out-of-section-timeout=300",
        *("-m", "tests.support.heartbeat_job", "learn", str(tmp_path)),
    )
    first, second = (json.loads(line) for line in re.findall(r"^\{.*\}$", output, re.M))
    given = {"rollout": 300.0, "training": None, "checkpoint": 40.0}
    assert first["monitor"] == given
    assert first["connected"] == {**given, "outside": 300.0}
    # Five times a fifth of a second is less than the minute that a section has at least.
    minute = {**given, "rollout": 60.0}
    assert first["after"] == {**minute, "outside": 60.0}
    assert second["monitor"] == minute
    assert second["connected"] == {**given, "rollout": 120.0, "outside": 120.0}
    learned = json.loads((tmp_path / heartbeat.FILE).read_text())
    assert learned.keys() == {"rollout", "training", "outside"}
    assert 0.2 <= learned["rollout"] < 60


@needs_package
def test_a_step_of_nemo_rl_is_a_heartbeat():
    """The first process has two, and hangs; without them it would be killed an hour later."""
    output = launch(
        *("--ft-initial-rank-heartbeat-timeout=3600", "--ft-rank-heartbeat-timeout=5"),
        *("--ft-workload-check-interval=0.5", "-m", "tests.support.heartbeat_job", "steps"),
    )
    assert "Did not get subsequent heartbeat" in output


@needs_package
def test_bad_input_is_not_tried_again():
    """With the settings that the documentation names; the exit code is 1, and 0 in 0.6.0."""
    recipe = "examples/configs/grpo_sort_cpu.yaml"
    arguments = ("-m", "nemo_specrl", "train", recipe, "grpo.max_num_stepz=3")
    output = launch("--ft-cfg-path=examples/fault_tolerance.yaml", *arguments, code=None)
    assert output.count("grpo.max_num_stepz: unknown key") == 1


def test_without_a_launcher_nothing_is_imported(tmp_path):
    code = (
        "import pathlib, sys; from nemo_specrl.monitoring import heartbeat\n"
        f"heartbeat.connect(pathlib.Path({str(tmp_path)!r}))\n"
        "heartbeat.start('a'); heartbeat.heartbeat(); heartbeat.end('a')\n"
        "heartbeat.no_restart('a')\n"
        "sys.exit('nvidia_resiliency_ext' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    assert not list(tmp_path.iterdir())


def test_a_monitor_that_is_not_there_is_a_warning(monkeypatch, tmp_path, caplog):
    for name in ("FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    heartbeat.connect(tmp_path)
    with heartbeat.section("rollout"):
        pass
    heartbeat.no_restart("bad input")
    assert caplog.text.count("the run is not watched") == 1

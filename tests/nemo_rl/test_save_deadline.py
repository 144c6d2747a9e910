"""The job's time limit, with NeMo-RL's own ``TimeoutChecker`` of the checkout in NEMO_RL_HOME."""

import importlib.util
import os
import time
from pathlib import Path

import pytest

from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl.save_deadline import (
    MUST_SAVE_AT,
    bounded,
    check_time_left,
    seconds_left,
)

TIMER = Path(os.environ.get("NEMO_RL_HOME", "/none")) / "nemo_rl" / "utils" / "timer.py"


@pytest.fixture(scope="module")
def checker():
    if not TIMER.is_file():
        pytest.skip("set NEMO_RL_HOME to a checkout of NVIDIA-NeMo/RL and run `make test-nemo`")
    spec = importlib.util.spec_from_file_location("nemo_rl_timer", TIMER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return bounded(module.TimeoutChecker)


@pytest.mark.parametrize(
    ("recipe", "limit", "until"),
    [
        ("00:03:45:00", None, 13500),
        (None, None, float("inf")),
        (None, 600, 600),
        ("00:03:45:00", 600, 600),  # setup has taken most of the job's time
        ("00:00:05:00", 600, 300),  # the recipe wants it earlier
    ],
)
def test_what_is_left_when_nemo_rl_begins_to_count(monkeypatch, checker, recipe, limit, until):
    monkeypatch.delenv(MUST_SAVE_AT, raising=False)
    if limit is not None:
        monkeypatch.setenv(MUST_SAVE_AT, str(int(time.time()) + limit))
    made = checker(timeout=recipe, fit_last_save_time=True)
    assert made.last_save_time == pytest.approx(until, abs=60)  # of a slow machine
    assert not made.check_save()
    made.start_time -= min(until, 1e9)
    assert made.check_save() == (until < 1e9)


def test_a_job_without_time_for_a_step_ends_in_one_line(monkeypatch):
    monkeypatch.setenv(MUST_SAVE_AT, str(int(time.time()) - 100))
    with pytest.raises(ConfigError) as raised:
        check_time_left()
    line = str(raised.value)
    assert f"{MUST_SAVE_AT}: " in line and "longer time limit" in line and "\n" not in line


def test_after_a_setup_that_took_all_the_time_the_first_step_is_saved(monkeypatch, checker):
    monkeypatch.setenv(MUST_SAVE_AT, str(int(time.time()) - 100))
    made = checker(timeout="00:03:45:00", fit_last_save_time=True)
    assert made.last_save_time == 0
    made.start_iterations()
    made.mark_iteration()
    assert made.check_save()


@pytest.mark.parametrize("value", ["soon", "1.5e9", "-5", "00:03:45:00", "9" * 400])
def test_a_deadline_that_is_no_moment_is_refused(monkeypatch, value):
    monkeypatch.setenv(MUST_SAVE_AT, value)
    with pytest.raises(ConfigError, match=r"SPECRL_MUST_SAVE_AT = .*: must be a moment in whole"):
        seconds_left()

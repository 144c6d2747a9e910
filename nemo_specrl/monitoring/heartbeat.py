"""Heartbeats and sections of a driver that runs under ``ft_launcher`` of nvidia-resiliency-ext.

``ft_launcher`` starts the driver and a monitor. The monitor kills the driver if a section has been
open for too long, or no heartbeat has arrived for too long, and the launcher restarts it. Without a
launcher every function here does nothing, and the package need not be installed.

Sections are those that the launcher's configuration names; others are ignored. Their timeouts, and
that of the time outside of them, are learned. Once a section has ended, its timeout is
``safety_factor`` times the longest that it has ever taken, and at least twelve times the monitor's
``workload_check_interval``; with the defaults, five times and a minute, respectively. Each restart
by the launcher doubles the timeouts, in case the section did not hang but was slower than before,
on other machines. The longest durations are kept with the run, for its next process. A timeout that
is configured as null stays off, and heartbeats keep the timeouts that are configured.

The package's own ``calculate_and_set_section_timeouts`` is not used. It needs a process group,
which the driver may not have. Its moving averages also fall while a resumed run takes steps from
the journal in a fraction of a second, so that the next real step would be killed.

Tested with the release 0.4.1 and, from their sources, with 0.5.0, 0.6.0 and main after 0.7.0-main.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_specrl.files import replacing

__all__ = ["connect", "end", "heartbeat", "no_restart", "section", "start"]

FILE = "section_seconds.json"
OUTSIDE = "outside"
"""The file's name for the time in which no section is open."""
LEAST_CHECKS = 12
"""A learned timeout is at least this many of the monitor's check intervals, since a section that
usually takes a fraction of a second may take several seconds now and then."""

logger = logging.getLogger(__name__)


class _Monitor:
    """The connection of this process to its monitor.

    Args:
        client: a connected ``RankMonitorClient``.
        file: file of the longest durations, seconds by section; None if there are no sections.
    """

    def __init__(self, client: Any, file: Path | None) -> None:
        self._client = client
        self._file = file
        self._started: dict[str, float] = {}
        self._outside_since = time.monotonic()
        self._longest: dict[str, float] = {}
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._longest = {str(k): float(v) for k, v in json.loads(file.read_text()).items()}
            self._set_timeouts()

    def heartbeat(self) -> None:
        self._client.send_heartbeat()

    def start(self, name: str) -> None:
        self._client.send_heartbeat()
        # The monitor of 0.4.1 fails at a section that it does not know.
        if name in self._client.section_timeouts.section:
            now = time.monotonic()
            if not self._started:
                self._took(OUTSIDE, now - self._outside_since)
            self._client.start_section(name)
            self._started[name] = now

    def end(self, name: str) -> None:
        started = self._started.pop(name, None)
        if started is not None:
            # Do this before the section ends: the disk may hang.
            self._took(name, time.monotonic() - started)
            self._client.end_section(name)
            self._outside_since = time.monotonic()
            self._set_timeouts()

    def close(self) -> None:
        self._client.shutdown_workload_monitoring()

    def _took(self, name: str, seconds: float) -> None:
        if seconds <= self._longest.get(name, 0.0):
            return
        self._longest[name] = seconds
        if self._file is None:
            return
        temporary = self._file.with_suffix(".tmp")
        # If this fails, the next process learns the timeouts from scratch.
        with contextlib.suppress(OSError), replacing(self._file, temporary, private=False) as file:
            file.write(json.dumps(self._longest).encode())

    def _set_timeouts(self) -> None:
        now = self._client.section_timeouts
        before = {**now.section, OUTSIDE: now.out_of_section}
        after = {name: self._learned(name, given) for name, given in before.items()}
        if after != before:
            timeouts = {
                "out_of_section": after.pop(OUTSIDE),
                "section": after,
                "calculated_sections": sorted(after.keys() & self._longest.keys()),
                "is_out_of_section_calculated": OUTSIDE in self._longest,
            }
            state = {self._client.CURRENT_TIMEOUTS_STATE_KEY: {"section": timeouts}}
            self._client.load_state_dict(state)

    def _learned(self, name: str, given: float | None) -> float | None:
        if given is None or name not in self._longest:
            return given
        config = self._client.cfg
        least = LEAST_CHECKS * float(config.workload_check_interval)
        doubled = 2.0 ** int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        return doubled * max(least, float(config.safety_factor) * self._longest[name])


_monitor: _Monitor | None = None


def connect(folder: Path | None = None) -> None:
    """Connect this process to its monitor, if it runs under ``ft_launcher``.

    Args:
        folder: folder of the run, where the longest durations are kept in ``section_seconds.json``.
            None: no timeouts are learned.
    """
    global _monitor
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ or _monitor is not None:
        return
    with _without_monitor_on_error():
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        client.init_workload_monitoring()
        _monitor = _Monitor(client, folder and folder / FILE)


def heartbeat() -> None:
    """Send a heartbeat."""
    with _without_monitor_on_error():
        if _monitor is not None:
            _monitor.heartbeat()


def start(name: str) -> None:
    """Begin a section, and send a heartbeat. Other sections may be open, but not the same one."""
    with _without_monitor_on_error():
        if _monitor is not None:
            _monitor.start(name)


def end(name: str) -> None:
    """End a section, and learn its timeout from how long it took."""
    with _without_monitor_on_error():
        if _monitor is not None:
            _monitor.end(name)


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Make a section, as a context manager or a decorator.

    After an exception the section stays open: what follows, such as ending other processes, may
    hang as well.
    """
    start(name)
    yield
    end(name)


def no_restart(reason: str) -> None:
    """Ask the launcher not to start this process again when it ends."""
    if "FT_LAUNCHER_IPC_SOCKET" not in os.environ:
        return
    with contextlib.suppress(Exception):  # a failure only means one more, useless restart
        from nvidia_resiliency_ext.fault_tolerance import ipc_connector
        from nvidia_resiliency_ext.fault_tolerance.data import (
            WorkloadAction,
            WorkloadControlRequest,
        )

        request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, reason)
        launcher = ipc_connector.IpcConnector(os.environ["FT_LAUNCHER_IPC_SOCKET"])
        launcher.send((int(os.environ.get("RANK", 0)), request))


@contextlib.contextmanager
def _without_monitor_on_error() -> Iterator[None]:
    """Disconnect from a monitor that is missing or fails, so that the training continues."""
    global _monitor
    try:
        yield
    except Exception as error:  # any error: from the package, the socket, or pickle
        if _monitor is not None:
            with contextlib.suppress(Exception):  # the first error is the one to be logged
                _monitor.close()
        _monitor = None
        logger.warning("ft_launcher's monitor cannot be used: the run is not watched (%s)", error)

"""Runs a command of this package in a child process that does not outlive its parent.

Otherwise, a killed comparison would leave behind a training that writes into the folder from which
the next comparison resumes.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["run_child"]

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def run_child(arguments: Sequence[str]) -> int:
    """Run ``nemo-specrl`` with arguments to its end.

    SIGTERM is passed on to the child, as a terminal's Ctrl-C is: a training finishes its step,
    saves and exits. If this process is killed, so is the child (on Linux).

    Returns:
        the exit code; minus the number of the signal that ended it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "nemo_specrl", *arguments],
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )

    def pass_on(number: int, _frame: Any) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        return process.wait()
    except KeyboardInterrupt:  # the child has it from the terminal, too
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)

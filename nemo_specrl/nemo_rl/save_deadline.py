"""Makes NeMo-RL save its last checkpoint before the job's time limit, however long ``setup`` took.

``checkpointing.checkpoint_must_save_by`` is a duration that NeMo-RL counts from the start of its
trainer (utils/timer.py, ``TimeoutChecker``). The engines and the policy have started by then, which
takes up to half an hour, and a batch script knows only when the job ends. It therefore names that
moment, and the time left until then is computed when NeMo-RL begins to count.
"""

from __future__ import annotations

import os
import time
from typing import Any

from nemo_specrl.errors import ConfigError
from nemo_specrl.nemo_rl import compat

__all__ = ["MUST_SAVE_AT", "bind_timeout_checker", "bounded", "check_time_left", "seconds_left"]

MUST_SAVE_AT = "SPECRL_MUST_SAVE_AT"
"""Environment variable: when the last checkpoint must be saved, whole seconds since 1970 (UTC)."""


def seconds_left() -> float | None:
    """Seconds until the last checkpoint must be saved, negative if that moment has passed; None
    if no such moment is named.

    Raises:
        ConfigError: the variable is not a time.
    """
    value = os.environ.get(MUST_SAVE_AT)
    if not value:
        return None
    if not value.isdecimal() or len(value) > 12:
        raise ConfigError(
            f"{MUST_SAVE_AT} = {value!r}: must be a moment in whole seconds since 1970, as "
            "`date +%s` prints it"
        )
    return int(value) - time.time()


def check_time_left() -> None:
    """Refuse to begin a job that would have no time for a step.

    Raises:
        ConfigError: the moment has already passed. Another start of the job would have no more time
            than this one.
    """
    left = seconds_left()
    if left is not None and left <= 0:
        raise ConfigError(
            f"{MUST_SAVE_AT}: the last checkpoint should have been saved {-left:.0f} s ago, before "
            "the first step; give the job a longer time limit, or less time for saving "
            "(SPECRL_SAVE_SECONDS)"
        )


def bind_timeout_checker() -> None:
    """Make NeMo-RL's ``TimeoutChecker`` know it, wherever this process makes one."""
    checker = compat.lookup("nemo_rl.utils.timer", "TimeoutChecker")
    compat.rebind("TimeoutChecker", checker, bounded(checker))


def bounded(checker: Any) -> Any:
    """Return a subclass of NeMo-RL's ``TimeoutChecker`` that knows when the job must have saved.

    The recipe's own ``checkpoint_must_save_by`` counts as well; the earlier of the two applies.
    If ``setup`` has outlasted it, the trainer saves after its first step.
    """

    class JobTimeoutChecker(checker):
        last_save_time: float

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            left = seconds_left()
            if left is not None:
                self.last_save_time = min(self.last_save_time, max(left, 0.0))

    return JobTimeoutChecker

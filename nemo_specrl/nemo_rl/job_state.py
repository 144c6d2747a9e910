"""What a batch script must know about a run in order to restart it: slurm/nemo_rl.sub.

The script names a folder in ``SPECRL_STATE``; without one nothing is written. ``training`` says
where the checkpoints are and from which one the run continues, so that the script can tell whether
a start has made any progress; ``heartbeat`` is touched at the end of each step, so that the script
notices a hang.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from nemo_specrl.files import step_folders

__all__ = ["heartbeat", "started"]

FOLDER = "SPECRL_STATE"


def started(checkpointing: Any) -> None:
    """Record where the checkpoints of the run are, when it is set up.

    Args:
        checkpointing: the recipe's ``checkpointing:`` block.
    """
    if FOLDER not in os.environ or not checkpointing["enabled"]:
        return
    folder = Path(checkpointing["checkpoint_dir"]).absolute()
    newest = next(reversed(step_folders(folder)), None)
    step = "" if newest is None else newest.name.removeprefix("step_")
    with contextlib.suppress(OSError):  # restarts without progress then count as such
        (Path(os.environ[FOLDER]) / "training").write_text(f"{folder}\n{step}\n")


def heartbeat() -> None:
    """Record that a step has ended."""
    if FOLDER in os.environ:
        with contextlib.suppress(OSError):
            (Path(os.environ[FOLDER]) / "heartbeat").touch()

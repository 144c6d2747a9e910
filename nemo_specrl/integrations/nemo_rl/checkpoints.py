"""What the plug-in saves in NeMo-RL's checkpoints: beside the weights, visible by the same rename.

``CheckpointManager`` renames ``tmp_step_N`` to ``step_N`` once all writes are done
(utils/checkpoint.py: ``finalize_checkpoint`` in v0.7.0, ``begin_finalization`` on main, both
there). The cache is written right before, in the step's temporary folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_specrl.integrations.nemo_rl.run import CACHE_FOLDER

__all__ = ["save_with"]

logger = logging.getLogger(__name__)

Save = Callable[[Path], None]


def save_with(checkpointer: Any, saves: Sequence[Save]) -> None:
    """Have a checkpoint manager call ``saves`` with a folder of their own in each checkpoint.

    One that fails is logged and costs the checkpoint nothing.
    """
    for name in ("begin_finalization", "finalize_checkpoint"):
        original = getattr(checkpointer, name, None)
        if original is not None:
            setattr(checkpointer, name, _after(saves, original))


def _after(saves: Sequence[Save], original: Any) -> Any:
    def finalize(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(checkpoint_path) / CACHE_FOLDER
        try:
            for save in saves:
                save(folder)
        except Exception as error:  # the cache can only cost speed, never a checkpoint
            logger.warning("%s was not written (%s); resuming from it starts cold", folder, error)
        return original(checkpoint_path, *args, **kwargs)

    return finalize

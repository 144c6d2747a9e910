"""The rollout cache in NeMo-RL's checkpoints: beside the weights, visible by the same rename.

``CheckpointManager`` renames ``tmp_step_N`` to ``step_N`` once all writes are done
(utils/checkpoint.py: ``finalize_checkpoint`` in v0.7.0, ``begin_finalization`` on main, both
there). The cache is written right before, in the step's temporary folder.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nemo_specrl.integrations.nemo_rl.run import CACHE_FOLDER

__all__ = ["save_cache_with"]

logger = logging.getLogger(__name__)


def save_cache_with(checkpointer: Any, generation: Any) -> None:
    """Have a checkpoint manager save the cache of ``generation`` with each checkpoint.

    A snapshot that fails is logged and costs the checkpoint nothing.
    """
    for name in ("begin_finalization", "finalize_checkpoint"):
        original = getattr(checkpointer, name, None)
        if original is not None:
            setattr(checkpointer, name, _after_snapshot(original, generation))


def _after_snapshot(original: Any, generation: Any) -> Any:
    def finalize(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(checkpoint_path) / CACHE_FOLDER
        try:
            if generation.cache is not None:
                generation.cache.snapshot(folder, generation.policy_version)
        except Exception as error:  # the cache can only cost speed, never a checkpoint
            logger.warning("%s was not written (%s); resuming from it starts cold", folder, error)
        return original(checkpoint_path, *args, **kwargs)

    return finalize

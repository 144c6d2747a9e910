"""Counts of what the drafter inside an engine has done, obtained from its workers."""

from __future__ import annotations

from typing import Any

from nemo_specrl.engine.drafters.v1_proposer import TreeProposer
from nemo_specrl.engine.metrics import DraftCounts
from nemo_specrl.engine.vllm.v2_patches import speculator_of

__all__ = ["NO_COUNTS", "take_counts"]

NO_COUNTS = (
    "spec_rl/tree_* metrics are missing because the engine's workers cannot be queried (%s: %s); "
    "set VLLM_ALLOW_INSECURE_SERIALIZATION=1 to allow it"
)
"""Warning if a worker cannot be asked, with the type of the error and the error."""


def take_counts(worker: Any) -> DraftCounts | None:
    """Take the counts of a worker's drafter since they were last taken; runs in the worker.

    Returns None if the worker's drafts are not the ones that count, or if it has no drafter, as in
    all pipeline stages but the last.
    """
    speculator = speculator_of(worker.model_runner)
    if speculator is not None:
        of_speculator: DraftCounts | None = speculator.take_counts()
        return of_speculator
    proposer = getattr(worker.model_runner, "drafter", None)
    return proposer.take_counts() if isinstance(proposer, TreeProposer) else None

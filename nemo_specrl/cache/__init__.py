"""The rollout cache: rollouts on node-local disk, found again by the tokens of their prompt."""

from nemo_specrl.cache.statistics import StoreStats
from nemo_specrl.cache.store import RolloutStore

__all__ = ["RolloutStore", "StoreStats"]

"""The rollout cache: rollouts on node-local disk, found again by the tokens of their prompt."""

from nemo_specrl.cache.store import RolloutStore, StoreStats

__all__ = ["RolloutStore", "StoreStats"]

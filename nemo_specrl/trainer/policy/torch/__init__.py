"""The torch backend: ``policy``, PPO's ``value`` model, and what they share in ``model``."""

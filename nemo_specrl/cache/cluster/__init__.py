"""The rollout cache of a Ray cluster: replicated shards, their keeper, and clients.

``driver`` is what a training driver uses; ``client`` is the part of it that generation workers get.
"""

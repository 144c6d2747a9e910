"""The rollout cache of a Ray cluster: replicated shards, their keeper, and clients.

Training drivers use ``driver``; generation workers get a ``client``.
"""

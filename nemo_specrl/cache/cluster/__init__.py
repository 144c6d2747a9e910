"""The rollout cache of a Ray cluster: a shard a node, and clients that find them by themselves.

Modules, each of which imports only from those below it::

    checkpoint    the driver's side: the cache in the policy's checkpoints
    client        looks responses up and keeps them, each call with a deadline
    shard         the store of one node behind a Ray actor
    placement     which nodes keep a prompt
"""

"""The rollout cache of a Ray cluster: replicated shards, their coordinator, and clients.

Training drivers use ``cluster_cache``; generation workers get a ``client``. Modules, each of which
imports only from those below it::

    run_cache               starts a run's shards, and fills them from its checkpoint
    cluster_cache           the cache as a training driver uses it
    claiming_client         a client that claims sample indices for rows that arrive one by one
    client                  looks rollouts up and stores them, each call with a deadline
    shard_calls             calls to shards: waiting for answers, shards not called for a while
    coordinator             an actor that watches nodes and keeps partitions replicated
    copy_tasks              copies that shards make of one another, one chunk at a time
    shard                   one node's part: its store, and the ranges of it that are copied
    shard_handle            what the coordinator knows about a shard
    membership, placement   which nodes serve and receive a partition
    sample_index_leases     sample indices for rows that are generated one at a time
    shard_identity          the identity of a shard's folder
"""

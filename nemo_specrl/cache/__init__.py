"""The rollout cache: rollouts on node-local disk, found again by the tokens of their prompt.

Modules, each of which imports only from those below it::

    cluster/                 the caches of a Ray cluster: replicated shards and their clients
    run_folders              the folder of a run's store: how it starts, and with what
    inspection               read-only access to stores, snapshots and exports
    export                   rollouts as safetensors files, for other programs
    store                    one node's store under a hard size cap
    snapshot                 a cluster's cache in a checkpoint: one file for each partition
    record_reader            choice and decoding of the records that a store serves
    storage/                 tables on disk: schema, transactions, checks, recovery, lock
    codec                    rollouts as bytes and back
    record_columns           the columns of many records at a time
    metrics                  what a store counts
    partitions               equal ranges of keys: the unit of snapshots and replication
    recency                  which of two rollouts is newer, and merging two stores' rollouts
"""

from nemo_specrl.cache.metrics import StoreStats
from nemo_specrl.cache.store import RolloutStore

__all__ = ["RolloutStore", "StoreStats"]

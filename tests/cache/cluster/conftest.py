"""Shards without a coordinator, for tests of what one shard does."""

import pytest

from nemo_specrl.cache.cluster.membership import ClusterView, Routing
from nemo_specrl.cache.cluster.shard import Shard

STORE = {"max_bytes": 2**20, "tokenizer_id": "tok", "groups_per_prompt": 1}


def learn(shard, view):
    """Have a shard know a view and hold a lease, as two heartbeats of its coordinator do."""
    _, answer = shard.heartbeat(view, shard._answers)
    shard.heartbeat(view, answer)


def view_of(epoch, *names, partitions=2):
    """A view by which these shards read and write everything."""
    everywhere = (names,) * partitions
    return ClusterView(Routing(epoch, everywhere, everywhere), {}, {})


@pytest.fixture
def shards(tmp_path):
    """Opens shards that know a view by which each of them reads and writes everything."""
    opened = []

    def open_shard(name="a", life=1, keep=False, warm=False, **options):
        shard = Shard(str(tmp_path / name), life, keep, STORE | options, warm)
        opened.append(shard)
        learn(shard, view_of(1, shard.name))
        return shard

    yield open_shard
    for shard in opened:
        shard.close()

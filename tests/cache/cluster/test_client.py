"""A process whose cluster, or whose disk, cannot be used: it goes on, with one line for each."""

import logging

import pytest

from nemo_specrl.cache import open_cache
from nemo_specrl.cache.cluster.checkpoint import ClusterCheckpoint
from nemo_specrl.cache.cluster.client import in_cluster
from nemo_specrl.config import CacheConfig
from nemo_specrl.monitoring import names
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.cluster.nodes import wait_until

VOCABULARY = "0" * 32
KEY = prompt_key([1])
ROLLOUT = Rollout(KEY, [1, 2], Finish.STOP)


@pytest.fixture
def no_raylet(monkeypatch):
    """As in a child of a Ray worker whose raylet has died."""
    monkeypatch.setenv("RAY_RAYLET_PID", str(2**22))


def test_a_process_outside_of_ray_is_in_no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    assert not in_cluster()
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    assert in_cluster()


def test_without_a_cluster_the_nodes_own_store_is_used(no_raylet, tmp_path, caplog):
    config = CacheConfig(dir=tmp_path)
    with caplog.at_level(logging.WARNING):
        cache = open_cache(config, VOCABULARY)
        assert cache.put([ROLLOUT]) == 1
        assert cache.get([KEY], 10.0) == {KEY: [ROLLOUT]}
        wait_until(lambda: "rollout cache: Ray:" in caplog.text)
        assert cache.get([KEY], 10.0) == {KEY: [ROLLOUT]}
        (known,) = cache.get([KEY], 10.0, {ROLLOUT.identity})[KEY]
        assert known.identity == ROLLOUT.identity and not len(known)
        assert cache.stats()[names.CACHE_NODES] == 0
        checkpoint = ClusterCheckpoint(config, VOCABULARY)
        checkpoint.save(tmp_path / "saved")
        assert checkpoint.wait() == checkpoint.restore(tmp_path / "saved") == 0
    cache.close()


def test_without_a_disk_either_nothing_is_kept(no_raylet, tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        cache = open_cache(CacheConfig(dir=tmp_path / "file"), VOCABULARY)
        assert cache.put([ROLLOUT]) == 0
        assert cache.get([KEY], 1.0) == cache.take_drafts({KEY: 1}, 1, 1.0) == {}
    assert len([r for r in caplog.records if "this node keeps nothing" in r.message]) == 1
    cache.close()

"""Real engines that move to other nodes, with other ranks, and find their prompts' histories."""

import time

import pytest
import ray

from nemo_specrl.cache.cluster.checkpoint import ClusterCheckpoint
from nemo_specrl.cache.cluster.client import REFRESH_SECONDS
from nemo_specrl.cache.cluster.shard import find_shards
from nemo_specrl.config import CacheConfig
from tests.support.cluster.engines import PROMPTS, vllm_engine_on
from tests.support.cluster.nodes import VOCABULARY, wait_until


@pytest.mark.slow  # test_nodes has the shards, without engines
@pytest.mark.timeout(1800)
def test_engines_on_another_node_with_more_ranks_draft_from_what_was_kept(network, random_model):
    """As where a refit finds engines in other places; the first engine's node keeps running."""
    config = CacheConfig(
        dir=str(network.disk(0) / "moving"), vocabulary=VOCABULARY, deadline_ms=5000
    )
    cache = config.model_dump(mode="json")
    one = vllm_engine_on(network.nodes[0], str(random_model), cache, 1)
    first, counted = ray.get(one.generate.remote(), timeout=600)
    assert counted["spec_rl/histories_found"] == 0
    ray.kill(one)
    two = vllm_engine_on(network.nodes[1], str(random_model), cache, 2)
    wait_until(lambda: len(find_shards(config, VOCABULARY, {})) == 2, 300)
    time.sleep(REFRESH_SECONDS + 1)  # by then the engine has asked which shards there are
    second, counted = ray.get(two.generate.remote(), timeout=600)
    assert second == first
    assert counted["spec_rl/histories_found"] == len(PROMPTS)
    assert counted["spec_rl/accepted_tokens"] > 0.7 * 40 * len(PROMPTS)
    # A refit in place: what this engine kept a moment ago drafts for the new weights.
    ray.get(two.refit.remote(1.25), timeout=600)
    third, now = ray.get(two.generate.remote(), timeout=600)
    assert third != second
    assert now["spec_rl/histories_found"] == 2 * len(PROMPTS)
    assert now["spec_rl/accepted_tokens"] > counted["spec_rl/accepted_tokens"]
    ray.kill(two)
    ClusterCheckpoint(config, VOCABULARY).end()

"""How long a client waits for shards, on a clock that moves only while somebody waits."""

import pytest

from nemo_specrl.cache.cluster import client as client_module
from nemo_specrl.cache.cluster import shard_calls
from nemo_specrl.cache.cluster.client import CacheClient
from nemo_specrl.cache.cluster.membership import ClusterView, Routing
from nemo_specrl.cache.cluster.shard_calls import FAILURES_TO_OPEN
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.cluster.in_process import Actor, InProcessRay


@pytest.fixture
def world(monkeypatch):
    world = InProcessRay(create=None)
    world.install(monkeypatch, client_module, shard_calls)
    return world


def client_of(world, shard, deadline_s):
    """A client that reads everything from a shard in this process."""
    actor = Actor(world, shard)
    everything = ((shard.name,),) * 2
    view = ClusterView(Routing(1, everything, everything), {shard.name: actor}, {})
    return CacheClient(view, None, deadline_s=deadline_s, tokenizer_id="tok", incarnation=1), actor


@pytest.mark.parametrize(
    ("deadline_s", "prompts", "seconds"),
    [(0.2, 1, 0.2), (0.2, 16, 3.2), (0.2, 512, 10.0), (60.0, 1, 60.0), (60.0, 16, 60.0)],
)
def test_a_look_up_of_many_prompts_is_waited_for_longer(
    world, shards, deadline_s, prompts, seconds
):
    client, actor = client_of(world, shards(), deadline_s)
    keys = [prompt_key([p]) for p in range(prompts)]
    actor.stopped = True
    began = world.now
    assert client.get([*keys, keys[0]]) == {} and client.failures == 1
    assert world.now - began == pytest.approx(seconds)


def test_what_comes_within_the_time_of_all_prompts_is_found(world, shards):
    shard = shards()
    put = [Rollout(prompt_key([p]), 0, [p], [0.0], Finish.STOP, 1) for p in range(16)]
    shard.put(put, 1)
    client, actor = client_of(world, shard, 0.2)
    keys = [rollout.key for rollout in put]

    def answer_after_two_seconds():
        actor.stopped = world.now < began + 2.0

    world.background = answer_after_two_seconds
    actor.stopped, began = True, world.now
    assert client.outlines(keys[:1]) == {}
    actor.stopped, began = True, world.now
    assert client.get(keys) == {rollout.key: [rollout] for rollout in put}
    assert client.failures == 1


def test_a_shard_that_is_left_alone_gets_what_is_put(world, shards):
    """Otherwise it would have missed a write, and have all that it serves copied to it again."""
    shard = shards()
    client, actor = client_of(world, shard, 0.2)
    rollout = Rollout(prompt_key([1]), 0, [1], [0.0], Finish.STOP, 1)
    actor.stopped = True
    for _ in range(FAILURES_TO_OPEN):
        assert client.get([rollout.key]) == {}
    actor.stopped = False
    assert client.get([rollout.key]) == {} and client.failures == FAILURES_TO_OPEN  # not asked
    client.put([rollout])
    client.deliver()
    [kept] = shard.store.get([rollout.key])[rollout.key]
    assert kept.tokens.tolist() == [1]

"""A coordinator, its shards and a client in this process, whose clock moves as the test says."""

import pytest

from nemo_specrl.cache.cluster import client, coordinator, copy_tasks, shard_calls
from nemo_specrl.cache.cluster.client import CacheClient
from nemo_specrl.cache.cluster.coordinator import Coordinator
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.cluster.in_process import Actor, InProcessRay

NODES, PARTITIONS, PROMPTS = 6, 32, 200
STORE = {"max_bytes": 2**22, "tokenizer_id": "tok", "groups_per_prompt": 1}
TICK = 0.25
MODULES = (shard_calls, client, coordinator, copy_tasks)


class Cluster:
    """Shards on several nodes, of which the test says which live."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.shards = folder, {}
        self.world = InProcessRay(self._create)
        self.world.install(monkeypatch, *MODULES)
        self.nodes = [f"{i:056x}" for i in range(NODES)]
        self.world.nodes_alive |= {node: node[-4:] for node in self.nodes}
        self.coordinator = Coordinator("store", 1, False, PARTITIONS, 2, STORE)
        self.go_on(1)
        self.world.background = lambda: self._step()

    def _create(self, cls, node, args):
        if node not in self.world.nodes_alive:
            return None
        folder = self.folder / node[-4:] / "store"
        folder.parent.mkdir(exist_ok=True)
        self.shards[node] = cls(str(folder), *args[1:], clock=self.world.monotonic)
        return self.shards[node]

    def _step(self):
        with self.world.acting("coordinator"):
            self.coordinator.step()
            self.world.carry_out_all_of("coordinator")

    def go_on(self, seconds, each=lambda: None):
        """Let time pass; ``each`` is called before every round of the coordinator."""
        for _ in range(int(seconds / TICK)):
            self.world.now += TICK
            each()
            self._step()

    def client(self):
        view, handle = self.coordinator.view(), Actor(self.world, self.coordinator)
        return CacheClient(view, handle, deadline_s=1.0, tokenizer_id="tok", incarnation=5)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch)
    yield cluster
    for shard in cluster.shards.values():
        shard.close()


def test_a_shard_whose_disk_is_full_does_not_keep_others_from_being_copied(
    cluster, monkeypatch, caplog
):
    """Clients say all the time that it has missed a write, while a dead node's copies are made."""
    cluster.go_on(10)
    writer = cluster.client()
    with cluster.world.acting("client"):
        writer.put(Rollout(prompt_key([p]), 0, [1], [0.0], Finish.STOP, 1) for p in range(PROMPTS))
        writer.deliver()
    assert cluster.coordinator.health() == (NODES, 0, 0)
    full = cluster.shards[cluster.nodes[0]]

    def refuse(rollouts):
        raise StoreUnavailable("no space left on device")

    monkeypatch.setattr(full.store, "put", refuse)
    dead = cluster.shards[cluster.nodes[-1]].name
    del cluster.world.nodes_alive[cluster.nodes[-1]]
    cluster.go_on(40, lambda: cluster.coordinator.report_missed([full.name]))
    [line] = [r.getMessage() for r in caplog.records if "does not take" in r.getMessage()]
    assert f"({cluster.nodes[0]})" in line and "left out for 60 s" in line
    for nodes in cluster.coordinator.view().routing.readers:
        assert len(nodes) == 2 and not {full.name, dead} & {*nodes}
    monkeypatch.undo()
    cluster.world.install(monkeypatch, *MODULES)
    cluster.go_on(60)
    assert cluster.coordinator.health() == (NODES - 1, 0, 0)  # and is back when it takes writes


def test_a_client_that_reaches_no_shard_does_not_empty_the_cache(cluster):
    cluster.go_on(10)
    writer = cluster.client()
    with cluster.world.acting("client"):
        writer.put(Rollout(prompt_key([p]), 0, [1], [0.0], Finish.STOP, 1) for p in range(PROMPTS))
        writer.deliver()
    names = [shard.name for shard in cluster.shards.values()]
    cluster.go_on(90, lambda: cluster.coordinator.report_missed(names))
    assert cluster.coordinator.health().nodes == NODES
    cluster.go_on(10)
    with cluster.world.acting("another"):
        assert len(cluster.client().get([prompt_key([p]) for p in range(PROMPTS)])) == PROMPTS

"""A cluster's cache in one process: the real coordinator, clients, shards and stores, without Ray.

Whatever happens, in any order: after a rollout was acknowledged, no look-up returns an older one,
and nothing is lost of which there is a copy.
"""

import itertools
import shutil
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from nemo_specrl.cache.cluster import client as client_module
from nemo_specrl.cache.cluster import coordinator as coordinator_module
from nemo_specrl.cache.cluster import copy_tasks as transfers_module
from nemo_specrl.cache.cluster import shard_calls as calls_module
from nemo_specrl.cache.cluster.client import CacheClient
from nemo_specrl.cache.cluster.coordinator import Coordinator
from nemo_specrl.cache.cluster.membership import Health
from nemo_specrl.cache.cluster.shard_identity import Identity, write_identity
from nemo_specrl.cache.partitions import partition_of
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.cluster.in_process import Actor, InProcessRay

PARTITIONS = 2
REPLICAS = 2
DISKS = 4
PROMPTS = 2
CLIENTS = 2
STORE = {"max_bytes": 2**20, "tokenizer_id": "tok", "groups_per_prompt": 1}
NOTHING = (-1, -1)


def newest(store, prompt):
    """Incarnation and version of the newest rollout that a store has for a prompt."""
    key = prompt_key([prompt])
    for rollout in store.scan(key, key + b"\0"):
        return rollout.incarnation, rollout.policy_version
    return NOTHING


class ClusterMachine(RuleBasedStateMachine):
    disk = st.integers(0, DISKS - 1)
    prompt = st.integers(0, PROMPTS - 1)
    client = st.integers(0, CLIENTS - 1)
    which = st.integers(0, 20)

    def __init__(self, folder, monkeypatch):
        super().__init__()
        self.folder = folder
        self.world = InProcessRay(self.create)
        modules = calls_module, client_module, coordinator_module, transfers_module
        self.world.install(monkeypatch, *modules)
        self.world.background = self.coordinator_goes_on
        self.nodes = {}  # disk -> id of the node that runs there
        self.actors = {}  # disk -> its shard's actor
        self.ids = itertools.count()
        self.incarnation = self.version = 0
        self.acknowledged = [NOTHING] * PROMPTS
        for disk in range(3):
            self.start(disk)
        self.start_run()

    # What happens to nodes

    @precondition(lambda self: len(self.nodes) < DISKS)
    @rule(disk=disk)
    def start(self, disk):
        """A node begins, with what its disk has."""
        if disk in self.nodes:
            return
        self.forget_node(disk)
        node = self.nodes[disk] = f"{next(self.ids):056x}"
        self.world.nodes_alive[node] = f"machine-{disk}"
        folder = self.folder / str(disk) / "store"
        if not folder.exists():  # names that are the same whenever this is run again
            folder.mkdir(parents=True)
            write_identity(folder, Identity(f"shard-{next(self.ids)}", self.incarnation))

    @precondition(lambda self: len(self.nodes) > 1 and not self.stopped())
    @rule(disk=disk, disk_lost=st.booleans(), noticed=st.booleans())
    def kill(self, disk, disk_lost, noticed):
        """A node dies; Ray notices it now or later."""
        if disk in self.nodes:
            del self.nodes[disk]
            self.end_shard(disk)
            if disk_lost:
                shutil.rmtree(self.folder / str(disk))
            if noticed:
                self.forget_node(disk)

    @precondition(lambda self: not self.stopped())
    @rule(disk=disk)
    def crash(self, disk):
        """A shard dies; its node lives on."""
        self.end_shard(disk)

    @rule()
    def notice(self):
        """Ray notices which nodes are dead."""
        for disk in range(DISKS):
            if disk not in self.nodes:
                self.forget_node(disk)

    @rule(disk=disk)
    def empty(self, disk):
        """A store starts again empty, like a damaged one."""
        if disk in self.actors:
            self.actors[disk].target.store.clear()

    @precondition(lambda self: not self.stopped())
    @rule(disk=disk)
    def stop(self, disk):
        """A shard hears and answers nothing."""
        if disk in self.actors:
            self.actors[disk].stopped = True

    @precondition(lambda self: self.stopped())
    @rule()
    def resume(self):
        for actor in self.actors.values():
            actor.stopped = False

    # What coordinator, network and clock do

    @rule()
    def coordinator_steps(self):
        self.world.now += coordinator_module.TICK_SECONDS
        with self.world.acting("coordinator"):
            self.coordinator.step()

    @precondition(lambda self: self.world.possible())
    @rule(which=which)
    def deliver(self, which):
        possible = self.world.possible()
        self.world.carry_out(possible[which % len(possible)])

    @rule()
    def deliver_all(self):
        while possible := self.world.possible():
            self.world.carry_out(possible[0])

    @rule(seconds=st.sampled_from([1, 6, 15]))
    def elapse(self, seconds):
        for _ in range(seconds):
            self.world.now += 1.0
            self.coordinator_goes_on()

    @rule(disks=st.sets(disk))
    def set_preferred_nodes(self, disks):
        here = set(self.world.nodes_alive)
        self.coordinator.set_preferred_nodes(
            [self.nodes[d] for d in disks if self.nodes.get(d) in here]
        )

    # What the run does

    @rule(client=client, prompt=prompt)
    def put(self, client, prompt):
        if any(prompt in under_way for under_way in self.under_way):
            return  # a sample index has one row at a time
        self.version += 1
        self.under_way[client][prompt] = (self.incarnation, self.version)
        with self.world.acting(f"client {client}"):
            self.clients[client].put(
                [Rollout(prompt_key([prompt]), 0, [1], [0.0], Finish.STOP, self.version)]
            )
            self.clients[client].flush()

    @rule(client=client, on_disk=st.booleans())
    def finish(self, client, on_disk):
        """Check that what a client put is acknowledged."""
        with self.world.acting(f"client {client}"):
            (self.clients[client].sync if on_disk else self.clients[client].deliver)()
        for prompt, what in self.under_way[client].items():
            if self.held(prompt) >= what:
                self.acknowledged[prompt] = max(what, self.acknowledged[prompt])
        self.under_way[client] = {}

    @rule(client=client, prompt=prompt, disk=disk)
    def look_up(self, client, prompt, disk):
        self.get(client, prompt, disk)

    def get(self, client, prompt, disk):
        """A client looks a prompt up, from the node of a disk: what it gets is not old.

        Returns:
            Incarnation and version of what was found. None: no shard answered.
        """
        key, cache = prompt_key([prompt]), self.clients[client]
        self.world.here = self.nodes.get(disk, "")
        cache.take_failures()
        cache._poll_coordinator()  # as the look-up does: what it asks is known before
        asked = any(cache._usable(node) for node in cache._view.routing.read(key))
        with self.world.acting(f"client {client}"):
            found = cache.get([key]).get(key)
        if found is None and (not asked or cache.failures):
            return None
        got = (found[0].incarnation, found[0].policy_version) if found else NOTHING
        assert got >= self.acknowledged[prompt], f"prompt {prompt}: {got} at disk {disk}"
        return got

    @rule(lost=st.integers(0, 5))
    def run_resumes(self, lost):
        """The job dies and restarts some policy versions earlier, with what the disks have."""
        for disk in list(self.actors):
            self.end_shard(disk)
        self.notice()
        self.version = max(0, self.version - lost)
        self.acknowledged = [NOTHING] * PROMPTS  # as long as the disks have not been compared
        self.start_run()

    # How

    def create(self, cls, node, args):
        for disk, running in self.nodes.items():
            if running == node:
                _, *rest = args
                folder = self.folder / str(disk) / Path(args[0]).name
                shard = cls(str(folder), *rest, clock=self.world.monotonic)
                break
        else:
            return None
        actor = self.actors.get(disk)
        assert actor is None or not actor.alive
        self.created = disk, shard
        return shard

    def start_run(self):
        self.incarnation += 1
        self.under_way = [{} for _ in range(CLIENTS)]
        self.world.pending.clear()
        self.world.now += 1.0  # routings of a later coordinator have later epochs
        self.actors = {}
        keep = self.incarnation > 1
        self.coordinator = Coordinator("store", self.incarnation, keep, PARTITIONS, REPLICAS, STORE)
        self.membership = self.coordinator._membership
        self.plan, self.membership.plan = self.membership.plan, self.plan_and_note_losses
        start_shard = self.coordinator._start_shard

        def started(node, machine):
            self.created = None
            handle = start_shard(node, machine)
            if self.created is not None:
                self.actors[self.created[0]] = handle.actor
            return handle

        self.coordinator._start_shard = started
        self.coordinator_goes_on()
        self.until(self.coordinator.started)
        self.coordinator._keep = False
        coordinator = Actor(self.world, self.coordinator)
        self.clients = [
            CacheClient(
                self.coordinator.view(), coordinator, deadline_s=1.0, tokenizer_id="tok",
                incarnation=self.incarnation,
            )
            for _ in range(CLIENTS)
        ]  # fmt: skip

    def coordinator_goes_on(self):
        with self.world.acting("coordinator"):
            for _ in range(2):
                self.coordinator.step()
                self.world.carry_out_all_of("coordinator")
            self.coordinator.step()

    def until(self, condition):
        for _ in range(200):
            if condition():
                return
            self.world.now += 1.0
            self.coordinator_goes_on()
        raise AssertionError("it does not come to rest")

    def stopped(self):
        return any(actor.stopped for actor in self.actors.values())

    def forget_node(self, disk):
        machine = f"machine-{disk}"
        alive = self.world.nodes_alive
        self.world.nodes_alive = {n: m for n, m in alive.items() if m != machine}

    def end_shard(self, disk):
        actor = self.actors.pop(disk, None)
        if actor is not None:
            self.world.kill(actor)
            actor.target.close()

    def shards(self):
        return {actor.target.name: actor.target for actor in self.actors.values()}

    def readers(self, prompt):
        """Disks whose shards answer look-ups of a prompt."""
        disks = {actor.target.name: disk for disk, actor in self.actors.items()}
        return [disks[n] for n in self.membership.routing.read(prompt_key([prompt])) if n in disks]

    def version_on(self, disk, prompt):
        return newest(self.actors[disk].target.store, prompt)[1]

    def held(self, prompt):
        """The oldest of the versions on readers that lack nothing."""
        sound = self.sound(partition_of(prompt_key([prompt]), PARTITIONS))
        shards = self.shards()
        has = [newest(shards[name].store, prompt) for name in sound if name in shards]
        return min(has, default=NOTHING)

    def sound(self, partition):
        membership = self.membership
        return [
            name
            for name in membership.routing.readers[partition]
            if name in membership.members
            and name not in membership._missed
            and partition not in membership._behind[name]
        ]

    def plan_and_note_losses(self):
        bereft = [p for p in range(PARTITIONS) if not self.sound(p)]
        for prompt in range(PROMPTS):
            # What every reader lacks may or may not come back with a disk.
            if partition_of(prompt_key([prompt]), PARTITIONS) in bereft:
                self.acknowledged[prompt] = NOTHING
        return self.plan()

    def at_rest(self):
        routing = self.membership.routing
        return (
            len(self.actors) == len(self.nodes)
            and self.coordinator.started()
            and all(s.store.restarts == s._described for s in self.shards().values())
            and self.membership.health == Health(len(self.nodes), 0, 0)
            and routing.readers == routing.writers
        )

    def rest(self):
        """Everything that is under way completes."""
        self.resume()
        self.notice()
        for client in range(CLIENTS):
            self.finish(client, True)
        self.until(self.at_rest)

    def teardown(self):
        on_disk = [
            max((newest(s.store, p) for s in self.shards().values()), default=NOTHING)
            for p in range(PROMPTS)
        ]
        self.rest()
        for prompt in range(PROMPTS):
            readers = self.readers(prompt)
            assert len(readers) == min(REPLICAS, len(self.nodes))
            for disk in readers:
                assert newest(self.actors[disk].target.store, prompt) >= on_disk[prompt]
                for client in range(CLIENTS):
                    self.elapse(1)
                    self.get(client, prompt, disk)
                    self.deliver_all()  # the coordinator's view, if it had to be asked
                    got = self.get(client, prompt, disk)
                    assert got is not None and got >= on_disk[prompt]
        for disk in list(self.actors):
            self.end_shard(disk)

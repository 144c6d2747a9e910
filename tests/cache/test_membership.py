"""The rules by which copies are kept, on real shards and stores: any order of events, without Ray.

A keeper and two clients do, step by step, what those of a cluster do; their messages wait until a
rule delivers them.
"""

import itertools
import shutil
import time
from collections import defaultdict, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from nemo_specrl.cache.cluster import shard as shard_module
from nemo_specrl.cache.cluster.membership import Copy, Health, Membership, Routing, View, owed
from nemo_specrl.cache.cluster.placement import place
from nemo_specrl.cache.cluster.shard import LEASE_SECONDS, Piece, Shard
from nemo_specrl.cache.snapshot import key_range, partition_of
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import Finish, Rollout, prompt_key

PARTITIONS = 2
REPLICAS = 2
DISKS = 4
PROMPTS = 2
STORE = {"max_bytes": 2**20, "tokenizer_id": "tok", "groups_per_prompt": 1}


def rollout(prompt, version, sample_index=0, occurrence=0):
    return Rollout(
        prompt_key([prompt]), sample_index, [version], [0.0], Finish.STOP, version,
        occurrence=occurrence
    )  # fmt: skip


def newest(store, prompt):
    """Version of the newest rollout that a store has of a prompt; 0: none."""
    key = prompt_key([prompt])
    return max((r.policy_version for r in store.scan(key, key + b"\0")), default=0)


# The rules alone


def settled(membership):
    """Has all copies made; the routings on the way."""
    seen = [membership.plan()]
    for _ in range(10):
        for copy in membership.told():
            membership.copied(copy)
        if not membership.settle():
            break
        seen.append(membership.routing)
    return seen


def test_nodes_that_start_empty_read_and_write_where_they_are_placed():
    membership = Membership(8, 2, epoch=100)
    for name in "abc":
        membership.join(name, [])
    assert membership.changed
    [routing] = settled(membership)
    assert routing == Routing(101, place("abc", 8, 2), place("abc", 8, 2))
    assert not membership.changed and membership.health == Health(3, 0, 0)


def test_a_node_that_joins_is_written_to_before_it_is_read_and_who_goes_the_other_way_round():
    membership = Membership(8, 2)
    membership.join("a", [])
    membership.join("b", [])
    settled(membership)
    membership.join("c", [])
    first, second, third = settled(membership)
    old, new = place("ab", 8, 2), place("abc", 8, 2)
    assert (first.readers, second.readers, third.readers) == (old, new, new)
    for partition in range(8):
        both = {*old[partition], *new[partition]}
        assert set(first.writers[partition]) == set(second.writers[partition]) == both
    assert third.writers == new


def test_when_a_node_dies_the_other_copy_serves_and_is_copied():
    membership = Membership(8, 2)
    for name in "abc":
        membership.join(name, [])
    settled(membership)
    membership.leave("a")
    assert membership.health.missing == sum("a" in nodes for nodes in place("abc", 8, 2))
    routing = membership.plan()
    left = tuple(tuple(n for n in nodes if n != "a") for nodes in place("abc", 8, 2))
    assert routing.readers == left
    copies = membership.told()
    assert copies and all({c.source, c.target} == {"b", "c"} for c in copies)
    for copy in copies:
        membership.copied(copy)
    assert membership.settle()
    assert membership.routing.readers == place("bc", 8, 2)
    assert membership.health == Health(2, 0, 0)


def test_nothing_is_copied_before_all_have_been_told():
    membership = Membership(4, 2)
    membership.join("a", [])
    membership.join("b", [])
    membership.plan()
    assert not membership.settle()
    membership.told()
    assert not membership.settle()  # nothing to do
    membership.leave("b")
    assert not membership.settle()  # there is, but it asks for a plan


def test_who_missed_a_write_is_no_reader_until_it_has_it():
    membership = Membership(4, 2)
    membership.join("a", [])
    membership.join("b", [])
    settled(membership)
    membership.missed("b")
    routing = membership.plan()
    assert routing.readers == (("a",),) * 4
    assert all(set(nodes) == {"a", "b"} for nodes in routing.writers)
    assert membership.told() == [Copy(p, "b", "a") for p in range(4)]
    membership.missed("b")  # once more: what was copied so far does not do
    for partition in range(4):
        membership.copied(Copy(partition, "b", "a"))
    assert not membership.settle()
    settled(membership)
    assert membership.routing.readers == place("ab", 4, 2)


def test_a_disk_that_comes_back_brings_what_nobody_else_has():
    membership = Membership(4, 2)
    for name in "ab":
        membership.join(name, [])
    settled(membership)
    membership.leave("a")
    membership.leave("b")
    membership.join("c", [])
    assert settled(membership)[-1].readers == (("c",),) * 4  # cold
    membership.join("a", [0, 2])
    membership.plan()
    copies = set(membership.told())
    assert copies == {Copy(p, "a", "c") for p in range(4)} | {Copy(p, "c", "a") for p in (0, 2)}


def test_disks_of_an_earlier_run_serve_what_they_have():
    membership = Membership(8, 1)
    membership.join("a", range(8))
    membership.join("b", [])
    first, *_, last = settled(membership)
    assert first.readers == (("a",),) * 8
    assert last.readers == place("ab", 8, 1) and ("b",) in last.readers


def test_nodes_with_engines_come_first():
    membership = Membership(16, 2)
    for name in "abcd":
        membership.join(name, [])
    settled(membership)
    membership.prefer(["a", "b"])
    assert all(set(nodes) == {"a", "b"} for nodes in settled(membership)[-1].readers)
    membership.prefer(["c"])
    assert all(nodes[0] == "c" and len(nodes) == 2 for nodes in settled(membership)[-1].readers)
    membership.prefer(["c"])
    assert not membership.changed
    assert place("abcd", 16, 2, first=["gone"]) == place("abcd", 16, 2)


# A shard


@pytest.fixture
def shards(tmp_path):
    """Opens shards, which have heard of a view in which each of them reads and writes all."""
    opened = []

    def open_shard(name="a", run="run", keep=False, **options):
        shard = Shard(str(tmp_path / name), run, keep, STORE | options)
        opened.append(shard)
        everywhere = ((shard.name,),) * PARTITIONS
        tell(shard, View(Routing(1, everywhere, everywhere), {}, {}))
        return shard

    yield open_shard
    for shard in opened:
        shard.close()


def tell(shard, view):
    _, answer = shard.see(view, shard._answers)
    shard.see(view, answer)


def test_the_name_and_what_is_on_disk_belong_to_a_run(shards):
    shard = shards()
    shard.put([rollout(1, 1)], 1)
    shard.close()
    again = shards()
    assert again.name == shard.name and newest(again.store, 1) == 1
    assert again.hello(2)[0] == shard.name and again.hello(2)[1] != shard.hello
    again.close()
    resumed = shards(run="another", keep=True)
    assert resumed.name == shard.name and newest(resumed.store, 1) == 1
    resumed.close()
    fresh = shards(run="a third")
    assert fresh.name == shard.name and newest(fresh.store, 1) == 0


def test_a_shard_that_has_not_heard_from_its_keeper_answers_nothing(tmp_path):
    now = [100.0]
    shard = Shard(str(tmp_path), "run", False, STORE, clock=lambda: now[0])
    everywhere = ((shard.name,),) * PARTITIONS
    view = View(Routing(1, everywhere, everywhere), {}, {})
    refused = pytest.raises(StoreUnavailable, match="its keeper has not been heard")
    with refused:
        shard.get([prompt_key([1])], 1)
    _, first = shard.see(view, 0)
    with refused:  # the keeper may not have got that answer
        shard.get([prompt_key([1])], 1)
    _, second = shard.see(view, first)
    assert shard.get([prompt_key([1])], 1) == ({}, None)
    now[0] += LEASE_SECONDS + 1  # stopped, say
    shard.put([rollout(1, 1)], 1)
    with refused:
        shard.get([prompt_key([1])], 1)
    _, third = shard.see(view, second)  # which may have waited for as long
    with refused:
        shard.claim(prompt_key([1]), 1, 1)
    shard.see(view, third)
    assert shard.get([prompt_key([1])], 0) == ({prompt_key([1]): [rollout(1, 1)]}, view)
    shard.close()


def test_what_is_newer_stays_whatever_comes_late(shards):
    shard = shards(groups_per_prompt=2)
    shard.put([rollout(1, 5)], 1)
    assert shard.put([rollout(1, 3), rollout(1, 4), rollout(2, 3)], 0).routing.epoch == 1
    piece = Piece([rollout(1, 5, occurrence=1), rollout(1, 2)], [], b"", None)
    assert shard.take(piece, None) is None
    found, _ = shard.get([prompt_key([1]), prompt_key([2])], 1)
    assert found[prompt_key([1])] == [rollout(1, 5, occurrence=1), rollout(1, 5)]
    assert found[prompt_key([2])] == [rollout(2, 3)]


def test_pieces_are_bounded_and_leave_nothing_out(shards, monkeypatch):
    monkeypatch.setattr(shard_module, "PIECE_TOKENS", 300)
    source, target = shards("a"), shards("b")
    source.put([rollout(p, 1, sample_index) for p in range(40) for sample_index in range(3)], 1)
    source.claims.hold(prompt_key([1]), 7)
    for partition in range(PARTITIONS):
        following, stop = key_range(partition, PARTITIONS)
        pieces = 0
        while following is not None:
            piece = source.piece(following, stop)
            assert len(piece.rollouts) <= 6 and len({r.key for r in piece.rollouts}) <= 2
            following = target.take(piece, stop)
            pieces += 1
        assert pieces > 5
    assert list(target.store.scan(b"")) == list(source.store.scan(b""))
    [(key, sample_index, seconds)] = target.claims.held(b"", None)
    assert (key, sample_index) == (prompt_key([1]), 7) and 3500 < seconds <= 3600


def test_only_the_first_reader_gives_out_sample_indices(shards):
    shard = shards()
    key = prompt_key([1])
    table = (("other", shard.name),) * PARTITIONS
    view = View(Routing(2, table, table), {}, {})
    tell(shard, view)
    assert shard.claim(key, 1, 1) == (None, view)
    shard.hold(key, 0)
    table = ((shard.name,),) * PARTITIONS
    tell(shard, View(Routing(3, table, table), {}, {}))
    assert shard.claim(key, 1, 3) == ((1, []), None)  # 0 was given out by the other


# Any order of events


class Client:
    """Writes and reads as :class:`nemo_specrl.cache.cluster.client.CacheClient` does."""

    def __init__(self):
        self.view = None
        self.sent = []  # [prompt, version, routing, nodes yet to answer, whether one has it]
        self.queues = defaultdict(deque)  # node -> (batch, late)

    def learn(self, view):
        if view is None or view.routing.epoch <= self.view.routing.epoch:
            return
        for batch in self.sent:
            for node in owed([rollout(*batch[:2])], batch[2], view.routing):
                self.queues[node].append((batch, True))
                batch[3].append(node)
            batch[2] = view.routing
        self.view = view


class ClusterMachine(RuleBasedStateMachine):
    """Never an older rollout after a newer one was acknowledged; nothing lost that has a copy."""

    disk = st.integers(0, DISKS - 1)
    prompt = st.integers(0, PROMPTS - 1)
    client = st.integers(0, 1)

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.membership = Membership(PARTITIONS, REPLICAS)
        self.shards = {}  # disk -> shard that runs
        self.stopped = set()  # disks whose shard runs and hears nothing
        self.offset = defaultdict(float)  # what clocks of stopped shards have gained
        self.heard = {}  # name -> number of its last answer
        self.epochs = {}  # name -> epoch that it knows
        self.copies = {}  # copy -> [where it goes on, piece under way]
        self.clients = [Client(), Client()]
        self.names = itertools.count()
        self.version = 0
        self.acked = defaultdict(int)
        for disk in range(3):
            self.start(disk)
        self.rest()
        for client in self.clients:
            client.view = self.view()

    # What happens

    @precondition(lambda self: len(self.shards) < DISKS)
    @rule(disk=disk)
    def start(self, disk):
        if disk not in self.shards:
            folder = self.folder / str(disk)
            if not folder.exists():  # names that are the same whenever this is run again
                folder.mkdir(parents=True)
                (folder / shard_module.NAME_FILE).write_text(f"shard-{next(self.names)} run")
            shard = Shard(
                str(folder), "run", False, STORE,
                clock=lambda: time.monotonic() + self.offset[disk],
            )  # fmt: skip
            self.shards[disk] = shard
            self.join(shard)

    @precondition(lambda self: len(self.shards) > 1)
    @rule(disk=disk, disk_lost=st.booleans(), noticed=st.booleans())
    def kill(self, disk, disk_lost, noticed):
        if disk in self.shards and not self.stopped:
            shard = self.shards.pop(disk)
            self.stopped.discard(disk)
            shard.close()
            if disk_lost:
                shutil.rmtree(self.folder / str(disk))
            if noticed:
                self.leave(shard.name)

    @precondition(lambda self: not self.stopped)
    @rule(disk=disk)
    def stop(self, disk):
        if disk in self.shards:
            self.stopped.add(disk)
            self.offset[disk] += 2 * LEASE_SECONDS

    @precondition(lambda self: self.stopped)
    @rule()
    def resume(self):
        self.stopped.clear()

    @rule()
    def notice(self):
        """The keeper looks around."""
        for name in sorted(self.membership.members):
            if self.reach(name) is None:
                self.leave(name)
        for disk, shard in self.shards.items():
            if disk not in self.stopped and shard.name not in self.membership.members:
                self.join(shard)

    @rule(first=st.sets(disk))
    def reshard(self, first):
        self.membership.prefer([self.shards[d].name for d in first if d in self.shards])

    @rule(disks=st.sets(disk, min_size=1))
    def tell(self, disks):
        for disk in sorted(disks & self.shards.keys() - self.stopped):
            shard, view = self.shards[disk], self.view()
            _, self.heard[shard.name] = shard.see(view, self.heard.get(shard.name, 0))
            self.epochs[shard.name] = view.routing.epoch

    @rule()
    def go_on(self):
        """The keeper's next step, as in its ``_go_on``."""
        membership = self.membership
        if membership.changed:
            self.plan()
        elif all(self.epochs.get(n) == membership.routing.epoch for n in membership.members):
            for copy in membership.told():
                self.copies.setdefault(copy, [key_range(copy.partition, PARTITIONS)[0], None])
            membership.settle()

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 20))
    def copy(self, which):
        """Half a step of a copy: a piece is read, or it is written."""
        copy = sorted(self.copies)[which % len(self.copies)]
        following, piece = self.copies[copy]
        stop = key_range(copy.partition, PARTITIONS)[1]
        source, target = self.reach(copy.source), self.reach(copy.target)
        if piece is None and source is not None:
            self.copies[copy][1] = source.piece(following, stop)
        elif piece is not None and target is not None:
            self.copies[copy] = [target.take(piece, stop), None]
            if self.copies[copy][0] is None:
                del self.copies[copy]
                self.membership.copied(copy)

    # What clients do

    @rule(client=client, prompt=prompt)
    def put(self, client, prompt):
        if any(batch[0] == prompt for c in self.clients for batch in c.sent):
            return  # a sample index has one row at a time
        client = self.clients[client]
        self.version += 1
        nodes = list(client.view.routing.write(prompt_key([prompt])))
        batch = [prompt, self.version, client.view.routing, nodes, False]
        client.sent.append(batch)
        for node in nodes:
            client.queues[node].append((batch, False))

    @precondition(lambda self: any(client.sent for client in self.clients))
    @rule(which=st.integers(0, 20))
    def deliver(self, which):
        waiting = [
            (client, node)
            for client in self.clients
            for node in sorted(client.queues)
            if client.queues[node]
        ]
        client, node = waiting[which % len(waiting)]
        batch, late = client.queues[node].popleft()
        prompt, version, routing, nodes, _ = batch
        nodes.remove(node)
        shard = self.reach(node)
        if shard is None:
            self.membership.missed(node)
        else:
            batch[4] = True
            client.learn(shard.put([rollout(prompt, version)], -1 if late else routing.epoch))
        if not batch[3]:
            client.sent.remove(batch)
            if batch[4]:  # `sync` returns
                if self.membership.changed:
                    self.plan()
                client.learn(self.view())
                if self.held(prompt) >= version:
                    self.acked[prompt] = max(version, self.acked[prompt])

    @rule(client=client, prompt=prompt, turned=st.booleans())
    def get(self, client, prompt, turned):
        client = self.clients[client]
        key = prompt_key([prompt])
        failed = set()
        while True:
            nodes = [n for n in client.view.routing.read(key) if n not in failed]
            if not nodes:
                return  # nobody answers: then the row is decoded plainly
            node = nodes[-turned]
            shard = self.reach(node)
            try:
                if shard is None:
                    raise StoreUnavailable("out of reach")
                found, news = shard.get([key], client.view.routing.epoch)
            except StoreUnavailable:
                failed.add(node)
                client.learn(self.view())
                continue
            client.learn(news)
            if node in client.view.routing.read(key):
                break
        version = found[key][0].policy_version if key in found else 0
        assert version >= self.acked[prompt], f"prompt {prompt}: {version} from {node}"

    # How

    def view(self):
        return View(self.membership.routing, {}, {})

    def reach(self, name):
        for disk, shard in self.shards.items():
            if shard.name == name and disk not in self.stopped:
                return shard
        return None

    def join(self, shard):
        self.membership.leave(shard.name)
        self.membership.join(shard.name, shard.hello(PARTITIONS).holds)

    def leave(self, name):
        self.membership.leave(name)

    def held(self, prompt):
        """Version of what the readers that lack nothing have; the least of them."""
        partition = partition_of(prompt_key([prompt]), PARTITIONS)
        versions = [
            newest(shard.store, prompt)
            for shard in self.shards.values()
            if shard.name in self.sound(partition)
        ]
        return min(versions, default=0)

    def sound(self, partition):
        membership = self.membership
        return [
            name
            for name in membership.routing.readers[partition]
            if name in membership.members
            and name not in membership._missed
            and partition not in membership._behind[name]
        ]

    def plan(self):
        bereft = [p for p in range(PARTITIONS) if not self.sound(p)]
        self.membership.plan()
        self.copies.clear()
        for prompt in range(PROMPTS):
            # What every reader lacks may come back with a disk, but need not.
            if partition_of(prompt_key([prompt]), PARTITIONS) in bereft:
                self.acked[prompt] = 0

    def rest(self):
        """All that is under way comes to its end."""
        self.resume()
        while any(client.sent for client in self.clients):
            self.deliver(0)
        self.notice()
        for _ in range(1000):
            if self.copies:
                self.copy(0)
            self.tell(set(self.shards))
            self.tell(set(self.shards))
            before = self.membership.routing
            self.go_on()
            if before is self.membership.routing and not self.copies:
                return
        raise AssertionError("it does not come to rest")

    def teardown(self):
        if any(self.shards):
            disks = {
                p: max(newest(s.store, p) for s in self.shards.values()) for p in range(PROMPTS)
            }
            self.rest()
            routing = self.membership.routing
            assert self.membership.health == Health(len(self.shards), 0, 0)
            assert routing.readers == routing.writers
            for prompt in range(PROMPTS):
                readers = routing.read(prompt_key([prompt]))
                assert len(readers) == min(REPLICAS, len(self.shards))
                for name in readers:
                    assert newest(self.reach(name).store, prompt) >= disks[prompt]
                for client in range(2):
                    self.get(client, prompt, False)
        for shard in self.shards.values():
            shard.close()


def test_any_order_of_events_serves_the_newest_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "PIECE_TOKENS", 1)  # a prompt at a time
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: ClusterMachine(tmp_path / str(next(numbers))),
        settings=settings(
            derandomize=True,
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            database=None,
        ),
    )


def read_by(machine, prompt):
    """Disks of the shards that have a prompt."""
    names = {shard.name: disk for disk, shard in machine.shards.items()}
    return [names[n] for n in machine.membership.routing.read(prompt_key([prompt]))]


def test_a_client_that_knows_nothing_gets_nothing_old_from_a_shard_that_was_stopped(tmp_path):
    machine = ClusterMachine(tmp_path)
    writer, idle = machine.clients
    machine.put(0, 0)
    machine.rest()
    first, second = read_by(machine, 0)
    machine.stop(first)
    machine.notice()
    machine.put(0, 0)
    while writer.sent:
        machine.deliver(0)
    assert machine.acked[0] == 2
    assert idle.view.routing.read(prompt_key([0]))[0] == machine.shards[first].name
    machine.resume()
    machine.get(1, 0, False)  # checks what it gets
    machine.tell({first})
    machine.get(1, 0, False)
    machine.rest()
    assert {newest(machine.shards[disk].store, 0) for disk in (first, second)} == {2}
    machine.teardown()


def test_what_is_put_by_an_old_routing_behind_a_copy_gets_to_who_copied(tmp_path):
    machine = ClusterMachine(tmp_path)
    machine.put(0, 0)
    machine.rest()
    first, second = read_by(machine, 0)
    [third] = {0, 1, 2} - {first, second}
    gone = machine.shards[second].name
    machine.kill(second, True, True)
    machine.go_on()
    machine.tell({first, third})
    machine.go_on()
    while machine.copies:
        machine.copy(0)
    machine.put(1, 0)  # by a client that has not heard of any of it
    machine.go_on()
    assert read_by(machine, 0) == [first, third] or read_by(machine, 0) == [third, first]
    writer = machine.clients[1]
    assert set(writer.queues) == {machine.shards[first].name, gone}
    while writer.sent:
        machine.deliver(0)
    assert machine.acked[0] == 2
    for client in (0, 1):
        for turned in (False, True):
            machine.get(client, 0, turned)
    assert newest(machine.shards[third].store, 0) == 2
    machine.teardown()

"""Shards that miss writes, and those that only seem to, with real clients and coordinators."""

import pytest

from nemo_specrl.cache.cluster.client import PUT_AT_ONCE, SYNC_SECONDS
from nemo_specrl.cache.cluster.shard_calls import FAILURES_TO_OPEN
from nemo_specrl.rollout import Finish, Rollout, prompt_key
from tests.support.cluster.machine import ClusterMachine


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Three nodes; two of them have version 1 of prompt 0."""
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.put(0, 0)
    machine.rest()
    yield machine
    machine.teardown()


def put(machine, client):
    """A client puts the next version of prompt 0."""
    machine.version += 1
    with machine.world.acting("client"):
        client.put([Rollout(prompt_key([0]), 0, [1], [0.0], Finish.STOP, machine.version)])
        client.flush()


def test_a_shard_whose_look_ups_are_late_receives_what_is_put(machine):
    first, second = machine.readers(0)
    actor, client = machine.actors[first], machine.clients[0]
    routing = machine.coordinator.view().routing
    actor.hanging = {"get"}
    for _ in range(FAILURES_TO_OPEN):
        assert machine.get(0, 0, first) is None
    actor.hanging = set()
    assert not client._usable(actor.target.name)
    machine.put(0, 0)
    machine.finish(0, False)
    assert machine.coordinator.view().routing == routing  # it has missed nothing
    assert [machine.version_on(disk, 0) for disk in (first, second)] == [2, 2]


def test_little_waits_for_a_shard_that_writes_nothing_and_yet_answers_its_coordinator(machine):
    first, second = machine.readers(0)
    actor, client = machine.actors[first], machine.clients[0]
    actor.hanging = {"put"}
    pause = SYNC_SECONDS / PUT_AT_ONCE / 2
    for _ in range(4 * PUT_AT_ONCE):  # for 60 s
        put(machine, client)
        machine.world.carry_out_all_of("client")
        machine.world.now += pause
        machine.coordinator_goes_on()
        waiting = sum(call.method == "put" for call in machine.world.pending)
        assert max(waiting, len(client._writes)) <= 2 * PUT_AT_ONCE + 1
    assert first not in machine.readers(0) and second in machine.readers(0)
    actor.hanging = set()
    machine.deliver_all()
    put(machine, client)
    machine.rest()
    assert {machine.version_on(disk, 0) for disk in machine.readers(0)} == {machine.version}
    assert first in machine.readers(0)

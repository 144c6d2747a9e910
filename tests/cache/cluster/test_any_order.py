"""The real coordinator and clients under any order of events, with real shards and stores."""

import itertools

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from nemo_specrl.cache.cluster import shard as shard_module
from nemo_specrl.errors import StoreUnavailable
from nemo_specrl.rollout import prompt_key
from tests.support.cluster.machine import ClusterMachine


def test_any_order_of_events_serves_the_newest_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "CHUNK_TOKENS", 1)  # a prompt at a time
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: ClusterMachine(tmp_path / str(next(numbers)), monkeypatch),
        settings=settings(
            derandomize=True,
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            database=None,
        ),
    )


def test_a_client_that_knows_nothing_gets_nothing_old_from_a_shard_that_was_stopped(
    tmp_path, monkeypatch
):
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.put(0, 0)
    machine.rest()
    first, second = machine.readers(0)
    stopped = machine.actors[first].target
    machine.stop(first)
    machine.put(0, 0)
    machine.finish(0, False)  # ends when the shard has been left out
    assert machine.acknowledged[0] == (1, 2)
    assert stopped.name not in machine.coordinator.view().shards
    idle = machine.clients[1]
    assert stopped.name in idle._view.routing.read(prompt_key([0]))
    machine.resume()
    assert machine.version_on(first, 0) == 1
    assert machine.get(1, 0, first) == (1, 2)  # from the other one
    assert idle.failures == 1
    machine.elapse(1)
    machine.get(1, 0, first)
    machine.rest()
    assert [machine.version_on(disk, 0) for disk in (first, second)] == [2, 2]
    machine.teardown()


def test_what_is_put_by_an_old_routing_behind_a_copy_gets_to_who_copied(tmp_path, monkeypatch):
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.put(0, 0)
    machine.rest()
    first, second = machine.readers(0)
    [third] = {0, 1, 2} - {first, second}
    machine.kill(second, True, True)
    while machine.version_on(third, 0) < 1:
        machine.coordinator_steps()
        machine.world.carry_out_all_of("coordinator")
    assert machine.readers(0) == [first]
    machine.put(1, 0)  # by a client that has not heard of any of it
    assert machine.clients[1]._view.routing.read(prompt_key([0])) != machine.coordinator.view()
    machine.elapse(6)
    assert set(machine.readers(0)) == {first, third}
    assert machine.version_on(third, 0) == 1
    machine.finish(1, False)
    assert machine.acknowledged[0] == (1, 2)
    for client in (0, 1):
        for disk in (first, third):
            assert machine.get(client, 0, disk) == (1, 2)
    assert machine.version_on(third, 0) == 2
    machine.teardown()


def test_a_shard_that_could_not_write_is_no_reader_until_it_has_caught_up(tmp_path, monkeypatch):
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.put(0, 0)
    machine.rest()
    first, second = machine.readers(0)

    def full(rollouts):
        raise StoreUnavailable("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(machine.actors[first].target.store, "put", full)
        machine.put(0, 0)
        machine.finish(0, False)
        assert machine.clients[0].take_failures() == 1
        assert machine.acknowledged[0] == (1, 2)
        assert machine.readers(0) == [second]
        machine.elapse(1)  # so that the shard hears of it, for clients that have not
        assert machine.get(1, 0, first) == (1, 2)
        assert machine.version_on(first, 0) == 1
    machine.rest()
    assert machine.version_on(first, 0) == 2
    machine.teardown()


def test_a_store_that_has_started_empty_is_not_read_until_it_is_filled_again(tmp_path, monkeypatch):
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.put(0, 0)
    machine.finish(0, False)
    machine.rest()
    first, second = machine.readers(0)
    machine.empty(first)
    assert machine.get(1, 0, first) == (1, 1)  # from the other one
    machine.rest()
    assert set(machine.readers(0)) == {first, second}
    assert machine.get(1, 0, first) == (1, 1)
    assert machine.version_on(first, 0) == 1
    machine.teardown()


def test_a_coordinator_whose_clock_was_set_back_is_believed(tmp_path, monkeypatch):
    machine = ClusterMachine(tmp_path, monkeypatch)
    machine.put(0, 0)
    machine.rest()
    clients, before = machine.clients, machine.coordinator.view().routing.epoch
    machine.world.now -= 500.0
    machine.run_resumes(0)
    coordinator = machine.coordinator
    assert coordinator.view().routing.epoch < before
    for client in clients:  # of the life before; the coordinator's handle is the same
        client._coordinator = machine.clients[0]._coordinator
        client._view_called_at = -1e9
        with machine.world.acting("client 0"):
            client._request_view()
            machine.coordinator_goes_on()
            machine.world.carry_out_all_of("client 0")
            client._poll_coordinator()
        assert client._view.routing.epoch > before
        assert client._view.shards == coordinator.view().shards
    machine.rest()
    machine.teardown()
